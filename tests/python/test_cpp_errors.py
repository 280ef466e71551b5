"""What is wrong with a variant of the user's own is said in their terms: their lines, their members' names."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import raddle
from small import attention, paged, refuses

LOGITS = "RADDLE_FN float logits(float s, const Row& r, const Key& c) const"


def made(name, body, params=None, **values):
    return attention(variant=[raddle.Variant(name, f"struct {name} {{\n{body}\n}};", params or {})(**values)])


def message(*arguments, **values):
    with pytest.raises(raddle.CompileError) as caught:
        made(*arguments, **values)
    return str(caught.value)


def test_the_users_own_line_comes_first():
    # The struct's own lines are counted from the text's first, includes and blank lines too.
    text = "\n#include <cstdint>\nstruct Wrong {\n  float a;\n\n  " + LOGITS + " { return s + undeclared; }\n};"
    with pytest.raises(raddle.CompileError) as caught:
        attention(variant=[raddle.Variant("Wrong", text, {"a": float})(a=1.0)])
    first, second = str(caught.value).splitlines()[:2]
    assert first == "variant 'Wrong' does not compile:"
    assert second.startswith("Wrong:6:") and "undeclared" in second


def test_includes():
    text = '#include <cstdint>\n#include "raddle/engine/core/interval.h"\nstruct Including {\n'
    text += "static_assert(sizeof(std::uint16_t) == 2);\n" + LOGITS + " { return s; }\n};"
    attention(variant=[raddle.Variant("Including", text)()], fuse=True)
    mine = raddle.Variant("Mine", '#include <cstdint>\n # include "mine.h"\nstruct Mine {' + LOGITS + " { return s; } };")
    with refuses(ValueError, "text of 'Mine' has # include \"mine.h\"", "paste others into the text"):
        attention(variant=[mine()])


EXPECTED = {
    "logits": "float logits(float s, const Row& r, const Key& c) const",
    "distance_slope": "float distance_slope(const Row& r) const",
    "mask": "bool mask(const Row& r, const Key& c) const",
    "row_span": "KvSpan row_span(const Row& r, Range keys) const",
    "knows_spans": "bool knows_spans() const",
    "sink": "float sink(const Row& r) const",
    "key": "void key(Vec& k, const Key& c) const",
    "output": "void output(Vec& o, const Row& r, float lse) const",
}
BODIES = {
    "logits": [
        "float logits(float s, const Row&, const Key&) { return s; }",
        "float logits(float s) const { return s; }",
    ],
    "distance_slope": ["float distance_slope(const Row&, const Key&) const { return 1.0f; }"],
    "mask": ["bool mask(const Row&) const { return true; }"],
    "row_span": ["KvSpan row_span(const Row&) const { return {everything, everything}; }"],
    "knows_spans": ["bool knows_spans(int) const { return true; }"],
    "sink": ["float sink(const Row&) { return 0; }"],
    "key": ["template <class Vec> void key(Vec& k, const Key& c) {}", "template <class Vec> void key(Vec& k) const {}"],
    "output": ["template <class Vec> void output(Vec& o, const Row& r) const {}"],
}


@pytest.mark.parametrize(("part", "body"), [(part, body) for part in BODIES for body in BODIES[part]])
def test_wrong_signatures_say_what_is_expected(part, body):
    assert EXPECTED[part] in message("Signature", body)


def test_structs_that_are_no_variant():
    assert "at least one part" in message("Nothing", "float a;", {"a": float}, a=1.0)
    span = "KvSpan kv_span(const Tile&) const { return {everything, everything}; }"
    assert "expected a mask beside" in message("Bounds", LOGITS + " { return s; }\n" + span)
    mask = "bool mask(const Row&, const Key&) const { return true; }\n"
    of_rows = "KvSpan row_span(const Row&, Range) const { return {everything, everything}; }"
    assert "what kv_span and coverage say of tiles; expected them beside" in message("Rows", mask + of_rows)
    assert "bool knows_spans() const, and kv_span beside" in message(
        "Knows", mask + "bool knows_spans() const { return true; }"
    )
    with refuses(ValueError, "no struct Other"):
        raddle.Variant("Other", "struct Another {};")
    with refuses(ValueError, "no struct Empty"):
        raddle.Variant("Empty", "")
    with refuses(ValueError, "name is 'My Name'"):
        raddle.Variant("My Name", "struct My Name {};")
    assert "does not compile" in message("Half", "float logits(float s")


def test_params_that_are_not_the_structs():
    body = "float a; Tensor<const i32, 2> t;\n" + LOGITS + " { return s + a + float(t.data[0]); }"
    good = {"a": float, "t": raddle.Tensor[int, None, "Hq"]}
    table = np.zeros((3, 4), np.int32)
    made("Members", body, good, a=1.0, t=table)
    assert "nobody" in message("Members", body, {**good, "nobody": float}, a=1.0, t=table, nobody=1.0)
    for name, kind, words in (
        ("a", int, ["'a' is said to be an integer", "expected a number"]),
        ("a", raddle.Tensor[None], ["'a' is said to be a float32 array of rank 1"]),
        ("t", raddle.Tensor[int, None], ["'t' is said to be an int32 array of rank 1", "int32 array of rank 2"]),
        ("t", raddle.Tensor[float, None, None], ["'t' is said to be a float32 array", "int32 array of rank 2"]),
    ):
        with refuses(TypeError, *words):
            made("Members", body, {**good, name: kind}, a=1.0, t=table)
    for nameless in (body, body + "i32 more;", body.replace("float a;", "float a = 4.0f;")):
        with refuses(ValueError, "params: struct Members has members that params does not name"):
            made("Members", nameless, {"t": good["t"]}, t=table)
    constants = "static constexpr float twice = 2.0f;\n" + body
    made("Members", constants, good, a=1.0, t=table)
    for wrong in ("float", np.float32, 3):
        with refuses(TypeError, "params['a']", "expected float, int"):
            raddle.Variant("Members", f"struct Members {{ {body} }};", {"a": wrong})
    for wrong in (("Hx",), (None,) * 5, ("float16", "Hq"), (int,)):
        with refuses(ValueError, "expected 1 to 4 extents"):
            raddle.Tensor[wrong]


VALUES = raddle.Variant(
    "Values",
    "struct Values { float a; i32 n; Tensor<const float, 1> h; Tensor<const i32, 2> t; Tensor<const u8, 1> b;\n"
    "  Tensor<const u32, 1> u; Tensor<const float, 1> g;\n"
    + LOGITS
    + " { return s + a + n + h.data[0] + t.data[0] + b.data[0] + u.data[0] + g.data[0]; } };",
    {
        "a": float,
        "n": int,
        "h": raddle.Tensor["Hq"],
        "t": raddle.Tensor[int, "Hkv", None],
        "b": raddle.Tensor[bool, None],
        "u": raddle.Tensor["uint32", None],
        "g": raddle.Tensor["Hkv"],
    },
)
GOOD = {
    "a": 0.5,
    "n": 2,
    "h": np.zeros(4, np.float32),
    "t": np.zeros((2, 3), np.int32),
    "b": np.zeros(3, bool),
    "u": np.zeros(3, np.uint32),
    "g": [1.0, 2.0],
}
NAN = float("nan")


def test_values_that_fit():
    for same in (
        {"a": 1, "n": 2.0},
        {"a": NAN},
        {"a": float("inf")},
        {"a": np.float32(1.5), "n": np.int64(3)},
        {"a": np.array(1.5), "n": np.array(3)},
        {"h": [1, 2, 3, 4], "b": np.zeros(1, np.uint8)},
        {"h": np.zeros(4), "t": np.zeros((2, 1), np.int64)},
        {"h": np.zeros((4, 2), np.float32)[:, 0], "g": np.zeros(2, np.float16)},
    ):
        attention(variant=[VALUES(**{**GOOD, **same})])


@pytest.mark.parametrize(
    ("name", "value", "error", "words"),
    [
        ("a", np.zeros(2, np.float32), TypeError, ["Values.a is a float32 array of rank 1", "expected a number"]),
        ("a", "1.0", TypeError, ["a"]),
        ("a", None, TypeError, ["a"]),
        ("n", 1.5, TypeError, ["Values.n", "expected an integer"]),
        ("n", NAN, TypeError, ["Values.n", "expected an integer"]),
        ("n", 2**31, TypeError, ["Values.n", "expected an integer"]),
        ("h", np.zeros(3, np.float32), ValueError, ["Values.h has 3 elements", "one a query head, 4"]),
        ("h", 1.0, TypeError, ["Values.h is a number", "a float32 array of rank 1"]),
        ("h", np.zeros((4, 1), np.float32), TypeError, ["Values.h is a float32 array of rank 2", "rank 1"]),
        ("g", [1.0], ValueError, ["Values.g has 1 elements", "one a KV head, 2"]),
        ("t", np.zeros((3, 3), np.int32), ValueError, ["Values.t, dimension 0, has 3", "one a KV head, 2"]),
        ("t", np.zeros((2, 3), np.float32), TypeError, ["Values.t is a float32 array", "int32 array of rank 2"]),
        ("t", np.zeros(6, np.int32), TypeError, ["Values.t is an int32 array of rank 1", "rank 2"]),
        ("b", np.float32([1]), TypeError, ["Values.b", "a uint8 or bool array of rank 1"]),
        ("b", np.int32([256]), TypeError, ["Values.b", "a uint8 or bool array of rank 1"]),
        ("u", np.int32([-1]), TypeError, ["Values.u", "a uint32 array of rank 1"]),
        ("h", np.zeros(4, complex), TypeError, ["Values.h has dtype complex128"]),
        ("t", np.zeros((1,) * 5, np.int32), ValueError, ["Values.t has 5 dimensions", "at most 4"]),
    ],
)
def test_values_that_do_not_fit(name, value, error, words):
    with refuses(error, *words):
        attention(variant=[VALUES(**{**GOOD, name: value})])


def test_missing_and_unknown_values():
    for missing in GOOD:
        with refuses(ValueError, f"Values.{missing} has no value"):
            attention(variant=[VALUES(**{name: value for name, value in GOOD.items() if name != missing})])
    with refuses(ValueError, "'Values' has no member 'z'"):
        attention(variant=[VALUES(**GOOD, z=1.0)])


def test_wrong_params_of_a_run_write_nothing(small_problem):
    attn = attention(variant=[VALUES(**GOOD)])
    q, kv = small_problem["q"], (small_problem["k"], small_problem["v"])
    out = np.full(q.shape, np.nan, np.float32)
    plan = attn.plan(paged())
    for name, value, error in (
        ("Values.h", np.zeros(5, np.float32), ValueError),
        ("Values.n", 0.5, TypeError),
        ("Values.z", 1.0, ValueError),
        ("Values", 1.0, ValueError),
        ("Values#2.a", 1.0, ValueError),
    ):
        with refuses(error, name):
            attn.run(plan, q, kv, out=out, params={name: value})
        assert np.isnan(out).all()


CHILD = """
import sys
sys.modules["torch"] = None
import raddle
raddle.Attention(raddle.AttentionSpec(2, 1, 8, variant=[raddle.SoftCap(3.0), raddle.Causal()]))
text = "struct Any { RADDLE_FN float logits(float s, const Row&, const Key&) const { return s; } };"
try:
    raddle.Attention(raddle.AttentionSpec(2, 1, 8, variant=[raddle.Variant("Any", text)()]))
    print("compiled")
except raddle.CompileError as error:
    print(error)
"""


def said(tmp_path, compiler=None, **variables):
    """What a process says that compiles one variant; shipped ones work in any case."""
    env = {name: value for name, value in os.environ.items() if name not in ("RADDLE_CXX", "CXX")}
    env["RADDLE_CACHE_DIR"] = str(tmp_path / "cache")
    if compiler is not None:
        path = tmp_path / "compiler"
        path.write_text(f"#!/bin/sh\ncase $1 in --version|-dump*) {compiler[0]};; *) {compiler[1]};; esac\n")
        path.chmod(0o755)
        env["RADDLE_CXX"] = str(path)
    env.update({name: str(value) for name, value in variables.items()})
    done = subprocess.run([sys.executable, "-c", CHILD], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_compiler(tmp_path):
    for variables in ({"PATH": ""}, {"PATH": tmp_path, "CXX": "no-such-compiler"}):
        text = said(tmp_path, **variables)
        assert "variant 'Any'" in text and "no C++ compiler" in text and "g++" in text and "RADDLE_CXX" in text


@pytest.mark.parametrize("value", ["/no/such/compiler", "no-such-compiler", "/tmp", "/etc/passwd"])
def test_raddle_cxx_that_names_no_program(tmp_path, value):
    assert f"RADDLE_CXX is '{value}'" in said(tmp_path, RADDLE_CXX=value)


def test_compilers_that_fail_strangely(tmp_path):
    text = said(tmp_path, ("echo odd", "echo out of luck; exit 1"))
    assert "out of luck" in text and "exit status 1" in text and f"{tmp_path}/compiler" in text
    text = said(tmp_path, ("true", "kill -9 $$"))
    assert "signal 9" in text
    for nothing in ("exit 0", "for a; do :; done; : > $a", "for a; do :; done; echo no library > $a"):
        assert "wrote no shared library" in said(tmp_path, ("true", nothing))
    assert "--version ends with exit status 3" in said(tmp_path, ("echo hm; exit 3", "exit 0"))
    # Nothing of it was kept.
    assert "compiled" in said(tmp_path)


def test_other_compilers(tmp_path):
    """Wrappers with arguments, paths with blanks, other languages of messages, and clang where there is one."""
    spaced = tmp_path / "my compilers"
    spaced.mkdir()
    (spaced / "c++").symlink_to("/usr/bin/c++")
    assert "compiled" in said(tmp_path, RADDLE_CXX=spaced / "c++", LC_ALL="de_DE.UTF-8")
    assert "compiled" in said(tmp_path, RADDLE_CXX="env LANG=C c++")
    assert "compiled" in said(tmp_path, CXX="c++ -DANYTHING=1")
    assert "compiled" in said(tmp_path, PATH=f"relative:{spaced}:{os.environ['PATH']}")

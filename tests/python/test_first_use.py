"""Which call waits for which kernel of a GPU: in processes where the full one takes until a file is there.

Kernels do nothing here (RADDLE_EMULATOR_HOLLOW): when they are there is all that is asked.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EMULATE = Path(__file__).parents[1] / "gpu/emulate.sh"

#: What each process begins with: the full kernel is on its way until release() is called.
BEGIN = """
import os, sys, threading, time
import raddle
from raddle import cache
cache_folder, gate = sys.argv[1:3]
os.environ["RADDLE_CACHE_DIR"] = cache_folder
SPEC = raddle.AttentionSpec(8, 2, 64, dtype="bfloat16", variant=raddle.Causal())
decode, prompt = raddle.RaggedKV([0, 1, 2], [0, 30, 90]), raddle.RaggedKV([0, 40], [0, 40])
def release(): open(gate, "w").close()
def reserve(attn, tokens): return attn.reserve(raddle.Maxima(2, tokens, max_kv_tokens=100))
def names(): return sorted(entry["name"] for entry in cache.entries())
def until(condition):
    while not condition(): time.sleep(0.01)
def waits(call):
    # For the full kernel: the call ends when it may be compiled, and not before.
    ended = threading.Event()
    thread = threading.Thread(target=lambda: (call(), ended.set()))
    thread.start()
    assert not ended.wait(0.2)
    release()
    thread.join()
    assert ended.is_set()
FULL, SHORT = "bf16 64/64 Causal", "bf16 64/64 Causal (short queries)"
"""


@pytest.fixture
def start(tmp_path):
    """Starts such a process with an empty cache, and with the same one again."""

    def start(script, **variables):
        ours = {"RADDLE_EMULATOR_HOLLOW": "1", "RADDLE_EMULATOR_HOLD": str(tmp_path / "gate"), **variables}
        environment = {name: value for name, value in {**os.environ, **ours}.items() if value is not None}
        command = [EMULATE, sys.executable, "-c", BEGIN + script, str(tmp_path / "cache"), str(tmp_path / "gate")]
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    return start


def finish(process):
    """What it said to stderr; it must have ended well."""
    _, said = process.communicate()
    assert process.returncode == 0, said
    return said


def test_decoding_does_not_wait_for_the_full_kernel(start):
    said = finish(
        start("""
attn = raddle.Attention(SPEC, device="cuda")
assert names() == [SHORT]
plan = attn.plan(decode)
assert SHORT in plan.explain()
reserve(attn, 4)  # 16 fused rows at most
assert names() == [SHORT]
""")
    )
    assert said == ""


@pytest.mark.parametrize("call", ["attn.plan(prompt)", "reserve(attn, 5)", "reserve(attn, 64)"])
def test_who_may_have_long_queries_waits(start, call):
    finish(
        start(f"""
attn = raddle.Attention(SPEC, device="cuda")
waits(lambda: {call})
assert names() == [FULL, SHORT]
assert SHORT in attn.plan(decode).explain()
explained = attn.plan(prompt).explain()
assert FULL in explained and SHORT not in explained
""")
    )


def test_reservations_run_the_kernel_that_their_maxima_ask_for(start):
    finish(
        start("""
release()
attn = raddle.Attention(SPEC, device="cuda")
for tokens, kernel in ((4, SHORT), (5, FULL)):
    reservation = reserve(attn, tokens)
    reservation.update(decode)
    assert kernel + " for" in reservation.plan.explain(), tokens
""")
    )


def test_waiting_longer_than_a_second_says_for_what(start, tmp_path):
    process = start("""
attn = raddle.Attention(SPEC, device="cuda")
attn.plan(prompt)
attn.plan(prompt)
""")
    said = process.stderr.readline()  # the kernel is on its way until it has been said
    (tmp_path / "gate").touch()
    said += finish(process)
    assert said == "raddle: compiling the kernel bf16 64/64 Causal for sm_80 with NVRTC 0.0\n"


def test_another_attention_waits_for_the_same_compilation(start):
    finish(
        start("""
first, second = (raddle.Attention(SPEC, device="cuda") for _ in range(2))
waits(lambda: (first.plan(prompt), second.plan(prompt)))
assert names() == [FULL, SHORT]
""")
    )


def test_an_attention_that_is_gone_leaves_its_kernel_to_others(start):
    finish(
        start("""
attn = raddle.Attention(SPEC, device="cuda")
plan = attn.plan(decode)
del attn, plan
assert names() == [SHORT]
release()
until(lambda: names() == [FULL, SHORT])
""")
    )


def test_a_process_ends_at_once_and_leaves_nothing(start, tmp_path):
    finish(start('attn = raddle.Attention(SPEC, device="cuda")\n'))
    assert not (tmp_path / "gate").exists()
    left = [path for path in (tmp_path / "cache").iterdir() if len(path.name) != 32]
    assert left == [], "locks and files of what was stopped"
    # The next one finds what there is, and compiles the rest.
    finish(start('release()\nraddle.Attention(SPEC, device="cuda").plan(prompt)\nassert names() == [FULL, SHORT]\n'))


def test_a_process_that_waits_for_another_ones_compilation_ends_at_once(start, tmp_path):
    first = start('raddle.Attention(SPEC, device="cuda").plan(prompt)\n')
    second = start("""
until(lambda: names() == [SHORT])
raddle.Attention(SPEC, device="cuda")
print("made")
""")
    assert finish(second) == "" and not (tmp_path / "gate").exists()
    (tmp_path / "gate").touch()
    finish(first)


def test_processes_that_start_together_compile_each_kernel_once(start, tmp_path):
    (tmp_path / "gate").touch()
    script = """
raddle.Attention(SPEC, device="cuda").plan(prompt)
assert names() == [FULL, SHORT]
"""
    counted = tmp_path / "counted"
    compiler = tmp_path / "counts"
    compiler.write_text(f'#!/bin/sh\necho once >> "{counted}"\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    for process in [start(script, CXX=str(compiler)) for _ in range(8)]:
        finish(process)
    assert counted.read_text() == "once\n" * 2


def test_a_fork_neither_waits_nor_keeps_others_waiting(start):
    finish(
        start("""
attn = raddle.Attention(SPEC, device="cuda")
plan = attn.plan(decode)
child = os.fork()
if child == 0:
    try:
        attn.plan(prompt)
    except RuntimeError as error:
        assert "forked" in str(error), error
        sys.exit(0)  # with all that a process does at its end
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
keeps = os.fork()
if keeps == 0:
    until(lambda: names() == [FULL, SHORT])
    until(lambda: not any(name.endswith(".lock") for name in os.listdir(cache_folder)))
    os._exit(0)
release()
attn.plan(prompt)
assert os.waitstatus_to_exitcode(os.waitpid(keeps, 0)[1]) == 0
""")
    )


WRONG = """
wrong = raddle.Variant("Wrong", '''struct Wrong {
  RADDLE_FN float logits(float s, const Row& r, const Key&) const { return s + nothing_of_that_name; }
};''')
"""


def test_mistakes_in_a_variant_are_raised_at_once(start):
    """With kernels that are compiled, without a C++ compiler for the host."""
    finish(
        start(
            WRONG
            + """
for _ in range(2):
    try:
        raddle.Attention(raddle.AttentionSpec(8, 2, 64, dtype="bfloat16", variant=wrong()), device="cuda")
    except raddle.CompileError as error:
        assert "nothing_of_that_name" in str(error), error
    else:
        raise AssertionError("it was taken")
""",
            RADDLE_EMULATOR_HOLLOW=None,
            RADDLE_CXX="/nowhere/c++",
            CXX="c++",
        )
    )


def test_a_full_kernel_that_cannot_be_compiled_is_an_error_of_who_needs_it(start):
    finish(
        start("""
attn = raddle.Attention(SPEC, device="cuda")
attn.plan(decode)
os.environ["CXX"] = "/nowhere/c++"
release()
for call in (lambda: attn.plan(prompt), lambda: reserve(attn, 64)):
    try:
        call()
    except raddle.CompileError as error:
        assert "NVRTC cannot compile the kernel for sm_80" in str(error), error
    else:
        raise AssertionError("it was taken")
attn.plan(decode)
os.environ["CXX"] = "c++"
raddle.Attention(SPEC, device="cuda").plan(prompt)  # is tried again
""")
    )


@pytest.mark.parametrize("compute", ["80", "90"])
def test_what_is_warm_is_not_compiled(start, compute):
    finish(
        start(
            """
from raddle import _cuda
arch = _cuda.driver()["gpus"][0]["target"]
told = []
SPEC = raddle.AttentionSpec(8, 2, 128, dtype="bfloat16", variant=raddle.Causal())
clusters = arch == "sm_90a"  # the kernel that a plan of a prompt may have compiled, too
assert cache.warm([SPEC], arch, tell=told.append) == 2 + clusters and sorted(told) == names()
assert cache.warm([SPEC], arch) == 0
attn = raddle.Attention(SPEC, device="cuda")
attn.plan(prompt)
assert sorted(told) == names()
every = []
assert cache.warm([SPEC], arch, True, every.append) == len(every) - len(told) > 1 and sorted(every) == names()
attn.plan(decode), attn.plan(raddle.PagedKV([0, 3], [0, 2], [0, 1], [20], 12))
reserve(attn, 4), reserve(attn, 64)
for levels in (1, 2):
    maxima = raddle.Maxima(2, 2, max_kv_tokens=128, max_qo_len=1, page_size=16, max_levels=levels)
    attn.reserve(maxima, device_lengths=True)
assert sorted(every) == names()
""",
            RADDLE_EMULATOR_COMPUTE=compute,
            RADDLE_EMULATOR_HOLD=None,
        )
    )

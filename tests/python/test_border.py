"""Arguments cross to C++ by name: each function of the library lists its own, and Python knows no other order."""

import ast

import pytest
import tvm_ffi
from raddle import _library
from statements import PACKAGE


def test_every_function_lists_its_arguments():
    names = [name for name in tvm_ffi.registry.list_global_func_names() if name.startswith("raddle.")]
    assert len(names) > 90
    for name in names:
        listed = _library._arguments(name)
        assert len(set(listed)) == len(listed), name
        assert all(each.isidentifier() for each in listed[:-1]), name


@pytest.mark.parametrize(
    "given", [{"left": 3}, {"left": 3, "wrong": 4}, {"left": 3, "right": 4, "middle": 5}], ids=["few", "other", "many"]
)
def test_other_names_are_refused(given):
    window = _library.function("raddle.variant.window")
    assert "window" in repr(window(right=2, left=3))
    with pytest.raises(TypeError, match="raddle.variant.window is called with .*; expected left, right"):
        window(**given)
    with pytest.raises(TypeError, match="positional arguments"):
        window(3, 2)


def test_another_order_is_refused():
    with pytest.raises(ImportError, match="takes reservation layout stream params; expected layout reservation stream"):
        _library.function_in_order("raddle.update", "layout reservation stream")


def orders(tree):
    """The names of arguments of each function_in_order of a module, by the variable that holds it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            if getattr(node.value.func, "attr", "") == "function_in_order":
                yield node.targets[0].id, node.value.args[1].value.split()


def calls(tree, function):
    """Arguments of a function that a module calls, or has a constructor call: expressions, and their names if given."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = function in {each.id for each in ast.walk(node.func) if isinstance(each, ast.Name)}
            passed = node.args and getattr(node.args[0], "id", "") == function
            if called or passed:
                given = node.args[passed:] + [each.value for each in node.keywords]
                yield given, [each.arg for each in node.keywords]


def test_calls_in_order_are_in_that_order():
    seen = 0
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        for function, listed in orders(tree):
            for arguments, names in calls(tree, function):
                seen += 1
                assert names in ([], listed), f"{path.name}: {names} are passed as {listed}"
                assert [isinstance(each, ast.Starred) for each in arguments] == [each[0] == "*" for each in listed]
                for argument, name in zip(arguments, listed):
                    # "q" of q, q_lent, lend(q, "q") and "out" of out_lent; the object itself is self.
                    used = {each.id for each in ast.walk(argument) if isinstance(each, ast.Name)}
                    words = {word for each in used for word in (each, each.removesuffix("_lent"))}
                    own = {"*kv": "pools", "kv_pool_k": "k_pool", "kv_pool_v": "v_pool"}.get(name, name)
                    assert words & {own, "self"}, f"{path.name}: {ast.unparse(argument)} is passed as {name}"
    assert seen >= 9


def test_a_library_older_than_the_code_says_so():
    with pytest.raises(ImportError, match=r"libraddle_ffi\.so has no raddle\.of_tomorrow: .*; build it again"):
        _library.function("raddle.of_tomorrow")

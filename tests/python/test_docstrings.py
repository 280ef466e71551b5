"""Every public name has an entry in docs/reference, and a docstring that says what comes back, what is raised, and how
it is used: its examples run."""

import doctest
import importlib
import inspect
import re

import ml_dtypes
import numpy as np
import pytest
import raddle
from documents import ROOT
from raddle import flex, mla, parallel
from raddle.integrations import sglang, vllm

MODULES = {
    "raddle": raddle.__all__,
    "raddle.flex": flex.__all__,
    "raddle.flex.masks": flex.masks.__all__,
    "raddle.flex.mods": flex.mods.__all__,
    "raddle.flex.ops": None,
    "raddle.mla": None,
    "raddle.cache": None,
    "raddle.parallel": parallel.__all__,
    "raddle.integrations.vllm": vllm.__all__,
    "raddle.integrations.sglang": sglang.__all__,
}
# Modules, and what means `min` and `max` inside of a traced function.
NO_ENTRY = {"raddle.flex.masks", "raddle.flex.mods", "raddle.flex.ops", "raddle.flex.ops.smallest", "raddle.flex.ops.largest"}
# Takes any device, and raises nothing.
NEVER_RAISES = {"raddle.flex.BlockMask.to", "raddle.flex.BlockMask.as_tuple"}
ENTRY = re.compile(r"^\.\. auto(\w+):: (\S+)$", re.MULTILINE)
PAGES = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs/reference").glob("*.md")))
ENTRIES = {name: kind for kind, name in ENTRY.findall(PAGES)}


def find(name):
    """The object of a dotted name: of an attribute and a module of one name, as raddle.attention, the attribute."""
    found, path = raddle, "raddle"
    for part in name.split(".")[1:]:
        path += f".{part}"
        found = getattr(found, part) if hasattr(found, part) else importlib.import_module(path)
    return found


def own_functions(module):
    """Public functions that a module without __all__ defines."""
    found = importlib.import_module(module)
    return [name for name, f in vars(found).items() if inspect.isfunction(f) and f.__module__ == module and name[0] != "_"]


def arguments(function):
    parameters = list(inspect.signature(function).parameters.values())
    return [each for each in parameters if each.name not in ("self", "cls")]


def public_methods(kind):
    """Methods and properties that a class defines itself."""
    for name, member in vars(kind).items():
        if name[0] != "_" and (inspect.isroutine(member) or isinstance(member, (property, classmethod, staticmethod))):
            yield name, member


def test_every_public_name_has_an_entry():
    names = {f"{module}.{name}" for module, listed in MODULES.items() for name in listed or own_functions(module)}
    assert names - NO_ENTRY - set(ENTRIES) == set()


@pytest.mark.parametrize("name", [name for name, kind in ENTRIES.items() if kind == "function"])
def test_function(name):
    function = find(name)
    doc = inspect.getdoc(function) or ""
    assert doc
    if not inspect.isfunction(function) or not arguments(function):
        return
    if function.__annotations__.get("return") != "None":
        assert name.startswith("raddle.flex.ops.") or "Returns:" in doc, "Returns"
    # Those of raddle.flex.ops compute what numpy does, for values of any kind.
    assert name.startswith("raddle.flex.ops.") or name.endswith(".noop_mask") or "Raises:" in doc, "Raises"
    assert ">>>" in doc, "an example"


@pytest.mark.parametrize("name", [name for name, kind in ENTRIES.items() if kind == "class"])
def test_class(name):
    kind = find(name)
    doc = inspect.getdoc(kind) or ""
    assert doc and doc != inspect.getdoc(super(kind, kind))
    is_result = issubclass(kind, tuple)  # what a function returns, or a plain record of numbers
    if "__init__" in vars(kind) and arguments(kind.__init__) and not is_result:
        assert "Raises:" in doc, "Raises"
        assert ">>>" in doc, "an example"
    missing = []
    for method, member in public_methods(kind):
        text = inspect.getdoc(member) or ""
        if not text:
            missing.append(f"{method}: a docstring")
        if isinstance(member, property):
            continue
        function = getattr(member, "__func__", member)
        if not inspect.isfunction(function):
            continue
        returned = function.__annotations__.get("return")
        if returned != "None" and not re.search(r"\b[Rr]eturns\b", text):
            missing.append(f"{method}: Returns")
        if arguments(function) and f"{name}.{method}" not in NEVER_RAISES and not re.search(r"\bRaises\b", text):
            missing.append(f"{method}: Raises")
    assert not missing


@pytest.mark.parametrize("name", ENTRIES)
def test_examples(name):
    found = find(name)
    names = {"np": np, "ml_dtypes": ml_dtypes, "raddle": raddle, "flex": flex, "mla": mla}
    members = [member for _, member in public_methods(found)] if inspect.isclass(found) else []
    for each in [found, *members]:
        doc = inspect.getdoc(each) or ""
        if ">>>" not in doc:
            continue
        test = doctest.DocTestParser().get_doctest(doc, dict(names), name, None, 0)
        said = []
        failed = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS).run(test, out=said.append)
        assert failed.failed == 0, "".join(said)

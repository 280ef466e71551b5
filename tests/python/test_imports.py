"""The modules of the package import each other in one direction: a module is understood with those below it alone."""

import ast
from pathlib import Path

import raddle

ROOT = next(Path(folder) for folder in raddle.__path__ if (Path(folder) / "attention.py").is_file())


def name_of(path):
    """"raddle.flex.trace" of flex/trace.py, "raddle.flex" of flex/__init__.py."""
    parts = ("raddle", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules():
    return {name_of(path): ast.parse(path.read_text()) for path in ROOT.rglob("*.py")}


def imported(name, tree, known, is_package=False):
    """Modules that a module names in its import statements, wherever they stand: those of a function run later, and are
    needed nevertheless. Imports for type checkers alone do not count."""
    ignored = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in ignored:
            continue
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name in known)
        elif isinstance(node, ast.ImportFrom):
            of = node.module or ""
            if node.level:  # "from .traces import Request"
                above = name.split(".") if is_package else name.split(".")[:-1]
                of = ".".join([*above[: len(above) - node.level + 1], *filter(None, [node.module])])
            for each in node.names:
                inner = f"{of}.{each.name}"
                if inner in known or of in known:
                    yield inner if inner in known else of


def circle(graph):
    """A list of modules of which each imports the next and the last the first; None where there is none."""
    done = set()

    def visit(name, path):
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return None
        for each in sorted(graph[name]):
            found = visit(each, [*path, name])
            if found:
                return found
        done.add(name)
        return None

    return next(filter(None, (visit(name, []) for name in sorted(graph))), None)


def test_modules_import_each_other_in_one_direction():
    trees = modules()
    packages = {name_of(path) for path in ROOT.rglob("__init__.py")}
    graph = {name: set(imported(name, tree, trees, name in packages)) for name, tree in trees.items()}
    assert len(graph) > 60 and graph["raddle.attention"] >= {"raddle.plans", "raddle.spec"}  # it has been read
    found = circle(graph)
    assert found is None, " imports ".join(found)


def test_a_circle_is_found():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None

"""The modules of the package import each other in one direction: a module is understood with those below it alone."""

from statements import PACKAGE, imported


def name_of(path):
    """"raddle.flex.trace" of flex/trace.py, "raddle.flex" of flex/__init__.py."""
    parts = ("raddle", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports():
    """The modules that each module imports, inside of functions too: what runs later is needed nevertheless."""
    paths = {name_of(path): path for path in PACKAGE.rglob("*.py")}
    graph = {name: set() for name in paths}
    for name, path in paths.items():
        for each in imported(path, for_types=False):
            module = each if each in paths else each.rpartition(".")[0]  # a module, or what is taken from one
            if module in paths:
                graph[name].add(module)
    return graph


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
    graph = imports()
    assert len(graph) > 60 and graph["raddle.attention"] >= {"raddle.plans", "raddle.spec"}  # it has been read
    assert "raddle.flex.trace" in graph["raddle.spec"]  # inside of a function
    found = circle(graph)
    assert found is None, " imports ".join(found)


def test_a_circle_is_found():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None

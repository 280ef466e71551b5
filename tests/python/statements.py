"""What modules of the package import, by their import statements."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "python" / "raddle"


def imported(path, package=PACKAGE, for_types=True):
    """Full names of the modules, and of what is taken from them, that a file of the package imports anywhere.

    Without ``for_types`` what only type checkers import is left out.
    """
    parents = ["raddle", *path.relative_to(package).parts[:-1]]
    tree = ast.parse(path.read_text())
    guards = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    unseen = set() if for_types else {node for guard in guards for inner in guard.body for node in ast.walk(inner)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and node not in unseen:
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node not in unseen:
            start = parents[: len(parents) + 1 - node.level] if node.level else []
            module = ".".join([*start, *([node.module] if node.module else [])])
            yield from (f"{module}.{each.name}" for each in node.names)

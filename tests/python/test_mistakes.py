"""Typical mistakes and their messages, word for word: the page of the guide that shows them is the table (mistakes.py)."""

import linecache

import pytest
from mistakes import MISTAKES, PROBLEM

EACH = pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.title.replace(" ", "_"))


def run(code):
    """Runs the code after the problem that all entries begin with."""
    scope = {}
    exec(PROBLEM, scope)
    path = "example.py"
    lines = [f"{line}\n" for line in code.splitlines()]
    linecache.cache[path] = (len(code), None, lines, path)  # where errors find the user's line
    exec(compile(code, path, "exec"), scope)


@EACH
def test_the_message(mistake):
    with pytest.raises(Exception) as caught:
        run(mistake.code)
    assert (type(caught.value).__name__, str(caught.value)) == (mistake.error, mistake.message)


@EACH
def test_what_to_write_instead(mistake):
    run(mistake.instead)


def test_there_are_enough_of_them():
    assert len(MISTAKES) >= 40 and len({mistake.title for mistake in MISTAKES}) == len(MISTAKES)

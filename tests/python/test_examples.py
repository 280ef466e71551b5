"""The Python examples run as they stand."""

import runpy
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples/python").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path, capsys):
    names = runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out
    if "out" in names:
        assert np.isfinite(names["out"].astype(np.float32)).all()


def test_there_are_examples():
    assert EXAMPLES

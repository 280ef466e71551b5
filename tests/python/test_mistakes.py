"""The messages of typical mistakes, word for word: what the troubleshooting page shows (`mistakes.py`)."""

import linecache
import math
import pickle

import numpy as np
import pytest
import raddle
import torch
from mistakes import MISTAKES
from raddle.flex import create_block_mask, flex_attention, masks


@pytest.fixture
def scope():
    """What the code of a mistake finds: a small problem, made rightly."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((6, heads, 16)).astype(np.float32) for heads in (4, 2, 2))
    attn = raddle.Attention(raddle.AttentionSpec(4, 2, 16, dtype="float32"))
    layout = raddle.RaggedKV([0, 6], [0, 6])
    return {
        **{"np": np, "torch": torch, "raddle": raddle, "math": math, "pickle": pickle},
        **{"create_block_mask": create_block_mask, "flex_attention": flex_attention, "masks": masks},
        **{"q": q, "k": k, "v": v, "x": rng.standard_normal((1, 4, 6, 16)).astype(np.float32)},
        **{"attn": attn, "layout": layout, "plan": attn.plan(layout)},
    }


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.id)
def test_the_message(mistake, scope):
    path = f"{mistake.id}.py"
    lines = [f"{line}\n" for line in mistake.code.splitlines()]
    linecache.cache[path] = (len(mistake.code), None, lines, path)  # where errors find the user's line
    with pytest.raises(Exception) as caught:
        exec(compile(mistake.code, path, "exec"), scope)
    assert (type(caught.value).__name__, str(caught.value)) == (mistake.error, mistake.message)


def test_there_are_enough_of_them():
    assert len(MISTAKES) >= 40 and len({mistake.id for mistake in MISTAKES}) == len(MISTAKES)

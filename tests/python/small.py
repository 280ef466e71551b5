"""One small problem that the tests of the Python package share, and how they expect a refusal."""

import re

import numpy as np
import pytest
import raddle


def ints(*values):
    return np.array(values, np.int32)


# Two requests with 1 and 2 rows, 20 and 5 keys, on pages of 16: three pages, 1, 4 and 2 of 6.
PAGED = {
    "qo_indptr": ints(0, 1, 3),
    "page_indptr": ints(0, 2, 3),
    "page_indices": ints(1, 4, 2),
    "kv_len": ints(20, 5),
    "page_size": 16,
}
SPEC = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16, "dtype": "float32"}


def paged(**changes):
    return raddle.PagedKV(**{**PAGED, **changes})


def attention(**changes):
    return raddle.Attention(raddle.AttentionSpec(**{**SPEC, **changes}))


def reserved(attn, **given):
    """A reservation of fields of its `raddle.Maxima` and options of `reserve` together."""
    fields = raddle.Maxima.__dataclass_fields__
    maxima = raddle.Maxima(**{name: value for name, value in given.items() if name in fields})
    return attn.reserve(maxima, **{name: value for name, value in given.items() if name not in fields})


def run(q, k, v, spec=SPEC, layout=None, **how):
    attn = raddle.Attention(raddle.AttentionSpec(**spec))
    return attn.run(attn.plan(layout or paged()), q, (k, v), **how)


def refuses(error, *words):
    """The message names each of the words, in this order."""
    return pytest.raises(error, match=".*".join(map(re.escape, words)))

"""The parts of the replay that are C++ (src/replay): the hash that gives Q, K and V, and the fp64 check."""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple, Sequence

import numpy as np

import raddle
from raddle import _library
from raddle._tensors import lend

from .traces import BLOCK_TOKENS, Request

_fill = _library.function("raddle.replay.fill")
_sinks = _library.function("raddle.replay.sinks")
_verify = _library.function("raddle.replay.verify")
_split_rows = _library.function("raddle.replay.split_rows")


class SharedPrompts(NamedTuple):
    """Whose keys and values are the same: those of a block in all requests that have it, and of a prompt in all samples.

    Where a request is asked for, s * requests + r is sample s of request r.
    """

    block_tokens: int = 0  # 0: nothing is shared
    indptr: np.ndarray | None = None  # of blocks, int64 [requests + 1]
    blocks: np.ndarray | None = None  # int64 [indptr[-1]]
    tokens: np.ndarray | None = None  # of prompts, int64 [requests]

    @classmethod
    def of(cls, requests: Sequence[Request]) -> SharedPrompts:
        indptr = np.cumsum([0, *(len(r.blocks) for r in requests)], dtype=np.int64)
        blocks = np.fromiter((block for r in requests for block in r.blocks), np.int64)
        return cls(BLOCK_TOKENS, indptr, blocks, np.array([r.input_tokens for r in requests], np.int64))

    def departing(self, request: int, position: int) -> SharedPrompts:
        """As drafts of number ``request`` see it: before ``position`` all is the text that they left."""
        tokens = self.tokens.copy()
        tokens[request % len(tokens)] = position
        return self._replace(tokens=tokens)


def fill(
    stream: str,
    seed: int,
    layer: int,
    request: np.ndarray,
    position: np.ndarray,
    out: np.ndarray,
    prompts: SharedPrompts = SharedPrompts(),
) -> None:
    """Writes rows of ``"query"``, ``"key"`` or ``"value"``: out[r] is what request[r] has at position[r].

    `request` and `position` are int32 [rows], `out` is [rows, heads, D] of any dtype. Queries are never
    shared.
    """
    rows = dict(out=lend(out, "out"), request=request, position=position)
    _fill(stream=stream, seed=seed, layer=layer, **rows, **prompts._asdict())


def sinks(seed: int, layer: int, num_heads: int) -> np.ndarray:
    """The layer's sink logits, fp32 [num_heads]."""
    return np.array(_sinks(seed=seed, layer=layer, heads=num_heads), np.float32)


def verify(
    reference: Mapping[str, Any],
    found: np.ndarray,
    request: np.ndarray,
    position: np.ndarray,
    head: np.ndarray,
    prompts: SharedPrompts = SharedPrompts(),
) -> list[dict[str, float]]:
    """Compares outputs of one layer, fp32 [n, D], with fp64 attention computed from the hash alone.

    One dict for each: the ``element`` that uses most of its budget, ``found``, ``expected`` and ``budget``
    there, and their ``ratio``, above 1 if the output is wrong. src/replay/verify.cpp derives the budgets.
    """
    samples = dict(found=found, request=request, position=position, head=head)
    verdicts = _verify(spec=dict(reference), **samples, **prompts._asdict())
    return [dict(verdict.items()) for verdict in verdicts]


def split_rows(plan: raddle.Plan, rows: int, num_kv_heads: int) -> np.ndarray:
    """Whether a row's output is composed of several chunks: bool [rows, num_kv_heads]."""
    split = np.empty((rows, num_kv_heads), np.bool_)
    _split_rows(plan=plan, split=split)
    return split

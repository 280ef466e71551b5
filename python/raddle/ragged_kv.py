"""K and V of a batch as ragged tensors."""

from __future__ import annotations

from typing import Any

from raddle import _library
from raddle._keywords import answered
from raddle._layout import Layout

_ragged_kv = _library.function_in_order("raddle.ragged_kv", "qo_indptr kv_indptr qo_pos")


class RaggedKV(Layout):
    """K and V as ragged tensors [tokens, Hkv, D]: request i's keys are rows kv_indptr[i] … kv_indptr[i + 1].

    Args:
        qo_indptr: [requests + 1] first row of each request in the query tensor.
        kv_indptr: [requests + 1] first row of each request in K and V.
        qo_pos: [rows] positions of the query rows in the text; None: their index,
            ``kv_len - qo_len + r`` for row r of a request.

    Raises:
        ValueError: offsets that do not ascend from 0, or arrays of lengths that do not fit together.
        TypeError: arrays that are neither int32 nor int64.

    Example:
        >>> raddle.RaggedKV(qo_indptr=[0, 3, 4], kv_indptr=[0, 3, 50])      # a prompt of 3, one row over 47 keys
        RaggedKV(2 requests, 4 rows)
    """

    @answered("RaggedKV")
    def __init__(self, qo_indptr: Any, kv_indptr: Any, qo_pos: Any = None) -> None:
        self._init(_ragged_kv, qo_indptr=qo_indptr, kv_indptr=kv_indptr, qo_pos=qo_pos)

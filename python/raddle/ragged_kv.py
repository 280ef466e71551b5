"""K and V of a batch as ragged tensors."""

from __future__ import annotations

from typing import Any

from raddle import _library
from raddle._keywords import answered
from raddle._layout import Layout

_ragged_kv = _library.function_in_order("raddle.ragged_kv", "qo_indptr kv_indptr qo_pos kv_first kv_len kv_begin")


class RaggedKV(Layout):
    """K and V as ragged tensors [tokens, Hkv, D]: request i's keys are rows kv_indptr[i] … kv_indptr[i + 1].

    With ``kv_first`` and ``kv_len`` instead, a request's keys lie anywhere in one piece: padding between requests is
    left out, and requests may share keys.

    Args:
        qo_indptr: [requests + 1] first row of each request in the query tensor.
        kv_indptr: [requests + 1] first row of each request in K and V.
        qo_pos: [rows] positions of the query rows in the text; None: their index, ``kv_begin + kv_len - qo_len + r``
            for row r of a request.
        kv_first: [requests] row of each request's first key.
        kv_len: [requests] keys of each request.
        kv_begin: [requests] index, and position, of each request's first key; None: 0.

    Raises:
        ValueError: offsets that do not ascend from 0, negative rows or lengths, arrays of lengths that do not fit
            together, or kv_indptr beside kv_first or kv_len.
        TypeError: arrays that are neither int32 nor int64, or neither kv_indptr nor the other two.

    Examples:
        >>> raddle.RaggedKV(qo_indptr=[0, 3, 4], kv_indptr=[0, 3, 50])      # a prompt of 3, one row over 47 keys
        RaggedKV(2 requests, 4 rows)
        >>> raddle.RaggedKV([0, 1, 2], kv_first=[5, 64], kv_len=[59, 30])   # of padded sequences of 64 keys
        RaggedKV(2 requests, 2 rows)
    """

    @answered("RaggedKV")
    def __init__(
        self,
        qo_indptr: Any,
        kv_indptr: Any = None,
        qo_pos: Any = None,
        *,
        kv_first: Any = None,
        kv_len: Any = None,
        kv_begin: Any = None,
    ) -> None:
        self._init(
            _ragged_kv,
            qo_indptr=qo_indptr,
            kv_indptr=kv_indptr,
            qo_pos=qo_pos,
            kv_first=kv_first,
            kv_len=kv_len,
            kv_begin=kv_begin,
        )

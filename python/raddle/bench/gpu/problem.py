"""The tensors of a case, in the arrangements that the engines take."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from raddle.bench.batch import indptr
from raddle.bench.gpu.cases import Case

DTYPE = torch.bfloat16


class Problem:
    """Random Q [rows, Hq, D], K and V of one batch. Cases that differ only in their variant can share it.

    K and V are pools [pages, page_size, Hkv, D] with pages in random order (forms "paged" and "cascade"),
    or [tokens, Hkv, D]; of a `latent` case V is a view of K's first columns. Those of a `kv_dtype` are its bits in
    bytes, with scales that are a number, or one a token and head. Offsets and tables are int32 arrays of numpy;
    `on_device` keeps copies of them.
    """

    def __init__(self, case: Case, device: Any, seed: int = 0) -> None:
        self.case, self.device = case, torch.device(device)
        self._copies: dict[str, torch.Tensor] = {}
        self._generator = torch.Generator(self.device).manual_seed(seed)
        rng = np.random.default_rng(seed)
        hq, hkv, dim = case.heads
        self.q = self._random(case.num_rows, hq, dim)
        self.qo_indptr, self.kv_indptr = indptr(case.qo_len), indptr(case.kv_len)
        self.kv_len = np.array(case.kv_len, np.int32)
        self.is_paged = case.form in ("paged", "cascade")
        if self.is_paged:
            self._make_table(rng)
            shape: tuple[int, ...] = (self.num_pages, case.page_size, hkv, dim)
        else:
            shape = (int(self.kv_len.sum()), hkv, dim)
        if case.form == "blocks":
            columns = rng.permutation(case.kv_len[0] // case.page_size)[: case.blocks]
            self.kept_blocks = np.sort(columns).astype(np.int32)
        self.k = self._random(*shape)
        self.v = self.k[..., : case.latent] if case.latent else self._random(*shape[:-1], case.dim_vo)
        self.k_scale: Any = None
        self.v_scale: Any = None
        if case.kv_dtype:
            self.k, self.k_scale = self._quantized(self.k)
            self.v, self.v_scale = self._quantized(self.v)

    @staticmethod
    def key(case: Case) -> tuple[Any, ...]:
        """Equal for cases that have the same tensors."""
        paged = case.page_size if case.form in ("paged", "cascade") else case.form
        stored = case.kv_dtype, case.scales
        columns = case.heads, case.latent, case.values
        return case.qo_len, case.kv_len, columns, paged, case.prefix, case.blocks, stored

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=DTYPE, device=self.device, generator=self._generator)

    def _quantized(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Bits in bytes, and their scale: the largest magnitude becomes the largest finite number."""
        stored = getattr(torch, self.case.kv_dtype)
        largest = x.abs().amax(-1) if self.case.scales == "token" else x.abs().amax()
        scale = largest.float() / torch.finfo(stored).max
        divided = x.float() / (scale[..., None] if scale.ndim else scale)
        return divided.to(stored).view(torch.uint8), scale if scale.ndim else float(scale)

    def _values(self, x: torch.Tensor, scale: Any, where: Any) -> torch.Tensor:
        if not self.case.kv_dtype:
            return x[where]
        chosen = x[where].view(getattr(torch, self.case.kv_dtype)).float()
        return chosen * (scale[where][..., None] if isinstance(scale, torch.Tensor) else scale)

    def _make_table(self, rng: np.random.Generator) -> None:
        """Page lists in random order; those of a shared prefix begin with the same pages."""
        page, shared = self.case.page_size, self.case.prefix // self.case.page_size
        if self.case.prefix % page:
            raise ValueError(f"a prefix of {self.case.prefix} keys ends within a page of {page}")
        own = [-(-n // page) - shared for n in self.case.kv_len]
        self.num_pages = shared + sum(own)
        order = rng.permutation(self.num_pages).astype(np.int32)
        self.prefix_pages, rest = order[:shared], order[shared:]
        self.own_indptr, self.own_pages = indptr(own), rest
        bounds = zip(self.own_indptr, self.own_indptr[1:])
        lists = [np.concatenate([self.prefix_pages, rest[a:b]]) for a, b in bounds]
        self.page_indptr = indptr([len(each) for each in lists])
        self.page_indices = np.concatenate(lists).astype(np.int32)

    def on_device(self, name: str) -> torch.Tensor:
        """The array of that name on the device, always the same copy."""
        if name not in self._copies:
            self._copies[name] = torch.from_numpy(getattr(self, name)).to(self.device)
        return self._copies[name]

    def tokens(self, request: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a request in the order of its keys, each [kv_len, Hkv, D]."""
        length = self.case.kv_len[request]
        pools = (self.k, self.k_scale), (self.v, self.v_scale)
        if not self.is_paged:
            first = int(self.kv_indptr[request])
            k, v = (self._values(*pool, slice(first, first + length)) for pool in pools)
            return k, v
        begin, end = (int(self.page_indptr[n]) for n in (request, request + 1))
        pages = self.on_device("page_indices")[begin:end].long()
        k, v = (self._values(*pool, pages).flatten(0, 1)[:length] for pool in pools)
        return k, v

    @functools.cached_property
    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as [B, Hkv, S, D], contiguous. Raises ValueError where lengths differ."""
        if len(set(self.case.kv_len)) > 1:
            raise ValueError("dense tensors need requests of equal lengths")
        found = [self.tokens(n) for n in range(len(self.case.kv_len))]
        k, v = (torch.stack(each).transpose(1, 2).contiguous() for each in zip(*found))
        return k, v

    @functools.cached_property
    def dense_q(self) -> torch.Tensor:
        """Q as [B, Hq, rows, D], contiguous."""
        hq, _, dim = self.case.heads
        return self.q.view(len(self.case.qo_len), -1, hq, dim).transpose(1, 2).contiguous()

    def empty(self) -> torch.Tensor:
        """An output [rows, Hq, D of V], full of NaN."""
        return self.q.new_full((*self.q.shape[:2], self.case.dim_vo), float("nan"))

"""FlashInfer's attention with a block-sparse matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from raddle.compat.flashinfer._planned import Planned
from raddle.compat.flashinfer._refusals import check_backend, refuse
from raddle.compat.flashinfer._tensors import host
from raddle.layouts import BlockSparse


class BlockSparseAttentionWrapper(Planned):
    """Attention with a block-sparse matrix (BSR) of rows and keys: FlashInfer's class of that name.

    Args:
        float_workspace_buffer, backend: same as in `BatchDecodeWithPagedKVCacheWrapper`.

    Raises:
        NotImplementedError: another backend.

    Example:
        >>> import torch
        >>> from raddle.compat import flashinfer
        >>> wrapper = flashinfer.BlockSparseAttentionWrapper(torch.empty(0, dtype=torch.uint8))
        >>> indptr, indices = torch.tensor([0, 1, 3, 5]), torch.tensor([2, 0, 2, 1, 2])
        >>> wrapper.plan(indptr, indices, 3, 3, 1, 1, 8, 2, 64, q_data_type="float32", o_data_type="float32")
        >>> wrapper.run(torch.ones(3, 8, 64), torch.ones(3, 2, 64), torch.ones(3, 2, 64)).shape
        torch.Size([3, 8, 64])
    """

    def __init__(self, float_workspace_buffer: torch.Tensor, backend: str = "auto") -> None:
        check_backend(backend)
        self.device, self._backend = float_workspace_buffer.device, backend

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        """Does nothing, since Raddle does not use the buffers. Raises nothing."""

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        M: int,
        N: int,
        R: int,
        C: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        mask: torch.Tensor | None = None,
        packed_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = "float16",
        non_blocking: bool = True,
    ) -> None:
        """Plans a matrix, as in FlashInfer.

        Args:
            indptr, indices: blocks of each of the ceil(M / R) rows of blocks.
            M, N, R, C: rows and keys, and those of a block.
            mask: [blocks, R, C] bool; packed_mask: bits of it, each row of blocks from a whole byte on, its elements by
                row of Q, as FlashInfer packs them.
            causal, pos_encoding_mode: refused.
            use_fp16_qk_reduction, non_blocking: have no effect.
            num_qo_heads, num_kv_heads, head_dim, logits_soft_cap, sm_scale, rope_scale, rope_theta: as in FlashInfer.
            q_data_type, kv_data_type, o_data_type: same as in `BatchDecodeWithPagedKVCacheWrapper.plan`.

        Raises:
            NotImplementedError: what Raddle does not have.
            ValueError: a matrix that cannot be.
        """
        refuse(causal=causal)
        if pos_encoding_mode != "NONE":
            refuse(pos_encoding_mode=pos_encoding_mode)
        heads = num_qo_heads, num_kv_heads, head_dim, head_dim
        terms = dict(logits_soft_cap=logits_soft_cap, sm_scale=sm_scale)
        self._set_terms(heads, q_data_type, kv_data_type, o_data_type, **terms)
        first, columns = host(indptr), host(indices)
        if packed_mask is not None:
            blocks = _unpacked(host(packed_mask).view(np.uint8), first, R, C)
        else:
            blocks = None if mask is None else host(mask).astype(bool)
        bits = None if blocks is None else np.packbits(blocks.ravel(), bitorder="little")
        layout = BlockSparse(R, C, first, columns, num_rows=M, num_cols=N, mask_bits=bits)
        self._plan_layout(lambda _: layout, np.zeros(0, np.int32))

    begin_forward = plan

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale_q: torch.Tensor | None = None,
        scale_k: torch.Tensor | None = None,
        scale_v: torch.Tensor | None = None,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Any:
        """`run` with another soft cap and scale than the plan's.

        Returns:
            out.

        Raises:
            NotImplementedError: what Raddle does not have.
        """
        if pos_encoding_mode != "NONE":
            refuse(pos_encoding_mode=pos_encoding_mode)
        self._override(logits_soft_cap=logits_soft_cap, sm_scale=sm_scale)
        return self.run(q, k, v, scale_q, scale_k, scale_v)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale_q: torch.Tensor | None = None,
        scale_k: torch.Tensor | None = None,
        scale_v: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Any:
        """Computes a layer, as in FlashInfer.

        Args:
            q: [M, Hq, D]; k, v: [N, Hkv, D].
            scale_q, scale_k, scale_v: refused.
            enable_pdl: has no effect.

        Returns:
            out, or (out, lse); lse [M, Hq] is to base 2.

        Raises:
            NotImplementedError: scales.
            ValueError: shapes that do not fit, before anything is written.
        """
        refuse(scale_q=scale_q, scale_k=scale_k, scale_v=scale_v)
        return self._run(q, (k, v), out=out, lse=lse, return_lse=return_lse)


def _unpacked(packed_mask: np.ndarray, indptr: np.ndarray, R: int, C: int) -> np.ndarray:
    """[blocks, R, C] of bits that FlashInfer packed: of a row of blocks [R, blocks * C], from a whole byte on."""
    found = np.zeros((int(indptr[-1]), R, C), bool)
    begin = 0
    for first, last in zip(indptr[:-1], indptr[1:]):
        size = int(last - first) * R * C
        flat = np.unpackbits(packed_mask[begin : begin + -(-size // 8)], bitorder="little")[:size]
        found[first:last] = flat.reshape(R, last - first, C).transpose(1, 0, 2)
        begin += -(-size // 8)
    return found

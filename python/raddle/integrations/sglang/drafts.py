"""Speculative decoding in SGLang: batches in which the model checks the tokens that were drafted (TARGET_VERIFY).

Every request has as many rows as there are drafts: its last token and those that follow it. In a chain each row sees those
before it. In a tree, which of them it sees is said by a byte a pair, which the kernel that builds the tree leaves on the
GPU. The draft model itself runs on one of SGLang's own backends, whose names are written down there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.speculative.eagle_utils import TreeMaskMode

from raddle.variants import Tensor, Variant

#: Algorithms whose drafts are checked as SGLang's EagleVerifyInput says.
_SERVED = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")

#: The run member of trees' bytes: uint8 [requests, drafts, drafts], 1 where the row sees the draft.
VISIBLE = "DraftTree.visible"

# A score, not a mask: its bytes are read where they lie, and a replay of a graph reads those of its own step. All rows of
# a tree see no draft behind their own, so the mask by which tiles are skipped is Causal's.
_DraftTree = Variant(
    "DraftTree",
    """struct DraftTree {
      Tensor<const u8, 3> visible;
      RADDLE_FN float logits(float s, const Row& r, const Key& c) const {
        const i32 first = r.kv_len - r.qo_len, draft = c.kv_index - first, row = r.q_index - first;
        if (draft < 0 || draft > row) return s;
        const i64 at = (i64{r.request} * visible.extent[1] + row) * visible.extent[2] + draft;
        return visible.data[at] ? s : -math::infinity;
      }
    };""",
    params={"visible": Tensor["uint8", None, None, None]},
)


class Drafts:
    """What is drafted, and the bytes of trees.

    Attributes:
        per_request: at most so many rows of a request are checked.
        branches: a draft may have several successors, so that a row does not see all drafts before its own.
        mask: SGLang's record of the memory that the kernel that builds trees fills in place.
    """

    def __init__(self, per_request: int, branches: bool) -> None:
        self.per_request, self.branches = per_request, branches
        self.mask: Any = None

    def tree(self) -> Variant:
        """The part of a layer's variant by which rows of a tree see their own branch; each run gives its bytes."""
        return _DraftTree(visible=np.ones((1, self.per_request, self.per_request), np.uint8))

    def make_mask(self, max_requests: int, device: Any) -> None:
        """Takes memory for the trees of so many requests."""
        # Of drafts alone: a mask of all keys has hundreds of megabytes, and all rows see the keys before the drafts.
        buffer = torch.zeros(max_requests * self.per_request**2, dtype=torch.bool, device=device)
        self.mask = VerifyMask(buffer, TreeMaskMode.QLEN_ONLY, max_requests, is_read=self.branches)

    def bring(self, spec_info: Any) -> None:
        """Has the memory that graphs read hold a batch's trees, if they were built elsewhere. A capture brings a mask of any
        length, whose bytes count for nothing."""
        built, ours = spec_info.custom_mask, self.mask.buffer
        if self.branches and built is not None and built.data_ptr() != ours.data_ptr():
            count = min(built.numel(), ours.numel())
            ours[:count].copy_(built[:count])

    def params(self, built: Any, num_requests: int, n: int) -> dict[str, Any] | None:
        """Run members of a batch whose trees, of n drafts each, are ``built``: [requests · n · n] bool, or longer."""
        if not self.branches:
            return None
        return {VISIBLE: built[: num_requests * n * n].view(torch.uint8).view(num_requests, n, n)}


def drafts_of(runner: Any) -> Drafts | None:
    """What SGLang drafts for the model; None: nothing. Raises NotImplementedError for what is not served."""
    arguments = runner.server_args
    algorithm = arguments.speculative_algorithm
    if not algorithm:
        return None
    if getattr(runner, "is_draft_worker", False):
        raise NotImplementedError(
            "a draft model on Raddle's backend for SGLang; name one of SGLang's own for it: "
            "--speculative-draft-attention-backend triton"
        )
    if algorithm.upper() not in _SERVED:
        raise NotImplementedError(
            f"speculative_algorithm '{algorithm}'; Raddle's backend for SGLang serves {', '.join(_SERVED)}"
        )
    return Drafts(int(arguments.speculative_num_draft_tokens), (arguments.speculative_eagle_topk or 1) > 1)

"""`BlockMask`: a mask and its lengths, and if the user gives them, the blocks that count.

`create_block_mask` stores a function, not blocks: coverage comes from the function itself, so that a mask over a
million tokens takes no time and no memory. Blocks are computed when they are looked at.
"""

from __future__ import annotations

import abc
import sys
import weakref
from typing import Any, Callable

import numpy as np

from raddle._compiled import compiled as operators
from raddle._compiled import is_traced, numbered
from raddle._keywords import answered
from raddle._tensors import lend_flag
from raddle.flex import picture
from raddle.flex._arrays import integer, pair
from raddle.flex.blocks import block_function, block_table, given_blocks, lengths_of, selected
from raddle.flex.offset import arguments, noop_mask
from raddle.flex.picture import EMPTY, FULL, PARTIAL
from raddle.flex.errors import SlicedMaskError, UnsupportedError
from raddle.flex.trace import trace_mask, trace_score

if operators is not None:
    from raddle.flex import compiled, traced_mask

_TO_SHOW = 1 << 26  # pairs of a mask whose blocks repr may compute


class BlockMask(abc.ABC):
    """What attends to what, for `flex_attention` and as ``variant=`` of an `AttentionSpec`.

    Made by `create_block_mask` or `BlockMask.from_kv_blocks`. Attributes follow PyTorch's: ``shape`` is
    (B, H, Q_LEN, KV_LEN); ``kv_num_blocks`` [B, H, rows] and ``kv_indices`` [B, H, rows, columns] list the partial
    blocks of each row of blocks, ``full_kv_num_blocks`` and ``full_kv_indices`` the full ones, ``q_…`` the same by
    column; int32, of torch if it is imported, else of numpy. B and H of 1 stand for any number. As ``variant=`` it has
    no lengths: its function counts, and of blocks that were given nothing is kept outside.

    Raises:
        TraceError: a function that cannot be traced.

    Example:
        >>> block_mask = flex.create_block_mask(flex.masks.causal(), None, None, 512, 512)
        >>> print(block_mask.to_string(grid_size=4))
        (0, 0)
        ▒···
        █▒··
        ██▒·
        ███▒
        >>> float(block_mask.sparsity())
        37.5
    """

    def __init__(
        self,
        seq_lengths: tuple[int, int],
        kv_num_blocks: Any,
        kv_indices: Any,
        full_kv_num_blocks: Any = None,
        full_kv_indices: Any = None,
        q_num_blocks: Any = None,
        q_indices: Any = None,
        full_q_num_blocks: Any = None,
        full_q_indices: Any = None,
        BLOCK_SIZE: int | tuple[int, int] = 128,
        mask_mod: Callable[..., Any] = noop_mask,
        **_: Any,
    ):
        """PyTorch's own arguments: `from_kv_blocks` says what they are. Lists by column are those by row, transposed,
        and are not looked at; nor are those of a backward pass (dq_…)."""
        blocks = kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices
        self._set(*given_blocks(*blocks, BLOCK_SIZE, seq_lengths), mask_mod)
        self._has_full = full_kv_indices is not None
        self._has_columns = q_indices is not None

    def _set(self, kinds: Any, shape: tuple[int, ...], block_size: tuple[int, int], mask_mod: Any) -> None:
        """``kinds``: of blocks, uint8 [B, H, rows, columns], or a function that makes them; None: as the mask says."""
        self._traced = None if mask_mod is _sliced else trace_mask(mask_mod)
        self._mask_mod = mask_mod
        self._blocks = kinds
        self._computed: np.ndarray | None = None
        self._rows: dict[tuple[int, int], dict[int, np.ndarray]] = {}  # of blocks, kinds that slices asked for
        self._whole: Callable[..., Any] | None = None
        self._shape, self._size = shape, block_size
        self._has_full = self._has_columns = True
        numbered(self)

    @classmethod
    def _of(cls, mask_mod: Any, shape: tuple[int, ...], block_size: tuple[int, int], kinds: Any) -> BlockMask:
        made = cls.__new__(cls)
        made._set(kinds, shape, block_size, mask_mod)
        return made

    @classmethod
    def from_kv_blocks(
        cls,
        kv_num_blocks: Any,
        kv_indices: Any,
        full_kv_num_blocks: Any = None,
        full_kv_indices: Any = None,
        BLOCK_SIZE: int | tuple[int, int] = 128,
        mask_mod: Callable[..., Any] | None = None,
        seq_lengths: tuple[int, int] | None = None,
        compute_q_blocks: bool = True,
    ) -> BlockMask:
        """A mask of given blocks. Other blocks are skipped whatever ``mask_mod`` says.

        Args:
            kv_num_blocks: [B, H, rows] (or without B, or both): partial blocks of each row of blocks.
            kv_indices: [B, H, rows, columns]: their columns; entries past kv_num_blocks may hold anything.
            full_kv_num_blocks, full_kv_indices: counts and indices of blocks that are kept whatever ``mask_mod`` says.
            BLOCK_SIZE: rows and keys of a block, or an int for both.
            mask_mod: what partial blocks keep; None: everything.
            seq_lengths: (Q_LEN, KV_LEN); None: all of the blocks.
            compute_q_blocks: has no effect: blocks by column are computed when asked for.

        Returns:
            A `BlockMask`.

        Raises:
            ValueError: shapes that do not fit together, or a column that is not there.
            TypeError: arrays of no integers, or a mask_mod that is no mask function.
        """
        blocks = kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices
        kinds, shape, size = given_blocks(*blocks, BLOCK_SIZE, seq_lengths)
        made = cls._of(mask_mod or noop_mask, shape, size, kinds)
        made._has_full, made._has_columns = full_kv_indices is not None, lend_flag(compute_q_blocks, "compute_q_blocks")
        return made

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, H, Q_LEN, KV_LEN)."""
        return self._shape

    @property
    def BLOCK_SIZE(self) -> tuple[int, int]:
        """Rows and keys of a block."""
        return self._size

    @property
    def seq_lengths(self) -> tuple[int, int]:
        """(Q_LEN, KV_LEN). Others may be set, for instance where a slice of blocks serves a single row: blocks stay."""
        return self._shape[2:]

    @seq_lengths.setter
    def seq_lengths(self, seq_lengths: tuple[int, int]) -> None:
        lengths = lengths_of(seq_lengths)
        if self._blocks is None:
            self._freeze()
        self._shape = (*self._shape[:2], *lengths)

    @property
    def mask_mod(self) -> Callable[..., Any]:
        """What partial blocks keep. Another one may be set: the blocks stay."""
        return self._mask_mod

    @mask_mod.setter
    def mask_mod(self, mask_mod: Callable[..., Any]) -> None:
        _check_mask(mask_mod)
        if self._blocks is None:
            self._freeze()
        self._traced, self._mask_mod, self._whole = trace_mask(mask_mod), mask_mod, None

    def _freeze(self) -> None:
        """The blocks become what they are now, whatever is set later."""
        before = BlockMask._of(self._mask_mod, self._shape, self._size, None)
        before._computed, self._blocks = self._computed, before._kinds

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name not in ("mask_mod", "seq_lengths", "number"):
            expected = "another mask by BlockMask.from_kv_blocks; mask_mod and seq_lengths can be set"
            raise AttributeError(f"{name} of a BlockMask is read-only; expected {expected}")
        if name in ("mask_mod", "seq_lengths") and is_traced():  # its number stands for it as it was outside
            found = f"{name} of a BlockMask that was made outside is set in a compiled function"
            raise UnsupportedError(f"{found}; expected it to be set outside, or of a mask made or sliced inside")
        object.__setattr__(self, name, value)

    def as_tuple(self, flatten: bool = True) -> tuple[Any, ...]:
        """All parts, in the order of PyTorch's constructor: lengths, lists by row and by column, lists of a backward
        pass (None here), block size, ``mask_mod``.

        Args:
            flatten: lengths and block size as two ints each; else as tuples.

        Returns:
            A tuple.
        """
        lengths, size = (self.seq_lengths, self._size) if lend_flag(flatten, "flatten") else ((self.seq_lengths,), (self._size,))
        lists = [getattr(self, name) for name in (*_LISTS, *_BACKWARD)]
        return (*lengths, *lists, *size, self._mask_mod)

    def as_mask(self) -> Callable[..., Any]:
        """Returns the whole as one mask function (b, h, q_idx, kv_idx): blocks, if they were given, and ``mask_mod``.

        Raises:
            ValueError: a slice that has no ``mask_mod`` yet.
        """
        if self._mask_mod is _sliced:
            _sliced()
        if self._blocks is None:
            return self._mask_mod
        if self._whole is None:
            self._whole = block_function(block_table(self._kinds()), self._size, self._mask_mod)
        return self._whole

    def to_dense(self) -> Any:
        """Returns which blocks keep anything: int32 [B, H, rows, columns] of 0 and 1."""
        return _like_torch((self._kinds() != EMPTY).astype(np.int32))

    def numel(self) -> int:
        """Returns the number of pairs, kept or not: the product of the shape."""
        return int(np.prod(self.shape, dtype=object))

    def sparsity(self) -> float:
        """Returns the percentage of blocks that keep nothing."""
        kinds = self._kinds()
        return 100.0 * (1.0 - np.count_nonzero(kinds) / kinds.size) if kinds.size else 0.0

    def to(self, device: Any) -> BlockMask:
        """Returns the mask itself: it is a function and has no device."""
        return self

    def to_string(self, grid_size: int | tuple[int, int] = (20, 40), limit: int = 4) -> str:
        """A picture, one character a block: █ full, ▒ partial, · empty; several blocks where the grid is smaller.

        Args:
            grid_size: lines and characters at most, or an int for both; -1: a character for each block.
            limit: requests and heads that are shown.

        Returns:
            Lines of text.

        Raises:
            TypeError: a grid_size that is neither an int nor a pair of ints.
        """
        kinds = self._kinds()
        whole = isinstance(grid_size, (int, tuple)) and grid_size in (-1, (-1, -1))
        grid = kinds.shape[2:] if whole else pair(grid_size, "grid_size")
        limit = integer(limit, "limit")
        shown = list(np.ndindex(*kinds.shape[:2]))
        parts = [f"{where}\n{picture.text(kinds[where], grid)}" for where in shown[:limit]]
        return "\n".join(parts + ["…"] * (len(shown) > limit))

    def __repr__(self) -> str:
        name = getattr(self._mask_mod, "__name__", repr(self._mask_mod))
        head = f"BlockMask(shape={self.shape}, BLOCK_SIZE={self.BLOCK_SIZE}, mask_mod={name}"
        return f"{head}, sparsity={self.sparsity():.2f}%)" if self._cheap() else f"{head})"

    def __str__(self) -> str:
        return f"{self!r}\n{self.to_string()}" if self._cheap() else repr(self)

    def __getitem__(self, index: Any) -> BlockMask:
        """A selection ``[b, h, blocks of rows]`` by ints, slices or arrays of ints; ints keep their dimension.

        Rows are packed: the first selected block of rows is the first of the result. Since the mask function would
        now see other rows, a slice has none: set ``mask_mod``, for instance to ``with_offset(mask_mod, row)``.

        Returns:
            A `BlockMask`.

        Raises:
            IndexError: an index out of range, or more than three.
        """
        if is_traced():
            return traced_mask.sliced(self, index)
        index = index if isinstance(index, tuple) else (index,)
        if len(index) > 3:
            raise IndexError(f"index has {len(index)} entries; expected at most 3: b, h, blocks of rows")
        index = (*index, slice(None), slice(None))[:3] if len(index) < 3 else index
        grid = (*self.shape[:2], -(-self.shape[2] // self.BLOCK_SIZE[0]))
        chosen = [selected(i, n) for i, n in zip(index, grid)]
        lengths = np.minimum(self.BLOCK_SIZE[0], self.shape[2] - chosen[2] * self.BLOCK_SIZE[0])
        exact = isinstance(index[2], (int, slice))  # of arrays, PyTorch does not look at the values
        q_len = int(lengths.sum()) if exact else len(lengths) * self.BLOCK_SIZE[0]
        shape = (len(chosen[0]), len(chosen[1]), q_len, self.shape[3])
        return self._like(BlockMask._of(_sliced, shape, self.BLOCK_SIZE, lambda: self._kinds(*chosen)))

    def _adjust(self, new_q_len: int, new_kv_len: int) -> BlockMask:
        """The upper left corner, for other lengths."""
        q_len, kv_len = integer(new_q_len, "new_q_len"), integer(new_kv_len, "new_kv_len")
        shape = (*self.shape[:2], q_len, kv_len)
        if self._blocks is None:
            return self._like(BlockMask._of(self._mask_mod, shape, self.BLOCK_SIZE, None))
        rows, columns = -(-q_len // self.BLOCK_SIZE[0]), -(-kv_len // self.BLOCK_SIZE[1])
        kinds = self._kinds()[:, :, :rows, :columns]
        return self._like(BlockMask._of(self._mask_mod, shape, self.BLOCK_SIZE, kinds))

    def _like(self, other: BlockMask) -> BlockMask:
        """A mask made of this one, which has the lists that this one has."""
        other._has_full, other._has_columns = self._has_full, self._has_columns
        return other

    def __getattr__(self, name: str) -> Any:
        if name in _BACKWARD:
            return None
        if name not in _LISTS:
            raise AttributeError(f"BlockMask has no attribute '{name}'")
        is_full, by_column = name.startswith("full"), "q_" in name
        if is_full and not self._has_full or by_column and not self._has_columns:
            return None
        kinds = self._kinds()
        kinds = kinds == FULL if is_full else kinds == PARTIAL if self._has_full else kinds != EMPTY
        kinds = kinds.swapaxes(2, 3) if by_column else kinds
        if name.endswith("num_blocks"):
            return _like_torch(kinds.sum(-1).astype(np.int32))
        return _like_torch(np.argsort(~kinds, axis=-1, kind="stable").astype(np.int32))

    def _cheap(self) -> bool:
        return self._computed is not None or isinstance(self._blocks, np.ndarray) or self.numel() <= _TO_SHOW

    def _kinds(self, bs: Any = None, hs: Any = None, rows: Any = None) -> np.ndarray:
        """Kinds of blocks, uint8 [B, H, rows, columns], or those of some requests, heads and rows."""
        if self._computed is None and callable(self._blocks):
            self._computed = self._blocks()
        known = self._blocks if isinstance(self._blocks, np.ndarray) else self._computed
        if known is not None:
            return known if bs is None else known[np.ix_(bs, hs, rows)]
        # Of a block larger than the mask one row or key beyond it is evaluated: it makes the block partial, as all would.
        height, width = (min(size, n + 1) for size, n in zip(self.BLOCK_SIZE, self.shape[2:]))
        everything = [np.arange(n) for n in (*self.shape[:2], -(-self.shape[2] // height))]
        chosen = everything if bs is None else (bs, hs, rows)
        kinds = np.zeros((*(len(part) for part in chosen), -(-self.shape[3] // width)), np.uint8)
        for i, j in np.ndindex(*kinds.shape[:2]):
            kinds[i, j] = self._kinds_of_rows(int(chosen[0][i]), int(chosen[1][j]), chosen[2], (height, width))
        if bs is None:
            self._computed, self._rows = kinds, {}
        return kinds

    def _kinds_of_rows(self, b: int, h: int, rows: np.ndarray, size: tuple[int, int]) -> Any:
        """Kinds of some rows of blocks of a request and head; kept, since steps of decoding slice the same rows."""
        known = self._rows.setdefault((b, h), {})
        missing = np.array([row for row in rows if row not in known], np.int64)
        if missing.size:
            q_idx = (missing[:, None] * size[0] + np.arange(size[0])).ravel()
            q_idx[q_idx >= self.shape[2]] = -1
            found = picture.tile_kinds(self._traced.evaluate, b, h, q_idx, self.shape[3], size)
            known.update(zip(missing.tolist(), found))
        return [known[row] for row in rows] if len(rows) else 0

    def _rows_of_blocks(self, rows: Any) -> Any:
        """Kinds of some rows of blocks, uint8 [B, H, rows, columns] of torch; for compiled graphs."""
        rows = selected(rows, -(-self.shape[2] // self._size[0]))
        return _like_torch(self._kinds(*(np.arange(n) for n in self.shape[:2]), rows))


_LISTS = [f"{full}{by}_{what}" for by in ("kv", "q") for full in ("", "full_") for what in ("num_blocks", "indices")]
_BACKWARD = ["dq_write_order", "dq_write_order_full", "dq_kv_order", "dq_kv_order_spt"]


@answered("create_block_mask")
def create_block_mask(
    mask_mod: Callable[..., Any],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """A mask function with its lengths. Nothing is computed: any length takes the same microseconds.

    Args:
        mask_mod: ``(b, h, q_idx, kv_idx)`` -> True = keep; what can be traced is in `raddle.flex`.
        B, H: requests and query heads; None or 1: the mask is the same for all.
        Q_LEN, KV_LEN: rows and keys.
        device: PyTorch's; has no effect, since a mask has no device.
        BLOCK_SIZE: of the blocks that the mask shows when asked; computing does not depend on it.
        separate_full_blocks: False: the mask lists full blocks among the partial ones, and full_kv_num_blocks and
            full_kv_indices are None. Computing does not depend on it.
        _compile, compute_dq_write_order, dq_kv_order: PyTorch's; have no effect.

    A tensor on a GPU that mask_mod captures is copied to the host here, which waits for the GPU.

    Returns:
        A `BlockMask`.

    Raises:
        TraceError: a function that cannot be traced.
        ValueError: lengths or sizes out of range, a captured array that is too short for these lengths.
        TypeError: what is no mask function.

    Example:
        >>> flex.create_block_mask(lambda b, h, q_idx, kv_idx: kv_idx <= q_idx, 1, 1, 1_000_000, 1_000_000).shape
        (1, 1, 1000000, 1000000)
    """
    if is_traced():
        return compiled.create_block_mask(mask_mod, (B or 1, H or 1, Q_LEN, KV_LEN), BLOCK_SIZE)
    _check_mask(mask_mod)
    shape = (1 if B is None else integer(B, "B", 1), 1 if H is None else integer(H, "H", 1))
    shape += (integer(Q_LEN, "Q_LEN"), integer(KV_LEN, "KV_LEN"))
    block_mask = BlockMask._of(mask_mod, shape, pair(BLOCK_SIZE, "BLOCK_SIZE"), None)
    block_mask._has_full = lend_flag(separate_full_blocks, "separate_full_blocks")
    block_mask._traced.check_indices(shape)
    return block_mask


@answered("create_mask")
def create_mask(
    mod_fn: Callable[..., Any], B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, device: Any = None
) -> Any:
    """A mask or score mod pair by pair, to look at: attention needs no such table.

    Args:
        mod_fn: ``(b, h, q_idx, kv_idx)`` -> True = keep; or ``(score, b, h, q_idx, kv_idx)`` -> score: a pair is dropped
            that gives -inf for a score of 0.
        B, H: requests and query heads; None: 1.
        Q_LEN, KV_LEN: rows and keys.
        device: where the tensor lies if torch is imported; None: the host.

    Returns:
        bool [B, H, Q_LEN, KV_LEN], of torch if it is imported, else of numpy.

    Raises:
        TraceError: a function that cannot be traced.
        ValueError: lengths out of range.
        TypeError: what is no mod.

    Example:
        >>> np.asarray(flex.create_mask(flex.masks.causal(), None, None, 2, 3)).astype(int).tolist()
        [[[[1, 0, 0], [1, 1, 0]]]]
    """
    is_mask = arguments(mod_fn, "mod_fn") == 4
    shape = (1 if B is None else integer(B, "B", 1), 1 if H is None else integer(H, "H", 1))
    shape += (integer(Q_LEN, "Q_LEN"), integer(KV_LEN, "KV_LEN"))
    traced = trace_mask(mod_fn) if is_mask else trace_score(mod_fn)
    traced.check_indices(shape)
    keep = np.broadcast_to(traced.evaluate(*np.ogrid[tuple(map(slice, shape))], 0.0), shape)
    keep = _like_torch(np.array(keep if is_mask else keep != -np.inf))
    return keep.to(device) if device is not None and not isinstance(keep, np.ndarray) else keep


def _kinds_of(traced: Any, shape: tuple[int, ...], size: tuple[int, int]) -> Any:
    """Kinds of blocks of a traced mask."""
    made = BlockMask._of(_sliced, shape, size, None)
    made._traced = traced
    return _like_torch(made._kinds())


if operators is not None:
    compiled.define_kinds(_kinds_of)
    BlockMask.register(traced_mask.TracedMask)  # for isinstance inside of compiled functions


_of_torch: dict[int, tuple[Any, Any, BlockMask]] = {}


def from_torch(block_mask: Any) -> BlockMask:
    """PyTorch's `BlockMask` as Raddle's: its blocks and its mask function. Blocks on a GPU are copied to the host once,
    unless they change."""
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    lists = [getattr(block_mask, name) for name in names]
    size, lengths = tuple(block_mask.BLOCK_SIZE), tuple(map(int, block_mask.seq_lengths))
    parts = size, lengths, block_mask.mask_mod, *map(_version, lists)
    known, of, found = _of_torch.get(id(block_mask), (None, None, None))
    if known is not None and known() is block_mask and of == parts:
        return found
    lists = [each if each is None else each.cpu().numpy() for each in lists]
    found = BlockMask.from_kv_blocks(*lists, size, block_mask.mask_mod, lengths)
    if not any(version is _UNKNOWN for version in parts):
        forget = weakref.ref(block_mask, lambda _, key=id(block_mask): _of_torch.pop(key, None))
        _of_torch[id(block_mask)] = forget, parts, found
    return found


_UNKNOWN = object()


def _version(tensor: Any) -> Any:
    """Tells a tensor's contents from others: it, and how often torch has written to it."""
    if tensor is None:
        return None
    return _UNKNOWN if tensor.is_inference() else (id(tensor), tensor._version)


def is_torch_block_mask(x: Any) -> bool:
    """Whether ``x`` is a `BlockMask` of torch.nn.attention.flex_attention."""
    return type(x).__name__ == "BlockMask" and type(x).__module__.split(".")[0] == "torch"


def _sliced(*_: Any) -> Any:
    found = "block_mask is a slice, whose rows are packed"
    raise SlicedMaskError(f"{found}; expected mask_mod to be set to one for these rows")


def _like_torch(x: np.ndarray) -> Any:
    torch = sys.modules.get("torch")
    return x if torch is None else torch.from_numpy(np.ascontiguousarray(x))


def _check_mask(mask_mod: Any) -> None:
    if arguments(mask_mod, "mask_mod") != 4:
        raise TypeError("mask_mod is a score mod; expected (b, h, q_idx, kv_idx)")

"""Joining and shifting of mods: and, or, nothing at all, rows that begin elsewhere."""

from __future__ import annotations

from typing import Any, Callable

from raddle._tensors import kind_of
from raddle.flex._arrays import by_request, num_arguments
from raddle.flex.errors import MaskTypeError

_INT_MIN = -(2**31)


def noop_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Mask: keeps every pair.

    Returns:
        True for every pair.

    Example:
        >>> bool(flex.noop_mask(0, 0, 3, 100))
        True
    """
    return kv_idx >= _INT_MIN


def and_masks(*mask_mods: Callable[..., Any]) -> Callable[..., Any]:
    """A mask that keeps what all of the masks keep; `noop_mask` for none.

    Args:
        mask_mods: ``(b, h, q_idx, kv_idx)`` -> True = keep.

    Returns:
        A mask mod.

    Raises:
        TypeError: what is no mask function.

    Example:
        >>> mask = flex.and_masks(flex.masks.causal(), flex.masks.document([0, 12, 36]))
        >>> bool(mask(0, 0, 20, 15)), bool(mask(0, 0, 20, 5))
        (True, False)
    """
    _check_masks(mask_mods)
    if not mask_mods:
        return noop_mask
    first, *others = mask_mods

    def all_of(b, h, q_idx, kv_idx):
        keep = first(b, h, q_idx, kv_idx)
        for mask in others:
            keep = keep & mask(b, h, q_idx, kv_idx)
        return keep

    return all_of


def or_masks(*mask_mods: Callable[..., Any]) -> Callable[..., Any]:
    """A mask that keeps what any of the masks keeps; for none, nothing.

    Args:
        mask_mods: ``(b, h, q_idx, kv_idx)`` -> True = keep.

    Returns:
        A mask mod.

    Raises:
        TypeError: what is no mask function.

    Example:
        >>> mask = flex.or_masks(flex.masks.causal(), flex.masks.sliding_window(3, 3))
        >>> bool(mask(0, 0, 10, 12)), bool(mask(0, 0, 10, 14))
        (True, False)
    """
    _check_masks(mask_mods)
    if not mask_mods:
        return lambda b, h, q_idx, kv_idx: kv_idx < _INT_MIN
    first, *others = mask_mods

    def any_of(b, h, q_idx, kv_idx):
        keep = first(b, h, q_idx, kv_idx)
        for mask in others:
            keep = keep | mask(b, h, q_idx, kv_idx)
        return keep

    return any_of


def with_offset(mod: Callable[..., Any], offset: Any) -> Callable[..., Any]:
    """The mod as rows see it that count from ``offset``: it is called with ``q_idx + offset``.

    Args:
        mod: a score mod (5 arguments) or a mask mod (4).
        offset: an int, or an array [requests] of ints.

    A mod written for positions in the text serves decoding in `flex_attention`, where rows count from 0, with the
    number of cached tokens as offset. In plan/run form positions are true already, and a mod written for rows takes
    ``qo_len - kv_len``.

    Returns:
        A mod of the same kind.

    Raises:
        TypeError: a mod with another number of arguments, or an offset of no integers.

    Example:
        >>> mask = flex.with_offset(flex.masks.causal(), 100)
        >>> bool(mask(0, 0, 0, 100)), bool(mask(0, 0, 0, 101))
        (True, False)
    """
    shifts = by_request(offset, "offset", _INT_MIN)
    if isinstance(shifts, int):
        shift = shifts

        def shifted(b, q_idx):
            return q_idx + shift

    else:

        def shifted(b, q_idx):
            return q_idx + shifts[b]

    def shifted_score(score, b, h, q_idx, kv_idx):
        return mod(score, b, h, shifted(b, q_idx), kv_idx)

    def shifted_mask(b, h, q_idx, kv_idx):
        return mod(b, h, shifted(b, q_idx), kv_idx)

    return {5: shifted_score, 4: shifted_mask}[arguments(mod, "mod")]


def arguments(mod: Any, name: str) -> int:
    """5 for a score mod, 4 for a mask mod. Raises TypeError, naming the argument ``name``, for anything else."""
    count = num_arguments(mod) if callable(mod) else None
    if count in (4, 5):
        return count
    found = f"a function of {count} arguments" if count is not None else kind_of(mod)
    raise TypeError(f"{name} is {found}; expected (score, b, h, q_idx, kv_idx) or (b, h, q_idx, kv_idx)")


def _check_masks(mask_mods: tuple[Any, ...]) -> None:
    for number, mask in enumerate(mask_mods):
        if not callable(mask):
            raise MaskTypeError(f"mask_mods[{number}] is {kind_of(mask)}; expected (b, h, q_idx, kv_idx)")
        if arguments(mask, f"mask_mods[{number}]") != 4:
            raise TypeError(f"mask_mods[{number}] is a score mod; expected (b, h, q_idx, kv_idx)")

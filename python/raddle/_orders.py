"""q, k and v of `raddle.attention`: in which order their dimensions are, and whether they fit each other."""

from __future__ import annotations

from typing import Any

from raddle._tensors import dtype_name

_FLOATS = ("float32", "float16", "bfloat16")


def checked_layout(q: Any, k: Any, v: Any, layout: str | None) -> str:
    """"THD", "BSHD" or "BHSD". Raises ValueError or TypeError, naming q, k, v or layout."""
    if q.ndim not in (3, 4) or k.ndim != q.ndim or v.ndim != q.ndim:
        raise ValueError(
            f"q, k and v have {q.ndim}, {k.ndim} and {v.ndim} dimensions; expected 3 [tokens, H, D] or 4 [B, S, H, D] "
            "each"
        )
    allowed = ("THD",) if q.ndim == 3 else ("BSHD", "BHSD")
    if layout is not None and layout not in allowed:
        expected = " or ".join(f"'{each}'" for each in allowed)
        raise ValueError(f"layout is {layout!r:.40}; expected {expected} of tensors with {q.ndim} dimensions")
    dtype = dtype_name(q.dtype)
    if dtype not in _FLOATS:
        cast = "q.view(ml_dtypes.bfloat16) if these are its bits" if dtype == "uint16" else "q.astype(numpy.float32)"
        raise TypeError(f"q has dtype {dtype}; expected float32, float16 or bfloat16: pass {cast}")
    for name, x in (("k", k), ("v", v)):
        if dtype_name(x.dtype) != dtype:
            raise TypeError(f"{name} has dtype {dtype_name(x.dtype)}; expected {dtype}, as q has")
    if layout is None and q.ndim == 3:
        layout = "THD"
    if layout is None:
        by_rows, by_heads = (_misfit(q, k, v, each) is None for each in allowed)
        if by_heads and (not by_rows or not _reads_alike(q, k)):
            shapes = f"q is {list(q.shape)} and k {list(k.shape)}, which can be"
            if not by_rows:
                misfit = _misfit(q, k, v, "BSHD")
                raise ValueError(f"{shapes} only [B, H, S, D]; expected layout='BHSD' (as [B, S, H, D], {misfit})")
            raise ValueError(
                f"{shapes} either [B, S, H, D] or [B, H, S, D]; expected layout='BSHD' (flash-attn's order) or "
                "layout='BHSD' (that of PyTorch's scaled_dot_product_attention)"
            )
        layout = "BSHD"
    misfit = _misfit(q, k, v, layout)
    if misfit is not None:
        raise ValueError(misfit if layout == "THD" else f"{misfit} (layout {layout})")
    return layout


def _reads_alike(q: Any, k: Any) -> bool:
    """Whether rows and heads may change places: one of each."""
    return all(x.shape[1] == 1 and x.shape[2] == 1 for x in (q, k))


def _misfit(q: Any, k: Any, v: Any, layout: str) -> str | None:
    """What is wrong with the shapes in a layout; None: nothing."""
    rows, heads = layout.index("T" if layout == "THD" else "S"), layout.index("H")
    if q.ndim == 4:
        for name, x in (("k", k), ("v", v)):
            if x.shape[0] != q.shape[0]:
                return f"{name} has a batch of {x.shape[0]}; expected {q.shape[0]}, as q has"
    if v.shape[rows] != k.shape[rows]:
        return f"v has {v.shape[rows]} keys; expected {k.shape[rows]}, as k has"
    if v.shape[heads] != k.shape[heads]:
        return f"v has {v.shape[heads]} heads; expected {k.shape[heads]}, as k has"
    if k.shape[heads] == 0 or q.shape[heads] == 0 or q.shape[heads] % k.shape[heads] != 0:
        return f"k has {k.shape[heads]} heads and q {q.shape[heads]}; expected a divisor of q's"
    if k.shape[-1] != q.shape[-1]:
        return f"k has a head dimension of {k.shape[-1]}; expected {q.shape[-1]}, as q has"
    for name, x, most in (("q", q, 576), ("v", v, 512)):
        if not 0 < x.shape[-1] <= most or x.shape[-1] % 8:
            return f"{name} has a head dimension of {x.shape[-1]}; expected a multiple of 8, at most {most}"
    return None

"""What attention is computed: heads, dtype, variant."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Iterable, Sequence

from raddle._keywords import answered
from raddle._library import refuse_unmade
from raddle._tensors import dtype_name, kind_of
from raddle.variants import Variant


class _AsHeadDim(int):
    """A head_dim_vo that was None, and became head_dim."""

    __slots__ = ()


@dataclass(frozen=True)
class AttentionSpec:
    """The attention that one or more layers compute.

    Args:
        num_qo_heads: query heads Hq, a multiple of num_kv_heads.
        num_kv_heads: KV heads Hkv; ``Hq / Hkv`` query heads share one (GQA).
        head_dim: of Q and K: a multiple of 8, at most 576.
        head_dim_vo: of V and the output: a multiple of 8, at most 512; None: head_dim. MLA with absorbed weights has
            576 and 512, one KV head, and V is a view of K's first columns, or see k_extends_v.
        dtype: "bfloat16", "float16" or "float32", of Q, K, V and the output; or that dtype of numpy or torch.
            It is kept as the string.
        kv_dtype: "float8_e4m3fn", "float8_e5m2" (OCP 8-bit floating point) or "int8", of K and V where they are
            quantised; None: dtype. Their values are what is stored times the scales that `run` is given.
        variant: a variant or a list of them (`raddle.variants`), among which may be score and mask functions
            and a `BlockMask` (`raddle.flex`); empty: plain attention.
        scale: softmax scale; None: ``1 / sqrt(head_dim)``.
        batch_invariant: a request's bits do not depend on the rest of the batch.
        fuse: compile the variant's parts into one function: the same bits, one pass over the logits. Needs
            a C++ compiler the first time.
        k_extends_v: a key is its row of V followed by its row of K, so that `run` takes K of ``head_dim -
            head_dim_vo`` columns: MLA whose latents and rotary keys are tensors of their own (`raddle.mla.kv`). Where
            they have 8 bits, each part of a key has the scale of its tensor. Needs a head_dim above head_dim_vo.

    The values are checked when an `Attention` is made; types that cannot be right raise TypeError here. A spec is
    immutable, and equal specs give equal results.

    Raises:
        TypeError: ``dtype`` or ``kv_dtype`` is not a dtype, or a part of ``variant`` is not a variant or function.
        ValueError: a `BlockMask` in ``variant`` for another number of heads.
        raddle.flex.TraceError: a function in ``variant`` that cannot be traced.

    Example:
        >>> spec = raddle.AttentionSpec(
        ...     num_qo_heads=32, num_kv_heads=8, head_dim=128, variant=[raddle.SoftCap(50.0), raddle.Causal()]
        ... )
        >>> spec.dtype, spec.head_dim_vo
        ('bfloat16', 128)
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_vo: int | None = None
    dtype: Any = "bfloat16"
    variant: Sequence[Variant | Callable[..., Any]] | Variant | Callable[..., Any] = field(default=())
    scale: float | None = None
    batch_invariant: bool = False
    fuse: bool = False
    kv_dtype: Any = None
    k_extends_v: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "variant", parts(self.variant, self.num_qo_heads))
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        if self.kv_dtype is not None:
            object.__setattr__(self, "kv_dtype", dtype_name(self.kv_dtype, "kv_dtype"))
        if self.head_dim_vo is None:
            object.__setattr__(self, "head_dim_vo", _AsHeadDim(self.head_dim) if type(self.head_dim) is int else self.head_dim)
        elif isinstance(self.head_dim_vo, _AsHeadDim) and self.head_dim_vo != self.head_dim:
            # dataclasses.replace hands over what None became: whether V shall change, too, it cannot say.
            raise ValueError(
                f"head_dim is {self.head_dim} and head_dim_vo {int(self.head_dim_vo)}, which followed another head_dim; "
                f"expected head_dim_vo, too: None, to follow this one, or int({int(self.head_dim_vo)})"
            )

    def fields(self) -> dict[str, Any]:
        """Returns all fields by name, as they cross to C++."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


AttentionSpec.__init__ = answered("AttentionSpec")(AttentionSpec.__init__)  # type: ignore[method-assign]


def fields_of(spec: Any, name: str) -> dict[str, Any]:
    """The fields of the argument ``name``, which must be a spec."""
    if isinstance(spec, AttentionSpec):
        return spec.fields()
    hint = ": pass its .spec" if isinstance(getattr(spec, "spec", None), AttentionSpec) else ""
    raise TypeError(f"{name} is {kind_of(spec)}; expected an AttentionSpec{hint}")


def parts(variant: Any, num_qo_heads: int) -> tuple[Any, ...]:
    """``variant`` of a spec as a tuple of parts; functions of Python and block masks are traced."""
    refuse_unmade(variant, "variant")
    if _is_part(variant):
        return (_traced(variant, num_qo_heads),)
    if isinstance(variant, (type, str)) or _is_array(variant) or not isinstance(variant, Iterable):
        _refuse_part(variant, "variant", "a variant or a list of variants")
    found = tuple(variant)
    for number, part in enumerate(found):
        refuse_unmade(part, f"variant[{number}]")
        if isinstance(part, type) or _is_array(part):
            _refuse_part(part, f"variant[{number}]", "a variant")
    return tuple(_traced(part, num_qo_heads) for part in found)


def _is_part(x: Any) -> bool:
    return isinstance(x, Variant) or not isinstance(x, type) and (callable(x) or _is_block_mask(x))


def _is_array(x: Any) -> bool:
    return hasattr(x, "__dlpack__")


def _is_block_mask(x: Any) -> bool:
    """Raddle's or PyTorch's."""
    return hasattr(x, "as_mask") or hasattr(x, "mask_mod") and hasattr(x, "kv_indices")


def _traced(part: Any, num_qo_heads: int) -> Any:
    """A variant for a function of Python or a `BlockMask`; anything else as it is."""
    if isinstance(part, Variant) or not _is_part(part):
        return part
    from raddle.flex.block_mask import from_torch  # not before it is needed: most specs have no functions
    from raddle.flex.trace import as_variant

    if not _is_block_mask(part):
        return as_variant(part)
    part = part if hasattr(part, "as_mask") else from_torch(part)
    heads = part.shape[1]
    if heads not in (1, num_qo_heads):
        raise ValueError(f"variant has a block mask of H = {heads}; expected 1 or num_qo_heads, {num_qo_heads}")
    return as_variant(part.as_mask())


def _refuse_part(part: Any, name: str, expected: str) -> None:
    if isinstance(part, type) and issubclass(part, Variant):
        expected = f"one made of it, with parentheses: {part.__name__}(…)"
    if part is None:
        expected += "; () for plain attention"
    if _is_array(part):
        expected += ": for a matrix raddle.PackedMask.from_masks([matrix]), or a function (b, h, q_idx, kv_idx)"
    kind = "an array" if _is_array(part) else kind_of(part)
    raise TypeError(f"{name} is {kind}; expected {expected}")

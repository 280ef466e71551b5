"""`flex_attention`: attention with a score and a mask written in Python, by PyTorch's signature."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, NoReturn, TypedDict

from raddle._compiled import compiled as operators
from raddle._compiled import is_traced
from raddle._keywords import answered
from raddle._tensors import dtype_name, lend, lend_flag
from raddle.flex.block_mask import BlockMask, from_torch, is_torch_block_mask
from raddle.flex.errors import LengthError, RankError, UnsupportedError
from raddle.flex.inputs import Inputs, like_in_order
from raddle.flex.offset import arguments
from raddle.flex.program import program_of
from raddle.flex.trace import Traced, trace_mask, trace_score, traced_before


if operators is not None:
    from raddle._torch_op import object_of
    from raddle.flex import compiled
else:
    compiled = None


class AuxRequest(NamedTuple):
    """Which further results `flex_attention` returns."""

    lse: bool = False  #: the natural logarithm of each row's denominator
    max_scores: bool = False  #: refused: the kernels do not keep it


class FlexKernelOptions(TypedDict, total=False):
    """PyTorch's hints for its own kernels, such as ``BLOCK_M``. None has an effect here: plans choose tiles."""


class AuxOutput(NamedTuple):
    """Further results of `flex_attention`; None where not asked for."""

    lse: Any = None  #: [B, Hq, L] float32
    max_scores: Any = None  #: always None


@answered("flex_attention")
def flex_attention(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: FlexKernelOptions | dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Any:
    """Attention of B equally long sequences with a score mod and a mask (FlexAttention, arXiv 2412.05496).

    Args:
        query: [B, Hq, L, E] in float32, float16 or bfloat16, of torch, numpy or JAX. E and Ev that are no multiple of 8
            are padded with zeros, which copies.
        key: [B, Hkv, S, E], read where it lies: any strides with a contiguous last dimension, otherwise copied.
        value: [B, Hkv, S, Ev], likewise. With a block_mask for B sequences, both may be of one that all share.
        score_mod: ``(score, b, h, q_idx, kv_idx)`` -> score, traced; h counts query heads, q_idx rows from 0.
        block_mask: of `create_block_mask` or `BlockMask.from_kv_blocks`, or PyTorch's own, of which blocks and mask_mod
            are taken; None: every pair.
        scale: of the scores before score_mod, a number or a tensor of one; None: ``1 / sqrt(E)``.
        enable_gqa: allow fewer KV heads than query heads.
        return_lse: return (out, lse); lse is [B, Hq, L] float32, a natural logarithm, -inf for a row without keys.
        kernel_options: PyTorch's hints for its own kernels; a dict, which is not looked at.
        return_aux: return (out, AuxOutput); ``AuxRequest(lse=True)`` asks for lse. max_scores are refused.

    Compiled once for heads, dims, dtype and the structure of the functions; lengths, captured numbers and arrays may
    change. Never computed densely, and forward only.

    Returns:
        out [B, Hq, L, Ev] in query's dtype; of torch with strides in the order of query's. A row without keys is 0.
        Or (out, lse), or (out, AuxOutput).

    Raises:
        TraceError: a function that cannot be traced.
        ValueError: shapes that do not fit together, a block_mask for other lengths, inputs that require a gradient.
        TypeError: a dtype, or what is no tensor, function or `BlockMask`.

    Example:
        >>> x = np.random.default_rng(0).standard_normal((1, 4, 100, 64)).astype(np.float32)
        >>> block_mask = flex.create_block_mask(flex.masks.sliding_window(15, 0), None, None, 100, 100)
        >>> flex.flex_attention(x, x, x, score_mod=flex.mods.softcap(30.0), block_mask=block_mask).shape
        (1, 4, 100, 64)
    """
    wants_lse = _wants_lse(return_lse, return_aux)
    if kernel_options is not None and not isinstance(kernel_options, dict):
        raise TypeError(f"kernel_options is a {type(kernel_options).__name__}; expected a dict or None")
    if is_traced():
        how = score_mod, block_mask, scale, enable_gqa, wants_lse
        out, lse = compiled.flex_attention(query, key, value, *how)
        lse = lse if wants_lse else None
    else:
        if is_torch_block_mask(block_mask):
            block_mask = from_torch(block_mask)
        _check_tensors(query, key, value, enable_gqa)
        _check_block_mask(query, key, block_mask)
        score, mask = _traced(score_mod, block_mask)
        out, lse = _attend(query, key, value, score, mask, scale, wants_lse)
    if return_aux is not None:
        return out, AuxOutput(lse=lse)
    return (out, lse) if wants_lse else out


def _attend(
    query: Any, key: Any, value: Any, score: Traced | None, mask: Traced | None, scale: Any, wants_lse: bool
) -> tuple[Any, Any]:
    """(out, lse); lse is None where it is not wanted."""
    inputs = Inputs(query, key, value, scale)
    program = program_of(inputs, score, mask)
    plan = program.plan(inputs.batch, inputs.length, inputs.kv_length, inputs.shares_keys, mask)
    out, rows_out = inputs.make_output()
    params = program.params_of_run(score)
    result = program.attention.run(
        plan, inputs.rows, inputs.kv, out=rows_out, return_lse=wants_lse, scale=inputs.scale, params=params
    )
    result, lse = result if wants_lse else (result, None)
    out = inputs.finish(result, rows_out, out)
    return out, lse if lse is None else inputs.finish_lse(lse)


def _attend_compiled(
    query: Any, key: Any, value: Any, score: Any, mask: Any, given: int, scale: Any, enable_gqa: bool, wants_lse: bool
) -> tuple[Any, Any]:
    """What the operator of torch.compile does; ``given``: the number of a block mask that was made outside."""
    block_mask = object_of(given, "the block mask") if given else None
    _check_tensors(query, key, value, enable_gqa)
    _check_block_mask(query, key, block_mask)
    if block_mask is not None:
        mask = trace_mask(block_mask.as_mask())
    return _attend(query, key, value, score, _told_apart(score, mask), scale, wants_lse)


if compiled is not None:
    compiled.define(_attend_compiled, like_in_order)


def _told_apart(score: Traced | None, mask: Traced | None) -> Traced | None:
    """The mask, whose members have names of their own where score and mask have one name (two lambdas, say)."""
    same = score is not None and mask is not None and score.name == mask.name
    return mask.renamed(f"{mask.name}_mask") if same else mask


def _traced(score_mod: Any, block_mask: BlockMask | None) -> tuple[Traced | None, Traced | None]:
    score = mask = None
    if score_mod is not None:
        score = traced_before(score_mod, is_mask=False)
        if score is None:
            if arguments(score_mod, "score_mod") != 5:
                raise TypeError("score_mod is a mask mod; expected (score, b, h, q_idx, kv_idx)")
            score = trace_score(score_mod)
    if block_mask is not None:
        mask = _told_apart(score, trace_mask(block_mask.as_mask()))
    return score, mask


def _wants_lse(return_lse: bool, return_aux: Any) -> bool:
    if return_aux is None:
        return lend_flag(return_lse, "return_lse")
    if lend_flag(return_lse, "return_lse"):
        raise ValueError("return_lse and return_aux are both given; expected one: return_aux=AuxRequest(lse=True)")
    if not (hasattr(return_aux, "lse") and hasattr(return_aux, "max_scores")):
        raise TypeError(f"return_aux is a {type(return_aux).__name__}; expected an AuxRequest or None")
    if lend_flag(return_aux.max_scores, "return_aux.max_scores"):
        raise UnsupportedError("return_aux.max_scores is True; expected False: only lse is kept of a softmax")
    return lend_flag(return_aux.lse, "return_aux.lse")


def _check_tensors(query: Any, key: Any, value: Any, enable_gqa: bool) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        lend(x, name)
        if str(x.dtype).endswith("float64"):
            _refuse_double(name)
        if x.ndim != 4:
            raise RankError(f"{name} has {x.ndim} dimensions; expected 4: [B, H, tokens, E]")
        if x.dtype != query.dtype and dtype_name(x.dtype) != dtype_name(query.dtype):  # of two libraries, say
            raise TypeError(f"{name} has dtype {dtype_name(x.dtype)}; expected {dtype_name(query.dtype)}, as query has")
    if key.shape[3] != query.shape[3]:
        raise ValueError(f"key has an embedding of {key.shape[3]}; expected {query.shape[3]}, as query has")
    if tuple(value.shape[:3]) != tuple(key.shape[:3]):
        raise ValueError(f"value has shape {tuple(value.shape)}; expected {tuple(key.shape[:3])} first, as key has")
    heads, kv_heads = query.shape[1], key.shape[1]
    if heads != kv_heads and not lend_flag(enable_gqa, "enable_gqa"):
        raise ValueError(f"key has {kv_heads} heads and query {heads}; expected as many, or enable_gqa=True")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"key has {kv_heads} heads; expected a divisor of query's {heads}")


def _refuse_double(name: str) -> NoReturn:
    raise ValueError(
        f"{name} has dtype float64; expected float32, float16 or bfloat16: kernels accumulate in float32, so that "
        f"float64 would promise what it does not hold; pass {name}.float()"
    )


def _check_block_mask(query: Any, key: Any, block_mask: BlockMask | None) -> None:
    batch, heads, length = query.shape[:3]
    if block_mask is not None and not isinstance(block_mask, BlockMask):
        hint = "a BlockMask of raddle.flex or of PyTorch, or None: create_block_mask makes one of a function"
        raise TypeError(f"block_mask is a {type(block_mask).__module__}.{type(block_mask).__name__}; expected {hint}")
    shares = key.shape[0] == 1 and block_mask is not None and block_mask.shape[0] == batch
    if key.shape[0] != batch and not shares:
        hint = ", or 1 with a block_mask for query's" if key.shape[0] == 1 else ", as query has"
        raise ValueError(f"key has a batch of {key.shape[0]}; expected {batch}{hint}")
    if block_mask is None:
        return
    lengths, expected = tuple(block_mask.seq_lengths), (length, key.shape[2])
    if lengths != expected:
        raise LengthError(f"block_mask is for lengths {lengths}; expected (query, key) = {expected}")
    for name, found, wanted in (("B", block_mask.shape[0], batch), ("H", block_mask.shape[1], heads)):
        if found not in (1, wanted):
            raise ValueError(f"block_mask has {name} = {found}; expected 1 or {wanted}, as query has")

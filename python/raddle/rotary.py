"""Rotary position embeddings, fused into attention: Q turns by ``q_pos``, K by ``kv_pos``."""

from __future__ import annotations

from numbers import Integral
from typing import Any, NamedTuple, Optional

from raddle import _library
from raddle._keywords import answered
from raddle._tensors import lend, lend_index
from raddle.variants import Variant

_make_rope = _library.function("raddle.variant.rope")
_make_rope_tables = _library.function("raddle.variant.rope_tables")


class LinearScaling(NamedTuple):
    """Divides all RoPE frequencies by ``factor``: positions are interpolated (arXiv 2306.15595).

    Example:
        >>> rope = raddle.Rope(128, scaling=raddle.LinearScaling(8.0))
    """

    factor: float  #: by which all pairs are divided


class Llama31Scaling(NamedTuple):
    """Llama 3.1's scaling of RoPE frequencies for contexts longer than the trained one.

    Slow pairs are divided by ``factor``, fast ones are kept, and those between are interpolated. The defaults are Llama
    3.1's.

    Example:
        >>> rope = raddle.Rope(128, theta=500000.0, scaling=raddle.Llama31Scaling())
    """

    factor: float = 8.0  #: by which slow pairs are divided
    low_freq_factor: float = 1.0  #: turns over the original context, below which a pair is slow
    high_freq_factor: float = 4.0  #: … and above which it is kept
    original_max_position: float = 8192.0  #: tokens of the original context


class YarnScaling(NamedTuple):
    """YaRN (arXiv 2309.00071): slows the slow pairs by ``factor``, and sharpens attention by a temperature.

    A pair that makes more than ``beta_fast`` turns over the original context keeps its frequency, one that makes
    fewer than ``beta_slow`` is divided by ``factor``, and those between are interpolated, linearly in the number
    of the pair, as the authors' code and transformers do it.

    Cosine and sine are multiplied by ``attention_factor``, for Q and K alike. None: ``0.1 ln(factor) + 1``, or,
    where ``mscale`` and ``mscale_all_dim`` are given (DeepSeek), ``(0.1 mscale ln(factor) + 1)
    / (0.1 mscale_all_dim ln(factor) + 1)``. DeepSeek's models also change the softmax scale; that is
    ``AttentionSpec(scale=…)``.

    ``truncate``: the interpolation begins and ends at whole pairs (gpt-oss: False).

    Example:
        >>> rope = raddle.Rope(64, scaling=raddle.YarnScaling(factor=40.0, original_max_position=4096))
    """

    factor: float  #: by which slow pairs are divided
    original_max_position: float  #: tokens of the original context
    beta_fast: float = 32.0  #: turns over the original context, above which a pair is kept
    beta_slow: float = 1.0  #: … and below which it is slow
    attention_factor: Optional[float] = None  #: of cosine and sine; None: as above
    mscale: Optional[float] = None  #: DeepSeek's
    mscale_all_dim: Optional[float] = None  #: DeepSeek's
    truncate: bool = True  #: begin and end at whole pairs


class Rope(Variant):
    """Rotary position embedding (RoFormer, arXiv 2104.09864) of Q and K.

    Args:
        rotary_dim: elements of a head that rotate, even, at most head_dim; the others pass unchanged.
        theta: base of the frequencies ``theta ** (-2 i / rotary_dim)``, above 1.
        scaling: `LinearScaling`, `Llama31Scaling`, `YarnScaling`, or None.
        offset: added to every position: an int, or one int32 or int64 a request.
        interleaved: rotate pairs ``(x[2i], x[2i + 1])``, as RoFormer, GPT-J and DeepSeek do, instead of
            ``(x[i], x[i + rotary_dim / 2])``, as Llama in transformers does.

    Run member: ``rope.offset`` (``rope_interleaved.offset``).

    Raises:
        ValueError: a bad rotary_dim, theta, scaling or offset.
        TypeError: offsets that are no integers.

    Example:
        >>> spec = raddle.AttentionSpec(32, 8, 128, variant=[raddle.Rope(128, theta=500000.0), raddle.Causal()])
    """

    @answered("Rope")
    def __init__(
        self,
        rotary_dim: int,
        theta: float = 10000.0,
        scaling: LinearScaling | Llama31Scaling | YarnScaling | None = None,
        offset: Any = 0,
        interleaved: bool = False,
    ) -> None:
        if not isinstance(offset, Integral):
            offset = lend_index(offset, "offset")
        given = scaling._asdict() if isinstance(scaling, (LinearScaling, Llama31Scaling, YarnScaling)) else {}
        fields = {name: value for name, value in given.items() if value is not None}
        turn = dict(rotary_dim=rotary_dim, theta=theta, offset=offset, interleaved=interleaved)
        self.__move_handle_from__(_make_rope(**turn, scheme=type(scaling).__name__, scaling=fields))


class RopeTables(Variant):
    """Rotary position embedding by cosines and sines of your own: the row of a position turns what lies there.

    Args:
        cos, sin: [positions, rotary_dim / 2] floats, of equal shapes; rotary_dim at most head_dim, the elements
            beyond it pass unchanged. They are copied. transformers keeps every column twice: pass the first half.
        interleaved: rotate pairs ``(x[2i], x[2i + 1])`` instead of ``(x[i], x[i + rotary_dim / 2])``.
        offset: added to every position: an int, or one int32 or int64 a request.

    `Attention.run` raises ValueError for a batch that has a position, its offset added, outside of the tables.

    Run members: ``rope_tables.cos``, ``rope_tables.sin``, ``rope_tables.offset`` (``rope_tables_interleaved…``).

    Raises:
        ValueError: tables that are empty, of unequal shapes, or of another rank.
        TypeError: tables of no floats, or offsets that are no integers.

    Example:
        >>> angle = np.arange(4096)[:, None] * 10000.0 ** (-np.arange(32) / 32)
        >>> rope = raddle.RopeTables(np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32))
    """

    def __init__(self, cos: Any, sin: Any, interleaved: bool = False, offset: Any = 0) -> None:
        if not isinstance(offset, Integral):
            offset = lend_index(offset, "offset")
        tables = {"cos": lend(cos, "cos"), "sin": lend(sin, "sin")}
        self.__move_handle_from__(_make_rope_tables(**tables, offset=offset, interleaved=interleaved))

"""Next tokens from logits."""

from __future__ import annotations

import operator
from typing import Any

from raddle import _library
from raddle._keywords import answered
from raddle._tensors import finished, lend, lend_index, lend_output, lend_scale, like

_sample = _library.function("raddle.sample")


@answered("sample")
def sample(
    logits: Any,
    *,
    temperature: Any = None,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
    repetition_penalty: Any = None,
    presence_penalty: Any = None,
    frequency_penalty: Any = None,
    counts: Any = None,
    count_drawn: bool = True,
    seed: Any = None,
    offset: Any = None,
    out: Any = None,
) -> Any:
    """Draws the next token of each row of logits: the same token from the same row, seed and offset, on every device.

    Each parameter is a number for all rows, or an array [rows] where the logits lie: float32, and int32 or int64 for
    top_k, seed and offset. They apply in the order in which they stand here, after the penalties. Tokens are ordered by
    their logits, equal ones by index, and each filter keeps the first tokens of this order.

    Args:
        logits: [rows, vocab] float32, float16 or bfloat16, any row stride; -inf: a token that is never drawn. vocab is
            at most 2²².
        temperature: divides logits; 0: the largest logit is taken, the first of equal ones. None: 1.
        top_k: how many tokens are kept; 0 or less, or vocab and more: all. None: all.
        top_p: above 0, at most 1: of what top_k keeps, the fewest tokens that have this share of its probability. None:
            1, all.
        min_p: 0 to 1: keeps tokens with at least this share of the largest probability. None: 0, all.
        repetition_penalty: above 0; positive logits of tokens that the text has are divided by it, others multiplied.
            None: 1. Source: Keskar et al. 2019, arXiv 1909.05858, section 4.1.
        presence_penalty: is taken off the logits of tokens that were generated. None: 0.
        frequency_penalty: the same, times how often they were generated. None: 0.
        counts: [rows, vocab] int32, which the penalties read: how often a token was generated; -1: it stands in the
            prompt alone. None: no penalties.
        count_drawn: the drawn token's count goes up by one, so that the next step finds ``counts`` ready.
        seed: what random numbers follow from (Philox 4x32-10). None: 0.
        offset: which of the seed's random numbers a row takes: the number of the step, say, where each request has a
            seed. None: row r takes number r.
        out: [rows] int32 or int64, written; None: a new tensor of int32, of the logits' kind.

    Weights are e^((logit - largest) / temperature) in fp32, rounded down to a multiple of 2⁻⁴⁰: what is less is never
    drawn. From there on all is computed in integers. On a GPU a call is one kernel on the caller's current stream and
    waits for nothing; a stream that captures a graph may take it, once a call before has compiled the kernel: a replay
    reads the arrays as they are then.

    Returns:
        out. On a GPU -1 for a row that has no token.

    Raises:
        ValueError: parameters out of range, shapes that do not fit, a penalty without counts; on the host, rows with
            NaN or +inf, or without a logit above -inf. GPUs draw -1 for such rows, and for a bad entry of an array.
        TypeError: dtypes other than these.

    Example:
        >>> logits = np.log(np.array([[0.6, 0.3, 0.1]] * 4, np.float32))
        >>> raddle.sample(logits, temperature=0.0).tolist()
        [0, 0, 0, 0]
        >>> raddle.sample(logits, top_k=2, seed=1).tolist() == raddle.sample(logits, top_p=0.8, seed=1).tolist()
        True
    """
    lent = lend(logits, "logits")
    numbers = {"temperature": temperature, "top_p": top_p, "min_p": min_p}
    penalties = {"repetition": repetition_penalty, "presence": presence_penalty, "frequency": frequency_penalty}
    numbers.update((f"{name}_penalty", x) for name, x in penalties.items())
    integers = {"top_k": top_k, "seed": seed, "offset": offset}
    lend_counts = lend_output if count_drawn else lend
    made = like(logits, tuple(logits.shape[:1]), "int32") if out is None else out
    _sample(
        logits=lent,
        **{name: lend_scale(x, name) for name, x in numbers.items()},
        **{name: _integers(x, name) for name, x in integers.items()},
        counts=None if counts is None else lend_counts(counts, "counts"),
        count_drawn=bool(count_drawn),
        out=lend_output(made, "out"),
    )
    return finished(logits, made) if out is None else out


def _integers(x: Any, name: str) -> Any:
    """An array, or an integer of 64 bits: their signed reading, which has the same bits."""
    if x is None or getattr(x, "ndim", 0) > 0 or isinstance(x, (list, tuple)):
        return None if x is None else lend_index(x, name)
    try:
        value = operator.index(x)
    except TypeError:
        return lend_index(x, name)
    if not -(2**63) <= value < 2**64:
        raise ValueError(f"{name} is {value}; expected an integer of 64 bits")
    return value if value < 2**63 else value - 2**64

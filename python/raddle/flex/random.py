"""Random numbers in score and mask mods, which are refused.

A mod runs once, when it is traced: a random number would be drawn then, and be the same for every pair of every call.
"""

from __future__ import annotations

import contextlib
import random
import re
import sys
from typing import Any, Iterator

import numpy as np

from raddle.flex import errors

_NAMES = re.compile(
    r"^_?(rand|randn|randint|randperm|bernoulli|multinomial|normal|poisson|dropout\w*|alpha_dropout|"
    r"(rand|randn|randint)_like|(uniform|normal|random|exponential|geometric|cauchy|log_normal|bernoulli)_)$"
)
_INSTEAD = "draw an array before, capture it and index it with b, h, q_idx or kv_idx"
_FOUND = "a random number is drawn when the function is traced, once, and would be the same for every pair and call"


def refuse_function(name: str) -> None:
    """Raises TraceError where torch's function ``name`` draws random numbers."""
    if _NAMES.match(name):
        raise errors.refuse(_FOUND, _INSTEAD)


def is_generator(x: Any) -> bool:
    """Whether a captured object draws random numbers."""
    torch = sys.modules.get("torch")
    kinds: tuple[Any, ...] = (np.random.Generator, np.random.RandomState, random.Random)
    return isinstance(x, kinds + ((torch.Generator,) if torch is not None else ()))


def refuse_generator(hint: str) -> None:
    raise errors.refuse(f"captured {hint} draws random numbers: {_FOUND}", _INSTEAD)


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """A context that raises TraceError where the generators of numpy or Python have drawn inside."""
    before = _states()
    yield
    if _states() != before:
        raise errors.TraceError(f"numpy.random or random is called in the function: {_FOUND}; {_INSTEAD}")


def _states() -> tuple[Any, ...]:
    _, keys, at, *rest = np.random.get_state()
    return keys.tobytes(), at, tuple(rest), random.getstate()

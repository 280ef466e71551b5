"""K and V of levels, and their scales."""

from __future__ import annotations

from typing import Any, Callable

import numpy as np

from raddle._tensors.inputs import lend
from raddle._tensors.kinds import kind_of


def lend_pools(kv: Any, lend: Callable[[Any, str], Any] = lend, name: str = "kv") -> list[Any]:
    """K and V of every level, one after another; None for V where one tensor holds both."""
    pools: list[Any] = []
    for number, level in enumerate(kv if isinstance(kv, list) else [kv]):
        where = f"{name}[{number}]" if isinstance(kv, list) else name
        if not isinstance(level, (tuple, list)):
            pools += (lend(level, where), None)
        elif len(level) == 2:
            pools += (lend(level[0], f"{where}: k"), lend(level[1], f"{where}: v"))
        else:
            raise ValueError(f"{where} has {len(level)} entries; expected a pair (k, v)")
    return pools


def lend_pool(kv: Any, lend: Callable[[Any, str], Any] = lend, name: str = "kv_pool") -> list[Any]:
    """K and V of a single level, as `lend_pools` lends them."""
    pools = lend_pools(kv, lend, name)
    if len(pools) != 2:
        raise ValueError(f"{name} is a list of {len(pools) // 2} levels; expected one pair (k, v), a call for each level")
    return pools


def lend_scale(x: Any, name: str) -> Any:
    """A scale of K or V: None, a number, a tensor, or a list of those, one a level."""
    if x is None or type(x) is float:
        return x
    if isinstance(x, list):
        return [lend_scale(each, f"{name}[{n}]") for n, each in enumerate(x)]
    if isinstance(x, (int, np.number)):
        return x if isinstance(x, int) else float(x)
    if isinstance(x, str):
        raise TypeError(f"{name} is {kind_of(x)}; expected a number or a tensor")
    return lend(x, name)

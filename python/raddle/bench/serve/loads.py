"""What engines are asked, the same in every version: prompts of random token ids, whose lengths are literal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Prompt = list[int]

# Below most vocabularies' sizes, above what tokenizers keep for themselves.
_TOKENS = range(10, 30000)


@dataclass(frozen=True)
class Load:
    """Requests that arrive at once.

    Attributes:
        shared: tokens that all prompts begin with. One more request computes them before, so that they are cached.
        own: further tokens of each prompt; a pair: drawn between the two.
        new: tokens that are generated.
    """

    name: str
    requests: int
    shared: int
    own: int | tuple[int, int]
    new: int

    def prompts(self, seed: int) -> tuple[Prompt, list[Prompt]]:
        """What all prompts begin with, and the prompts."""
        rng = np.random.default_rng([seed, *self.name.encode()])

        def tokens(count: int) -> Prompt:
            return [int(each) for each in rng.integers(_TOKENS.start, _TOKENS.stop, count)]

        shared = tokens(self.shared)
        least, most = self.own if isinstance(self.own, tuple) else (self.own, self.own)
        return shared, [shared + tokens(int(rng.integers(least, most + 1))) for _ in range(self.requests)]


LOADS = [
    Load("check", 64, 0, (5, 700), 24),
    Load("single", 1, 0, 2048, 128),
    Load("short", 64, 0, 1024, 128),
    Load("prefix", 32, 8192, 256, 64),
    Load("long", 32, 0, 8192, 64),
]
#: With its token an engine's start ends.
FIRST = Load("first", 1, 0, 256, 1)
#: Before anything is timed.
WARM_UP = Load("warm-up", 8, 0, 256, 16)


def chosen(names: tuple[str, ...], loads: Sequence[Load] = LOADS) -> list[Load]:
    """Loads by their names, all where there are none. Raises ValueError for an unknown one."""
    by_name = {load.name: load for load in loads}
    for name in names:
        if name not in by_name:
            raise ValueError(f"{name} is no load; expected some of: {', '.join(by_name)}")
    return [by_name[name] for name in names or by_name]

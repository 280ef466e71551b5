"""A figure and its bar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional


@dataclass(frozen=True)
class Measured:
    """``value`` in ``unit``; ``us`` is the time behind it, if there is one."""

    name: str
    us: Optional[float]
    value: float
    unit: str
    bar: Optional[float] = None  #: the most that the value may be
    at_least: bool = False  #: or, if this is set, the least

    @property
    def met(self) -> Optional[bool]:
        """Whether the value keeps its bar; None where there is none."""
        if self.bar is None:
            return None
        return self.value >= self.bar if self.at_least else self.value <= self.bar

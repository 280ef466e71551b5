"""A figure and the most it may be."""

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
    bar: Optional[float] = None

    @property
    def met(self) -> Optional[bool]:
        """Whether the value keeps its bar; None where there is none."""
        return None if self.bar is None else self.value <= self.bar

"""Compares what was found with the exact answer, element by element, within its budget."""

from __future__ import annotations

import numpy as np
from reference import Exact


def within(exact: Exact, out, lse=None) -> float:
    """Asserts that every element lies within its budget; returns the worst error / budget."""
    worst = compare("O", out, exact.out, exact.out_budget)
    if lse is not None:
        worst = max(worst, compare("LSE", lse, exact.lse, exact.lse_budget))
    return worst


def compare(name: str, found, expected, budget) -> float:
    ratio = excess(found, expected, budget)
    worst = np.unravel_index(np.argmax(ratio), ratio.shape) if ratio.size else ()
    assert not ratio.size or ratio[worst] <= 1.0, (
        f"{name}{list(map(int, worst))} is {found[worst]}, expected {expected[worst]}: "
        f"error / budget = {ratio[worst]:.3g}; {(ratio > 1).sum()} of {ratio.size} elements are off, "
        f"rows {np.unique(np.nonzero(ratio > 1)[0])[:20]}"
    )
    return float(ratio.max(initial=0.0))


def excess(found, expected, budget) -> np.ndarray:
    """Error / budget; 0 where both are equal (both -inf, say), infinite where a budget of 0 or a NaN is met."""
    found = np.asarray(found, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.abs(found - expected) / budget
    return np.where(found == expected, 0.0, np.where(np.isnan(ratio), np.inf, ratio))

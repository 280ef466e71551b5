"""Whether engines computed what they were asked for, before they are timed."""

from __future__ import annotations

import numpy as np
import torch

from raddle.bench.engines import WrongOutput, error
from raddle.bench.gpu.cases import Case
from raddle.bench.gpu.problem import Problem
from raddle.bench.gpu.variants import exact_row

#: Largest accepted RMS error relative to the RMS of the exact rows: bfloat16 arithmetic keeps far below.
TOLERANCE = 1e-2
_SAMPLED_ROWS = 4


def sampled_rows(case: Case, count: int = _SAMPLED_ROWS) -> list[tuple[int, int]]:
    """Some (request, row of the request): the first and the last, and others in between."""
    rng = np.random.default_rng(len(case.kv_len))
    found = {(0, 0), (len(case.qo_len) - 1, case.qo_len[-1] - 1)}
    for _ in range(count):
        request = int(rng.integers(len(case.qo_len)))
        found.add((request, int(rng.integers(case.qo_len[request]))))
    return sorted(found)


def all_rows(case: Case) -> list[tuple[int, int]]:
    return [(request, row) for request, count in enumerate(case.qo_len) for row in range(count)]


def exact(problem: Problem, case: Case, rows: list[tuple[int, int]]) -> torch.Tensor:
    """O [len(rows), Hq, D] in fp64 of the given rows."""
    found, last, k, v = [], None, None, None
    for request, row in rows:
        if request != last:
            k, v = (x.double() for x in problem.tokens(request))
            if case.form == "blocks":
                k, v = (_kept(problem, x) for x in (k, v))
            last = request
        q = problem.q[int(problem.qo_indptr[request]) + row].double()
        q_index = case.kv_len[request] - case.qo_len[request] + row
        found.append(exact_row(case.variant, q, k, v, q_index))
    return torch.stack(found)


def _kept(problem: Problem, x: torch.Tensor) -> torch.Tensor:
    blocks = x.view(-1, problem.case.page_size, *x.shape[1:])
    return blocks[problem.on_device("kept_blocks").long()].flatten(0, 1)


def flat_rows(problem: Problem, rows: list[tuple[int, int]]) -> list[int]:
    return [int(problem.qo_indptr[request]) + row for request, row in rows]


def verify(
    name: str, out: torch.Tensor, problem: Problem, rows: list[tuple[int, int]], reference: torch.Tensor
) -> float:
    """The error on the sampled rows. Raises WrongOutput if it is too large, or an element was not written."""
    found = error(out[flat_rows(problem, rows)], reference)
    if not found <= TOLERANCE:
        raise WrongOutput(f"{name}: relative RMS error {found:.1e}; expected at most {TOLERANCE:.0e}")
    if not bool(torch.isfinite(out).all()):
        raise WrongOutput(f"{name}: {int((~torch.isfinite(out)).sum())} elements are not finite or were not written")
    return found


def agree(name: str, out: torch.Tensor, other: torch.Tensor) -> None:
    """Raises WrongOutput unless both outputs are the same but for rounding, in every row."""
    a, b = out.flatten(1), other.flatten(1)
    # A row's own size: an error in a few rows of many would drown in a mean over all of them.
    step = max(1, (1 << 28) // a.shape[1])
    for first in range(0, len(a), step):
        x, y = (each[first : first + step].float() for each in (a, b))
        relative = (x - y).norm(dim=1) / y.norm(dim=1).clamp_min(1e-6)
        worst = float(relative.max())
        if not worst <= 5 * TOLERANCE:
            row = first + int(relative.argmax())
            raise WrongOutput(f"{name}: row {row} differs by {worst:.1e} of its size from the first engine's")

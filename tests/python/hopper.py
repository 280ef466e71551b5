"""Problems on Hopper's family of GPU kernels, by the fixture `wgmma`."""

from __future__ import annotations

import raddle
from checks import within
from engine import Engine, OnDevice, spec_of, twin
from reference import attention

HEADS = {"dim": 64, "group": 2, "num_kv_heads": 2, "dtype": "bfloat16"}


def attention_of(gpu, problem, **options):
    return OnDevice(raddle.Attention(spec_of(problem, **options), device=gpu))


ROW_BY_ROW = ", keys row by row"
CLUSTERS = ", clusters of two blocks"


def runs_on(plan, short_rows, levels=False):
    """Whether `explain` says that the plan runs on that kernel; 0: that of long queries. It may copy keys row by row, and have
    clusters for workers."""
    some = ", several levels" if levels else ""
    kernel = f"(wgmma, short queries of {short_rows} rows{some}) for" if short_rows else "(wgmma) for"
    return kernel in plan.explain().replace(ROW_BY_ROW, "").replace(CLUSTERS, "")


def check(gpu, problem, num_workers=None, state=False, schedule="auto", short_rows=0):
    """Plans, runs, and compares with the reference; returns O and LSE."""
    attn = attention_of(gpu, problem)
    plan = attn.plan(twin(problem.layout), num_workers=num_workers, schedule=schedule)
    levels = len(getattr(problem.layout, "levels", [problem.layout])) > 1
    assert "kernel family: wgmma" in plan.explain() and runs_on(plan, short_rows, levels), plan.explain()
    out, lse = Engine(gpu).run_plan(attn, plan, problem, state=state)
    within(attention(problem, state=state), out, lse)
    return out, lse

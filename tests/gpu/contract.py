"""The variant contract on a GPU, against the fp64 reference: drawn problems of every kind, in fp16 and bf16.

    python tests/gpu/contract.py --seed 1 --out result.json          # all kinds, 50 problems each and dtype
    python tests/gpu/contract.py --only rope,cascade --cases 10
    RADDLE_BACKEND=wgmma python tests/gpu/contract.py --only decode  # what Hopper's kernels of short queries serve
    RADDLE_CUDA_ARCH=75 python tests/gpu/contract.py                 # kernels of sm_75 on a later GPU, fp16 alone

Worker processes draw the problems, compile their kernels into the cache, and compute the exact answers; this
process draws the same problems again and runs them on the GPU. Lengths go to 4096, group sizes to 8; every output
starts as NaN, and so does all K and V that no row may read.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one process a core: numpy must not add threads
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "python"))

import layout_draws  # noqa: E402
import numpy as np  # noqa: E402
import raddle  # noqa: E402
from checks import excess  # noqa: E402
from draws import KV_DTYPES, SCALES, draw  # noqa: E402
from engine import Engine, OnDevice, spec_of, twin  # noqa: E402
from raddle import _cuda  # noqa: E402
from reference import Causal, Llama31Scaling, Rope, Sigmoid, Sinks, SlidingWindow, SoftCap, attention  # noqa: E402
from reference.variants import Mask  # noqa: E402

DTYPES = ["float16", "bfloat16"]
MLA = (576, 512)  # one KV head, V the first columns of K
DIMS = [(64, 64), (128, 128), (80, 80), (256, 256), (192, 128), (24, 40)]
LAYOUTS = ["ragged", "paged", "paged_hnd", "paged_interleaved", "paged_table", "bsr", "bsr_bits", "bsr_blocks"]
BOXED = [8, 16, 64, 128, 256]  # page sizes of kind "decode": those that Hopper's kernels read
LONGEST = 4096
MOST_ROWS = 1500  # rows times heads at that length: bounds the reference's time and memory


@dataclasses.dataclass
class Document(Mask):
    """A row sees its own document; a function of Python on Raddle's side, arithmetic on ids here."""

    offsets: np.ndarray

    def keep(self, q_index, q_pos, kv_index, kv_pos):
        ids = np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))
        return ids[q_pos] == ids[kv_pos]

    def traced(self):
        from raddle.flex import trace

        try:
            from raddle.flex.masks import document
        except ImportError:
            document = _document
        return trace.as_variant(document(self.offsets))


def _document(offsets):
    ids = np.repeat(np.arange(len(offsets) - 1, dtype=np.int32), np.diff(offsets))

    def document(b, h, q_idx, kv_idx):
        return ids[q_idx] == ids[kv_idx]

    return document


def document_mask(rng) -> Document:
    cuts = np.sort(rng.integers(1, LONGEST, rng.integers(3, 40)))
    # Positions of explicit blocks have gaps: they go beyond the lengths.
    return Document(np.concatenate([[0], cuts, [6 * LONGEST]]).astype(np.int32))


def rope(rng, heads, dim):
    if rng.integers(2):
        return [Rope(dim, 10000.0), Causal()]
    return [Rope(2 * int(rng.integers(1, dim // 2 + 1)), 500000.0, Llama31Scaling(), int(rng.integers(0, 100000))), Causal()]


def maybe_causal(rng):
    return [Causal()] if rng.integers(2) else []


# kind -> parts of the variant
KINDS = {
    "rope": rope,
    "softcap": lambda rng, heads, dim: [SoftCap(float(rng.choice([2.0, 30.0]))), *maybe_causal(rng)],
    "sink": lambda rng, heads, dim: [
        Sinks(rng.normal(0.0, 3.0, heads).astype(np.float32)),
        SlidingWindow(int(rng.integers(0, 600))),
        Causal(),
    ],
    "sum": lambda rng, heads, dim: [Sigmoid(float(rng.normal(-3.0))), *maybe_causal(rng)],
    "document": lambda rng, heads, dim: [document_mask(rng), *maybe_causal(rng)],
    "cascade": lambda rng, heads, dim: [Rope(dim, 10000.0), SoftCap(30.0), Causal()] if rng.integers(2) else [Causal()],
    "quantized": lambda rng, heads, dim: KINDS[str(rng.choice(["rope", "softcap", "sink", "sum"]))](rng, heads, dim),
    "mla": lambda rng, heads, dim: KINDS[str(rng.choice(["softcap", "sink", "sum", "document", "cascade"]))](
        rng, heads, dim
    ),
    "decode": lambda rng, heads, dim: KINDS[str(rng.choice(["softcap", "sink", "sum", "document"]))](rng, heads, dim),
}


def long_cascade(rng, lengths):
    """Some of the requests, not adjacent ones, share a prefix of up to 2048 keys; all have pages of their own."""
    sharing = np.flatnonzero(rng.random(len(lengths)) < 0.7)
    return layout_draws.cascade_of(rng, lengths, sharing, int(rng.choice([17, 100, 700, 2048])))


layout_draws.LAYOUTS["long_cascade"] = (long_cascade, layout_draws.cascade_pools)
layout_draws.SHARED_ROWS.add("long_cascade")


def draw_lengths(rng, number, heads, longest) -> list[tuple[int, int]]:
    """(qo_len, kv_len) a request. Every tenth problem is as long as problems get."""
    if number % 10 == 0:
        return [(max(1, min(longest, MOST_ROWS // heads)), longest)]
    kinds = [
        lambda: [(1, int(kv)) for kv in np.exp(rng.uniform(0, np.log(longest), rng.integers(1, 9)))],
        lambda: [(int(rng.integers(2, 64)), int(rng.integers(64, 1024))) for _ in range(rng.integers(1, 4))],
        lambda: [(n, n) for n in rng.integers(1, 300, rng.integers(1, 4)).tolist()],
        lambda: [(int(rng.integers(0, 5)), int(rng.integers(5, 130))) for _ in range(rng.integers(1, 9))],
    ]
    drawn = kinds[rng.integers(len(kinds))]()
    return [(min(qo, longest), min(kv, longest)) for qo, kv in drawn]


@dataclasses.dataclass
class Case:
    """One drawn problem: the same from the same arguments, in every process."""

    seed: int
    kind: str
    dtype: str
    number: int
    longest: int = LONGEST

    def draw(self):
        """The problem, and how to run it."""
        key = [self.seed, list(KINDS).index(self.kind), DTYPES.index(self.dtype), self.number]
        rng = np.random.default_rng(key)
        dim, dim_vo = DIMS[int(rng.integers(len(DIMS)))]
        group, heads = int(rng.integers(1, 9)), int(rng.integers(1, 3))
        layout = "long_cascade" if self.kind == "cascade" else str(rng.choice(LAYOUTS))
        stored = {}
        if self.kind == "mla":
            (dim, dim_vo), heads, group = MLA, 1, int(rng.choice([5, 16, 32, 128]))
            layout = str(rng.choice([*(each for each in LAYOUTS if each != "paged_interleaved"), "long_cascade"]))
            stored = {"latent": bool(rng.integers(4))}
        if self.kind == "decode":
            layout = str(rng.choice([each for each in LAYOUTS if not each.startswith("bsr")]))
            stored = {} if layout == "ragged" else {"page_size": int(rng.choice(BOXED))}
        if self.kind == "quantized":
            layout = "long_cascade" if rng.integers(5) == 0 else layout
            stored = {"kv_dtype": str(rng.choice(KV_DTYPES)), "scales": tuple(rng.choice(SCALES, 2).tolist())}
        lengths = draw_lengths(rng, self.number, group * heads, self.longest)
        if self.kind == "mla":
            lengths = [(min(qo, max(1, MOST_ROWS // group)), kv) for qo, kv in lengths]
        if self.kind == "decode":  # at most 32 fused rows, so that heads of any width fit
            lengths = [(min(qo, 32 // group), kv) for qo, kv in lengths]
        problem = draw(
            rng,
            layout=layout,
            variant=KINDS[self.kind](rng, group * heads, dim),
            dtype=self.dtype,
            dim=dim,
            dim_vo=None if layout == "paged_interleaved" else dim_vo,
            group=group,
            num_kv_heads=heads,
            lengths=lengths,
            **stored,
        )
        how = {
            "return_state": bool(rng.random() < 0.2),
            "num_workers": [None, 1, 7, 132][int(rng.integers(4))],
            "schedule": str(rng.choice(["auto", "linear", "algorithm1"])),
        }
        return problem, how

    def spec(self, problem) -> raddle.AttentionSpec:
        documents = [part for part in problem.variant if isinstance(part, Document)]
        shipped = [part for part in problem.variant if not isinstance(part, Document)]
        spec = spec_of(dataclasses.replace(problem, variant=shipped))
        return dataclasses.replace(spec, variant=(*spec.variant, *(part.traced() for part in documents)))


def prepare(job):
    """In a worker: the exact answer and its budget; the kernel is in the cache afterwards."""
    case, arch = job
    try:
        problem, how = case.draw()
        raddle.cache.warm([case.spec(problem)], arch)
        exact = attention(problem, state=how["return_state"], rounded_weights=True)
        return case, exact, None
    except Exception:  # noqa: BLE001: told with its case, and counted as a failure
        return case, None, traceback.format_exc()


def run_on_gpu(case: Case, exact) -> float:
    """Worst error over its budget; infinite where something was not written, or is NaN."""
    problem, how = case.draw()
    attn = OnDevice(raddle.Attention(case.spec(problem), device="cuda"))
    plan = attn.plan(twin(problem.layout), num_workers=how["num_workers"], schedule=how["schedule"])
    out, lse = Engine("cuda").run_plan(attn, plan, problem, state=how["return_state"])
    worst = float(excess(out, exact.out, exact.out_budget).max(initial=0.0))
    if lse is not None:
        worst = max(worst, float(excess(lse, exact.lse, exact.lse_budget).max(initial=0.0)))
    return worst


def commit() -> str | None:
    """RADDLE_COMMIT, else the checkout's: a folder that was carried to a GPU may have another's history."""
    if os.environ.get("RADDLE_COMMIT"):
        return os.environ["RADDLE_COMMIT"]
    found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    return found.stdout.strip() or None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    parser.add_argument("--only", default=",".join(KINDS), help="kinds, joined by commas")
    parser.add_argument("--cases", type=int, default=50, help="problems of each kind and dtype")
    parser.add_argument("--longest", type=int, default=LONGEST, help="most keys of a request")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    parser.add_argument("--no-gpu", metavar="ARCH", help="only draw, compile for ARCH and compute the reference")
    arguments = parser.parse_args()
    kinds = arguments.only.split(",")
    unknown = set(kinds) - set(KINDS)
    if unknown:
        parser.error(f"--only names {', '.join(sorted(unknown))}; expected some of {', '.join(KINDS)}")

    start = time.time()
    # The workers are there before the driver is loaded: a GPU's context does not survive a fork.
    pool = multiprocessing.get_context("spawn").Pool(arguments.processes)
    machine = {"arch": arguments.no_gpu, "nvrtc": _cuda.nvrtc_version()} if arguments.no_gpu else _cuda.machine()
    machine.pop("nvrtc_path", None)
    print(f"seed {arguments.seed}; {machine}", flush=True)
    # The longest first, so that none of them is left alone at the end.
    dtypes = DTYPES
    if machine["arch"].endswith("_75"):  # which has no bfloat16, and too little shared memory for MLA
        dtypes, kinds = ["float16"], [kind for kind in kinds if kind != "mla"]
    cases = [
        Case(arguments.seed, kind, dtype, number, arguments.longest)
        for number in sorted(range(arguments.cases), key=lambda n: n % 10)
        for kind in kinds
        for dtype in dtypes
    ]
    results, failures = {(kind, dtype): [] for kind in kinds for dtype in dtypes}, []
    shown = start
    for case, exact, error in pool.imap_unordered(prepare, [(case, machine["arch"]) for case in cases]):
        worst = float("inf")
        if error is None:
            try:
                worst = 0.0 if arguments.no_gpu else run_on_gpu(case, exact)
            except Exception:  # noqa: BLE001
                error = traceback.format_exc()
        results[case.kind, case.dtype].append(worst)
        if error is not None or not worst <= 1.0:
            failures.append({**dataclasses.asdict(case), "error_over_budget": worst, "error": error})
            if len(failures) <= 5:
                print(f"FAILED {case}: error / budget = {worst:.3g}\n{error or ''}", flush=True)
        if time.time() - shown > 10:
            shown = time.time()
            done = sum(map(len, results.values()))
            print(f"{done} of {len(cases)} after {shown - start:.0f} s, {len(failures)} failed", flush=True)
    pool.terminate()

    print(f"{'kind':10}{'dtype':10}{'cases':>6}{'passed':>8}  worst error / budget")
    table = []
    for (kind, dtype), ratios in results.items():
        row = {"kind": kind, "dtype": dtype, "cases": len(ratios), "passed": sum(r <= 1.0 for r in ratios)}
        row["worst"] = max(ratios, default=0.0)
        table.append(row)
        print(f"{kind:10}{dtype:10}{row['cases']:6}{row['passed']:8}  {row['worst']:.3f}")
    print(f"{len(cases)} cases, {len(failures)} failed, {time.time() - start:.0f} s")
    if arguments.out:
        report = {
            "seed": arguments.seed,
            "machine": machine,
            "commit": commit(),
            "seconds": round(time.time() - start),
            "results": table,
            "failures": failures,
        }
        arguments.out.write_text(json.dumps(report, indent=2, default=str) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

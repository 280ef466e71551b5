"""The log of a replay's steps: with the seed in it, it repeats a replay exactly, data and batches."""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import dataclass
from pathlib import Path

from .span import Span
from .speculation import Shape
from .traces import Request

_FORMAT = "raddle replay steps 3"
_MOST_BYTES = 1 << 30


@dataclass
class StepLog:
    """What fixes the work of a replay; model, schedule and threads are free."""

    trace: str
    """Where the requests came from, for people."""
    seed: int
    page_size: int
    num_pages: int
    token_budget: int
    prefix_cache: bool
    samples: int
    """Of each request."""
    speculate: Shape | None
    """Of the trees that decodes are."""
    rate: float
    requests: list[Request]
    steps: list[list[Span]]
    queued: list[int]
    """Requests that waited for pages."""


def save(log: StepLog, path: Path) -> None:
    """Writes JSON, compressed if the name ends in ``.gz``."""
    record = {
        "format": _FORMAT,
        "trace": log.trace,
        "seed": log.seed,
        "page_size": log.page_size,
        "num_pages": log.num_pages,
        "token_budget": log.token_budget,
        "prefix_cache": log.prefix_cache,
        "samples": log.samples,
        "speculate": log.speculate,
        "rate": log.rate,
        "requests": [[r.arrival, r.input_tokens, r.output_tokens, r.blocks] for r in log.requests],
        "steps": log.steps,
        "queued": log.queued,
    }
    text = json.dumps(record, separators=(",", ":")).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


def load(path: Path) -> StepLog:
    """Reads what `save` wrote. Raises ``ValueError`` naming the file for anything else."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES} bytes")
        record = json.loads(data)
        if record.pop("format") != _FORMAT:
            raise ValueError("unknown format")
        record["requests"] = [
            Request(float(a), int(n), int(m), tuple(map(int, blocks))) for a, n, m, blocks in record["requests"]
        ]
        record["steps"] = [[Span(int(r), int(b), int(n)) for r, b, n in step] for step in record["steps"]]
        if record["speculate"] is not None:
            record["speculate"] = Shape(*map(int, record["speculate"]))
        return StepLog(**record)
    except (ValueError, KeyError, TypeError, AttributeError, OSError, EOFError, OverflowError, RecursionError, zlib.error) as error:
        raise ValueError(f"{path.name} is not a log of steps as --save-steps writes it: {error!r:.300}") from None

"""Request traces: when a request arrives, how long its prompt is, and how many tokens it generates."""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import math
import random
import zlib
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, TextIO

EXCERPT = Path(__file__).parent.parent / "data" / "azure_llm_2023_conv_excerpt.csv"
BLOCK_TOKENS = 512
"""Prompt tokens to a hash of a Mooncake trace."""
_MOST_BLOCKS = 2**63 // BLOCK_TOKENS
_MOST_TOKENS = 2**31 - 1
_LONGEST_LINE = 16 << 20  # characters; a prompt of a million tokens has 2,000 hashes of at most 19 digits


@dataclass(frozen=True)
class Request:
    """One request of a trace."""

    arrival: float
    """Seconds since the first request."""
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """Numbers of the whole blocks of `BLOCK_TOKENS` tokens that its prompt begins with. A number stands for all tokens
    up to the block's end: requests that have it have those in common."""

    @property
    def tokens(self) -> int:
        """Room that the request needs in the pool: prompt and output."""
        return self.input_tokens + self.output_tokens


class TraceError(ValueError):
    """A line of a trace that can't be read: file, line, what was found and what was expected."""

    def __init__(self, path: Path, line: int, found: str) -> None:
        super().__init__(f"{path.name}:{line}: {found}")


def read_trace(path: Path) -> Iterator[Request]:
    """The requests of a trace file, in the file's order.

    The format is told from the first line: the Azure LLM inference CSV (``TIMESTAMP,ContextTokens,
    GeneratedTokens``) or Mooncake's JSON lines (``timestamp`` in ms, ``input_length``, ``output_length``, and maybe
    ``hash_ids``, one for each 512 prompt tokens, which count where the prompt fills the block). A name that ends in
    ``.gz`` is decompressed. Raises `TraceError`.
    """
    with _open(path) as file:
        lines = _lines(path, file)
        first = next(lines, "")
        parse = _parser(path, first)
        start = None
        for number, line in enumerate(itertools.chain([first], lines), 1):
            if number == 1 and parse is _azure or not line.strip():
                continue
            try:
                request = parse(line)
            except (ValueError, KeyError, TypeError, OverflowError, csv.Error) as error:
                raise TraceError(path, number, f"{str(error):.200}; found {_shown(line)}") from None
            except RecursionError:
                raise TraceError(path, number, f"lists in each other without end; found {_shown(line)}") from None
            start = request.arrival if start is None else start
            if request.input_tokens < 1 or request.output_tokens < 1:
                tokens = f"{request.input_tokens} prompt and {request.output_tokens} generated tokens"
                raise TraceError(path, number, f"found {tokens}; expected at least 1 each")
            if request.tokens > _MOST_TOKENS:
                raise TraceError(path, number, f"more than {_MOST_TOKENS} tokens; found {_shown(line)}")
            if request.arrival < start:
                raise TraceError(path, number, "arrives before the first request")
            yield replace(request, arrival=request.arrival - start)


def synthetic(text: str, seed: int) -> Iterator[Request]:
    """Requests without end, drawn as `text` says.

    ``uniform:512:2048``: prompts of 512 to 2,048 tokens, all equally likely, outputs an eighth as long
    (drawn apart), arrivals at random (exponential gaps), one a second in the mean. Raises ``ValueError``.
    """
    kind, *bounds = text.split(":")
    if kind != "uniform" or len(bounds) != 2 or not all(b.isdigit() for b in bounds):
        raise ValueError(f"found {text!r}; expected uniform:LOW:HIGH, for example uniform:512:2048")
    low, high = map(int, bounds)
    if not 1 <= low <= high:
        raise ValueError(f"found {text!r}; expected 1 <= LOW <= HIGH")
    return _uniform(low, high, random.Random(seed))


def select(
    requests: Iterable[Request], max_context: int | None = None, count: int | None = None
) -> list[Request]:
    """The first `count` requests of at most `max_context` tokens, prompt and output; time starts with them."""
    fitting = (r for r in requests if max_context is None or r.tokens <= max_context)
    chosen = sorted(itertools.islice(fitting, count), key=lambda r: r.arrival)
    start = chosen[0].arrival if chosen else 0.0
    return [replace(r, arrival=r.arrival - start) for r in chosen]


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return open(path, encoding="utf-8", newline="")


def _lines(path: Path, file: TextIO) -> Iterator[str]:
    """The lines of a file, of bounded length: what is no text, or ends early, is an error that names its line."""
    for number in itertools.count(1):
        try:
            line = file.readline(_LONGEST_LINE + 1)
        except (UnicodeDecodeError, OSError, EOFError, zlib.error) as error:
            raise TraceError(path, number, f"{error}; expected lines of text, or a gzip file named .gz") from None
        if len(line) > _LONGEST_LINE:
            raise TraceError(path, number, f"more than {_LONGEST_LINE} characters; found {_shown(line)}")
        if not line:
            return
        yield line


def _parser(path: Path, first: str) -> Callable[[str], Request]:
    """What reads a line; arrivals are on the trace's own clock."""
    if first.lstrip("\ufeff \t").startswith("{"):
        return _mooncake
    if first.lstrip("\ufeff").strip() == "TIMESTAMP,ContextTokens,GeneratedTokens":
        return _azure
    expected = "expected 'TIMESTAMP,ContextTokens,GeneratedTokens' (Azure) or a JSON object (Mooncake)"
    raise TraceError(path, 1, f"{expected}; found {_shown(first)}")


def _azure(line: str) -> Request:
    fields = next(csv.reader([line]))
    if len(fields) != 3:
        raise ValueError(f"expected 3 fields, not {len(fields)}")
    # Seven digits of a second; Python reads six.
    stamp = datetime.strptime(fields[0][:26], "%Y-%m-%d %H:%M:%S.%f")
    return Request((stamp - datetime(2000, 1, 1)).total_seconds(), _tokens(fields[1]), _tokens(fields[2]))


def _tokens(digits: str) -> int:
    if len(digits) > 20:  # what Python would take long to read
        raise ValueError("a number of more than 20 digits")
    return int(digits)


def _mooncake(line: str) -> Request:
    record = json.loads(line)
    missing = [name for name in ("timestamp", "input_length", "output_length") if name not in record]
    if missing:
        raise ValueError(f"{missing[0]} is missing")
    fields = [record[name] for name in ("timestamp", "input_length", "output_length")]
    for name, value in zip(("timestamp", "input_length", "output_length"), fields):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"{name} is {value!r}; expected a finite number")
    prompt, output = int(fields[1]), int(fields[2])
    return Request(fields[0] / 1000.0, prompt, output, _whole_blocks(record.get("hash_ids"), prompt))


def _whole_blocks(ids: Any, prompt: int) -> tuple[int, ...]:
    """Of a prompt's hashes those of blocks that it fills."""
    if ids is None:
        return ()
    expected = -(-prompt // BLOCK_TOKENS)
    if not isinstance(ids, list) or len(ids) != expected:
        count = len(ids) if isinstance(ids, list) else repr(ids)
        raise ValueError(f"hash_ids: {count} for {prompt} tokens; expected {expected}, each for {BLOCK_TOKENS}")
    for block in ids:
        if isinstance(block, bool) or not isinstance(block, int) or not 0 <= block < _MOST_BLOCKS:
            raise ValueError(f"hash_ids has {block!r}; expected integers from 0 to {_MOST_BLOCKS - 1}")
    return tuple(ids[: prompt // BLOCK_TOKENS])


def _uniform(low: int, high: int, draw: random.Random) -> Iterator[Request]:
    arrival = 0.0
    while True:
        prompt, output = draw.randint(low, high), max(1, draw.randint(low, high) // 8)
        yield Request(arrival, prompt, output)
        arrival += draw.expovariate(1.0)


def _shown(line: str) -> str:
    text = line.rstrip("\n")
    return repr(text if len(text) <= 60 else text[:57] + "...")

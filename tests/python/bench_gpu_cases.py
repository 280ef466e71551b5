"""Small cases for the tests of `raddle bench gpu`, and stand-ins for what needs a GPU."""

import dataclasses
import re

import torch
from raddle.bench import report
from raddle.bench.engines import Engine
from raddle.bench.gpu.cases import Case

TINY = {"heads": (4, 2, 32), "page_size": 16}
DECODE = Case("decode", (1, 1, 1), (33, 64, 5), **TINY)
PREFILL = Case("prefill", (40, 9), (40, 9), form="ragged", unit="TFLOP/s", **TINY)
CASES = [
    DECODE,
    PREFILL,
    Case("mixed", (7, 1), (40, 18), **TINY),
    Case("prefix", (1, 1, 1), (48, 41, 33), form="cascade", prefix=32, **TINY),
    Case("mla", (1, 1, 3), (33, 64, 5), (6, 1, 48), page_size=16, latent=32),
    dataclasses.replace(PREFILL, name="values", heads=(4, 2, 48), values=32),
    Case("blocks", (1,), (128,), (4, 4, 32), form="blocks", blocks=3, variant="plain"),
    *(dataclasses.replace(DECODE, name=name, variant=name) for name in ("alibi", "sinks", "sigmoid", "rope")),
    *(dataclasses.replace(PREFILL, name=name, variant=name) for name in ("wide window", "softcap")),
    Case("window", (7, 1), (1500, 1100), variant="window", **TINY),
    dataclasses.replace(DECODE, name="turned", variant="rope interleaved"),
    *(dataclasses.replace(PREFILL, name=f"calls, {name}", qo_len=(140, 140), kv_len=(140, 140), variant=name, is_call=True)
      for name in ("causal", "documents", "softcap")),  # fmt: skip
]

SQUARE = dataclasses.replace(PREFILL, qo_len=(150, 150), kv_len=(150, 150), peers=("flex", "fa2"))
STEP = dataclasses.replace(DECODE, kv_len=(40, 40, 40), peers=("flex", "fa2"))


class Quiet:
    def say(self, text, total=None):
        pass

    def advance(self):
        pass


class Clock:
    """Stands in for the GPU's timer: an engine's time is written into its call."""

    def turn(self, call):
        def timed(number):
            call(number)
            return call.us

        call(0)
        return timed


def stand_in(name, out, us, fails_at=None):
    """An engine that writes ``out`` and pretends to take ``us``; its call of that number raises."""
    written = torch.empty_like(out)
    count = [0]

    def call(step):
        count[0] += 1
        if count[0] == fails_at:
            raise RuntimeError("broke\nsecond line")
        return written.copy_(out)

    call.us = us
    return name, lambda: Engine(name, call, written)


def shows(section, rows, *texts):
    """What is printed of a section holds all the texts; Raddle's own targets only where they are asked for."""
    with (out := report.console()).capture() as captured:
        out.print(*report.tables(section, rows, with_bars=True), sep="\n")
    assert all(text in captured.get() for text in texts), captured.get()
    with out.capture() as captured:
        out.print(*report.tables(section, rows), sep="\n")
    values = [text.rstrip(" ✗✓") for text in texts if text[0] not in "≤≥" and "met" not in text]
    assert all(text in captured.get() for text in values), captured.get()
    assert not re.search("≤|≥", captured.get()), captured.get()
    assert not re.search("✗|✓|missed|bar", captured.get()), captured.get()

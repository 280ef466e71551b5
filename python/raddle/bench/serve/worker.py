"""One engine of vLLM in a process of its own: starts it, sends the loads, keeps the time of every token."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Optional

from raddle.bench.serve.loads import FIRST, WARM_UP, Load, Prompt, chosen

#: Tokens of a request as they come: (its name, prompt, how many) -> the next ones, each time.
Generate = Callable[[str, Prompt, int], AsyncIterator[list[int]]]


@dataclasses.dataclass
class Options:
    """What a process is told.

    Attributes:
        engine: further arguments of vLLM's AsyncEngineArgs, by name.
        rounds: how often every load is sent, each time with other prompts.
    """

    model: str
    backend: str
    loads: tuple[str, ...]
    rounds: int
    seed: int
    engine: dict[str, Any]


async def measure(
    generate: Generate,
    options: Options,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.perf_counter,
    warm_up: Optional[Load] = WARM_UP,
) -> list[dict[str, Any]]:
    """For each load and round: seconds until each request's first token, those between tokens, and the tokens."""
    found = []
    if warm_up is not None:
        await _send(generate, warm_up, options.seed, clock)
    for number in range(options.rounds):
        for load in chosen(options.loads):
            say(f"{options.backend}: {load.name}")
            found.append(await _send(generate, load, options.seed + number, clock))
    return found


async def _send(generate: Generate, load: Load, seed: int, clock: Callable[[], float]) -> dict[str, Any]:
    shared, prompts = load.prompts(seed)

    async def one(name: str, prompt: Prompt, new: int) -> tuple[float, list[float], list[int]]:
        start, stamps, tokens = clock(), [], []
        async for some in generate(f"{load.name}-{seed}-{name}", prompt, new):
            stamps.append(clock())
            tokens += some
        return stamps[0] - start, [b - a for a, b in zip(stamps, stamps[1:])], tokens

    if shared:
        await one("shared", shared, 1)
    start = clock()
    every = await asyncio.gather(*(one(str(n), prompt, load.new) for n, prompt in enumerate(prompts)))
    return {
        "load": load.name,
        "seconds": clock() - start,
        "first_s": [first for first, _, _ in every],
        "between_s": [gap for _, gaps, _ in every for gap in gaps],
        "tokens": [tokens for _, _, tokens in every],
    }


async def _serve(options: Options) -> dict[str, Any]:
    """vLLM's own loop, as its server has it, without HTTP and without a tokenizer."""
    # CUDA does not work in a process that is forked after its parent has started CUDA.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    import vllm
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    fixed = {"model": options.model, "attention_backend": options.backend}
    quiet = {"skip_tokenizer_init": True, "disable_log_stats": True}
    start = time.perf_counter()
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**{**quiet, **options.engine, **fixed}))

    async def generate(name: str, prompt: Prompt, new: int) -> AsyncIterator[list[int]]:
        how = {"temperature": 0, "ignore_eos": True, "detokenize": False, "output_kind": RequestOutputKind.DELTA}
        async for each in engine.generate({"prompt_token_ids": prompt}, SamplingParams(max_tokens=new, **how), name):
            yield list(each.outputs[0].token_ids)

    try:
        await _send(generate, FIRST, options.seed, time.perf_counter)
        ready = time.perf_counter() - start
        loads = await measure(generate, options, lambda text: print(text, flush=True))
    finally:
        engine.shutdown()
    return {"backend": options.backend, "vllm": vllm.__version__, "ready_s": ready, "loads": loads}


def main(options: str, out: str) -> None:
    """Writes what was measured to ``out``, as JSON. ``options``: those of `Options`, as JSON."""
    given = Options(**json.loads(options))
    Path(out).write_text(json.dumps(asyncio.run(_serve(given))), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

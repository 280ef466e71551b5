"""What the command's options ask to replay: requests, and the model whose attention it is."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

from . import steplog, traces
from .models import MODELS, Model

SYNTHETIC_REQUESTS = 64


def new_log(options: dict[str, Any]) -> steplog.StepLog:
    """The log of a replay that is still to come: without steps. Raises ``ValueError`` without requests."""
    count = options["requests"]
    if options["synthetic"]:
        name = options["synthetic"]
        count = count or SYNTHETIC_REQUESTS
        # Bounded, since --max-context may leave out all of them.
        source = itertools.islice(traces.synthetic(name, options["seed"]), 1000 * count)
    else:
        path = options["trace"] or traces.EXCERPT
        name, source = path.name, traces.read_trace(path)
    requests = traces.select(source, options["max_context"], count)
    if not requests:
        raise ValueError(f"{name} has no request for these options")
    has_blocks = any(r.blocks for r in requests)
    prefix_cache = has_blocks if options["prefix_cache"] is None else options["prefix_cache"]
    if prefix_cache and not has_blocks:
        raise ValueError(f"--prefix-cache: {name} has no hashes of whole blocks of prompts (hash_ids)")
    rate = options["rate"]
    if not math.isfinite(rate):
        raise ValueError(f"--rate is {rate}; expected a finite number")
    page_size = options["page_size"]
    if page_size > options["pool_tokens"]:
        raise ValueError(f"--page-size is {page_size}; expected at most --pool-tokens, {options['pool_tokens']}")
    return steplog.StepLog(
        trace=name,
        seed=options["seed"],
        page_size=page_size,
        num_pages=options["pool_tokens"] // page_size,
        token_budget=options["token_budget"],
        prefix_cache=prefix_cache,
        samples=options["parallel"],
        speculate=options["speculate"],
        rate=rate,
        requests=[replace(r, arrival=r.arrival / rate) for r in requests],
        steps=[],
        queued=[],
    )


def model_of(options: dict[str, Any]) -> Model:
    """Raises ``ValueError`` for heads or a RoPE that cannot be."""
    model = MODELS[options["model"]]
    shape = {
        name: options[name]
        for name in ("num_qo_heads", "num_kv_heads", "head_dim")
        if options[name] is not None
    }
    model = replace(model, dtype=options["dtype"], **shape)
    if model.num_qo_heads % model.num_kv_heads:
        heads = f"{model.num_qo_heads} query and {model.num_kv_heads} KV heads"
        raise ValueError(f"found {heads}; expected query heads to be a multiple of KV heads")
    if options["window"] is not None:
        model = model.with_kinds(window=options["window"] or None)
    if options["soft_cap"] is not None:
        model = model.with_kinds(soft_cap=options["soft_cap"] or None)
    if options["sinks"] is not None:
        model = model.with_kinds(sinks=options["sinks"])
    if not options["rope"]:
        return model
    if model.rope is None:
        raise ValueError(f"--rope: Raddle does not ship the RoPE of {model.name} (YaRN)")
    return model.with_kinds(rope=model.rope)

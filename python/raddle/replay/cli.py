"""The command ``raddle replay``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

import raddle
from raddle._console import table_console
from raddle._progress import Progress

from . import page, pictures, report, steplog
from .engine import Engine
from .faults import INJECT
from .inputs import SYNTHETIC_REQUESTS, model_of, new_log
from .machine import engine_of, facts, read_gbps
from .metrics import summary
from .models import MODELS, Model
from .prefix_cache import NoPrefixCache, PrefixCache
from .sampling import Sampler, Verified
from .scheduler import Playback, Scheduler
from .serving import serve
from .speculation import Shape

_NEW_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)
_FILE = click.Path(dir_okay=False, exists=True, path_type=Path)
_POSITIVE = click.IntRange(min=1)
_SCHEDULES = ("auto", "linear", "algorithm1", "one-per-request")
# Faster, and requests queue where cores are slow; slower, and each is computed alone. At this rate two cores with 150
# GFLOP/s and 15 GB/s, half of what a quiet Zen 4 reaches, are busy for two thirds of the time, and no request queues.
_RATE = 0.4
# A log of steps has its own, so these can't be given beside it.
_FIXED_BY_LOG = (
    *("trace", "synthetic", "requests", "max_context", "rate"),
    *("page_size", "pool_tokens", "token_budget", "prefix_cache", "parallel", "speculate", "seed", "save_steps"),
)


class BadInput(click.ClickException):
    """Something that the user gave can't be replayed."""

    exit_code = 2


def _split_schedules(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    names = _SCHEDULES if value == "all" else tuple(dict.fromkeys(value.split(",")))
    for name in names:
        if name not in _SCHEDULES:
            raise click.BadParameter(f"found {name!r}; expected some of {', '.join(_SCHEDULES)}, or all")
    return names


def _parse_shape(context: click.Context, parameter: click.Parameter, value: str | None) -> Shape | None:
    try:
        return value and Shape.parse(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _option(*names: str, **settings: Any) -> Any:
    return click.option(*names, show_default="default" in settings, **settings)


@click.command("replay")
# What arrives
@_option(
    "--trace",
    type=_FILE,
    help="Requests: an Azure LLM inference CSV or a Mooncake JSONL file, .gz too. [default: an excerpt of the Azure "
    "conversation trace, which comes with Raddle]",
)
@_option(
    "--synthetic",
    metavar="uniform:LOW:HIGH",
    help="Draw requests instead: LOW to HIGH prompt tokens, an eighth as many generated ones, one request "
    f"per second on average. --requests says how many, {SYNTHETIC_REQUESTS} without it.",
)
@_option("--requests", type=_POSITIVE, help="Replay this many requests, the first ones. [default: all]")
@_option(
    "--max-context",
    type=_POSITIVE,
    help="Drop requests with more prompt and output tokens together, before --requests counts.",
)
@_option(
    "--rate",
    type=click.FloatRange(min=0, min_open=True),
    default=_RATE,
    help="How many times as fast as in the trace requests arrive. The default suits two CPU cores; at 16 the whole "
    "default excerpt arrives within a second, and most requests wait.",
)
# What is computed
@_option(
    "--model",
    type=click.Choice(list(MODELS)),
    default="llama-3.1-8b",
    help="Heads, head dimension, and each layer's variant. The next seven options change parts of it.",
)
@_option("--num-qo-heads", type=_POSITIVE, help="Query heads.")
@_option("--num-kv-heads", type=_POSITIVE, help="KV heads.")
@_option("--head-dim", type=_POSITIVE, help="Head dimension.")
@_option("--window", type=click.IntRange(min=0), help="Tokens that a row sees, itself included; 0: all.")
@_option("--soft-cap", type=click.FloatRange(min=0), help="Soft cap of the logits; 0: none.")
@_option("--sinks/--no-sinks", default=None, help="A sink for each query head, or none.")
@_option(
    "--rope", is_flag=True, help="Apply the model's RoPE inside attention. Without it, Q and K are rotated before."
)
@_option("--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), default="bfloat16", help="Of Q, K, V and O.")
@_option("--layers", type=_POSITIVE, default=2, help="How many layers to compute; equal ones share a plan.")
@_option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    default=0,
    help="Seed of Q, K, V, of synthetic requests, and of the choice of outputs to verify.",
)
# How it is served
@_option("--device", default="cpu", help="Device that computes and holds the pools: cpu, cuda or cuda:1.")
@_option("--page-size", type=_POSITIVE, default=16, help="Tokens per page.")
@_option(
    "--pool-tokens",
    type=_POSITIVE,
    default=16384,
    help="Tokens that the pool has room for. A request waits until all of its tokens fit.",
)
@_option(
    "--token-budget",
    type=_POSITIVE,
    default=512,
    help="Query rows per step: one for each request that decodes, the others for chunks of prompts.",
)
@_option(
    "--prefix-cache/--no-prefix-cache",
    default=None,
    help="Whether the keys of prompts stay in the pool, for later prompts with the same beginning, until their pages "
    "are needed. [default: if the trace has hashes of blocks, as Mooncake's have]",
)
@_option(
    "--parallel",
    type=_POSITIVE,
    default=1,
    help="Samples of each request: they share its prompt, and each generates as many tokens as the trace says.",
)
@_option(
    "--speculate",
    metavar="WIDTHxDEPTH",
    callback=_parse_shape,
    help="Decode with drafted trees: WIDTH chains of DEPTH tokens, verified in one step. The seed decides how many "
    "tokens of which chain are accepted. On a CPU, without --parallel.",
)
@_option(
    "--schedule",
    "schedules",
    default="auto",
    callback=_split_schedules,
    metavar="NAMES",
    help=f"How plans spread the work: {', '.join(_SCHEDULES)}. With several, separated by commas, or all, every step "
    "is computed with each of them, in turns, and the report compares them; the clock counts the first.",
)
@_option(
    "--compare",
    type=click.Choice(["single"]),
    help="Compute each step also without cascades, in turns, and report what they save. Needs --prefix-cache or "
    "--parallel, and a CPU: there, pages that requests share are read once for all of them where that is faster.",
)
@_option("--num-workers", type=_POSITIVE, help="Workers to plan for. [default: all threads]")
@_option(
    "--save-steps",
    type=_NEW_FILE,
    help="Write a log of the steps to this file: seed, requests, and the rows of each step. May end in .gz.",
)
@_option(
    "--steps",
    type=_FILE,
    help="Repeat the steps of a log that --save-steps wrote: equal batches of equal data, to compare schedules, dtypes "
    "or machines.",
)
# What is said about it
@_option(
    "--verify",
    "num_verified",
    type=click.IntRange(min=0),
    default=200,
    help="How many outputs to check against fp64. If an error is above its budget, the command fails.",
)
@_option(
    "--inject",
    type=click.Choice(list(INJECT)),
    help="Make a mistake of this kind on purpose, to see that the verification finds it.",
)
@_option("--json", "json_path", type=_NEW_FILE, help="Also write the figures to this file.")
@_option(
    "--report",
    "report_path",
    metavar="FILE.html",
    type=_NEW_FILE,
    help="Also write a page with pictures: distributions, the cache over time, and what each worker did in the longest "
    "step. Needs matplotlib.",
)
@click.pass_context
def replay(ctx: click.Context, **options: Any) -> None:
    """Replay a request trace through the attention engine.

    This is a serving loop over attention alone, with continuous batching, chunked prefill and a paged pool. Each step
    appends new K and V, plans once, and runs its layers. Q, K and V are numbers that follow from request, position and
    layer, so that a sample of the outputs can be computed again in fp64, without pool, pages and plan, and compared.

    Exits with 1 if verification fails, with 2 on bad input.
    """
    _check_options(ctx, options)
    try:
        if options["report_path"]:
            pictures.require()
        log = steplog.load(options["steps"]) if options["steps"] else new_log(options)
        result, verified = _run(log, model_of(options), options)
    except (ValueError, MemoryError) as error:
        raise BadInput(str(error) or "out of memory") from error
    if options["json_path"]:
        options["json_path"].write_text(json.dumps(result, indent=2) + "\n")
    out = table_console()
    for sheet in report.sheets(result):
        out.print(sheet.rich())
    out.print(*report.conditions(result), sep="\n", markup=False)
    if options["report_path"]:
        click.echo(f"report: {options['report_path']}")
    if verified.failed:
        worst = "\n".join(f"  {sample}" for sample in verified.worst_samples)
        click.echo(f"verification failed; the worst:\n{worst}", err=True)
        ctx.exit(1)


def _check_options(ctx: click.Context, options: dict[str, Any]) -> None:
    given = {
        name for name in options if ctx.get_parameter_source(name) == ParameterSource.COMMANDLINE
    }
    if options["steps"]:
        for name in _FIXED_BY_LOG:
            if name in given:
                flag = "--" + name.replace("_", "-")
                raise click.UsageError(f"{flag} can't be combined with --steps: the log decides it")
    if options["trace"] and options["synthetic"]:
        raise click.UsageError("--trace and --synthetic can't be combined")
    for name, flag in (("save_steps", "--save-steps"), ("json_path", "--json"), ("report_path", "--report")):
        if options[name] and not options[name].parent.is_dir():
            raise click.UsageError(f"{flag}: there is no folder {options[name].parent}")


def _run(
    log: steplog.StepLog, model: Model, options: dict[str, Any]
) -> tuple[dict[str, Any], Verified]:
    pool = raddle.PagePool(log.num_pages, log.page_size)
    prefixes = PrefixCache if log.prefix_cache else NoPrefixCache
    if options["steps"]:
        scheduler: Scheduler = Playback(
            log.requests, pool, log.steps, log.queued, prefixes, log.samples, log.speculate, log.seed
        )
    else:
        scheduler = Scheduler(
            log.requests, pool, log.token_budget, prefixes, log.samples, log.speculate, log.seed
        )
    layers = options["layers"]
    with Progress(counts=True) as progress:
        progress.say("preparing the KV pool and the kernels")
        engine = engine_of(log, model, options)
        sampler = Sampler(
            model,
            layers,
            log.page_size,
            options["num_verified"],
            log.seed,
            engine.rounds_weights,
            engine.prompts,
        )
        progress.say("serving", total=scheduler.tokens_to_do)
        history = serve(scheduler, engine, sampler, report.shown_by(progress, scheduler))
        progress.say("checking outputs against fp64", total=sampler.num_drawn)
        verified = sampler.verify(progress.advance)
        bandwidth = read_gbps(engine.device, progress)
        if options["save_steps"]:
            log.steps = [step.spans for step in history.steps]
            log.queued = sorted(scheduler.queued)
            steplog.save(log, options["save_steps"])
        result = {
            "trace": log.trace,
            **summary(history, scheduler, model, layers, bandwidth),
            "verified": verified.report(),
            "config": _config(log, model, engine, options),
        }
        if options["report_path"]:
            progress.say("drawing the report")
            page.write(options["report_path"], result, history, engine.longest)
    return result, verified


def _config(log: steplog.StepLog, model: Model, engine: Engine, options: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": model.name,
        "num_qo_heads": model.num_qo_heads,
        "num_kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "dtype": model.dtype,
        "layers": options["layers"],
        "schedule": ",".join(options["schedules"]),
        "num_workers": options["num_workers"],
        "rate": log.rate,
        "token_budget": log.token_budget,
        "seed": log.seed,
        "prefix_cache": log.prefix_cache,
        "cascades": any(way.cascades for way in engine.ways.values()),
        "compare": options["compare"],
        "speculate": str(log.speculate) if log.speculate else None,
        "repeated": options["steps"] is not None,
        "inject": options["inject"],
        "version": raddle.__version__,
        "device": engine.device,
        **facts(engine),
    }

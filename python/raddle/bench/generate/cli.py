"""The command ``raddle bench generate``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Optional

import click

from raddle._progress import Progress
from raddle.bench.options import check_folder, json_option, model_options, names_option, rounds_option, torch_module
from raddle.bench.serve.loads import chosen


@click.command()
@model_options("transformers")
@click.option(
    "--implementations",
    default="sdpa,flex_attention,raddle",
    show_default=True,
    metavar="NAMES",
    help="transformers' attention implementations; greedy tokens are compared with the first one's.",
)
@names_option("--loads", "Only these loads: first, equal, padded, continuous.")
@rounds_option(5)
@click.option("--device", help="PyTorch's device.  [default: cuda, where there is one, else cpu]")
@click.option("--dtype", default="bfloat16", show_default=True, help="PyTorch's name of the weights' type.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the prompts and of dummy weights.")
@json_option
def generate(
    model: str,
    dummy_weights: bool,
    implementations: str,
    loads: tuple[str, ...],
    rounds: int,
    device: Optional[str],
    dtype: str,
    seed: int,
    json_path: Optional[Path],
) -> None:
    """Generate with a model of transformers by several attention implementations in turns.

    Times are those of whole calls: `generate` for 8 prompts of 2,000 tokens, with one new token (first) and with 64
    (equal), for 8 padded ones, and `generate_batch` (continuous) for 32 prompts of many lengths, which takes no
    flex_attention.
    """
    torch = torch_module()
    try:
        import transformers
    except ImportError:
        raise click.ClickException("`raddle bench generate` needs transformers: pip install transformers") from None
    if not hasattr(transformers, "ContinuousBatchingConfig"):
        raise click.ClickException(f"transformers is {transformers.__version__}; expected 5.17 or later")
    from raddle.bench import report
    from raddle.bench.generate import calls, turns

    check_folder("--json", json_path)
    try:
        found = chosen(loads, turns.LOADS)
    except ValueError as error:
        raise click.UsageError(f"--loads: {error}") from None
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    names = tuple(dict.fromkeys(implementations.split(",")))
    where = torch.cuda.get_device_name(device) if device.startswith("cuda") else report.cpu_name()
    out = report.console()
    out.print(f"{where}, torch {torch.__version__}, transformers {transformers.__version__}, {model} in {dtype}", highlight=False)
    rows: list[dict[str, Any]] = []
    # Beyond the limit PyTorch would run flex_attention uncompiled, and time that.
    with Progress() as progress, torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        progress.say(f"making {model} on {device}")
        made = calls.make_model(model, dummy_weights, device, dtype, seed)
        for load in found:
            progress.say(f"{load.name} with {', '.join(names)}", total=len(names) * (rounds + turns.WARM_UPS))
            call = {name: calls.caller(made, name, load, seed, calls.HOW[load.name]) for name in names}
            rows += turns.measure(load.name, call, rounds, progress.advance)
            if json_path:  # what is there stays there when a later load fails
                report.write_json(json_path, rows)
    out.print(turns.table(rows))
    for line in turns.failures(rows):
        out.print(line, highlight=False, markup=False)

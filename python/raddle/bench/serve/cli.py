"""The command ``raddle bench serve``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Optional

import click

from raddle._progress import Progress
from raddle.bench.options import check_folder, json_option, model_options, names_option, rounds_option
from raddle.bench.serve.loads import chosen


@click.command()
@model_options("vLLM")
@click.option(
    "--backends",
    default="FLASH_ATTN,CUSTOM,FLASH_ATTN",
    show_default=True,
    metavar="NAMES",
    help="vLLM's attention backends, in the order of their turns; Raddle is CUSTOM.",
)
@names_option("--loads", "Only these loads: check, single, short, prefix, long.")
@rounds_option(2)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the prompts.")
@click.option("--engine", default="{}", help="Further engine arguments of vLLM, as a JSON object.")
@click.option("--logs", type=click.Path(path_type=Path, file_okay=False), help="A folder for what the engines write.")
@click.option("--seconds", type=click.FloatRange(min=1), default=900.0, show_default=True, help="The most that a turn takes.")
@json_option
def serve(
    model: str,
    dummy_weights: bool,
    backends: str,
    loads: tuple[str, ...],
    rounds: int,
    seed: int,
    engine: str,
    logs: Optional[Path],
    seconds: float,
    json_path: Optional[Path],
) -> None:
    """Serve a model by vLLM with several attention backends in turns.

    Each turn is an engine in a process of its own: time to the first token, between tokens, and tokens a second, of
    requests alone, many at once, with a prefix in common, and long. Greedy tokens are compared with the first turn's.
    """
    from raddle.bench import report
    from raddle.bench.serve import turns
    from raddle.bench.serve.worker import Options

    check_folder("--json", json_path)
    try:
        chosen(loads)
        given = json.loads(engine)
        if not isinstance(given, dict):
            raise ValueError(f"expected an object, not {engine}")
    except ValueError as error:
        raise click.UsageError(f"--loads or --engine: {error}") from None
    if dummy_weights:
        given = {"load_format": "dummy", **given}
    if logs:
        logs.mkdir(parents=True, exist_ok=True)
    done: list[Any] = []
    with Progress() as progress:
        for backend in backends.split(","):
            progress.say(f"{backend}, turn {len(done) + 1}")
            log = logs / f"{len(done) + 1}-{backend}.log" if logs else None
            try:
                done.append(turns.run_turn(Options(model, backend, loads, rounds, seed, given), seconds, log=log))
            except turns.Failed as error:
                raise click.ClickException(str(error)) from None
            if json_path:  # what is there stays there when a later turn fails
                report.write_json(json_path, turns.rows_of(done))
    report.console().print(turns.table(turns.rows_of(done)))

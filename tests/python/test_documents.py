"""README and guide do what they say: every block of code runs, every command is there, every variable is named."""

import re
import subprocess

import click
import pytest
from documents import GUIDE, ROOT, blocks, run

from raddle.cli import main

PAGES = pytest.mark.parametrize("page", GUIDE, ids=lambda path: str(path.relative_to(ROOT)))


@PAGES
def test_python(page):
    run(page)


@PAGES
def test_what_is_not_run_says_why(page):
    for block in blocks(page):
        if block.mark.startswith("syntax"):
            assert re.fullmatch(r"syntax, .{10,}", block.mark), f"{page.name}:{block.line}: {block.mark}"


@PAGES
def test_shell(page):
    for block in blocks(page, "sh"):
        where = f"{page.name}:{block.line}"
        parsed = subprocess.run(["bash", "-n"], input=block.code, text=True, capture_output=True)
        assert parsed.returncode == 0, f"{where}: {parsed.stderr}"
        for line in block.code.splitlines():
            command = re.sub(r"^(\w+=\S+ +)*", "", line.partition(" #")[0]).split()
            if command[:1] == ["make"]:
                _is_target(command[1], where)
            if command[:1] == ["raddle"]:
                _is_command(command[1:], where)


def _is_target(name, where):
    assert re.search(rf"^{re.escape(name)}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"{where}: make {name}"


def _is_command(words, where):
    """The subcommand is there, and takes each of the options."""
    command, context = main, click.Context(main)
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        command = command.get_command(context, words.pop(0))
        assert command is not None, f"{where}: no such command"
    known = {option for each in command.params for option in (*each.opts, *each.secondary_opts)} | {"--help"}
    for word in words:
        option = word.partition("=")[0]
        assert not option.startswith("--") or option in known or option == "--version", f"{where}: {option}"


def test_every_environment_variable_is_in_the_guide():
    """Those that the program reads; those of the tests are in tests/."""
    quoted = re.compile(r'"(RADDLE_[A-Z_]+)"')
    sources = [path for name in ("python", "src") for path in (ROOT / name).rglob("*") if path.suffix in (".py", ".cpp", ".h")]
    read = {name for path in sources for name in quoted.findall(path.read_text(encoding="utf-8"))}
    read = {name for name in read if not name.endswith("_")}
    page = (ROOT / "docs/guide/environment.md").read_text(encoding="utf-8")
    assert "RADDLE_CPU_ISA" in read
    assert read <= set(re.findall(r"`(RADDLE_[A-Z_]+)`", page))


def test_the_readme_names_the_figures_of_its_chart(monkeypatch):
    """Ranges in its text are those of the results that the chart is drawn from; so is the picture itself."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import charts

    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    decode, prefixes = (
        [times for _, times in charts.against_best(chart).values()] for chart in ("gpu_decode", "gpu_prefix")
    )
    assert f"reaches {min(decode):.2f} to {max(decode):.2f} times" in text
    assert f"up to {max(prefixes):.1f} times" in text
    for peer, said in (
        ("flashinfer fa3", "{:.2f} to {:.2f} times the speed of FlashInfer's `fa3`"),
        ("fa3", "{:.2f} to {:.2f} times FlashAttention-3's"),
        ("fa4", "{:.2f} to {:.2f} times FlashAttention-4's"),
        ("cudnn", "{:.2f} to {:.2f} times cuDNN's"),
    ):
        ratios = charts.against("gpu_prefill", peer).values()
        assert said.format(min(ratios), max(ratios)) in text
    calls = [1 / times for _, times in charts.against_best("gpu_flex").values()]
    assert f"{min(calls):.2f} to {max(calls):.2f} of FlexAttention's time" in text
    drawn = charts.README_CHART.read_text(encoding="utf-8")
    for title, ratios in charts.ranges().items():
        assert title in drawn and charts.range_text(ratios) in drawn, "refresh it: python docs/charts.py"


def test_every_chart_has_raddle_and_a_peer(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import charts

    for chart in charts.SOURCES:
        assert charts.rows_of(chart), chart
    assert any("fa3" in name for name in charts.rows_of("gpu_prefill")["causal S4096"])


def test_the_summary_begins_with_the_worst(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import charts

    least = [float(number) for number in re.findall(r"\*\*([\d.]+)\*\*", charts.summary())]
    assert len(least) == len(charts.SOURCES) and least == sorted(least)


@PAGES
def test_links_lead_to_files(page):
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []

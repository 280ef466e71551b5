"""The gallery of masks, docs/gallery.md: written by `raddle gallery`, so that the pictures are those of the code."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from raddle.flex import masks, picture
from raddle.flex.offset import and_masks

_NAMES = {"masks": masks, "and_masks": and_masks}


class Entry(NamedTuple):
    """One mask of the gallery; ``code`` is shown, and run to draw it."""

    name: str
    says: str
    code: str
    tokens: int = 64
    tile: int = 8


ENTRIES = [
    Entry("causal", "A row sees itself and what came before.", "masks.causal()"),
    Entry("sliding_window", "A window of 16 tokens, the row included.", "masks.sliding_window(15, 0)"),
    Entry("prefix_lm", "The prompt of 20 tokens sees all of itself.", "masks.prefix_lm(20)"),
    Entry("document", "Documents of 12, 24, 8 and 20 tokens.", "masks.document([0, 12, 36, 44, 64])"),
    Entry(
        "causal_document",
        "These documents, each of them causal: two masks combined.",
        "and_masks(masks.causal(), masks.document([0, 12, 36, 44, 64]))",
    ),
    Entry("dilated_window", "Every third key, 5 to each side.", "masks.dilated_window(window=5, dilation=3)"),
    Entry("global_local", "Longformer: 6 to each side, 4 global tokens.", "masks.global_local(6, global_tokens=4)"),
    Entry("attention_sinks", "StreamingLLM: the first 4 tokens and a window.", "masks.attention_sinks(4, window=15)"),
    Entry(
        "tree",
        "Speculative decoding: 16 drafted tokens after 16 of context.",
        "masks.tree([-1, 0, 0, 0, 1, 1, 2, 3, 4, 4, 5, 6, 8, 8, 10, 12], context=16)",
        tokens=32,
        tile=4,
    ),
]
NATTEN = [
    Entry("natten", "row by row", "masks.natten(canvas=32, kernel=7)", 1024, 16),
    Entry("natten_tiled", "4 × 4 tiles", "masks.natten(32, 7, masks.tiled_order(32, 4))", 1024, 16),
    Entry("natten_morton", "Morton's curve", "masks.natten(32, 7, masks.morton_order(32))", 1024, 16),
]


def files() -> dict[str, str]:
    """The gallery's page and pictures: text by path, relative to the folder of the docs."""
    drawn = {entry.name: draw(entry) for entry in ENTRIES + NATTEN}
    result = {f"gallery/{name}.svg": image for name, (image, _) in drawn.items()}
    kinds = {name: tiles for name, (_, tiles) in drawn.items()}
    result["gallery.md"] = page(kinds)
    return result


def draw(entry: Entry) -> tuple[str, np.ndarray]:
    """An entry's picture, and the kinds of its tiles."""
    mask = eval(entry.code, dict(_NAMES))  # noqa: S307: the page shows exactly the code that it drew
    rows = np.arange(entry.tokens)
    kinds = picture.tile_kinds(mask, 0, 0, rows, entry.tokens, (entry.tile, entry.tile))
    keep = picture.pairs(mask, 0, 0, rows, entry.tokens) if entry.tokens <= 64 else None
    return picture.svg(kinds, keep, entry.tile, entry.code), kinds


def page(kinds: dict[str, np.ndarray]) -> str:
    """docs/gallery.md."""
    lines = [
        "# Gallery of masks",
        "",
        "Rows are queries, columns are keys. Dark tiles are full: Raddle computes them without the mask. Light tiles are",
        "partial, with the kept pairs in dark. Blank tiles are never loaded. `raddle gallery` draws the pictures, from the",
        "code that is shown; `masks` is `raddle.flex.masks`.",
        "",
    ]
    for entry in ENTRIES:
        lines += [f"## {entry.name}", "", f"{entry.says} Tiles of {entry.tile}: {_counts(kinds[entry.name])}.", ""]
        lines += ["```python", entry.code, "```", "", f"![{entry.name}](gallery/{entry.name}.svg)", ""]
    lines += [
        "## natten",
        "",
        "Neighbourhood attention on a canvas of 32 × 32 tokens with a kernel of 7 × 7: every token sees 49 of 1,024. The",
        "order of the tokens decides how many tiles of 16 × 16 are loaded:",
        "",
        "| order | code | full | partial | kept of 4,096 |",
        "| --- | --- | --- | --- | --- |",
    ]
    for entry in NATTEN:
        full, partial, _ = count(kinds[entry.name])
        lines.append(f"| {entry.says} | `{entry.code}` | {full} | {partial} | {full + partial} |")
    lines.append("")
    lines.append(" ".join(f"![{entry.says}](gallery/{entry.name}.svg)" for entry in NATTEN))
    return "\n".join(lines) + "\n"


def count(kinds: np.ndarray) -> tuple[int, int, int]:
    """Numbers of full, partial and empty tiles."""
    return tuple(int((kinds == kind).sum()) for kind in (picture.FULL, picture.PARTIAL, picture.EMPTY))


def _counts(kinds: np.ndarray) -> str:
    return "{} full, {} partial, {} empty".format(*count(kinds))


@click.command()
@click.argument("folder", default="docs", type=click.Path(file_okay=False, path_type=Path))
def gallery(folder: Path) -> None:
    """Draw the masks of raddle.flex.masks.

    Writes the page FOLDER/gallery.md, and its pictures into FOLDER/gallery.
    """
    written: dict[str, Any] = files()
    for name, text in written.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    click.echo(f"wrote {folder / 'gallery.md'} and {len(written) - 1} pictures")

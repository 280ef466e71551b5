"""The worked example of docs/design/formats.md and formats-levels.md, run block after block as a reader would."""

import re

from documents import ROOT, blocks, run

DOCUMENTS = [ROOT / "docs" / "design" / name for name in ("formats.md", "formats-levels.md")]


def test_the_documents_run_in_one_session():
    names = {"__name__": "worked_example"}
    for document in DOCUMENTS:
        run(document, names)
    assert {"lists", "flat", "prefix_state", "tree"} <= names.keys()


def test_every_layout_and_both_levels_are_shown():
    code = "".join(block.code for document in DOCUMENTS for block in blocks(document))
    for name in ("RaggedKV", "PagedKV", "BlockSparse", "Cascade", "TokenTree", "merge_state"):
        assert f"raddle.{name}(" in code
    assert code.count("shows(") >= 9


def test_the_numbers_of_the_tables_are_those_of_the_code():
    """The results stand in the text as well: as fractions, row by row."""
    text = "".join(document.read_text(encoding="utf-8") for document in DOCUMENTS)
    rows = re.findall(r"^\| (\d|D|F|E) \|.*\| ([^|]*) \| (ln \d+|0) \|$", text, re.MULTILINE)
    found = [(o.split("=")[-1].strip(), lse) for _, o, lse in rows]
    expected = ["4", "8", "5", "9/2", "18/5", "11/2", "9", "7/4"]
    assert [o for o, _ in found] == expected
    assert [lse for _, lse in found] == ["ln 4", "0", "ln 4", "ln 8", "ln 10", "ln 4", "0", "ln 8"]

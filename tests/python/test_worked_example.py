"""The worked example of docs/design/formats.md and the README's lines, run block after block as a reader would."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "design" / "formats.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(document=DOCUMENT):
    """(line of the document, code) of every block."""
    text = document.read_text(encoding="utf-8")
    return [(text.count("\n", 0, found.start(1)), found.group(1)) for found in BLOCK.finditer(text)]


def names_after(document) -> dict:
    """Runs a document's blocks in one namespace."""
    names = {"__name__": document.stem}
    for line, code in blocks(document):
        # Blank lines in front, so that a failure names the document's own line.
        exec(compile("\n" * line + code, str(document), "exec"), names)
    return names


def test_the_document_runs():
    assert {"flat", "prefix_state"} <= names_after(DOCUMENT).keys()


def test_the_readme_runs():
    names = names_after(ROOT / "README.md")
    assert names["out"].shape == (2, 32, 128) and names["out"].dtype == names["q"].dtype
    assert names["lse"].shape == (2, 32)


def test_every_layout_and_both_levels_are_shown():
    code = "".join(code for _, code in blocks())
    for name in ("RaggedKV", "PagedKV", "BlockSparse", "Cascade", "merge_state"):
        assert f"raddle.{name}(" in code
    assert code.count("shows(") >= 9


def test_the_numbers_of_the_tables_are_those_of_the_code():
    """The results stand in the text as well: as fractions, row by row."""
    text = DOCUMENT.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d|D|F|E) \|.*\| ([^|]*) \| (ln \d+|0) \|$", text, re.MULTILINE)
    found = [(o.split("=")[-1].strip(), lse) for _, o, lse in rows]
    expected = ["4", "8", "5", "9/2", "18/5", "11/2", "9", "7/4"]
    assert [o for o, _ in found] == expected
    assert [lse for _, lse in found] == ["ln 4", "0", "ln 4", "ln 8", "ln 10", "ln 4", "0", "ln 8"]

"""The table of typical mistakes, which is a page of the guide: what is written, what Raddle says, and what to write instead.

An entry of docs/guide/mistakes.md is a heading and three blocks: the mistake, its error word for word, and the code that
is right. What stands before the entries is the problem that each of them begins with.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from documents import ROOT

PAGE = ROOT / "docs/guide/mistakes.md"
_ENTRY = re.compile(
    r"^### (?P<title>[^\n]+)\n\n```python\n(?P<code>.*?)```\n\n```output\n(?P<error>\w+): (?P<message>.*?)\n```\n\n"
    r"Instead:\n\n```python\n(?P<instead>.*?)```$",
    re.MULTILINE | re.DOTALL,
)


class Mistake(NamedTuple):
    title: str
    code: str
    error: str  # the exception's type
    message: str
    instead: str


_TEXT = PAGE.read_text(encoding="utf-8")
PROBLEM = re.search(r"^```python\n(.*?)^```$", _TEXT, re.MULTILINE | re.DOTALL)[1]
MISTAKES = [Mistake(**entry.groupdict()) for entry in _ENTRY.finditer(_TEXT)]
assert len(MISTAKES) == len(re.findall("^### ", _TEXT, re.MULTILINE)), f"{PAGE.name}: an entry is not as the others are"

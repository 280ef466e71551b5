"""Keeps torch out of commands that use none of it. Imports nothing, since it runs before everything else.

tvm_ffi imports torch where it is installed, which takes seconds; `raddle --help` must not wait for them. What cannot
be imported is None in `sys.modules` (Python's import system): then tvm_ffi finds no torch, and neither does Raddle.
"""

from __future__ import annotations

import os
import sys
from typing import Sequence

#: Words of a command line that ask for tensors of torch: benchmarks and replays on a GPU, and `cache warm`, which
#: imports modules of the user's.
_WITH_TORCH = ("bench", "warm")
_HELP = ("-h", "--help")


def hide_torch() -> None:
    """Makes torch impossible to import, if this process is the command `raddle` and the command needs none."""
    arguments = _arguments()
    if arguments is not None and "torch" not in sys.modules and not needs_torch(arguments):
        sys.modules["torch"] = None  # type: ignore[assignment]


def needs_torch(arguments: Sequence[str]) -> bool:
    """Whether `raddle` with these arguments may use torch."""
    if any(word in _HELP for word in arguments):
        return False
    on_gpu = "replay" in arguments and any("cuda" in word for word in arguments)
    return on_gpu or any(word in _WITH_TORCH for word in arguments)


def _arguments() -> list[str] | None:
    """Those of `raddle …` or `python -m raddle …`; None where this process is another program."""
    program, *arguments = getattr(sys, "argv", None) or [""]
    if os.path.basename(program) == "raddle":
        return arguments
    started = getattr(sys, "orig_argv", [])  # Python 3.10; while a module is looked for, its name is nowhere else
    is_module = program == "-m" and "-m" in started and started[started.index("-m") + 1] == "raddle"
    return arguments if is_module else None

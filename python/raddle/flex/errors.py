"""What the tracer says when it cannot go on: the user's own line, what was found, what to write instead."""

from __future__ import annotations

import linecache
import os
import re
import sys
from types import CodeType, FrameType, TracebackType
from typing import Container

_here = os.path.dirname(os.path.abspath(__file__))
_ours = {
    os.path.join(_here, name + ".py")
    for name in ("errors", "expr", "graph", "ops", "capture", "rebuild", "foreign", "evaluate", "codegen", "trace",
        "random", "reads", "elementary", "activations", "vector", "vector_functions")
}
_jax = re.compile(r"(site|dist)-packages[/\\]jax")
_libraries = re.compile(r"(site|dist)-packages[/\\](torch|numpy|jax|jaxlib)[/\\]")


class TraceError(TypeError):
    """A Python function does something that cannot become a kernel."""


class SlicedMaskError(ValueError, RuntimeError):
    """A slice of a block mask has no mask function yet. PyTorch raises RuntimeError."""


class BlockListError(ValueError, RuntimeError):
    """Block lists of too few dimensions. PyTorch raises RuntimeError."""


class IncompleteError(ValueError, AssertionError):
    """One of two lists that belong together is missing. PyTorch raises AssertionError."""


class MaskTypeError(TypeError, RuntimeError):
    """Something among masks is no mask function. PyTorch raises RuntimeError."""


class RankError(ValueError, NotImplementedError):
    """Tensors of another number of dimensions than 4. PyTorch raises NotImplementedError."""


class LengthError(ValueError, RuntimeError):
    """A block mask for other lengths than query's and key's. PyTorch raises RuntimeError."""


class UnsupportedError(ValueError, NotImplementedError):
    """What is not computed here, such as gradients and maxima. PyTorch raises NotImplementedError on CPUs."""


def refuse(found: str, instead: str) -> TraceError:
    """The error for the user's line that is running now."""
    return TraceError(f"{describe_line(_calling_frame())}{found}; {instead}")


def refuse_in(code: CodeType | None, found: str, instead: str) -> TraceError:
    """The error for a function as a whole, such as a result of the wrong type."""
    where = "" if code is None else f"{code.co_filename}:{code.co_firstlineno}: {code.co_name}\n  "
    return TraceError(f"{where}{found}; {instead}")


def wrap(error: Exception, known: Container[str]) -> TraceError:
    """Any other exception of the user's function, with the line that raised it; ``known``: as in `float_advice`."""
    if isinstance(error, TraceError):
        return error
    where, at, by_jax = None, error.__traceback__, "jax" in str(error).lower()
    while at is not None:
        by_jax = by_jax or _jax.search(at.tb_frame.f_code.co_filename) is not None
        if not _is_internal(at.tb_frame):
            where = at
        at = at.tb_next
    text = describe_line(where)
    if by_jax:
        raise_at = "" if where is None else source_line(where.tb_frame, where.tb_lineno)
        found = "a function of JAX gets a traced value, which it cannot compute with"
        return TraceError(f"{text}{found}; {_jax_advice(raise_at, known)}")
    traced = TraceError(
        f"{text}tracing raised {type(error).__name__}: {error}; expected arithmetic, comparisons, "
        "indexing of captured arrays and the functions of raddle.flex.ops"
    )
    traced.__cause__ = error
    return traced


def describe_line(at: FrameType | TracebackType | None) -> str:
    """``file:line: source text`` and a new line; empty where there is none."""
    if at is None:
        return ""
    frame, line = (at, at.f_lineno) if isinstance(at, FrameType) else (at.tb_frame, at.tb_lineno)
    name = frame.f_code.co_filename
    return f"{name}:{line}: {source_line(frame, line)}\n  "


def source_line(frame: FrameType, line: int) -> str:
    text = linecache.getline(frame.f_code.co_filename, line, frame.f_globals).strip()
    return text or f"(in {frame.f_code.co_name})"


def user_line() -> str:
    """The text of the user's line that is running now."""
    frame = _calling_frame()
    return "" if frame is None else source_line(frame, frame.f_lineno)


def condition_advice() -> str:
    """What to write instead of a condition on a traced value, guessed from the line."""
    line = user_line()
    if re.search(r"\band\b", line):
        return "write `a & b` (with parentheses) instead of `a and b`"
    if re.search(r"\bor\b", line):
        return "write `a | b` (with parentheses) instead of `a or b`"
    if re.search(r"\bnot\b", line):
        return "write `~a` instead of `not a`"
    if re.search(r"[<>]=?[^<>=]+[<>]=?", line) and not re.search(r"\b(if|while)\b", line):
        return "write `(a < b) & (b < c)` instead of `a < b < c`"
    if re.search(r"\b(if|while)\b", line):
        return "write raddle.flex.ops.where(condition, a, b) instead of if"
    return "combine conditions with & | ~, and choose between values with raddle.flex.ops.where"


def float_advice(known: Container[str]) -> str:
    """What to write instead of a function that wants a Python number; ``known``: names of functions of `ops`."""
    found = re.search(r"\bmath\.(\w+)", user_line())
    if found and found.group(1) in known:
        return f"write raddle.flex.ops.{found.group(1)} instead of math.{found.group(1)}"
    return "write x.float() or raddle.flex.ops.cast(x, 'float32')"


def _jax_advice(line: str, known: Container[str]) -> str:
    """What to write instead of a function of jax.numpy."""
    found = re.search(r"\b(?:jnp|jax\.numpy|lax|jax\.nn)\.(\w+)", line)
    if found and found.group(1) in known:
        return f"write raddle.flex.ops.{found.group(1)} instead of {found.group(0)}"
    return "use arithmetic, and the functions of raddle.flex.ops, numpy or torch"


def _is_internal(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return os.path.abspath(name) in _ours or _libraries.search(name) is not None


def _calling_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_internal(frame):
        frame = frame.f_back
    return frame

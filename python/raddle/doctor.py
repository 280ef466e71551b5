"""What `raddle doctor` and `raddle support` print: this machine and why, and what works on which backend."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from raddle import _library

cpu_isa = _library.function("raddle.cpu_isa")
cpu_threads = _library.function("raddle.cpu_threads")
_cpu_describe = _library.function("raddle.cpu_describe")

_PACKAGES = ("apache-tvm-ffi", "numpy", "ml_dtypes", "torch", "jax")


def report() -> str:
    """Lines of text for people, and for bug reports."""
    packages = ", ".join(f"{name} {_version_of(name)}" for name in _PACKAGES)
    return "\n".join(
        [
            f"raddle {_library.version()} on Python {platform.python_version()}, {platform.platform()}",
            f"library: {_library.find()}",
            f"packages: {packages}",
            "devices: cpu",
            _cpu_describe().rstrip(),
        ]
    )


def support_page() -> str:
    """docs/support.md: the support matrix, in Markdown."""
    from raddle.functional import support_matrix

    lines = [
        "# What works, and what is refused",
        "",
        "Printed by `raddle support`, which tries each feature on a small problem; a refusal's reason is its message.",
        "",
        "| feature | backend | |",
        "| --- | --- | --- |",
    ]
    for row in support_matrix():
        verdict = "works" if row["works"] else f"refused: {row['reason']}"
        lines.append(f"| {row['feature']} | {row['backend']} | {verdict} |".replace("and |:", "and \\|:"))
    return "\n".join(lines)


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"

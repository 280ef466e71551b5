"""What `raddle doctor` and `raddle support` print: this machine and why, and what works on which backend."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Sequence

from raddle import _library, _toolchain

cpu_isa = _library.function("raddle.cpu_isa")
cpu_threads = _library.function("raddle.cpu_threads")
_cpu_report = _library.function("raddle.cpu_report")

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_HUGE_PAGES_TEXT = {
    "always": "for all memory",
    "madvise": "for who asks: K and V in numpy's arrays, as of PagePool.make_kv; torch's if THP_MEM_ALLOC_ENABLE=1",
    "never": f"none ({_HUGE_PAGES}): decoding small pages on the CPU is slower",
}
_PACKAGES = ("apache-tvm-ffi", "numpy", "ml_dtypes", "torch", "jax")


def facts() -> dict[str, Any]:
    """What this machine can do, by stable names: what `raddle doctor --json` prints.

    ``problem`` is a sentence where something is off, else None; paths and versions of what is not there are
    None. Sizes are bytes.
    """
    nvrtc, driver = _toolchain.nvrtc(), _toolchain.driver()
    return {
        "raddle": {"version": _library.version(), "library": str(_library.find())},
        "python": {"version": platform.python_version(), "platform": platform.platform()},
        "packages": {name: _version_of(name) for name in _PACKAGES},
        "devices": _devices(nvrtc, driver),
        "cpu": _cpu(),
        "compiler": _toolchain.compiler(),
        "nvrtc": nvrtc,
        "driver": driver,
        "cache": _toolchain.cache(),
    }


def report() -> str:
    """The same as lines of text for people, and for bug reports."""
    found = facts()
    packages = ", ".join(f"{name} {number or '(not installed)'}" for name, number in found["packages"].items())
    python = f"Python {found['python']['version']}, {found['python']['platform']}"
    return "\n".join(
        [
            f"raddle {found['raddle']['version']} on {python}",
            f"library: {found['raddle']['library']}",
            f"packages: {packages}",
            f"devices: {', '.join(found['devices'])}",
            *_cpu_lines(found["cpu"]),
            f"C++ compiler: {_tool_text(found['compiler'])}",
            f"NVRTC: {_tool_text(found['nvrtc'])}",
            f"NVIDIA driver: {_driver_text(found['driver'])}",
            f"cache: {_cache_text(found['cache'])}",
        ]
    )


def _devices(nvrtc: dict[str, Any], driver: dict[str, Any]) -> list[str]:
    """What `Attention` takes as its device here."""
    gpus = driver["gpus"] if nvrtc["found"] else []
    return ["cpu", *(f"cuda:{number}" for number, gpu in enumerate(gpus) if gpu["supported"])]


def _cpu() -> dict[str, Any]:
    try:
        found = dict(_cpu_report().items())
    except ValueError as error:  # of an environment variable
        return {"problem": str(error)}
    found["supported_isas"] = list(found["supported_isas"])
    found["quota_cpus"] = found["quota_cpus"] or None
    found["quota_source"] = found["quota_source"] or None
    return {**found, "huge_pages": _huge_pages(), "problem": None}


def _huge_pages() -> str | None:
    """Who gets huge pages from Linux: "always", "madvise" (who asks) or "never"; None if unknown."""
    try:
        text = _HUGE_PAGES.read_text()
    except OSError:
        return None
    return text.partition("[")[2].partition("]")[0] or None


def _cpu_lines(cpu: dict[str, Any]) -> list[str]:
    if cpu["problem"]:
        return [f"CPU: {cpu['problem']}"]
    quota = f"{cpu['quota_cpus']:g} CPUs ({cpu['quota_source']})" if cpu["quota_cpus"] else "none"
    pinning = "worker i to the i-th CPU of the mask" if cpu["pinned"] else "off"
    return [
        f"instruction set: {cpu['isa']} ({cpu['isa_reason']}; supported: {', '.join(cpu['supported_isas'])})",
        f"threads: {cpu['threads']} ({cpu['threads_reason']})",
        f"CPUs in the affinity mask: {cpu['affinity_cpus']} of {cpu['online_cpus']} online",
        f"CPU quota: {quota}",
        f"pinning: {pinning} (RADDLE_PIN)",
        f"huge pages: {_HUGE_PAGES_TEXT.get(cpu['huge_pages'], 'unknown')}",
    ]


def _tool_text(tool: dict[str, Any]) -> str:
    return tool["problem"] or f"{tool['path']}, {tool['version']} ({tool['origin']})"


def _driver_text(driver: dict[str, Any]) -> str:
    if not driver["gpus"]:
        return driver["problem"]
    gpus = ", ".join(f"{gpu['name']} ({_arch_text(gpu)})" for gpu in driver["gpus"])
    return f"CUDA {driver['version']}; {gpus}" + (f"; {driver['problem']}" if driver["problem"] else "")


def _arch_text(gpu: dict[str, Any]) -> str:
    translated = gpu["target"] != gpu["arch"]
    return gpu["arch"] + (f", kernels compiled for {gpu['target']}: RADDLE_CUDA_ARCH" if translated else "")


def _cache_text(cache: dict[str, Any]) -> str:
    state = f"{cache['bytes'] / 1e6:.1f} MB" if cache["found"] else "nothing yet"
    return f"{cache['path']} ({cache['origin']}), {state}" + (f"; {cache['problem']}" if cache["problem"] else "")


def support_page(devices: Sequence[str] = ("cpu",)) -> str:
    """docs/support.md: the support matrix of the devices, a column each, in Markdown."""
    from raddle.functional import support_matrix

    verdicts: dict[str, list[str]] = {}
    for device in devices:
        for row in support_matrix(device):
            verdict = "works" if row["works"] else f"refused: {row['reason']}"
            verdicts.setdefault(row["feature"], []).append(verdict)
    backends = " | ".join(device.partition(":")[0] for device in devices)
    lines = [
        "# What works, and what is refused",
        "",
        "Printed by `raddle support`, which tries each feature on a small problem; a refusal's reason is its message.",
        "GPUs (cuda) have a column where there is one, real or emulated (tests/gpu/emulate.sh); all say the same.",
        "",
        f"| feature | {backends} |",
        "|" + " --- |" * (1 + len(devices)),
    ]
    for feature, found in verdicts.items():
        cells = [each.replace("|", "\\|") for each in (feature, *found)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def has_gpu() -> bool:
    """Whether `Attention` takes "cuda" as its device here."""
    return len(_devices(_toolchain.nvrtc(), _toolchain.driver())) > 1


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

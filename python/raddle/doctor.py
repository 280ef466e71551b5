"""What `raddle doctor` and `raddle support` print: this machine and why, and what works on which backend."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Sequence

from raddle import _library, _toolchain

_cpu_isa = _library.function("raddle.cpu_isa")
_cpu_threads = _library.function("raddle.cpu_threads")
_cpu_report = _library.function("raddle.cpu_report")

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_HUGE_PAGES_TEXT = {
    "always": "for all memory",
    "madvise": "on request: numpy arrays and PagePool.make_kv get them, torch tensors if THP_MEM_ALLOC_ENABLE=1 is set",
    "never": f"none ({_HUGE_PAGES} says never): decoding from small pages on the CPU is slower",
}
_PACKAGES = ("apache-tvm-ffi", "numpy", "ml_dtypes", "torch", "jax")


def cpu_isa() -> str:
    """The instruction set that CPU kernels use in this process.

    Returns "generic", "avx2", "avx512", "avx512_bf16" or "amx": the best one that the CPU has, or the one that
    ``RADDLE_CPU_ISA`` names. Raises ValueError if the variable names none, or one that the CPU lacks.
    """
    return str(_cpu_isa())


def cpu_threads() -> int:
    """How many threads the worker pool has, the calling thread included.

    Returns ``RADDLE_NUM_THREADS`` where it is set, else as many as this process may use: its affinity mask and the
    container's CPU quota count. Raises ValueError if the variable is not a number of threads.
    """
    return int(_cpu_threads())


def facts() -> dict[str, Any]:
    """What this machine can do, by stable names: what `raddle doctor --json` prints.

    ``problem`` of a section is a sentence where something is missing or wrong, else None; ``problems`` are those that
    need mending. Paths and versions of what is not there are None. Sizes are bytes.
    """
    nvrtc, driver = _toolchain.nvrtc(), _toolchain.driver()
    found = {
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
    return {**found, "problems": _problems(found)}


def _problems(found: dict[str, Any]) -> list[str]:
    """What is wrong: settings that cannot be, and parts that do not work. What is not installed is no problem."""
    wrong = {
        "CPU": found["cpu"],
        "C++ compiler": found["compiler"] if os.environ.get("RADDLE_CXX") else {"problem": None},
        # A GPU is there, and no compiler for it; or a variable names the wrong one.
        "NVRTC": found["nvrtc"] if os.environ.get("RADDLE_NVRTC") or found["driver"]["gpus"] else {"problem": None},
        "NVIDIA driver": found["driver"] if found["driver"]["gpus"] else {"problem": None},
        "cache": found["cache"],
    }
    return [f"{name}: {section['problem']}" for name, section in wrong.items() if section["problem"]]


def report(found: dict[str, Any] | None = None) -> str:
    """`facts` as lines of text for people, and for bug reports."""
    found = facts() if found is None else found
    packages = ", ".join(f"{name} {number or '(not installed)'}" for name, number in found["packages"].items())
    python = f"Python {found['python']['version']}, {found['python']['platform']}"
    lines = [
        f"raddle {found['raddle']['version']} on {python}",
        f"library: {found['raddle']['library']}",
        f"packages: {packages}",
        f"devices: {', '.join(found['devices'])}",
        *_cpu_lines(found["cpu"]),
        f"C++ compiler: {_tool_text(found['compiler'])}",
        f"NVRTC: {_tool_text(found['nvrtc'])}",
        f"NVIDIA driver: {_driver_text(found['driver'])}",
        f"cache: {_cache_text(found['cache'])}",
        "",
    ]
    if not found["problems"]:
        return "\n".join([*lines, "Everything that is installed works."])
    return "\n".join([*lines, "Problems:", *(f"- {problem}" for problem in found["problems"])])


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
    """Which memory gets huge pages from Linux: "always" (all), "madvise" (on request) or "never"; None if unknown."""
    try:
        text = _HUGE_PAGES.read_text()
    except OSError:
        return None
    return text.partition("[")[2].partition("]")[0] or None


def _cpu_lines(cpu: dict[str, Any]) -> list[str]:
    if cpu["problem"]:
        return [f"CPU: {cpu['problem']}"]
    quota = f"{cpu['quota_cpus']:g} CPUs ({cpu['quota_source']})" if cpu["quota_cpus"] else "none"
    pinning = "each worker stays on its own CPU" if cpu["pinned"] else "off"
    return [
        f"instruction set: {cpu['isa']} ({cpu['isa_reason']}; supported: {', '.join(cpu['supported_isas'])})",
        f"threads: {cpu['threads']} ({cpu['threads_reason']})",
        f"CPUs in the affinity mask: {cpu['affinity_cpus']} of {cpu['online_cpus']} online",
        f"CPU quota: {quota}",
        f"pinning: {pinning} (set by RADDLE_PIN)",
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
        "`raddle support` prints this page. It tries each feature on a small problem. If a device refuses one, the page has the",
        "message. The column `cuda` appears on machines with an NVIDIA GPU. It is the same for all GPUs of compute",
        "capability 8.0 and later. GPUs of 7.5 also refuse bfloat16, and heads whose tiles do not fit their shared",
        "memory, such as those with a `head_dim_vo` above 256 (MLA has 512).",
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

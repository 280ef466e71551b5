"""The machine code of GPU kernels, compiled by NVRTC without a GPU: what each takes, and whether it changed.

    make sass ARGS="--out before.json"         # compile the table of kernels, and record it
    make sass ARGS="--against before.json"     # compile again; list the kernels whose code differs
    make sass ARGS="--only short,planner"      # kernels whose names contain one of these

A kernel's product loops are its innermost loops that hold matrix instructions. Of the kernel and of these loops a hash
of the instructions tells whether they changed: their text without addresses, with labels numbered in order, so that a
renamed function or a moved one changes nothing. `opcodes` hashes the instructions' names alone: where only `code`
differs, registers or constants have other numbers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import raddle
from raddle import _cuda, _library

ARCHS = ["sm_80", "sm_90a"]
_compile_kv = _library.function("raddle.cuda.compile_kv")

# struct of a variant with a part for values and one for outputs
SCALED = raddle.Variant(
    "ScaledValues",
    """struct ScaledValues {
  float factor;
  template <class Vec> RADDLE_FN void value(Vec& v, const Key&) const {
    v.map([&](float x, i32) { return x * factor; });
  }
  template <class Vec> RADDLE_FN void output(Vec& o, const Row&, float) const {
    o.map([&](float x, i32) { return x / factor; });
  }
};""",
    {"factor": float},
)(factor=2.0)


def spec(variant, dim=128, dim_vo=None, dtype="bfloat16", kv_dtype=None, heads=(8, 2)):
    return raddle.AttentionSpec(*heads, dim, dim_vo or dim, dtype=dtype, kv_dtype=kv_dtype, variant=variant)


CAUSAL, E4M3 = raddle.Causal(), "float8_e4m3fn"
MASK = raddle.PackedMask.from_masks([np.ones((2, 3), bool)])
SPECS = {
    "causal": spec([CAUSAL]),
    "causal 64": spec([CAUSAL], 64),
    "causal 80": spec([CAUSAL], 80),
    "causal 256": spec([CAUSAL], 256, dtype="float16"),
    "causal 192/128": spec([CAUSAL], 192, 128),
    "MLA": spec([CAUSAL], 576, 512, heads=(16, 1)),
    "alibi softcap": spec([raddle.Alibi(raddle.alibi_slopes(8)), raddle.SoftCap(30.0), CAUSAL]),
    "sinks window": spec([raddle.Sinks([0.5] * 8), raddle.SlidingWindow(9), CAUSAL], 64),
    "sigmoid": spec([raddle.Sigmoid(-1.0), CAUSAL]),
    "rope": spec([raddle.Rope(128), CAUSAL]),
    "packed mask": spec([MASK], 64),
    "scaled values": spec([SCALED, CAUSAL], 64),
    "e4m3": spec([CAUSAL], kv_dtype=E4M3),
    "int8 fp16": spec([CAUSAL], dtype="float16", kv_dtype="int8"),
    "e5m2 rope": spec([raddle.Rope(64), CAUSAL], 64, kv_dtype="float8_e5m2"),
}
BOTH = {"causal", "MLA", "e4m3"}  # for every architecture; others for the last


def table() -> dict:
    """name -> a function that compiles the kernel, or kernels, to a cubin and what the assembler says."""
    kernels = {}
    for name, each in SPECS.items():
        for arch in ARCHS if name in BOTH else ARCHS[-1:]:
            for short in (False, True):
                what = f"{name} {'short' if short else 'all'} {arch}"
                kernels[what] = lambda e=each, a=arch, s=short: _cuda.compile_kernel(e, a, s)
    for name in ("causal", "causal 64", "sigmoid"):
        for rows, levels in ((0, False), (8, False), (64, True)):
            what = f"{name} wgmma {rows or 'long'}{' levels' if levels else ''} {ARCHS[-1]}"
            which = False, "wgmma", rows, levels
            kernels[what] = lambda e=SPECS[name], w=which: _cuda.compile_kernel(e, ARCHS[-1], *w)
        what = f"{name} wgmma clusters {ARCHS[-1]}"
        kernels[what] = lambda e=SPECS[name]: _cuda.compile_kernel(e, ARCHS[-1], family="wgmma", clusters=True)
    for prefixes in (False, True):
        what = f"planner{' prefixes' if prefixes else ''} {ARCHS[-1]}"
        kernels[what] = lambda p=prefixes: _cuda.compile_planner(SPECS["causal"], ARCHS[-1], p)
    for name in ("rope", "e5m2 rope"):
        kernels[f"cache {name} {ARCHS[-1]}"] = lambda e=SPECS[name]: _compile_kv(spec=e.fields(), arch=ARCHS[-1])
    return kernels


def disassembler() -> str:
    """nvdisasm of the wheel nvidia-cuda-nvdisasm, else one on the path."""
    wheel = next(Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin/nvdisasm"), None)
    found = str(wheel) if wheel else shutil.which("nvdisasm")
    if not found:
        sys.exit("nvdisasm is missing: install the wheel nvidia-cuda-nvdisasm, as `make sass` does")
    if wheel:
        wheel.chmod(0o755)
    return found


def disassemble(cubin: bytes, tool: str) -> dict[str, list[str]]:
    """Entry point -> its lines: instructions, and labels that end in a colon."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True)
    found, lines = {}, []
    for line in text.stdout.splitlines():
        if section := re.match(r"\s*\.section\s+\.text\.([\w$]+)", line):
            lines = found.setdefault(section[1], [])
        elif re.match(r"\s*\.section\s", line):
            lines = []
        elif label := re.match(r"\s*([.$\w]+):\s*$", line):
            lines.append(label[1] + ":")
        elif code := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?)\s*;", line):
            lines.append(code[1])
    return found


def is_label(line: str) -> bool:
    return line.endswith(":")


def functions_of(lines: list[str]) -> list[list[str]]:
    """The kernel, and the functions that it calls."""
    found = [[]]
    for line in lines:
        if is_label(line) and line.startswith("$"):
            found.append([])
        found[-1].append(line)
    return found


def normalised(lines: list[str]) -> list[str]:
    """Without what depends on names: labels and addresses of symbols have numbers in the order in which they occur,
    calls have no target, and functions are in the order of their text.
    """
    texts = []
    for function in functions_of(lines):
        labels = {line[:-1]: f"L{n}" for n, line in enumerate(filter(is_label, function))}
        symbols: dict[str, str] = {}
        text = []
        for line in function:
            line = re.sub(r"(CALL\S*) `\([^)]*\)", r"\1", line)
            line = re.sub(r"c\[0x4\]\[\w+\]", lambda at: symbols.setdefault(at[0], f"symbol {len(symbols)}"), line)
            text.append(re.sub(r"[.$\w]+", lambda name: labels.get(name[0], name[0]), line))
        texts.append(text)
    return sum([texts[0], *sorted(texts[1:])], [])


def product_loops(lines: list[str]) -> list[list[str]]:
    """The innermost loops with matrix instructions: from a label to a branch back to it."""
    where = {line[:-1]: n for n, line in enumerate(lines) if is_label(line)}
    loops = []
    for n, line in enumerate(lines):
        target = re.search(r"\bBRA\b.*?`\(([^)]+)\)", line)
        if target and where.get(target[1], n) < n:
            loops.append((where[target[1]], n))
    # The shortest first. Code that is seldom run lies behind the kernel's end and branches back into loops: what that
    # spans holds whole loops, or parts of them.
    found = []
    for a, b in sorted(loops, key=lambda loop: loop[1] - loop[0]):
        has_products = any(re.search(r"\b(HMMA|HGMMA|QGMMA|IMMA)", line) for line in lines[a:b])
        if has_products and all(b < c or d < a for c, d in found):
            found.append((a, b))
    return [lines[a : b + 1] for a, b in sorted(found)]


def digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def opcodes(lines: list[str]) -> list[str]:
    return [re.sub(r"^@!?U?P\w+\s+", "", line).split()[0] for line in lines if not is_label(line)]


def hashes(lines: list[str]) -> dict:
    return {"instructions": len(opcodes(lines)), "code": digest(normalised(lines)), "opcodes": digest(opcodes(lines))}


def resources(log: str) -> dict[str, dict]:
    """Entry point -> registers, bytes spilled and static shared memory, as the assembler says."""
    found = {}
    for part in log.split("Compiling entry function '")[1:]:
        registers = re.search(r"Used (\d+) registers", part)
        shared = re.search(r"(\d+) bytes smem", part)
        found[part.split("'")[0]] = {
            "registers": int(registers[1]) if registers else 0,
            "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", part))),
            "shared": int(shared[1]) if shared else 0,
        }
    return found


def measure(name, compiles, tool) -> dict[str, dict]:
    report = compiles()
    code, used, found = disassemble(bytes(report["cubin"]), tool), resources(report["log"]), {}
    for entry, lines in code.items():
        row = {**used.get(entry, {}), **hashes(lines), "loops": [hashes(loop) for loop in product_loops(lines)]}
        if "shared_bytes" in report:
            row["shared"] = report["shared_bytes"]
        found[name if len(code) == 1 else f"{name} {entry}"] = row
    return found


def line_of(name, row) -> str:
    loops = " ".join(f"{loop['instructions']}:{loop['code'][:6]}" for loop in row["loops"])
    numbers = f"{row['registers']:5}{row['spilled']:7}{row['shared']:8}{row['instructions']:8}"
    return f"{name:48}{numbers}  {row['code'][:8]}  {loops}"


def compare(before: dict, after: dict) -> int:
    """Prints what differs; returns how many kernels do."""
    changed = 0
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if old == new or new is None:
            continue
        changed += 1
        if old is None:
            print(f"new       {line_of(name, new)}")
            continue
        same = old["loops"] == new["loops"]
        alike = [loop["opcodes"] for loop in old["loops"]] == [loop["opcodes"] for loop in new["loops"]]
        kind = "loops same" if same else "loops: other registers" if alike else "LOOPS DIFFER"
        print(f"was       {line_of(name, old)}\nis now    {line_of(name, new)}\n          {kind}")
    return changed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="parts of names, joined by commas")
    parser.add_argument("--out", type=Path, help="where to write the record as JSON")
    parser.add_argument("--against", type=Path, help="an earlier record to compare with; returns 1 if some differ")
    arguments = parser.parse_args()
    tool, wanted = disassembler(), arguments.only.split(",")
    kernels = {name: compiles for name, compiles in table().items() if any(part in name for part in wanted)}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = list(pool.map(lambda item: measure(*item, tool), kernels.items()))
    rows = {name: row for each in found for name, row in each.items()}
    record = {"nvrtc": _cuda.nvrtc_version(), "kernels": rows}
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    if not arguments.against:
        columns = "regs spilled  shared instrs  code      product loops (instructions:code)"
        print(f"{'NVRTC ' + record['nvrtc']:48} {columns}")
        print("\n".join(line_of(name, row) for name, row in rows.items()))
        return 0
    before = json.loads(arguments.against.read_text())
    if before["nvrtc"] != record["nvrtc"]:
        sys.exit(f"{arguments.against} is of NVRTC {before['nvrtc']}; this is {record['nvrtc']}")
    old = {name: row for name, row in before["kernels"].items() if any(part in name for part in wanted)}
    gone = old.keys() - rows.keys()
    changed = compare(old, rows) + len(gone)
    print(f"{len(rows)} kernels, {changed} differ" + (f"; gone: {', '.join(sorted(gone))}" if gone else ""))
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())

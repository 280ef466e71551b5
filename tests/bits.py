"""Hashes of outputs on fixed problems: whether a change of the code changed a bit of a result.

    make bits ARGS="--out before.json"           # every instruction set of this machine
    make bits ARGS="--against before.json"       # again: lists the problems whose bits differ
    make bits ARGS="--device cuda --few"         # a GPU, or, where there is none, kernels on emulated threads

Problems are drawn from a seed and their name. They spread over layouts, variants, dtypes, head dimensions, quantised K
and V, splits, states, batch invariance, functions of Python, and the calls on a KV cache; not every combination occurs.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import os
import subprocess
import sys
import zlib
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests/python"))

MIXED = [(1, 700), (40, 300), (1, 33), (0, 9), (3, 150)]
DECODE = [(1, 900), (1, 130), (1, 64), (1, 2000)]
LONG = [(200, 300), (130, 130)]
HALVES = ["float16", "bfloat16"]


def problems() -> dict[str, dict]:
    """name -> what `draw` is asked for, and under "how" what `Engine.run` is."""
    from draws import KV_DTYPES, VARIANTS
    from layout_draws import LAYOUTS

    few, more = {}, {}
    # Those of `few` need about ten GPU kernels, for emulated ones take long to compile.
    kernel = {"dtype": "bfloat16", "dim": 64, "num_kv_heads": 2, "group": 2}
    for layout in LAYOUTS:
        few[f"layout {layout}"] = {**kernel, "layout": layout, "variant": "causal", "lengths": MIXED, "num_workers": 7}
    for workers in (1, 2, 5, 30):
        few[f"decode on {workers} workers"] = {**kernel, "variant": "causal", "lengths": DECODE, "num_workers": workers}
        few[f"long on {workers} workers"] = {**kernel, "variant": "causal", "lengths": LONG, "num_workers": workers}
    for schedule in ("linear", "algorithm1", "one-per-request"):
        few[f"schedule {schedule}"] = {**kernel, "lengths": MIXED, "num_workers": 7, "schedule": schedule}
    few["state"] = {**kernel, "lengths": MIXED, "num_workers": 7, "state": True}
    few["batch invariant"] = {**kernel, "lengths": MIXED, "num_workers": 7, "batch_invariant": True}
    stored = {"kv_dtype": KV_DTYPES[0], "scales": ("token", "head")}
    few["e4m3"] = {**kernel, **stored, "variant": "causal", "lengths": MIXED}
    few["everything"] = {**kernel, "variant": "everything", "lengths": MIXED, "num_workers": 7}
    latent = {"dim": 576, "dim_vo": 512, "group": 16, "num_kv_heads": 1, "latent": True}
    few["MLA"] = {**kernel, **latent, "lengths": DECODE}
    few["score function"] = {**kernel, "variant": "function score", "lengths": MIXED, "num_workers": 7}
    for number, variant in enumerate(VARIANTS):
        more[f"variant {variant}"] = {
            "variant": variant,
            "dtype": ["float32", *HALVES][number % 3],
            "dim": [64, 128, 72][number % 3],
            "group": [4, 1, 7][number % 3],
            "lengths": MIXED if number % 2 else LONG,
            "num_workers": 7,
        }
    for dims in ((8, 8), (80, 80), (128, 128), (256, 256), (192, 128), (24, 40)):
        for dtype in ("float32", *HALVES):
            shape = {"dtype": dtype, "dim": dims[0], "dim_vo": dims[1], "num_kv_heads": 1}
            name = f"{dims[0]}/{dims[1]} {dtype}"
            more[f"dims {name}"] = {**shape, "variant": "gemma2", "lengths": MIXED, "num_workers": 5}
            more[f"decode {name}"] = {**shape, "variant": "sinks", "lengths": DECODE, "group": 8}
    for kv_dtype in KV_DTYPES:
        for k_kind, v_kind in (("none", "none"), ("tensor", "token"), ("head", "head"), ("token", "tensor")):
            stored = {"dtype": HALVES[len(k_kind) % 2], "kv_dtype": kv_dtype, "scales": (k_kind, v_kind)}
            more[f"stored {kv_dtype} {k_kind} {v_kind}"] = {**stored, "dim": 128, "lengths": MIXED, "num_workers": 7}
    turned = {"dtype": "bfloat16", "kv_dtype": KV_DTYPES[0], "variant": "rope"}
    more["stored float8_e4m3fn rope"] = {**turned, "lengths": MIXED}
    more["MLA, many rows"] = {**few["MLA"], "lengths": [(7, 300), (1, 900)], "num_workers": 5}
    more["mask function"] = {"dtype": "bfloat16", "variant": "function mask", "lengths": MIXED}
    more["huge logits"] = {"dtype": "float32", "lengths": LONG, "peak": 300.0}
    return {**few, **{name: {**given, "more": True} for name, given in more.items()}}


def functions(name: str) -> list:
    """Variants of Python functions."""
    from raddle.flex import masks, mods

    return [mods.softcap(5.0), masks.sliding_window(50)] if name == "function score" else [masks.prefix_lm(40)]


def hash_of(*arrays) -> str:
    import numpy as np

    digest = hashlib.sha256()
    for x in arrays:
        if x is not None:
            digest.update(np.ascontiguousarray(x).tobytes())
    return digest.hexdigest()[:16]


def attention(name: str, given: dict, device: str, seed: int) -> str:
    import numpy as np
    from draws import draw
    from engine import Engine

    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    given = {key: value for key, value in given.items() if key != "more"}
    how = {key: given.pop(key) for key in ("num_workers", "schedule", "state", "batch_invariant") if key in given}
    if str(given.get("variant")).startswith("function"):
        given["variant"] = functions(given["variant"])
    how.setdefault("num_workers", 7)
    return hash_of(*Engine(device).run(draw(rng, **given), **how))


def cache_calls(device: str, seed: int) -> dict[str, str]:
    """append_kv and merge_states."""
    import numpy as np
    import raddle
    from device_arrays import DeviceArray
    from draws import numpy_dtype
    from engine import twin
    from layout_draws import paged, paged_pools

    there = (lambda x: x) if device == "cpu" else DeviceArray
    back = np.asarray if device == "cpu" else lambda x: x.numpy()
    rng = np.random.default_rng([seed, 1])
    layout = paged(rng, [(1, 70), (5, 33), (2, 100)], page_size=16)
    k, v = (there(x) for x in paged_pools(rng, layout, 2, 64, 64, numpy_dtype("bfloat16"))[0])
    new = [there(rng.standard_normal((8, 2, 64)).astype(numpy_dtype("bfloat16"))) for _ in range(2)]
    raddle.append_kv(twin(layout), (k, v), *new, rope=raddle.Rope(64))
    found = {"append": hash_of(back(k), back(v))}
    states = [there(rng.standard_normal(shape).astype(np.float32)) for shape in ((3, 5, 4, 64), (3, 5, 4))]
    out = tuple(there(np.zeros(shape, np.float32)) for shape in ((5, 4, 64), (5, 4)))
    raddle.merge_states(*states, out=out)
    found["merge"] = hash_of(*map(back, out))
    return found


def measure(device: str, few: bool, only: str, seed: int) -> dict[str, str]:
    """Hash of every problem; the reason in place of one where the device refuses it."""
    if device != "cpu":
        import draws
        from device_arrays import use_gpu

        use_gpu(device)
        draws.STAND_IN["float32"] = "float16"
    found = {}
    for name, given in problems().items():
        if (few and given.get("more")) or not fnmatch.fnmatch(name, only):
            continue
        try:
            found[name] = attention(name, given, device, seed)
        except (TypeError, ValueError) as error:
            found[name] = f"refused: {error}"
    if fnmatch.fnmatch("cache", only):
        found.update({f"cache {name}": value for name, value in cache_calls(device, seed).items()})
    return found


def in_processes(arguments) -> dict[str, dict[str, str]]:
    """Instruction set, or device -> hashes: one process each, for a process has one instruction set."""
    places, given = {}, ["--measure", "--only", arguments.only, "--seed", str(arguments.seed)]
    if arguments.few:
        given.append("--few")
    if arguments.device == "cpu":
        from test_isa import HERE

        places = {isa: ([], {"RADDLE_CPU_ISA": isa}) for isa in HERE}
    else:
        emulator = [] if Path("/dev/nvidiactl").exists() else [str(ROOT / "tests/gpu/emulate.sh")]
        places = {"emulated cuda" if emulator else arguments.device: (emulator, {})}
        given += ["--device", arguments.device]
    found = {}
    for place, (before, environment) in places.items():
        command = [*before, sys.executable, __file__, *given]
        environment = {**os.environ, **environment}
        ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        found[place] = json.loads(ended.stdout)
    return found


def compare(before: dict, after: dict) -> int:
    """Prints what differs, and returns how much does."""
    changed, compared = 0, 0
    for place in after.keys() & before.keys():
        for name in after[place].keys() & before[place].keys():
            compared += 1
            if before[place][name] != after[place][name]:
                changed += 1
                print(f"{place}: {name}: was {before[place][name]}, is {after[place][name]}")
    print(f"{compared} hashes compared, {changed} differ")
    return changed or (0 if compared else 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:1")
    parser.add_argument("--few", action="store_true", help="the problems that need few kernels")
    parser.add_argument("--only", default="*", help="a pattern of the problems' names: '*MLA*'")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="where to write the hashes as JSON")
    parser.add_argument("--against", type=Path, help="earlier hashes to compare with; 1 is returned if some differ")
    parser.add_argument("--measure", action="store_true", help="only this process's hashes, as JSON")
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.device, arguments.few, arguments.only, arguments.seed)))
        return 0
    found = in_processes(arguments)
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    if arguments.against:
        return 1 if compare(json.loads(arguments.against.read_text()), found) else 0
    for place, hashes in found.items():
        print(place)
        for name, value in hashes.items():
            print(f"  {name:40} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

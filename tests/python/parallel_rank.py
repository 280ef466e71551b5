"""One process of test_parallel: attends to its share of the keys, and compares with one process that has all."""

import os
import signal
import sys

import numpy as np
import raddle
import torch
import torch.distributed as dist
from raddle import parallel

HQ, HKV, D, PAGE = 4, 2, 64, 8

VARIANTS = {
    "causal, ALiBi": [raddle.Alibi(raddle.alibi_slopes(HQ)), raddle.Causal()],
    "window, soft cap": [raddle.SoftCap(20.0), raddle.SlidingWindow(70)],
    "sinks": [raddle.Causal(), raddle.Sinks([0.5, -1.0, 2.0, 0.0])],
}
BATCHES = {"decode": ([1] * 5, [333, 70, 1, 9, 512]), "prefill": ([40, 7, 130], [40, 300, 130])}


def pool_of(keys, spans):
    """A pool of pages with the keys of one span of each request, and its page table's arrays."""
    counts = [-(-int(end - begin) // PAGE) for begin, end in spans]
    pool = torch.full((sum(counts) + 1, 2, PAGE, HKV, D), float("nan"), dtype=keys[0].dtype)
    order = np.random.default_rng(0).permutation(sum(counts)).astype(np.int32)
    at = 0
    for each, (begin, end), count in zip(keys, spans, counts):
        for n in range(count):
            first, last = begin + n * PAGE, min(begin + (n + 1) * PAGE, end)
            pool[order[at + n], :, : last - first] = each[first:last].transpose(0, 1)
        at += count
    return pool, np.concatenate([[0], np.cumsum(counts)]).astype(np.int32), order


def level(keys, spans, qo_indptr):
    pool, indptr, pages = pool_of(keys, spans)
    lengths = (spans[:, 1] - spans[:, 0]).astype(np.int32)
    begin = np.ascontiguousarray(spans[:, 0])
    return raddle.PagedKV(qo_indptr, indptr, pages, lengths, page_size=PAGE, kv_begin=begin), pool


def compare(group, dtype, parts, rows, lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    spec = raddle.AttentionSpec(HQ, HKV, D, dtype=str(dtype).rpartition(".")[2], variant=parts)
    attention = raddle.Attention(spec)
    qo_indptr = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
    q = torch.randn(sum(rows), HQ, D, generator=generator).to(dtype)
    keys = [torch.randn(n, 2, HKV, D, generator=generator).to(dtype) for n in lengths]
    whole, pool = level(keys, np.array([[0, n] for n in lengths]), qo_indptr)
    out, lse = attention.run(attention.plan(whole), q, pool, return_lse=True)

    together = parallel.ContextParallel(attention, group, timeout=60.0)
    spans = parallel.spans(lengths, together.num_ranks, PAGE)[together.rank]
    levels, pools = zip(*(level(keys, spans[:, nth], qo_indptr) for nth in range(2)))
    plan = together.plan(parallel.layout(levels, qo_indptr, lengths))
    ours, our_lse = together.run(plan, q, pools, return_lse=True)
    budget = {torch.float32: 2e-5, torch.bfloat16: 2e-2}[dtype]
    assert torch.allclose(ours.float(), out.float(), atol=budget, rtol=budget), (parts, (ours - out).abs().max())
    assert torch.allclose(our_lse, lse, atol=1e-4, rtol=1e-5), (parts, (our_lse - lse).abs().max())
    everywhere = [torch.empty_like(ours) for _ in range(together.num_ranks)]
    dist.all_gather(everywhere, ours, group=group)
    assert all(torch.equal(each, ours) for each in everywhere)
    return together, plan, q, pools


def main(store, rank, num_ranks, dies):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    torch.set_num_threads(1)
    last = None
    for seed, (name, parts) in enumerate(VARIANTS.items()):
        for rows, lengths in BATCHES.values():
            last = compare(None, torch.bfloat16 if name == "sinks" else torch.float32, parts, rows, lengths, seed)
    print("equal", flush=True)
    if dies < 0:
        return dist.barrier()
    if rank == dies:
        os.kill(os.getpid(), signal.SIGKILL)
    together, plan, q, pools = last
    try:
        while True:  # the others may have begun before it died
            together.run(plan, q, pools)
    except parallel.RankLost as error:
        print(error, flush=True)
        os._exit(3)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))

"""Decoding from captured CUDA graphs: one reservation and one graph for each batch size, and an update a step.

    python examples/python/cuda_graphs.py

Needs torch. Without a GPU the same code runs on the CPU, where a graph is a function that is called again. Requests
come and go, and every step's output is that of a plan made for it alone.
"""

import numpy as np
import raddle
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS, HQ, HKV, DIM, PAGE_SIZE, NUM_PAGES = 2, 8, 2, 64, 16, 64
BATCH_SIZES, LONGEST = (1, 2, 4), 128

rng = torch.Generator().manual_seed(0)
spec = raddle.AttentionSpec(HQ, HKV, DIM, dtype="float16", variant=[raddle.Causal()])
attention = raddle.Attention(spec, DEVICE)


def numbers(*shape):
    return torch.randn(*shape, generator=rng).to(DEVICE, torch.float16)


pools = [(numbers(NUM_PAGES, PAGE_SIZE, HKV, DIM), numbers(NUM_PAGES, PAGE_SIZE, HKV, DIM)) for _ in range(LAYERS)]


class Graph:
    """What a function launches, to be launched again."""

    def __init__(self, function):
        self.function = function
        if DEVICE == "cuda":
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                function()

    def replay(self):
        if DEVICE == "cuda":
            self.graph.replay()
        else:
            self.function()


class Size:
    """A batch size: tensors at addresses that never change, a reservation, and the graph of all layers."""

    def __init__(self, num_requests, layout):
        zeros = dict(dtype=torch.float16, device=DEVICE)
        self.q = torch.zeros(LAYERS, num_requests, HQ, DIM, **zeros)
        self.k, self.v = (torch.zeros(LAYERS, num_requests, HKV, DIM, **zeros) for _ in range(2))
        self.out = torch.zeros_like(self.q)
        # Where each row of k and v goes; -1: nowhere.
        self.slots = torch.full((num_requests,), -1, dtype=torch.int32, device=DEVICE)
        maxima = raddle.Maxima(
            max_requests=num_requests, max_qo_tokens=num_requests, max_kv_tokens=num_requests * LONGEST, max_qo_len=1
        )
        self.reservation = attention.reserve(maxima)
        self.reservation.update(layout)  # once before the capture
        raddle.append_kv(self.slots, pools[0], self.k[0], self.v[0])  # once, too: compiles its kernel
        self.graph = Graph(self.run)

    def run(self):
        for layer, kv in enumerate(pools):  # a model computes q, k and v of each layer here
            raddle.append_kv(self.slots, kv, self.k[layer], self.v[layer])
            attention.run(self.reservation, self.q[layer], kv, out=self.out[layer])


def last_slot(request):
    """The slot of a request's last key."""
    key = pool.kv_len(request) - 1
    return int(pool.pages(request)[key // PAGE_SIZE]) * PAGE_SIZE + key % PAGE_SIZE


pool = raddle.PagePool(NUM_PAGES, PAGE_SIZE)
requests = [pool.add() for _ in range(4)]
pool.append(requests, [40, 17, 3, 60])
sizes = [Size(n, pool.layout(requests[:n], qo_len=1)) for n in BATCH_SIZES]

used = []
for step in range(12):
    if step in (4, 8):  # half of the requests end
        pool.finish(requests[len(requests) // 2 :])
        requests = requests[: len(requests) // 2]
    pool.append(requests, 1)
    layout, rows = pool.layout(requests, qo_len=1), len(requests)
    # The smallest that fits.
    reservations = [size.reservation for size in sizes]
    size = sizes[reservations.index(raddle.select(reservations, layout))]
    q = numbers(LAYERS, rows, HQ, DIM)
    size.q[:, :rows] = q
    size.k[:, :rows], size.v[:, :rows] = numbers(LAYERS, rows, HKV, DIM), numbers(LAYERS, rows, HKV, DIM)
    size.slots.fill_(-1)
    size.slots[:rows] = torch.tensor([last_slot(request) for request in requests])
    size.reservation.update(layout)
    size.graph.replay()
    used.append(size.q.shape[1])

    plan = attention.plan(layout, schedule="linear")
    expected = torch.stack([attention.run(plan, q[layer], kv) for layer, kv in enumerate(pools)])
    torch.testing.assert_close(size.out[:, :rows], expected, rtol=2e-3, atol=2e-3)  # two roundings to float16

out = size.out[:, :rows].cpu().numpy()
assert np.isfinite(out.astype(np.float32)).all()
print(f"12 steps on {DEVICE}, from graphs of {used} requests: the output of a plan for each step")

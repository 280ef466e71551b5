"""torch's tensors, streams and graphs on a GPU. Run with --device cuda."""

import ml_dtypes
import numpy as np
import pytest
import raddle
from checks import within
from device_batches import MAX_REQUESTS, MAX_ROWS, PAGES, batches
from draws import draw
from engine import spec_of, twin
from reference import Causal, PagedKV, Problem, SoftCap, attention
from small import reserved

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU", allow_module_level=True)

HEADS = {"dim": 64, "group": 2, "num_kv_heads": 2, "dtype": "bfloat16"}


def test_torch_tensors(gpu, rng):
    problem = draw(rng, "paged", "causal", lengths=[(1, 300), (3, 40)], page_size=16, **HEADS)
    attn = raddle.Attention(spec_of(problem), device=torch.device("cuda"))
    q, k, v = (torch.from_numpy(x.astype(np.float32)).cuda().bfloat16() for x in (problem.q, *problem.kv[0]))
    exact = attention(problem)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            out, lse = attn.run(attn.plan(twin(problem.layout)), q, (k, v), return_lse=True)
            assert out.device == q.device and out.dtype == q.dtype
            within(exact, out.float().cpu().numpy(), lse.cpu().numpy())
    plan = attn.plan(twin(problem.layout))
    with pytest.raises(ValueError, match="no reservation"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        attn.run(plan, q, (k, v), out=out)
    alone = raddle.attention(q, q[:, :2], q[:, :2], causal=True)
    assert alone.device == q.device


@pytest.mark.parametrize("backend", ["mma", "wgmma"])
def test_graphs_replay_changing_batches(gpu, rng, backend, monkeypatch):
    """One capture of two layers, replayed over 1,000 batches of any lengths: equal bits with eager runs of the same
    family of kernels."""
    if backend == "wgmma" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma needs an sm_90 GPU")
    monkeypatch.setenv("RADDLE_BACKEND", backend)
    device = torch.device("cuda", torch.cuda.current_device())
    rows, pages, heads = 32, 512, {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 128}
    variant = [raddle.SoftCap(30.0), raddle.Causal()]
    attn = raddle.Attention(raddle.AttentionSpec(**heads, variant=variant), device=device)
    maxima = {"max_requests": 16, "max_qo_tokens": rows, "max_kv_tokens": 16 * pages, "max_qo_len": 2, "page_size": 16}
    reservation = reserved(attn, **maxima)

    def layout():
        lengths = rng.integers(0, 3, rng.integers(1, 17)), rng.integers(1, 500, 16)
        qo, kv = lengths[0], lengths[1][: len(lengths[0])]
        indptr = np.concatenate([[0], np.cumsum(-(-kv // 16))]).astype(np.int32)
        return raddle.PagedKV(
            np.concatenate([[0], np.cumsum(qo)]).astype(np.int32),
            indptr,
            rng.integers(0, pages, indptr[-1]).astype(np.int32),
            kv.astype(np.int32),
        )

    q = torch.randn(rows, 8, 128, device=device, dtype=torch.bfloat16)
    pools = [torch.randn(2, pages, 16, 2, 128, device=device, dtype=torch.bfloat16) for _ in range(2)]
    caps, outs = (50.0, 20.0), [torch.empty_like(q) for _ in range(2)]
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        reservation.update(layout())
        with torch.cuda.graph(graph, stream=stream):
            for (k, v), cap, out in zip(pools, caps, outs):
                attn.run(reservation, q, (k, v), out=out, params={"softcap.cap": cap})
        for _ in range(1000):
            now = layout()
            reservation.update(now)
            graph.replay()
            plan = attn.plan(now)
            for (k, v), cap, out in zip(pools, caps, outs):
                expected = attn.run(plan, q[: now.num_rows], (k, v), params={"softcap.cap": cap})
                assert torch.equal(expected, out[: now.num_rows])


@pytest.mark.parametrize("prefixes", [0, 64])
def test_graphs_plan_by_themselves(gpu, rng, prefixes):
    """One capture of an update and a run, replayed over 1,000 batches that are only known on the GPU.

    Every one has the bits of the host's plan; every 50th is compared with the reference.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    attn = raddle.Attention(raddle.AttentionSpec(8, 2, 128, variant=twin(_VARIANT)), device=device)
    maxima = {"max_requests": MAX_REQUESTS, "max_qo_tokens": MAX_ROWS, "max_kv_tokens": 16 * PAGES}
    maxima["max_levels"] = 2 if prefixes else 1
    there = reserved(attn, **maxima, device_lengths=True)
    host = reserved(attn, **maxima, schedule="linear")
    drawn = batches(rng, 1000, shared=prefixes > 0)
    all_of = [{name: torch.from_numpy(x).to(device) for name, x in batch.items()} for batch in drawn]
    now = {name: x.clone() for name, x in all_of[0].items()}
    q = torch.randn(MAX_ROWS, 8, 128, device=device, dtype=torch.bfloat16)
    k, v = torch.randn(2, PAGES, 16, 2, 128, device=device, dtype=torch.bfloat16)
    out, expected = torch.zeros_like(q), torch.zeros_like(q)
    lists = now["qo_indptr"], None, now["table"], now["kv_len"]
    layout = raddle.PagedKV(*lists, num_requests=now["count"], num_pages=PAGES, discover_prefixes=prefixes)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        with torch.cuda.graph(graph, stream=stream):
            there.update(layout)
            attn.run(there, q, (k, v), out=out)
        for number, batch in enumerate(drawn):
            for name, x in all_of[number].items():
                now[name].copy_(x)
            graph.replay()
            requests = int(batch["count"][0])
            indptr, table, kv_len = batch["qo_indptr"][: requests + 1], batch["table"][:requests], batch["kv_len"]
            host.update(raddle.PagedKV(indptr, None, table, kv_len[:requests], discover_prefixes=prefixes))
            attn.run(host, q, (k, v), out=expected)
            rows = int(indptr[-1])
            assert torch.equal(out[:rows], expected[:rows]), f"batch {number}"
            if number % 50 == 0:
                there.check()
                exact = attention(_problem(q[:rows], k, v, indptr, table, kv_len[:requests]))
                within(exact, out[:rows].float().cpu().numpy())
        there.check()


_VARIANT = [SoftCap(30.0), Causal()]


def _problem(q, k, v, indptr, table, kv_len):
    q, k, v = (x.float().cpu().numpy().astype(ml_dtypes.bfloat16) for x in (q, k, v))
    return Problem(q, [(k, v)], PagedKV(indptr, None, table, kv_len, 16), _VARIANT)


def test_compiled_graphs_replay_changing_batches(gpu, rng):
    """torch.compile captures a reservation's runs in CUDA graphs of its own, between operators of its own."""
    device = torch.device("cuda", torch.cuda.current_device())
    attn = raddle.Attention(raddle.AttentionSpec(8, 2, 128, variant=[raddle.Causal()]), device=device)
    reservation = reserved(attn, max_requests=4, max_qo_tokens=16, max_kv_tokens=1024)
    q = torch.randn(16, 8, 128, device=device, dtype=torch.bfloat16)
    k, v = torch.randn(2, 1024, 2, 128, device=device, dtype=torch.bfloat16)
    torch._dynamo.mark_static_address(k), torch._dynamo.mark_static_address(v)

    def layer(plan, q, k, v):
        return attn.run(plan, 2 * q, (k, v)) + 1

    compiled = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
    for _ in range(10):
        qo, kv = rng.integers(1, 5, 4), rng.integers(4, 256, 4)
        layout = raddle.RaggedKV(np.r_[0, np.cumsum(qo)], np.r_[0, np.cumsum(kv)])
        reservation.update(layout)
        torch.compiler.cudagraph_mark_step_begin()
        rows = layout.num_rows
        found = compiled(reservation, q, k, v)[:rows].clone()
        assert torch.equal(found, layer(reservation, q, k, v)[:rows])
        # A plan of this batch alone may run on another kernel, with other bits.
        torch.testing.assert_close(found, layer(attn.plan(layout), q[:rows], k, v), atol=0.03, rtol=0.02)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_in_turns(gpu, rng):
    """Eager runs and a graph of each GPU of a process, with steps of both interleaved; the current device is left."""
    problem = draw(rng, "paged", "causal", lengths=[(1, 700), (40, 90), (1, 33)], page_size=16, **HEADS)
    exact, layout = attention(problem), twin(problem.layout)
    places = []
    for device in (torch.device("cuda:0"), torch.device("cuda:1")):
        attn = raddle.Attention(spec_of(problem), device=device)
        q, k, v = (torch.from_numpy(x.astype(np.float32)).to(device).bfloat16() for x in (problem.q, *problem.kv[0]))
        reservation = reserved(attn, max_requests=4, max_qo_tokens=len(q), max_kv_tokens=1024)
        reservation.update(layout)
        out, graph = torch.full_like(q, float("nan")), torch.cuda.CUDAGraph()
        with torch.cuda.device(device), torch.cuda.graph(graph):
            attn.run(reservation, q, (k, v), out=out)
        places.append((attn, q, (k, v), reservation, out, graph))
    for current in (0, 1):
        torch.cuda.set_device(current)
        for attn, q, kv, reservation, out, graph in places:
            eager, lse = attn.run(attn.plan(layout), q, kv, return_lse=True)
            reservation.update(layout)
            graph.replay()
            assert torch.cuda.current_device() == current and eager.device == q.device
            torch.cuda.synchronize(q.device)
            within(exact, eager.float().cpu().numpy(), lse.cpu().numpy())
            assert torch.equal(eager, out)
    torch.cuda.set_device(0)
    with pytest.raises(ValueError, match="'cuda:1'"):
        places[0][0].run(places[0][0].plan(layout), places[1][1], places[1][2])

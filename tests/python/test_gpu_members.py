"""Run members that lie on the GPU: kernels read them there, and what needs their values on the host is refused.

On the emulated driver, which counts what goes up and what is waited for (`test_emulated.py`).
"""

import numpy as np
import pytest
import raddle
from device_arrays import DeviceArray
from draws import draw
from engine import OnDevice, spec_of, twin
from reference import Alibi, Causal, Rope, RopeTables, Sinks
from small import refuses

HEADS = {"dim": 64, "group": 2, "num_kv_heads": 2, "dtype": "bfloat16"}
HQ = 4
BATCHES = {"long": [(40, 90), (3, 70), (1, 300)], "short": [(1, 300), (2, 40), (1, 9)]}

TABLE = raddle.Variant(
    "Table",
    """struct Table {
  Tensor<const float, 2> bias;
  Tensor<const i32, 1> at;
  Tensor<const u8, 1> on;
  Tensor<const u32, 1> shift;
  RADDLE_FN float logits(float s, const Row& r, const Key& c) const {
    const i32 n = at.data[c.kv_index % at.extent[0]];
    return s + (on.data[r.q_head] ? bias.data[r.q_head * bias.extent[1] + n] : float(shift.data[0] & 3u));
  }
};""",
    {
        "bias": raddle.Tensor["Hq", None],
        "at": raddle.Tensor[int, None],
        "on": raddle.Tensor[bool, "Hq"],
        "shift": raddle.Tensor["uint32", None],
    },
)


def table(rng):
    return {
        "bias": rng.normal(0.0, 1.0, (HQ, 7)).astype(np.float32),
        "at": rng.integers(0, 7, 11).astype(np.int32),
        "on": rng.random(HQ) < 0.5,
        "shift": np.uint32([7]),
    }


def turns(rng, rows=400, pairs=32):
    angle = rng.uniform(-np.pi, np.pi, (rows, pairs))
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def drawn(rng, name):
    """A variant, and other values of its run members."""
    floats = lambda *shape: rng.normal(0.0, 1.0, shape).astype(np.float32)  # noqa: E731
    if name == "sinks":
        return [Sinks(floats(HQ)), Causal()], {"sinks.logit": floats(HQ)}
    if name == "alibi":
        return [Alibi(floats(HQ)), Causal()], {"alibi.slopes": floats(HQ) * 0.1}
    if name == "rope":
        return [Rope(64), Causal()], {"rope.offset": np.int32([3, 0, 77])}
    if name == "rope_tables":
        cos, sin = turns(rng)
        return [RopeTables(*turns(rng)), Causal()], {"rope_tables.cos": cos, "rope_tables.sin": sin}
    return [], {f"Table.{member}": value for member, value in table(rng).items()}


def made(rng, gpu, name, lengths="long"):
    """A problem, its attention, and other values of its run members."""
    variant, values = drawn(rng, name)
    problem = draw(rng, "paged", variant, lengths=BATCHES[lengths], page_size=16, **HEADS)
    spec = spec_of(problem)
    if name == "own":
        spec = raddle.AttentionSpec(HQ, 2, 64, dtype="bfloat16", variant=[TABLE(**table(rng))], scale=problem.scale)
    return problem, OnDevice(raddle.Attention(spec, device=gpu)), values


def lent(values):
    return {name: DeviceArray(x) for name, x in values.items()}


def same_as_of_the_host(rng, gpu, name, lengths):
    problem, attn, values = made(rng, gpu, name, lengths)
    plan = attn.plan(twin(problem.layout))
    given = plan, problem.q, problem.kv[0]
    usual, there = attn.run(*given, return_lse=True), attn.run(*given, return_lse=True, params=lent(values))
    here = attn.run(*given, return_lse=True, params=values)
    for a, b in zip(here, there):
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))
    assert not np.array_equal(np.float32(here[0]), np.float32(usual[0]))


@pytest.mark.parametrize("lengths", BATCHES)
@pytest.mark.parametrize("name", ["sinks", "alibi", "rope", "rope_tables", "own"])
def test_the_same_bits_as_of_the_host(gpu, rng, name, lengths):
    same_as_of_the_host(rng, gpu, name, lengths)


@pytest.mark.parametrize("lengths", BATCHES)
@pytest.mark.parametrize("name", ["sinks", "alibi"])
def test_the_same_bits_on_wgmma(wgmma, rng, name, lengths):
    same_as_of_the_host(rng, wgmma, name, lengths)


@pytest.mark.parametrize("name", ["sinks", "rope_tables"])
def test_nothing_is_copied_or_waited_for(emulator, gpu, rng, name):
    """Nor kept: the next run sees what was written since."""
    problem, attn, values = made(rng, gpu, name)
    plan, there = attn.plan(twin(problem.layout)), lent(values)
    q, out, kv = DeviceArray(problem.q), DeviceArray(problem.q), tuple(map(DeviceArray, problem.kv[0]))
    given = {"plan": plan, "q": q, "kv": kv, "out": out}
    attn.attention.run(**given)
    counters = ("uploads", "allocations", "releases", "waits")
    counts = [getattr(emulator, f"raddle_emulator_{each}") for each in counters]
    before = [count() for count in counts]
    seen = []
    for _ in range(3):
        attn.attention.run(**given, params=there)
        seen.append(np.float32(out.numpy()))
        for name, value in there.items():
            value.write(rng.normal(0.0, 1.0, value.shape).astype(np.float32))
    assert [count() for count in counts] == before
    assert not np.array_equal(seen[0], seen[1]) and not np.array_equal(seen[1], seen[2])


def test_some_members_on_the_gpu(gpu, rng):
    """Beside others on the host, and scalars."""
    variant = [raddle.SoftCap(30.0), raddle.Alibi([0.1] * HQ), raddle.Sinks([0.0] * HQ), raddle.Causal()]
    attn = OnDevice(raddle.Attention(raddle.AttentionSpec(HQ, 2, 64, dtype="bfloat16", variant=variant), device=gpu))
    problem = draw(rng, "ragged", "causal", lengths=BATCHES["long"], **HEADS)
    given = attn.plan(twin(problem.layout)), problem.q, problem.kv[0]
    values = {"alibi.slopes": np.float32([0.5, 0.2, -0.1, 0.0]), "sinks.logit": np.float32([1, 2, 3, -np.inf])}
    here = attn.run(*given, params={"softcap.cap": 2.0, **values})
    there = attn.run(*given, params={"softcap.cap": 2.0, **values, "sinks.logit": DeviceArray(values["sinks.logit"])})
    np.testing.assert_array_equal(here.view(np.uint8), there.view(np.uint8))
    unchecked = attn.run(*given, params={"sinks.logit": DeviceArray(np.float32([0, np.inf, np.nan, 0]))})
    kept = np.isfinite(np.float32(unchecked)).all(axis=(0, 2))
    assert kept[0] and kept[3] and not kept[2], "they are not read on the host"


def refused(attn, problem, error, *words, **params):
    """The run is refused in these words, and writes nothing."""
    attn, plan = attn.attention, attn.plan(twin(problem.layout))
    out = DeviceArray(np.full(problem.q.shape, np.nan, problem.q.dtype))
    with refuses(error, *words):
        attn.run(plan, DeviceArray(problem.q), tuple(map(DeviceArray, problem.kv[0])), out=out, params=params)
    assert np.isnan(np.float32(out.numpy())).all()


def test_what_kernels_cannot_read_as_it_is(gpu, rng):
    problem, attn, _ = made(rng, gpu, "sinks")
    zeros = lambda dtype, n=HQ: DeviceArray(np.zeros(n, dtype))  # noqa: E731
    name, where = "sinks.logit", f"'{attn.attention.device}'"
    for dtype in ("float16", "float64", "int64"):
        words = f"params['{name}'] has dtype {dtype} on device {where}", "expected float32, int32", "x.float()"
        refused(attn, problem, TypeError, *words, **{name: zeros(dtype)})
    words = f"params: '{name}' is an int32 array of rank 1 on {where}", "expected a float32 array of rank 1", "where it lies"
    refused(attn, problem, TypeError, *words, **{name: zeros(np.int32)})
    refused(attn, problem, TypeError, f"'{name}' is a float32 array of rank 2", **{name: zeros(np.float32, (HQ, 1))})
    refused(attn, problem, ValueError, f"{name}' has 3 elements", "one a query head, 4", **{name: zeros(np.float32, 3)})
    apart = DeviceArray(np.zeros((HQ, 2), np.float32)[:, 0])
    refused(attn, problem, ValueError, f"['{name}'] is not contiguous on device {where}", "x.contiguous()", **{name: apart})
    shifted = DeviceArray(np.zeros(HQ, np.float32), shift=2)
    refused(attn, problem, ValueError, f"['{name}'] is not aligned to its elements of 4 bytes", **{name: shifted})


def test_another_gpu(emulator, gpu, rng):
    problem, attn, values = made(rng, gpu, "sinks")
    other = DeviceArray(values["sinks.logit"], 1)
    words = "params: 'sinks.logit' lies on device 'cuda:1'", "expected 'cuda:0', this attention's device, or host memory"
    refused(attn, problem, ValueError, *words, **{"sinks.logit": other})


def test_memory_that_the_run_writes(gpu, rng):
    problem, attn, _ = made(rng, gpu, "sinks")
    rows = len(problem.q)
    both = DeviceArray(np.zeros((rows + 1, HQ), np.float32))
    lse, sinks = both.first_rows(rows), DeviceArray(np.zeros(HQ, np.float32))
    given = attn.plan(twin(problem.layout)), DeviceArray(problem.q), tuple(map(DeviceArray, problem.kv[0]))
    out = DeviceArray(problem.q)
    row_of_lse = both.first_rows(1)
    row_of_lse.shape, row_of_lse.ndim, row_of_lse.strides = (HQ,), 1, (4,)
    with refuses(ValueError, "lse shares memory with params: 'sinks.logit'", "expected memory of its own"):
        attn.attention.run(*given, out=out, lse=lse, params={"sinks.logit": row_of_lse})
    attn.attention.run(*given, out=out, lse=lse, params={"sinks.logit": sinks})


def test_numbers_are_taken_by_value(gpu, rng):
    attn = OnDevice(raddle.Attention(raddle.AttentionSpec(HQ, 2, 64, dtype="bfloat16", variant=raddle.SoftCap(3.0)), gpu))
    problem = draw(rng, "ragged", "plain", lengths=[(1, 9)], **HEADS)
    words = "params['softcap.cap'] is a single element on device", "expected a number", "float(x)"
    refused(attn, problem, ValueError, *words, **{"softcap.cap": DeviceArray(np.full((), 2.0, np.float32))})


def test_values_that_the_host_needs(gpu, rng):
    """Offsets into tables of cosines, whose rows must suffice; extremes of a SpanTensor; members of masks."""
    problem, attn, values = made(rng, gpu, "rope_tables")
    words = "rope_tables.offset lies on device", "expected host memory", "rows of the tables"
    refused(attn, problem, ValueError, *words, **{"rope_tables.offset": DeviceArray(np.int32([0]))})
    refused(attn, problem, ValueError, "rope_tables.cos has 9 rows", **lent({n: x[:9] for n, x in values.items()}))
    own = raddle.Variant(
        "Spans",
        """struct Spans {
  SpanTensor<const float, 1> by;
  Tensor<const i32, 1> least;
  RADDLE_FN float logits(float s, const Row& r, const Key&) const { return s * by.data[r.q_head]; }
  RADDLE_FN bool mask(const Row&, const Key& c) const { return c.kv_index >= least.data[0]; }
};""",
        {"by": raddle.Tensor["Hq"], "least": raddle.Tensor[int, None]},
    )
    variant = own(by=np.ones(HQ, np.float32), least=np.int32([1]))
    attn = OnDevice(raddle.Attention(raddle.AttentionSpec(HQ, 2, 64, dtype="bfloat16", variant=variant), gpu))
    words = "params: 'Spans.by' lies on device", "expected host memory", "minima and maxima"
    refused(attn, problem, ValueError, *words, **{"Spans.by": DeviceArray(np.ones(HQ, np.float32))})
    with refuses(ValueError, "params['Spans.least'] lies on device", "expected host memory: pass a copy on 'cpu'"):
        attn.plan(twin(problem.layout), params={"Spans.least": DeviceArray(np.int32([0]))})


def test_specs_and_attentions_of_the_host_take_none(gpu):
    there = DeviceArray(np.zeros(HQ, np.float32))
    for made in (raddle.Sinks, raddle.Alibi):
        with refuses(ValueError, "lies on device", "expected host memory: pass a copy on 'cpu'"):
            made(there)
    attn = raddle.Attention(raddle.AttentionSpec(HQ, 2, 16, dtype="float32", variant=raddle.Sinks([0.0] * HQ)))
    x, kv = np.ones((1, HQ, 16), np.float32), np.ones((3, 2, 16), np.float32)
    words = "params: 'sinks.logit' lies on device 'cuda", "expected 'cpu', this attention's device"
    with refuses(ValueError, *words):
        attn.run(attn.plan(raddle.RaggedKV([0, 1], [0, 3])), x, (kv, kv), params={"sinks.logit": there})


def test_scores_of_python_capture_arrays_of_the_gpu(gpu, rng):
    """An index that comes from values there is clamped; one by extents alone is checked as ever."""
    from raddle.flex.trace import trace_score

    bias, which = rng.normal(0.0, 1.0, 50).astype(np.float32), rng.integers(0, 9, HQ).astype(np.int32)
    by_value = trace_score(lambda score, b, h, q_idx, kv_idx: score + bias[which[h]])
    problem = draw(rng, "paged", [], lengths=BATCHES["long"], page_size=16, **HEADS)
    spec = raddle.AttentionSpec(HQ, 2, 64, dtype="bfloat16", variant=[by_value.variant()])
    attn = OnDevice(raddle.Attention(spec, device=gpu))
    given = attn.plan(twin(problem.layout)), problem.q, problem.kv[0]
    values = {f"{by_value.name}.{name}": np.asarray(x) for name, x in by_value.values.items()}
    here, there = attn.run(*given, params=values), attn.run(*given, params=lent(values))
    np.testing.assert_array_equal(here.view(np.uint8), there.view(np.uint8))
    inner = next(name for name, x in values.items() if x.dtype == np.int32)
    refused(attn, problem, ValueError, "has 3 elements and is indexed with 3", **{inner: DeviceArray(which[:3])})
    outside = dict(values, **{inner: which + 50})
    with refuses(ValueError, "has 50 elements and is indexed with"):
        attn.run(*given, params=outside)
    assert np.isfinite(np.float32(attn.run(*given, params=lent(outside)))).all()

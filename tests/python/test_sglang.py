"""The backend for SGLang, on the CPU and without SGLang: batches of a serving loop as SGLang runs them, against fp64."""

import dataclasses
import re
import sys
from pathlib import Path

import fake_sglang
import ml_dtypes
import numpy as np
import pytest
import torch
from checks import within
from fake_sglang import ForwardBatch, ForwardMode, RadixAttention
from reference import Causal, Mask, PagedKV, Problem, Sinks, SlidingWindow, SoftCap, attention
from raddle.integrations import sglang as integration
from small import refuses

backend = fake_sglang.backend()

HEADS, KV_HEADS, DIM = 4, 2, 32
REQUESTS, CONTEXT, SLOTS = 6, 150, 1000
SHARED = 40  # tokens that the first three requests have in common


@pytest.fixture(autouse=True)
def short_prefixes(monkeypatch):
    monkeypatch.setenv("RADDLE_SGLANG_MIN_PREFIX", "32")


def layer_of(number, scaling=DIM**-0.5, **given):
    return RadixAttention(HEADS, DIM, scaling, KV_HEADS, number, **given)


class Block(torch.nn.Module):
    """A decoder layer, whose sinks, if it has them, lie beside its attention."""

    def __init__(self, attn, sinks=None):
        super().__init__()
        self.attn, self.sinks = attn, sinks


def array(x):
    """A torch tensor of bfloat16 as the reference takes it."""
    return x.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)


class Server:
    """A model's attention layers, the requests' slots, and a step of all layers."""

    def __init__(self, rng, blocks, variants, has_window_pool=False, **config):
        self.rng, self.variants = rng, variants
        self.model = torch.nn.ModuleList(blocks)
        kv_dtype = config.get("kv_cache_dtype", torch.bfloat16)
        buffers = {b.attn.layer_id: tuple(self.tensor(2, SLOTS, KV_HEADS, DIM).to(kv_dtype)) for b in blocks}
        to_window = torch.from_numpy(rng.permutation(SLOTS))
        self.pool = fake_sglang.WindowPool(buffers, to_window) if has_window_pool else fake_sglang.Pool(buffers)
        slots = rng.permutation(SLOTS)[: REQUESTS * CONTEXT].reshape(REQUESTS, CONTEXT).astype(np.int32)
        slots[:3, :SHARED] = slots[0, :SHARED]
        self.table = torch.from_numpy(slots)
        runner = fake_sglang.runner(self.model, self.pool, self.table, **config)
        self.backend = backend.Backend(runner)

    def tensor(self, *shape):
        return torch.from_numpy(self.rng.standard_normal(shape).astype(np.float32)).to(torch.bfloat16)

    def batch(self, requests, mode=None, knows_lengths=True):
        """Of requests {number: (new tokens, tokens)}."""
        numbers, lengths = list(requests), list(requests.values())
        new, held = (torch.tensor(x, dtype=torch.int64) for x in zip(*lengths))
        decodes = all(n == 1 for n, _ in lengths)
        mode = mode or (ForwardMode.DECODE if decodes else ForwardMode.EXTEND)
        slots = [self.table[i, t - n : t] for i, (n, t) in requests.items()]
        batch = ForwardBatch(mode, len(numbers), torch.tensor(numbers), held, torch.cat(slots).long())
        batch.seq_lens_cpu = held if knows_lengths else None
        if mode is not ForwardMode.DECODE:
            batch.extend_seq_lens = new
            batch.extend_seq_lens_cpu = new.tolist() if knows_lengths else None
        return batch

    def attend(self, requests, batch, padding=0):
        """Computes all layers of a batch that is planned, and compares them with the reference."""
        rows = len(batch.out_cache_loc)
        for block in self.model:
            layer = block.attn
            q, k, v = self.tensor(rows + padding, HEADS * DIM), *self.tensor(2, rows, KV_HEADS, DIM)
            more = {} if block.sinks is None else {"sinks": block.sinks}
            out = self.backend.forward(q, k, v, layer, batch, **more)
            assert out.shape == (rows + padding, HEADS * DIM) and not out[rows:].any()
            within(attention(self.problem(layer, q[:rows], requests)), array(out[:rows]).reshape(rows, HEADS, DIM))

    def problem(self, layer, q, requests):
        new, held = np.array(list(requests.values()), np.int32).T
        starts, indptr = (np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in (new, held))
        slots = np.concatenate([self.table[i, :t].numpy() for i, (_, t) in requests.items()])
        slots = self.pool.place_of(layer, torch.from_numpy(slots)).numpy().astype(np.int32)
        kv = tuple(array(x)[:, None] for x in self.pool.get_kv_buffer(layer.layer_id))
        q = array(q).reshape(-1, HEADS, DIM)
        layout = PagedKV(starts, indptr, slots, held, 1)
        return Problem(q, [kv], layout, self.variants[layer.layer_id], scale=layer.scaling)

    def step(self, requests, mode=None, padding=0, knows_lengths=True):
        batch = self.batch(requests, mode, knows_lengths)
        self.backend.init_forward_metadata(batch)
        self.attend(requests, batch, padding)


# Prompts, a chunk behind a prefix of the cache, decodes of any order, decodes beside a prompt.
STEPS = [
    {"requests": {0: (60, 60), 4: (3, 3)}},
    {"requests": {1: (10, 50), 2: (25, 65)}, "knows_lengths": False},
    {"requests": {2: (1, 66), 0: (1, 61), 1: (1, 51), 4: (1, 4)}},
    {"requests": {5: (9, 9), 0: (1, 62), 2: (1, 67)}, "mode": ForwardMode.MIXED},
    {"requests": {5: (1, 10), 1: (1, 52)}, "knows_lengths": False, "padding": 2},
]
# SGLang's arguments of a layer -> the variant that it means
LAYERS = {
    "plain": ({}, [Causal()]),
    "window": ({"sliding_window_size": 30}, [SlidingWindow(30), Causal()]),
    "cap": ({"logit_cap": 20.0}, [SoftCap(20.0), Causal()]),
}


@pytest.mark.parametrize("name", LAYERS)
def test_steps_of_a_serving_loop(rng, name):
    given, variant = LAYERS[name]
    server = Server(rng, [Block(layer_of(n, (n + 1) * 0.1, **given)) for n in range(2)], [variant, variant])
    for step in STEPS:
        server.step(**step)
        assert len(server.backend.steps.planned) == 1, "one plan serves both layers, whose scales differ"


@pytest.mark.parametrize("has_window_pool", [False, True])
def test_layers_of_several_kinds(rng, has_window_pool):
    """Windows have a plan of their own, and maybe slots of their own; sinks differ from layer to layer of one plan."""
    sinks = [torch.nn.Parameter(torch.randn(HEADS).to(torch.bfloat16)) for _ in range(2)]
    blocks = [
        Block(layer_of(0), sinks[0]),
        Block(layer_of(1, sliding_window_size=20), sinks[1]),
        Block(layer_of(2, sliding_window_size=20), sinks[0]),
        Block(layer_of(3), sinks[1]),
    ]
    values = [Sinks(x.detach().float().numpy()) for x in sinks]
    window = SlidingWindow(20)
    variants = [[values[0], Causal()], [values[1], window, Causal()], [values[0], window, Causal()], [values[1], Causal()]]
    server = Server(rng, blocks, variants, has_window_pool)
    for step in STEPS:
        server.step(**step)
        assert len(server.backend.steps.planned) == 2


def test_prefixes_are_read_once(rng, monkeypatch):
    """Requests whose first slots are equal share a level, unless it is turned off or SGLang caches no prefixes."""
    requests = {0: (1, 61), 1: (1, 51), 2: (1, 66), 4: (1, 9)}

    def reads(**config):
        server = Server(rng, [Block(layer_of(0))], [[Causal()]], **config)
        server.step(requests)
        return server.backend.steps.planned[0].plan.explain()

    shared = reads()
    assert f"level 0: 1 group of requests, with {SHARED} keys" in shared
    assert "level 0" not in reads(disable_radix_cache=True)
    monkeypatch.setenv("RADDLE_SGLANG_MIN_PREFIX", "0")
    assert "level 0" not in reads()
    monkeypatch.setenv("RADDLE_SGLANG_MIN_PREFIX", "some")
    with refuses(ValueError, "RADDLE_SGLANG_MIN_PREFIX is 'some'"):
        reads()


def test_graphs_of_decodes(rng):
    """A replay is the update in the graph, and the runs: they read what lies at the addresses of the capture."""
    server = Server(rng, [Block(layer_of(0)), Block(layer_of(1, sliding_window_size=25))], [[Causal()], LAYERS["window"][1]])
    server.variants[1] = [SlidingWindow(25), Causal()]
    with refuses(RuntimeError, "init_cuda_graph_state"):
        server.backend.init_forward_metadata_out_graph(server.batch({0: (1, 2)}))
    server.backend.init_cuda_graph_state(8, 8)
    assert server.backend.get_cuda_graph_seq_len_fill_value() == 1 and not server.backend.needs_cpu_seq_lens
    addresses = [x.data_ptr() for x in server.backend.graph]
    for requests in ({0: (1, 1), 1: (1, 1), 2: (1, 1)}, {0: (1, 61), 2: (1, 50), 5: (1, 90)}, {4: (1, 7), 1: (1, 3), 0: (1, 62)}):
        batch = server.batch(requests)
        server.backend.init_forward_metadata_out_graph(batch, in_capture=len(addresses) == 0)
        server.backend.init_forward_metadata_in_graph(batch)
        server.attend(requests, batch)
        assert [x.data_ptr() for x in server.backend.graph] == addresses
    prompt = server.batch({0: (5, 60)})
    with refuses(NotImplementedError, "forward mode EXTEND; Raddle's backend for SGLang serves DECODE and IDLE here"):
        server.backend.init_forward_metadata_out_graph(prompt)


def test_more_requests_in_graphs_than_slots_for_them(rng):
    server = Server(rng, [Block(layer_of(0))], [[Causal()]])
    server.backend.init_cuda_graph_state(3 * REQUESTS, 3 * REQUESTS)
    assert server.backend.max_requests == 3 * REQUESTS
    server.step({0: (1, 61), 2: (1, 50)})


def test_quantised_keys_and_values(rng):
    given = {"k_scale": torch.tensor(0.02), "k_scale_float": 0.02, "v_scale": torch.tensor(0.015), "v_scale_float": 0.015}
    layer = layer_of(0, **given)
    server = Server(rng, [Block(layer)], [[Causal()]], kv_cache_dtype=torch.float8_e4m3fn)
    requests = {0: (40, 40), 4: (7, 7)}
    batch = server.batch(requests)
    server.backend.init_forward_metadata(batch)
    q, k, v = server.tensor(47, HEADS, DIM), *server.tensor(2, 47, KV_HEADS, DIM)
    before = k.clone()
    out = server.backend.forward(q, k, v, layer, batch)
    assert torch.equal(k, before), "SGLang's pool divides what it is given in place"
    kv = tuple(x.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)[:, None] for x in server.pool.get_kv_buffer(0))
    server.pool.buffers[0] = tuple(torch.zeros(2, SLOTS, KV_HEADS, DIM, dtype=torch.bfloat16))
    problem = server.problem(layer, q.reshape(47, -1), requests)
    problem = dataclasses.replace(problem, kv=[kv], k_scale=0.02, v_scale=0.015)
    within(attention(problem), array(out).reshape(47, HEADS, DIM))


def test_keys_of_another_layer(rng):
    """A layer without keys of its own reads those that lie in its pool."""
    server = Server(rng, [Block(layer_of(0))], [[Causal()]])
    requests = {0: (1, 30), 3: (1, 12)}
    batch, layer = server.batch(requests), server.model[0].attn
    server.backend.init_forward_metadata(batch)
    held = [x.clone() for x in server.pool.get_kv_buffer(0)]
    q, k = server.tensor(2, HEADS * DIM), server.tensor(2, KV_HEADS, DIM)
    for given in ({"k": None, "v": None}, {"k": k, "v": k, "save_kv_cache": False}):
        out = server.backend.forward(q, layer=layer, forward_batch=batch, **given)
        within(attention(server.problem(layer, q, requests)), array(out).reshape(2, HEADS, DIM))
        assert all(map(torch.equal, held, server.pool.get_kv_buffer(0)))


def test_idle_batches(rng):
    server = Server(rng, [Block(layer_of(0))], [[Causal()]])
    idle = server.batch({0: (1, 1)}, ForwardMode.IDLE)
    server.backend.init_forward_metadata(idle)
    assert server.backend.forward(server.tensor(0, HEADS * DIM), None, None, server.model[0].attn, idle).shape == (0, 128)


# --- drafts ------------------------------------------------------------------------------------------

DRAFTS = 5
CHAINS = {"speculative_algorithm": "EAGLE3", "speculative_num_draft_tokens": DRAFTS, "speculative_eagle_topk": 1}
TREES = {**CHAINS, "speculative_eagle_topk": 2}


@dataclasses.dataclass
class Seen(Mask):
    """The reference's mask of trees: which drafts each row of a request sees; [requests, drafts, drafts] bool."""

    trees: np.ndarray

    def pairs(self, keys):
        first = keys.kv_len - keys.qo_len
        draft, row = keys.kv_index[None] - first, keys.q_index[:, None] - first
        return (draft < 0) | self.trees[keys.request][row, np.clip(draft, 0, None)]


def trees_of(rng, num_requests, drafts):
    """Each draft's parent is a random one before it; the first is the root."""
    seen = np.zeros((num_requests, drafts, drafts), bool)
    for tree in seen:
        for row in range(drafts):
            if row > 0:
                tree[row] = tree[rng.integers(row)]
            tree[row, row] = True
    return seen


class Checking(Server):
    """Batches in which drafts are checked: SGLang's lengths do not count them."""

    def __init__(self, rng, variants, given=None, **config):
        self.of_layers = variants
        super().__init__(rng, [Block(layer_of(0, **(given or {})))], variants, **config)

    def checks(self, lengths, drafts=DRAFTS, branches=True, in_graph=False, in_place=False, knows_lengths=True):
        """Of requests {number: tokens before the drafts}. In place: in the memory that the backend made for the trees."""
        requests = {number: (drafts, n + drafts) for number, n in lengths.items()}
        batch = self.batch(requests, ForwardMode.TARGET_VERIFY, knows_lengths)
        batch.seq_lens = batch.seq_lens - drafts
        batch.seq_lens_cpu = batch.seq_lens if knows_lengths else None
        seen = trees_of(self.rng, len(lengths), drafts)
        built = torch.from_numpy(np.append(seen, np.ones(2 * REQUESTS * DRAFTS**2, bool)))  # as long as a capture's
        if in_place:
            built, at = self.backend.verify_mask.buffer, built[: seen.size]
            built[: len(at)] = at
        batch.spec_info = fake_sglang.EagleVerifyInput(built, drafts)
        if in_graph:
            self.backend.init_forward_metadata_out_graph(batch)
            self.backend.init_forward_metadata_in_graph(batch)
        else:
            self.backend.init_forward_metadata(batch)
        self.variants = [[*([Seen(seen)] if branches else []), *self.of_layers[0]]]
        self.attend(requests, batch)
        self.variants = self.of_layers


BEFORE = [{0: 60, 2: 50, 1: 45}, {4: 1, 0: 90}, {5: 33}]


@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize("in_graph", [False, True])
def test_drafts(rng, branches, in_graph):
    """Chains and trees, of requests with shared tokens and without, between prompts and decodes; trees built elsewhere."""
    server = Checking(rng, [[SoftCap(20.0), Causal()]], {"logit_cap": 20.0}, **(TREES if branches else CHAINS))
    assert server.backend.verify_mask.is_read == branches and server.backend.verify_mask.fits(REQUESTS)
    server.backend.init_cuda_graph_state(REQUESTS, REQUESTS * DRAFTS)
    for lengths in BEFORE:
        for in_place in (False, True):
            server.checks(lengths, branches=branches, in_graph=in_graph, in_place=in_place, knows_lengths=in_place)
        server.step({0: (1, 61), 1: (1, 51)})
        server.step({3: (9, 20), 1: (1, 51)})
    server.checks({0: 70, 3: 4}, drafts=1, branches=branches, in_graph=in_graph)
    with refuses(NotImplementedError, "a batch checks 6 drafts", "at most speculative_num_draft_tokens = 5"):
        server.checks({0: 60}, drafts=6)


def test_drafts_read_shared_tokens_once(rng):
    server = Checking(rng, [[Causal()]], **TREES)
    server.checks({0: 60, 1: 50, 2: 65, 4: 9})
    assert f"level 0: 1 group of requests, with {SHARED} keys" in server.backend.steps.planned[0].plan.explain()


def test_drafts_behind_windows(rng):
    """A chain's positions are those of its slots."""
    server = Checking(rng, [[SlidingWindow(20), Causal()]], {"sliding_window_size": 20}, **CHAINS)
    for lengths in BEFORE:
        server.checks(lengths, branches=False)


REFUSED = [
    ({}, {"attention_arch": "MLA"}, "latent attention (MLA): Raddle's backend for SGLang does not serve it"),
    ({}, {"is_encoder_decoder": True}, "a model with an encoder"),
    ({}, {"speculative_algorithm": "NGRAM"}, "speculative_algorithm 'NGRAM'; Raddle's backend for SGLang serves EAGLE"),
    ({}, {**TREES, "is_draft_worker": True}, "a draft model on Raddle's backend", "speculative-draft-attention-backend"),
    ({"sliding_window_size": 9}, TREES, "speculative_eagle_topk above 1 beside layers with a sliding window"),
    ({}, {"enable_deterministic_inference": True}, "enable_deterministic_inference"),
    ({}, {"kv_cache_dtype": torch.int8}, "a KV cache of int8 beside torch.bfloat16"),
    ({"is_cross_attention": True}, {}, "layer 0 has cross-attention"),
    ({"attn_type": fake_sglang.AttentionType.ENCODER_ONLY}, {}, "layer 0 has attn_type 'encoder_only'"),
    ({"v_head_dim": 16}, {}, "layer 0 has head dims 32 and 16"),
    ({"logit_cap": 3.0, "logit_capping_method": "none"}, {}, "layer 0 has logit_capping_method 'none'"),
    ({"pos_encoding_mode": "ROPE"}, {}, "layer 0 has pos_encoding_mode 'ROPE'"),
    ({"use_irope": True}, {}, "layer 0 has attention in chunks"),
    ({"xai_temperature_len": 1024}, {}, "layer 0 has a temperature by length"),
]


@pytest.mark.parametrize("refused", REFUSED, ids=lambda row: row[2][:30])
def test_what_is_not_served_is_refused_when_the_engine_starts(rng, refused):
    layer, config, *messages = refused
    with refuses(NotImplementedError, *messages):
        Server(rng, [Block(layer_of(0, **layer))], [[Causal()]], **config)


def test_calls_that_are_not_served(rng):
    server = Server(rng, [Block(layer_of(0))], [[Causal()]])
    batch, layer, q = server.batch({0: (1, 5)}), server.model[0].attn, server.tensor(1, HEADS * DIM)
    with refuses(NotImplementedError, "forward mode TARGET_VERIFY; Raddle's backend for SGLang serves DECODE and EXTEND"):
        server.backend.init_forward_metadata(server.batch({0: (3, 9)}, ForwardMode.TARGET_VERIFY))
    server.backend.init_forward_metadata(batch)
    with refuses(NotImplementedError, "q_rope of an attention layer"):
        server.backend.forward(q, None, None, layer, batch, q_rope=q)
    with refuses(NotImplementedError, "layer 0 is called with sinks"):
        server.backend.forward(q, None, None, layer, batch, sinks=torch.zeros(HEADS))


# --- SGLang finds it ---------------------------------------------------------------------------------


def test_registers(rng, monkeypatch, caplog):
    for name, module in fake_sglang.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    point = re.search(r'^\[project.entry-points."sglang.srt.plugins"\]\nraddle = "([\w.]+):(\w+)"$', project, re.MULTILINE)
    assert point is not None and getattr(sys.modules[point[1]], point[2]) is integration.register
    integration.register(), integration.register()
    assert "raddle" in fake_sglang.choices and not caplog.records
    pool = fake_sglang.Pool({0: tuple(torch.zeros(2, SLOTS, KV_HEADS, DIM, dtype=torch.bfloat16))})
    table = torch.zeros((REQUESTS, CONTEXT), dtype=torch.int32)
    model = torch.nn.ModuleList([Block(layer_of(0))])
    made = fake_sglang.registered["raddle"](fake_sglang.runner(model, pool, table))
    assert isinstance(made, backend.Backend)
    monkeypatch.setattr(sys.modules["sglang"], "__version__", "0.6.0")
    integration.register()
    assert "written for SGLang 0.5.23; this is 0.6.0" in caplog.text

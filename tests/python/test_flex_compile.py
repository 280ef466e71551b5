"""`flex_attention` under torch.compile: one graph, whatever lengths and captured values its batches have."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from raddle.flex import AuxRequest, create_block_mask, flex_attention

HEADS, D = 4, 8
SLOPES = torch.rand(HEADS)  # on the CPU, whatever the device of queries is
DOCUMENT = torch.arange(64) // 7
#: What programs may differ by that fuse differently, by the dtype of their tensors.
CLOSE = {torch.float32: {"rtol": 1e-5, "atol": 1e-6}, torch.float16: {"rtol": 2e-3, "atol": 2e-3}}


@pytest.fixture(autouse=True)
def fresh(rng, torch_device):
    torch._dynamo.reset()
    torch.manual_seed(int(rng.integers(2**31)))


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.o = torch.nn.Linear(HEADS * D, 3 * HEADS * D), torch.nn.Linear(HEADS * D, HEADS * D)

    def forward(self, x, score_mod, block_mask):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, D).permute(2, 0, 3, 1, 4)
        out = flex_attention(q, k, v, score_mod=score_mod, block_mask=block_mask)
        return x + self.o(out.transpose(1, 2).reshape(x.shape))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(), Layer()])

    def forward(self, x, score_mod, block_mask):
        for layer in self.layers:
            x = layer(x, score_mod, block_mask)
        return x


def biased(slopes, cap, shift):
    def score_mod(score, b, h, q, kv):
        return cap * torch.tanh(score / cap) + slopes[h] * (kv - q - shift)

    return score_mod


def documents(size):
    def mask(b, h, q, kv):
        return (q // size == kv // size) & (q >= kv)

    return mask


def test_a_model_of_two_layers_is_one_graph():
    """Over ten batches of other lengths, masks, captured tensors and numbers nothing is compiled again."""
    model = Model().eval()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for n in range(5, 15):
            block_mask = create_block_mask(documents(n), None, None, 3 * n, 3 * n)
            how = torch.randn(2, 3 * n, HEADS * D), biased(torch.rand(HEADS), 10.5 + n, n), block_mask
            agree(compiled, model, how)
    assert counter.frame_count == 1


def test_a_model_under_cuda_graphs():
    """torch.compile captures what lies between the layers' attention; on a CPU the mode changes nothing."""
    model = Model().eval()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, mode="reduce-overhead")
    with torch.no_grad():
        for n in (5, 9, 5, 5, 9):
            block_mask = create_block_mask(documents(n), None, None, 3 * n, 3 * n)
            torch.compiler.cudagraph_mark_step_begin()
            agree(compiled, model, (torch.randn(2, 3 * n, HEADS * D), biased(torch.rand(HEADS), 11.5, n), block_mask))


def agree(compiled, function, how):
    """Compiled and eager compute the same; a failure says which of the two computes something else a second time."""
    found, expected = compiled(*how), function(*how)

    def explained(message):
        again = [same_bits(first, f(*how)) for f, first in ((compiled, found), (function, expected))]
        return f"{message}\na second call gives the same bits: compiled {again[0]}, eager {again[1]}"

    torch.testing.assert_close(found, expected, **CLOSE[torch.get_default_dtype()], msg=explained)


def same_bits(first, second):
    both = ([x] if isinstance(x, torch.Tensor) else x for x in (first, second))
    return all(torch.equal(a, b) for a, b in zip(*both))


def counted(function, batches, backend="aot_eager"):
    """Compiled and eager agree, in one graph."""
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    for batch in batches:
        agree(compiled, function, batch)
    return counter.frame_count


def inputs(lengths=range(9, 14), **how):
    for n in lengths:
        yield tuple(torch.randn(2, n, HEADS, D).transpose(1, 2) for _ in "qkv")


def of_globals(score, b, h, q, kv):
    return score + SLOPES[h] * (kv - q)


def same_document(b, h, q, kv):
    return DOCUMENT[q] == DOCUMENT[kv]


PROGRAMS = {
    "itself": flex_attention,
    "a function of globals": lambda q, k, v: flex_attention(q, k, v, score_mod=of_globals),
    "lse": lambda q, k, v: flex_attention(q, k, v, return_lse=True),
    "aux": lambda q, k, v: flex_attention(q, k, v, scale=0.3, return_aux=AuxRequest(lse=True))[1].lse,
    "a mask made inside": lambda q, k, v: flex_attention(
        q, k, v, score_mod=of_globals, block_mask=create_block_mask(same_document, None, None, q.shape[2], q.shape[2])
    ),
    "gqa": lambda q, k, v: flex_attention(q, k[:, :2], v[:, :2], enable_gqa=True),
    "what follows": lambda q, k, v: flex_attention(q * 2, k, v).transpose(1, 2).flatten(2) + 1,
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_programs_are_one_graph(program):
    assert counted(program, inputs()) == 1


def test_a_number_that_python_needs_is_guarded():
    def mod(steps):
        def score_mod(score, b, h, q, kv):
            for i in range(steps):
                score = score * 0.5 + i
            return score

        return score_mod

    q, k, v = next(inputs())
    batches = [(q, k, v, mod(n)) for n in (1, 2, 2, 1)]
    assert counted(lambda q, k, v, mod: flex_attention(q, k, v, score_mod=mod), batches) == 2


def test_what_cannot_be_read_again_is_refused():
    import collections

    held = collections.deque([5])
    compiled = torch.compile(flex_attention, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="cannot be read again"):
        compiled(*next(inputs()), score_mod=lambda score, b, h, q, kv: score + held[0])


def test_errors_are_those_of_eager_calls():
    q, k, v = next(inputs())
    compiled = torch.compile(flex_attention, backend="aot_eager", fullgraph=True)
    with pytest.raises(ValueError, match="block_mask is for lengths"):
        compiled(q, k, v, block_mask=create_block_mask(same_document, None, None, 5, 5))


ORDERS = {"BHSD": (0, 1, 2, 3), "BSHD": (0, 2, 1, 3), "SBHD": (2, 0, 1, 3), "HBSD": (1, 0, 2, 3)}


def in_order(order, length=9, dim=D):
    sizes = 2, HEADS, length, dim
    return torch.randn([sizes[d] for d in order]).permute([order.index(d) for d in range(4)])


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("dim", [8, 12])
def test_the_operator_is_what_a_graph_is_told(order, dim):
    """Shapes, strides and dtypes; lengths that change; nothing is written that was given."""
    q, k, v = in_order(order, dim=dim), in_order(ORDERS["BHSD"], dim=dim), in_order(order, dim=8)
    flex_attention(q, k, v)  # registers nothing, but compiles the kernel before it is watched
    nothing = [], [], []
    for wants_lse in (False, True):
        args = q, k, v, 0, *nothing, 0, *nothing, 0, None, None, False, wants_lse, True
        torch.library.opcheck(torch.ops.raddle.flex_attention.default, args)


def test_a_graph_hands_over_the_strides_that_it_knows():
    """Inductor may lay out what it computes as it likes, unless the operator says that strides matter."""
    operator = torch.ops.raddle.flex_attention.default
    assert {torch.Tag.needs_exact_strides, torch.Tag.cudagraph_unsafe} <= set(operator.tags)

    def attend(x, y):
        q, k, v = (each.sin() for each in (x.transpose(1, 2), y.permute(0, 3, 2, 1), x.transpose(1, 2)))
        first, second = flex_attention(q, k, v), flex_attention(k * 2, q, v)
        return first, second, first.transpose(1, 2).flatten(2), second + first

    compiled = torch.compile(attend, fullgraph=True, dynamic=True)
    with torch._functorch.config.patch(custom_op_default_layout_constraint="flexible_layout"):
        for n in (9, 13):
            x, y = torch.randn(2, n, HEADS, D), torch.randn(2, D, n, HEADS)
            for found, expected in zip(compiled(x, y), attend(x, y)):
                torch.testing.assert_close(found, expected, **CLOSE[torch.get_default_dtype()])
                assert found.stride() == expected.stride()

"""What cannot be traced says where it stands, what was found, and what to write instead."""

from __future__ import annotations

import collections
import math
import random
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import raddle.flex
import torch

from raddle.flex import ops
from raddle.flex.trace import TraceError, as_variant, takes_score, trace_mask, trace_score

TABLE = np.arange(8.0)
INDEX = np.arange(8)
T_TABLE = torch.arange(8.0)


def python_if(score, b, h, q, kv):
    if q > kv:  # here
        return score
    return -score


def python_ternary(score, b, h, q, kv):
    return score if q > kv else -score  # here


def python_and(b, h, q, kv):
    return q > kv and h > 3  # here


def python_or(b, h, q, kv):
    return q > kv or h > 3  # here


def python_not(b, h, q, kv):
    return not q > kv  # here


def chained(b, h, q, kv):
    return 0 <= q - kv < 5  # here


def in_helper(score, b, h, q, kv):
    def helper(x):
        return x * 2 if x > 1 else x  # here

    return helper(score)


def python_while(score, b, h, q, kv):
    while score > 0:  # here
        score = score - 1
    return score


def math_function(score, b, h, q, kv):
    return math.exp(score)  # here


def unknown_torch(score, b, h, q, kv):
    return torch.erfinv(score)  # here


def unknown_numpy(score, b, h, q, kv):
    return np.spacing(score)  # here


def unknown_method(score, b, h, q, kv):
    return score.erfinv()  # here


def float_index(score, b, h, q, kv):
    return TABLE[q / 2]  # here


def torch_float_index(score, b, h, q, kv):
    return T_TABLE[q / 2]  # here


def bool_index(score, b, h, q, kv):
    return TABLE[q > kv]  # here


def too_many_indices(score, b, h, q, kv):
    return TABLE[q, kv]  # here


def list_index(score, b, h, q, kv):
    return [1.0, 2.0, 3.0][b]  # here


def loop_to_traced(score, b, h, q, kv):
    for _ in range(h):  # here
        score = score * 2
    return score


def item(score, b, h, q, kv):
    return score + q.item()  # here


def int_of(score, b, h, q, kv):
    return score + int(q)  # here


def wide_integer(score, b, h, q, kv):
    return score + (q + 2**70)  # here


def whole_array(score, b, h, q, kv):
    return score + TABLE  # here


def whole_tensor(score, b, h, q, kv):
    return torch.where(q > kv, T_TABLE, score)  # here


def bitwise_float(score, b, h, q, kv):
    return score & 3  # here


def bool_difference(b, h, q, kv):
    return (q > kv) - (h > 3)  # here


def rounds(score, b, h, q, kv):
    return round(score)  # here


def iterates(score, b, h, q, kv):
    a, b = score  # here
    return a


def raises(score, b, h, q, kv):
    return {}["missing"] + score  # here


ADVICE = {
    python_if: "where(condition, a, b) instead of if",
    python_ternary: "where(condition, a, b) instead of if",
    python_and: "`a & b` (with parentheses) instead of `a and b`",
    python_or: "`a | b` (with parentheses) instead of `a or b`",
    python_not: "`~a` instead of `not a`",
    chained: "`(a < b) & (b < c)`",
    in_helper: "where(condition, a, b) instead of if",
    python_while: "where(condition, a, b) instead of if",
    math_function: "raddle.flex.ops.exp instead of math.exp",
    unknown_torch: "`erfinv` of a traced value is unknown",
    unknown_numpy: "`spacing` of a traced value is unknown",
    unknown_method: "a traced value has no .erfinv",
    float_index: "captured array TABLE is indexed with a float; write i.int(), or // instead of /",
    torch_float_index: "captured array T_TABLE is indexed with a float",
    bool_index: "captured array TABLE is indexed with a bool",
    too_many_indices: "captured array TABLE has 1 dimensions and gets 2 indices",
    list_index: "capture a tensor or numpy array",
    loop_to_traced: "range()",
    item: ".item() of a traced value",
    int_of: "write x.int()",
    wide_integer: "does not fit in 64 bits",
    whole_array: "captured array TABLE as a whole meets a traced value",
    whole_tensor: "captured array T_TABLE as a whole meets a traced value",
    bitwise_float: "of a float",
    bool_difference: "a & ~b",
    rounds: "floor(x + 0.5)",
    iterates: "cannot be iterated",
    raises: "KeyError: 'missing'",
}


def marked_line(fn):
    """``file:line`` and the text of the function's line that is marked ``# here``."""
    import inspect

    lines, first = inspect.getsourcelines(fn)
    n = next(n for n, line in enumerate(lines) if "# here" in line)
    return f"{__file__}:{first + n}: {lines[n].strip()}"


@pytest.mark.parametrize("fn", ADVICE, ids=lambda fn: fn.__name__)
def test_the_message_has_the_line_and_the_advice(fn):
    with pytest.raises(TraceError) as caught:
        (trace_score if takes_score(fn) else trace_mask)(fn)
    message = str(caught.value)
    assert message.startswith(marked_line(fn)), message
    assert ADVICE[fn] in message, message


def capturing(array):
    return lambda score, b, h, q, kv: score + array[h]


REFUSED = [
    (np.array([1, 2**40]), "holds 1099511627776", ", which does not fit in 32 bits"),
    (np.array([-(2**33), 0]), "holds -8589934592", ""),
    (np.array([2**32 - 1], np.uint32), "holds 4294967295", ""),
    (torch.tensor([2**32 - 1], dtype=torch.uint32), "holds 4294967295", ""),
    (np.zeros(0), "is empty", r" \(shape \(0,\)\)"),
    (np.array(["a", "b"]), "has dtype <U1", ""),
    (np.zeros(3, complex), "has dtype complex128", ""),
    (torch.ones(3, requires_grad=True), "requires a gradient", ""),
]


@pytest.mark.parametrize("array, fault, more", REFUSED)
def test_arrays_that_cannot_be_members_are_named(array, fault, more):
    with pytest.raises(TraceError, match=f"captured (array|tensor) array {fault}{more}"):
        # Code that was not traced before.
        trace_score(eval("lambda score, b, h, q, kv: score + array[h]", {"array": array}))


@pytest.mark.parametrize("array, fault, _", REFUSED)
def test_arrays_are_refused_by_code_that_was_traced_with_a_good_one(array, fault, _):
    kind = array.dtype if array.dtype in (np.int64, np.uint32, torch.uint32) else None
    as_variant(capturing(torch.ones(3, dtype=kind) if isinstance(array, torch.Tensor) else np.ones(3, kind)))
    with pytest.raises((TraceError, ValueError), match=f"array {fault}"):
        as_variant(capturing(array))


def test_more_than_four_dimensions_are_refused():
    table = np.zeros((1, 2, 1, 2, 1))
    with pytest.raises(TraceError, match="captured array table has 5 dimensions; expected 1 to 4"):
        trace_score(lambda score, b, h, q, kv: table[0, b, 0, h, q])


def test_a_gradient_matters_only_where_one_is_taken():
    weight = torch.ones(8, requires_grad=True)
    with torch.no_grad():
        assert trace_score(capturing(weight)).values["array"].dtype == np.float32


HELD = {"int64": "int32", "uint8": "int32", "bool": "uint8"}
HELD.update({"float16": "float32", "bfloat16": "float32", "float64": "float32"})


@pytest.mark.parametrize("dtype, held", HELD.items())
def test_dtypes_of_members(dtype, held):
    array = torch.ones(8).to(getattr(torch, dtype))
    assert trace_score(capturing(array)).values["array"].dtype == held
    if dtype != "bfloat16":
        assert trace_score(capturing(array.numpy())).values["array"].dtype == held


def test_results_of_the_wrong_type():
    with pytest.raises(TraceError, match="the mask is a float; expected a bool"):
        trace_mask(lambda b, h, q, kv: q / 2)
    with pytest.raises(TraceError, match="the mask is an int; expected a bool"):
        trace_mask(lambda b, h, q, kv: q - kv)
    with pytest.raises(TraceError, match="the function returns None; expected a bool: is `return` missing"):
        trace_mask(lambda b, h, q, kv: None)
    with pytest.raises(TraceError, match="is no function"):
        trace_mask(3)
    for result, kind in (((1, 2), "a tuple"), ("q", "a str"), (np.arange(3), "an array")):
        with pytest.raises(TraceError, match=f"{__file__}:.*\n  the function returns {kind}; expected one score"):
            trace_score(lambda score, b, h, q, kv: result)


RNG = np.random.default_rng(0)
DRAWING = {
    "torch.rand": lambda score, b, h, q, kv: score + torch.rand(()),
    "torch.rand_like": lambda score, b, h, q, kv: score + torch.rand_like(torch.zeros(3))[0],
    "torch.randint": lambda score, b, h, q, kv: score + torch.randint(0, 3, ()),
    "torch.bernoulli": lambda score, b, h, q, kv: score + torch.bernoulli(torch.tensor(0.5)),
    "Tensor.normal_": lambda score, b, h, q, kv: score + torch.zeros(()).normal_(),
    "dropout": lambda score, b, h, q, kv: score * torch.nn.functional.dropout(torch.ones(()), 0.5),
    "numpy.random": lambda score, b, h, q, kv: score + np.random.rand(),
    "random": lambda score, b, h, q, kv: score + random.random(),
    "Generator": lambda score, b, h, q, kv: score + RNG.random(),
}


@pytest.mark.parametrize("mod", DRAWING.values(), ids=DRAWING)
def test_random_numbers_are_refused(mod):
    with pytest.raises(TraceError, match=r"random number.* once.* the same for every pair and call; draw an array before"):
        trace_score(mod)


def test_functions_that_draw_nothing_still_trace():
    table = torch.linspace(0, 1, 8)
    trace_score(lambda score, b, h, q, kv: score + torch.where(q > kv, table[h], 0.0) + random_bias(h))


def random_bias(h):
    return h * 0.5


JAX_MODS = {
    "tanh": lambda score, b, h, q, kv: jnp.tanh(score),
    "where": lambda score, b, h, q, kv: jnp.where(q > kv, score, 0.0),
    "minimum": lambda score, b, h, q, kv: jnp.minimum(score, 3.0),
}


@pytest.mark.parametrize("name, mod", JAX_MODS.items())
def test_functions_of_jax_say_what_to_write(name, mod):
    with pytest.raises(TraceError, match=rf"JAX.*write raddle\.flex\.ops\.{name} instead of jnp\.{name}") as caught:
        trace_score(mod)
    assert len(str(caught.value).splitlines()) == 2


def test_a_constant_index_is_within():
    table = np.arange(6).reshape(2, 3)
    with pytest.raises(TraceError, match="table is indexed with 2 where it has 2 elements"):
        trace_mask(lambda b, h, q, kv: q > table[2, 0])
    with pytest.raises(TraceError, match="table is indexed with -4 where it has 3 elements"):
        trace_mask(lambda b, h, q, kv: q > table[0][-4])


def test_functions_that_do_not_tell_their_parameters():
    with pytest.raises(TraceError, match="does not tell its parameters; expected a function written in Python"):
        takes_score(min)


def test_the_number_of_arguments_tells_what_a_function_is():
    assert takes_score(lambda score, b, h, q, kv: 0)
    assert not takes_score(lambda b, h, q, kv, window=3: True)
    with pytest.raises(TraceError, match=r"takes 3 positional arguments; expected 5 .* or 4"):
        takes_score(lambda b, q, kv: True)


def test_functions_compute_on_numbers_and_arrays_as_well():
    x = np.linspace(-3, 3, 7)
    chosen = ops.where(x > 0, ops.exp(x), ops.clamp(x, -1, 1))
    np.testing.assert_allclose(chosen, np.where(x > 0, np.exp(x), x.clip(-1, 1)))
    np.testing.assert_allclose(ops.tanh_approx(x), np.tanh(x), atol=1e-4)
    np.testing.assert_array_equal(ops.cast(x, "int32"), np.trunc(x))
    assert ops.sigmoid(0.0) == 0.5 and ops.maximum(2, 3) == 3
    np.testing.assert_allclose(ops.sigmoid(torch.from_numpy(x)).numpy(), 1 / (1 + np.exp(-x)))
    np.testing.assert_allclose(ops.clamp(torch.from_numpy(x), -1, 1).numpy(), x.clip(-1, 1))


def test_arrays_that_the_tracer_does_not_see():
    arrays = collections.deque([np.arange(8.0)])
    with pytest.raises(TraceError, match="capture the array in a variable of its own"):
        trace_score(lambda score, b, h, q, kv: score + arrays[0][h])


def test_what_is_advised_exists():
    folder = Path(ops.__file__).parent
    text = "".join(file.read_text() for file in folder.glob("*.py"))
    assert set(re.findall(r"raddle\.flex\.(\w+)\(", text)) <= set(dir(raddle.flex))
    assert {"where", "cast", "floor"} <= set(re.findall(r"raddle\.flex\.ops\.(\w+)", text)) <= set(dir(ops))

"""Handles that no constructor made are refused, as arguments and as self: tvm-ffi would read through a null pointer."""

import inspect

import numpy as np
import pytest
import raddle
from forked import outcome
from small import refuses

KINDS = {
    each.__name__: each
    for each in vars(raddle).values()
    if isinstance(each, type) and issubclass(each, raddle._library.Handle)
}
#: What a slot holds, which a constructor never filled.
SLOTS = {"spec", "device", "number", "pages", "parents"}


def unmade(kind):
    return kind.__new__(kind)


def failed_constructor():
    """What a constructor that raised leaves in its frame."""
    try:
        raddle.SoftCap(-1.0)
    except ValueError as error:
        frames = []
        where = error.__traceback__
        while where is not None:
            frames.append(where.tb_frame.f_locals.get("self"))
            where = where.tb_next
        return next(each for each in frames if isinstance(each, raddle.SoftCap))


def test_the_kinds_are_found():
    assert {"Attention", "Plan", "Reservation", "PagedKV", "PagePool", "RadixCache", "Causal", "TokenTree"} <= set(KINDS)


def given_for(parameter):
    return {"requests": [0], "layout": raddle.RaggedKV([0, 1], [0, 1]), "other": raddle.Causal()}.get(parameter, 0)


def use_every_member(kind):
    """Names of members of a handle of nothing that do not raise ValueError or TypeError."""
    accepted = []
    for name in [*filter(lambda each: not each.startswith("_"), dir(kind)), "__and__", "__or__", "__reduce__"]:
        found = inspect.getattr_static(kind, name, None)
        if name not in dir(kind) or isinstance(found, (staticmethod, classmethod)) or name in SLOTS:
            continue
        if name in ("same_as", "is_", "id_"):  # of tvm-ffi: they ask about the handle itself
            continue
        try:
            value = getattr(unmade(kind), name)
            if callable(value):
                needed = [
                    each.name
                    for each in inspect.signature(value).parameters.values()
                    if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
                ]
                value(*map(given_for, needed))
        except (ValueError, TypeError):
            continue
        accepted.append(name)
    return accepted


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_as_self(kind):
    allowed = {"last_busy_us"}  # of the calling thread, whatever the attention
    assert set(outcome(lambda: use_every_member(kind))) <= allowed


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_as_an_argument(kind):
    attn = raddle.Attention(raddle.AttentionSpec(4, 2, 16, dtype="float32"))
    layout = raddle.RaggedKV([0, 3], [0, 3])
    plan, pool = attn.plan(layout), raddle.PagePool(4)
    q, k = np.ones((3, 4, 16), np.float32), np.ones((3, 2, 16), np.float32)
    pages = np.zeros((1, 16, 2, 16), np.float32)
    x = unmade(kind)
    calls = {
        "layout": lambda: attn.plan(x),
        "num_workers": lambda: attn.plan(layout, num_workers=x),
        "schedule": lambda: attn.plan(layout, schedule=x),
        "plan": lambda: attn.run(x, q, (k, k)),
        "q": lambda: attn.run(plan, x, (k, k)),
        "kv": lambda: attn.run(plan, q, (k, x)),
        "return_lse": lambda: attn.run(plan, q, (k, k), return_lse=x),
        "pages": lambda: raddle.SelectedPages(x, x, x).layout(raddle.PagedKV([0, 1], None, [[0]], [1])),
        "scale": lambda: attn.run(plan, q, (k, k), scale=x),
        "k_scale": lambda: attn.run(plan, q, (k, k), k_scale=[x]),
        "params": lambda: attn.run(plan, q, (k, k), params={"softcap.cap": [x]}),
        "maxima": lambda: attn.reserve(raddle.Maxima(4, 4, x)),
        "layout of an update": lambda: attn.reserve(raddle.Maxima(4, 4, 64)).update(x),
        "reservations": lambda: raddle.select([x], layout),
        "levels": lambda: raddle.Cascade([layout, x]),
        "variant": lambda: raddle.AttentionSpec(4, 2, 16, variant=[raddle.Causal(), x]),
        "variant, one after another": lambda: raddle.AttentionSpec(4, 2, 16, variant=iter([raddle.Causal(), x])),
        "other": lambda: raddle.Causal() & x,
        "qo_indptr": lambda: raddle.RaggedKV(x, [0, 3]),
        "kv_len": lambda: raddle.PagedKV([0, 1], None, [[0]], x),
        "page_size": lambda: raddle.PagedKV([0, 1], None, [[0]], [3], page_size=x),
        "entries": lambda: raddle.PagedKV([0, 1], None, [[x]], [3]),
        "cap": lambda: raddle.SoftCap(x),
        "num_pages": lambda: raddle.PagePool(x),
        "requests": lambda: pool.layout(x),
        "rope": lambda: raddle.append_kv(raddle.PagedKV([0, 1], None, [[0]], [1]), (k, k), k, k, rope=x),
        "layout of append_kv": lambda: raddle.append_kv(x, (pages, pages.copy()), k[:1], k[:1]),
        "kv_layout of slots": lambda: raddle.append_kv([0], (pages, pages.copy()), k[:1], k[:1], kv_layout=x),
        "layout of accept_tree": lambda: raddle.accept_tree(x, (pages, pages.copy()), [-1], [0]),
        "pool": lambda: raddle.RadixCache(x),
        "num_heads": lambda: raddle.alibi_slopes(x),
    }

    def accepted():
        wrong = []
        for name, call in calls.items():
            try:
                call()
            except (ValueError, TypeError):
                continue
            wrong.append(name)
        return wrong

    assert outcome(accepted) == []


def test_what_a_constructor_left_behind():
    x = failed_constructor()
    assert repr(x) == "SoftCap(not made)"
    with refuses(ValueError, "variant is a SoftCap that was not made"):
        raddle.AttentionSpec(4, 2, 16, variant=x)


def test_lists_in_lists_without_end():
    endless = []
    endless.append(endless)
    with refuses(ValueError, "slopes", "lists in each other"):
        raddle.Alibi(endless)


@pytest.mark.parametrize("use", [
    lambda attn, layout: attn.plan(raddle.Layout()),
    lambda attn, layout: raddle.Layout().num_rows,
    lambda attn, layout: raddle.Cascade([raddle.Layout()]),
    lambda attn, layout: attn.run(raddle.Plan(), np.ones((3, 4, 16), np.float32), np.ones((2, 3, 2, 16), np.float32)),
    lambda attn, layout: raddle.Plan().explain(),
    lambda attn, layout: raddle.select([raddle.Reservation()], layout),
    lambda attn, layout: raddle.Reservation().update(layout),
    lambda attn, layout: raddle.Reservation().check(),
])  # fmt: skip
def test_objects_without_a_value(use):
    """What tvm-ffi makes of a class without a constructor."""
    attn = raddle.Attention(raddle.AttentionSpec(4, 2, 16, dtype="float32"))
    answer = outcome(lambda: use(attn, raddle.RaggedKV([0, 3], [0, 3])))
    assert isinstance(answer, ValueError) and "is empty; expected one that was made" in str(answer)

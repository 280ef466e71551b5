"""Keywords of other libraries are answered with what to write here."""

import inspect

import numpy as np
import pytest
import raddle
from raddle import _keywords
from raddle.flex import create_block_mask, flex_attention
from small import refuses

CALLS = {
    "attention": raddle.attention,
    "AttentionSpec": raddle.AttentionSpec,
    "Attention": raddle.Attention,
    "Attention.plan": raddle.Attention.plan,
    "Attention.reserve": raddle.Attention.reserve,
    "Attention.run": raddle.Attention.run,
    "workspace_bytes": raddle.workspace_bytes,
    "PagedKV": raddle.PagedKV,
    "RaggedKV": raddle.RaggedKV,
    "SlidingWindow": raddle.SlidingWindow,
    "SoftCap": raddle.SoftCap,
    "Rope": raddle.Rope,
    "Sinks": raddle.Sinks,
    "Alibi": raddle.Alibi,
    "flex_attention": flex_attention,
    "create_block_mask": create_block_mask,
    "append_kv": raddle.append_kv,
    "sample": raddle.sample,
}


def arguments_of(call):
    """One for each that is needed: the keyword is looked at before they are."""
    function = call.__init__ if isinstance(call, type) else call
    parameters = dict(inspect.signature(function).parameters)
    if isinstance(call, type):
        del parameters["self"]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [None for each in parameters.values() if each.default is each.empty and each.kind is kind]


@pytest.mark.parametrize("call", CALLS)
def test_every_hint_is_given(call):
    function = CALLS[call]
    for keyword, write in _keywords.HINTS[call].items():
        assert keyword not in inspect.signature(function).parameters
        with refuses(TypeError, f"{call} has no argument '{keyword}'; write {write}"):
            function(*arguments_of(function), **{keyword: 1})


def test_every_table_of_hints_is_tested():
    assert set(CALLS) == set(_keywords.HINTS)


@pytest.mark.parametrize("call", CALLS)
def test_hints_name_arguments_that_there_are(call):
    for write in _keywords.HINTS[call].values():
        name, equals, rest = write.partition("=")
        of_another_call = " of " in rest and "where kv_len" not in rest and "of most models" not in rest
        owner = raddle.AttentionSpec if of_another_call and "AttentionSpec" in rest else CALLS[call]
        if equals and name.isidentifier() and "raddle.PagedKV" not in rest:
            assert name in inspect.signature(owner).parameters, write


def test_an_argument_that_is_missing_for_its_name():
    with refuses(TypeError, "SlidingWindow has no argument 'window'; write left="):
        raddle.SlidingWindow(window=16)
    with refuses(TypeError, "'cu_seqlens_q'; write qo_indptr=", "'cu_seqlens_k'; write kv_indptr="):
        raddle.RaggedKV(cu_seqlens_q=[0, 1], cu_seqlens_k=[0, 1])


def test_unknown_keywords_name_a_near_one_or_all():
    with refuses(TypeError, "PagedKV has no argument 'page_sizes'; expected page_size="):
        raddle.PagedKV([0, 1], None, [[0]], [1], page_sizes=16)
    with refuses(TypeError, "SoftCap has no argument 'zzz'; expected cap"):
        raddle.SoftCap(3.0, zzz=1)


def test_other_errors_stay_as_they_are():
    with refuses(TypeError, "missing 1 required positional argument: 'left'"):
        raddle.SlidingWindow()
    with refuses(TypeError, "cap is a string"):
        raddle.SoftCap("3")
    with refuses(TypeError, "k is a str"):
        raddle.attention(np.zeros((1, 1, 8), np.float32), "k", "v")

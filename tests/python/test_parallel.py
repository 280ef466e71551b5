"""Keys on several processes: the result of one process, and an error that names a process that died."""

import pathlib
import subprocess
import sys

import numpy as np
import pytest
import raddle
from raddle import parallel

SCRIPT = pathlib.Path(__file__).with_name("parallel_rank.py")


def start(tmp_path, num_ranks, dies=-1):
    """Exit code and output of each process."""
    command = [sys.executable, str(SCRIPT), str(tmp_path / "store")]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(num_ranks), str(dies)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(num_ranks)
    ]
    return [(each.communicate(timeout=600)[0], each.returncode) for each in processes]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_processes_equal_one(tmp_path, num_ranks):
    for output, code in start(tmp_path, num_ranks):
        assert (code, output.splitlines()[-1:]) == (0, ["equal"]), output


@pytest.mark.parametrize("dies", [0, 1])
def test_a_process_that_dies_is_named(tmp_path, dies):
    ended = start(tmp_path, 3, dies)
    assert ended.pop(dies)[1] == -9
    for output, code in ended:
        assert code == 3 and f"rank {dies} of 3 processes that attend together ended" in output, output


@pytest.mark.parametrize("lengths", [[0], [1], [15, 16, 17], [1000, 3, 64, 65, 0, 129]])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("page_size", [1, 16])
def test_spans_cover_every_key_once(lengths, num_ranks, page_size):
    spans = parallel.spans(lengths, num_ranks, page_size)
    assert spans.shape == (num_ranks, len(lengths), 2, 2)
    for request, length in enumerate(lengths):
        owners = np.zeros(length, int)
        for begin, end in spans[:, request].reshape(-1, 2):
            assert begin % page_size == 0 or begin == end
            owners[begin:end] += 1
        assert (owners == 1).all()
    assert (spans[:, :, 0, 1] <= spans[:, :, 1, 0]).all()


def test_spans_balance_causal_prefill():
    n, ranks = 4096, 4
    kept = np.arange(n, 0, -1)  # rows that attend to each key
    work = [sum(kept[b:e].sum() for b, e in spans[0]) for spans in parallel.spans([n], ranks)]
    assert max(work) - min(work) < 0.01 * sum(work)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="num_ranks is 0"):
        parallel.spans([3], 0)
    with pytest.raises(ValueError, match="kv_len is"):
        parallel.spans([-1], 2)
    sums = raddle.Attention(raddle.AttentionSpec(2, 2, 64, variant=[raddle.Sigmoid()]))
    with pytest.raises(ValueError, match="Sigmoid"):
        parallel.ContextParallel(sums)
    softmax = raddle.Attention(raddle.AttentionSpec(2, 2, 64))
    with pytest.raises(ValueError, match="timeout is 0"):
        parallel.ContextParallel(softmax, timeout=0)
    with pytest.raises(RuntimeError, match="not initialised"):
        parallel.ContextParallel(softmax)
    paged = raddle.PagedKV([0, 1], [0, 1], [0], [8], page_size=8, kv_begin=[0])
    with pytest.raises(ValueError, match=r"kv_begin\[0\] is 4; expected at least 8"):
        parallel.layout([paged], [0, 1], [4])

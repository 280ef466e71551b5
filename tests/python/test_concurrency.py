"""One Attention in several threads, after a fork, and beside PyTorch's own threads."""

import os
import subprocess
import sys
import threading

import numpy as np
import torch
from draws import draw
from engine import twin


def prepared(engine, rng):
    problem = draw(rng, "paged", "causal", "float32", group=4, num_kv_heads=2, lengths=[(1, 3000), (64, 500), (1, 900)])
    attn = engine.attention(problem)
    plan = attn.plan(twin(problem.layout), num_workers=9)
    return lambda: attn.run(plan, problem.q, problem.kv[0])


def test_several_threads_run_one_plan(engine, rng):
    run = prepared(engine, rng)
    expected, wrong = run(), []

    def work():
        for _ in range(20):
            if not np.array_equal(run(), expected):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong


def test_beside_torchs_threads(engine, rng):
    run = prepared(engine, rng)
    expected = run()
    a = torch.randn(300, 300)
    product = a @ a
    for _ in range(10):
        np.testing.assert_array_equal(run(), expected)
        torch.testing.assert_close(a @ a, product)


FORKED = """
import os, numpy as np, raddle
rng = np.random.default_rng(5)
q, k, v = (rng.standard_normal((n, h, 64)).astype(np.float32) for n, h in ((65, 8), (4400, 2), (4400, 2)))
attn = raddle.Attention(raddle.AttentionSpec(8, 2, 64, dtype="float32", variant=[raddle.Causal()]))
plan = attn.plan(raddle.RaggedKV([0, 1, 65], [0, 3000, 4400]), num_workers=9)
expected = attn.run(plan, q, (k, v))
child = os.fork()
if child == 0:
    os._exit(0 if np.array_equal(attn.run(plan, q, (k, v)), expected) else 3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert np.array_equal(attn.run(plan, q, (k, v)), expected)
"""


def test_after_fork():
    """The child has none of the parent's worker threads, and makes its own. In a process without other
    libraries' threads, which fork would break."""
    subprocess.run([sys.executable, "-c", FORKED], check=True)


THREADED = """
import sys, numpy as np, raddle
assert raddle.cpu_threads() == int(sys.argv[1])
rng = np.random.default_rng(5)
q, k, v = (rng.standard_normal((n, h, 64)).astype(np.float32) for n, h in ((40, 8), (2000, 2), (2000, 2)))
attn = raddle.Attention(raddle.AttentionSpec(8, 2, 64, dtype="float32", variant=[raddle.Causal()]))
plan = attn.plan(raddle.RaggedKV([0, 1, 40], [0, 1500, 2000]), num_workers=11)
np.save(sys.argv[2], attn.run(plan, q, (k, v)))
"""


def test_any_number_of_threads_gives_the_same_bits(tmp_path):
    """Threads take items from the plan's queues; which thread computes what changes no bit."""
    results = []
    for threads in ("1", "5"):
        env = {**os.environ, "RADDLE_NUM_THREADS": threads}
        subprocess.run([sys.executable, "-c", THREADED, threads, tmp_path / "out.npy"], env=env, check=True)
        results.append(np.load(tmp_path / "out.npy"))
    np.testing.assert_array_equal(*results)

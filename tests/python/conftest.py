"""Fixtures of all tests: random numbers that a failure tells how to repeat, and the engine on each device.

Every session draws fresh problems. A failing test prints the command that draws the same ones again.
"""

from __future__ import annotations

import os
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "raddle", deadline=None, max_examples=40, print_blob=True, suppress_health_check=list(HealthCheck)
)
settings.load_profile("raddle")


def pytest_addoption(parser):
    parser.addoption("--seed", type=int, default=None, help="draw the problems of an earlier session again")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    config.addinivalue_line("markers", "every_isa: runs once more on each instruction set (test_isa.py)")
    if config.option.seed is None:
        config.option.seed = int.from_bytes(os.urandom(4), "little")
    if config.getoption("--hypothesis-seed", None) is None:
        config.option.hypothesis_seed = str(config.option.seed)


def pytest_report_header(config):
    return f"seed: {config.option.seed}"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item):
    report = (yield).get_result()
    if report.failed:
        isa = os.environ.get("RADDLE_CPU_ISA")
        prefix = f"RADDLE_CPU_ISA={isa} " if isa else ""
        command = f"{prefix}python -m pytest '{item.nodeid}' --seed {item.config.option.seed}"
        report.sections.append(("to repeat", command))


@pytest.fixture
def rng(request):
    """Random numbers of the session's seed and this test's name."""
    return np.random.default_rng([request.config.option.seed, zlib.crc32(request.node.nodeid.encode())])


@pytest.fixture(scope="session", params=["cpu"])
def engine(request):
    from engine import Engine

    return Engine(request.param)


@pytest.fixture
def small_problem(rng):
    """Q, K and V for `small.paged()`."""
    return {
        "q": rng.standard_normal((3, 4, 16)).astype(np.float32),
        "k": rng.standard_normal((6, 16, 2, 16)).astype(np.float32),
        "v": rng.standard_normal((6, 16, 2, 16)).astype(np.float32),
    }

"""A part of the attack (attack.py) with every session's seed; `make fuzz` runs it for half an hour."""

import ctypes
import os
import re
import sys
import time

import attack
import attack_cache
import attack_calls
import numpy as np
import pytest
from attack_problems import guarded


def test_hostile_calls_guarded_problems_and_threads(request):
    """Twenty forks: nothing ends a process, hangs, touches a byte outside, or raises an error of another kind."""
    seed = request.config.option.seed % 10**9
    counts, found = attack.Counter(), []
    for number in range(20):
        more, wrong = attack.attack(seed + number)
        counts.update(more)
        found += wrong
    assert not found, "\n".join(found)
    assert counts == {"forks": 20, **{kind: 20 * count for kind, count in attack.SHARE.items()}}


def test_killed_compilations_and_failing_disks(request):
    """The cache stays whole, and processes that follow compute right."""
    counts, wrong = attack_cache.attack(request.config.option.seed)
    assert not wrong, "\n".join(wrong)
    assert counts["kills"] >= 1 and counts["faults"] >= 1


@pytest.fixture
def found(monkeypatch):
    """What the attack finds where its one call is another function's."""

    def of(call, surroundings=lambda: None):
        monkeypatch.setattr(attack, "SHARE", {"calls": 1})
        monkeypatch.setattr(attack_calls, "Surroundings", surroundings)
        monkeypatch.setattr(attack_calls, "call_hostile", call)
        (wrong,) = attack.attack(7)[1]
        return wrong

    return of


def test_errors_of_another_kind_are_found(found):
    assert found(lambda around, seed: "KeyError: of another kind") == "seed 7, calls 7000: KeyError: of another kind"

    class Unreadable(KeyError):
        def __str__(self):
            raise LookupError("no text")

    def raising():
        raise Unreadable

    assert "Unreadable" in attack_calls.said("f", {"x": 1}, Unreadable())
    assert re.search(r"calls 7000: Traceback.*Unreadable", found(lambda around, seed: raising()), re.DOTALL)


def test_writes_outside_are_found(found):
    def write_outside(around, seed):
        line = guarded(np.zeros(16, np.float32), at_end=True)
        ctypes.memset(line.ctypes.data, 0, 65)

    assert re.match(r"seed 7: SIGSEGV in calls 7000; stderr:\nFatal.*in write_outside", found(write_outside), re.DOTALL)


def test_a_fork_that_ends_by_itself_tells_where_and_why(found):
    def leave(around, seed):
        print("its last words", file=sys.stderr, flush=True)
        os._exit(3)

    assert found(leave) == "seed 7: exit status 3 in calls 7000; stderr:\nits last words"

    def refuse():
        raise KeyError("before the first call")

    said = found(leave, surroundings=refuse)
    assert re.match(r"seed 7: exit status 1 in the start; stderr:\nTraceback.*before the first call", said, re.DOTALL)


def test_a_hang_tells_where(found, monkeypatch):
    def wait_for_ever(around, seed):
        time.sleep(10**6)

    monkeypatch.setattr(attack, "SECONDS_AT_ONCE", 6)
    said = found(wait_for_ever)
    assert re.match(r"seed 7: SIGALRM in calls 7000; stderr:\nTimeout.*in wait_for_ever", said, re.DOTALL)

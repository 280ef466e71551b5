"""An attack on the public API: calls with hostile arguments, problems between guard pages, and threads, each in a fork;
and on the cache of compiled variants.

``python tests/python/attack.py --seconds 1800`` (``make fuzz``) runs until the time is over and prints its figures; a
problem prints the seed that repeats it, which ``--only SEED`` does. `test_attack.py` runs a part with every session's seed.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import pickle
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from typing import Any, Callable

import attack_cache
import attack_calls
import attack_problems
import attack_serving

SECONDS_AT_ONCE, MOST_MEMORY = 120, 8 << 30
#: From one round of killed compilations and failing disks (attack_cache.py) to the next.
SECONDS_BETWEEN_ROUNDS = 60
#: What a fork does, and how often.
SHARE = {"calls": 100, "guarded": 8, "traced": 1, "merged": 2, "served": 2, "threads": 1}


def steps(around: attack_calls.Surroundings) -> dict[str, Callable[[int], str | None]]:
    """Kinds of steps; each takes the seed that repeats it, and returns what went wrong."""
    return {
        "calls": lambda seed: attack_calls.call_hostile(around, seed),
        "guarded": attack_problems.run_guarded,
        "traced": attack_problems.run_traced,
        "merged": attack_problems.merge_guarded,
        "served": attack_serving.serve,
        "threads": attack_problems.run_in_threads,
    }


def attack(seed: int) -> tuple[Counter[str], list[str]]:
    """A fork's share. Returns how many steps of each kind, and what went wrong.

    However the fork ends: where it was, what it wrote to stderr and the stacks of its threads are part of the answer.
    """
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as stderr:
        child = os.fork()
        if child == 0:
            os.close(reading)
            _work(seed, writing, stderr.fileno())
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            data = pipe.read()
        status = os.waitpid(child, 0)[1]
        stderr.seek(0)
        said = stderr.read().decode(errors="replace").strip()
    last_words = said if len(said) < 8000 else f"{said[:5000]}\n…\n{said[-3000:]}"
    counts: Counter[str] = Counter(forks=1)
    found = []
    last = "the start"
    for line in data.split(b"\n\0\n")[:-1]:
        kind, item, wrong = pickle.loads(line)
        if wrong is None:
            counts[kind] += 1
            last = f"{kind} {item}"
        else:
            found.append(f"seed {seed}, {kind} {item}: {wrong}")
    if status:
        how = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit status {status >> 8}"
        found.append(f"seed {seed}: {how} in {last}" + (f"; stderr:\n{last_words}" if last_words else ""))
    return counts, found


def _work(seed: int, writing: int, stderr: int) -> None:
    """All of a fork's life: whatever happens, it ends here, and tells why."""
    status = 1
    try:
        _prepare(stderr)
        _take_steps(seed, writing)
        status = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode(errors="replace"))
    finally:
        os._exit(status)


def _prepare(stderr: int) -> None:
    os.dup2(stderr, 2)
    sys.stderr = open(2, "w", closefd=False, errors="replace")  # under pytest it is another file
    faulthandler.enable(2)
    faulthandler.dump_traceback_later(SECONDS_AT_ONCE - 5, file=2)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(SECONDS_AT_ONCE)
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))


def _take_steps(seed: int, writing: int) -> None:
    def say(*what: Any) -> None:
        data = pickle.dumps(what) + b"\n\0\n"
        while data:
            data = data[os.write(writing, data) :]

    kinds = steps(attack_calls.Surroundings())
    numbered = [name for name, count in SHARE.items() for _ in range(count)]
    for number, kind in enumerate(numbered):
        item = seed * 1000 + number
        say(kind, item, None)  # before it runs, so that a crash has a name
        try:
            wrong = kinds[kind](item)
        except BaseException:
            wrong = traceback.format_exc().strip()
        if wrong:
            say(kind, item, wrong)


def run_for(seconds: float, seed: int) -> tuple[Counter[str], list[str]]:
    """Forks one after another until the time is over, and each minute a round of the cache; tells at once what is found."""
    counts, found = Counter[str](), []
    begin = last = time.monotonic()
    while time.monotonic() < begin + seconds:
        of_cache = time.monotonic() > last + SECONDS_BETWEEN_ROUNDS
        more, wrong = attack_cache.attack(seed) if of_cache else attack(seed)
        last = time.monotonic() if of_cache else last
        counts.update(more)
        found += wrong
        for each in wrong:
            print(f"  {each}", flush=True)
        seed += 1
    return counts, found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    parser.add_argument("--only", type=int, help="the one fork of this seed")
    given = parser.parse_args()
    seed = given.seed if given.only is None else given.only
    print(f"seed {seed}", flush=True)
    counts, found = run_for(given.seconds, seed) if given.only is None else attack(seed)
    print(", ".join(f"{n} {kind}" for kind, n in counts.items()))
    print(*(found if given.only is not None else []), f"{len(found)} wrong", sep="\n")
    sys.exit(bool(found))

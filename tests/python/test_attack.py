"""A part of the attack (attack.py) with every session's seed; `make fuzz` runs it for half an hour."""

import attack


def test_hostile_calls_guarded_problems_and_threads(request):
    """30 forks: nothing ends a process, hangs, touches a byte outside, or raises an error of another kind."""
    seed = request.config.option.seed % 10**9
    counts, found = attack.Counter(), []
    for number in range(30):
        more, wrong = attack.attack(seed + number)
        counts.update(more)
        found += wrong
    assert not found, "\n".join(found)
    assert counts == {"forks": 30, "calls": 3000, "guarded": 300, "threads": 30}


def test_the_attack_finds_what_is_wrong(monkeypatch):
    """A crash, an error of another kind and a write outside are found, and named by their seed."""
    monkeypatch.setattr(attack, "CALLS_AT_ONCE", 1)
    monkeypatch.setattr(attack, "call_hostile", lambda around, seed: "KeyError: of another kind")
    assert attack.attack(7)[1] == ["seed 7, calls 7000: KeyError: of another kind"]
    monkeypatch.setattr(attack, "call_hostile", lambda around, seed: attack.ctypes.string_at(0))
    assert attack.attack(7)[1] == ["seed 7: SIGSEGV in ('calls', 7000)"]

    def write_outside(around, seed):
        line = attack.guarded(attack.np.zeros(16, attack.np.float32), at_end=True)
        attack.ctypes.memset(line.ctypes.data, 0, 65)

    monkeypatch.setattr(attack, "call_hostile", write_outside)
    assert attack.attack(7)[1] == ["seed 7: SIGSEGV in ('calls', 7000)"]

"""What a call does in a process of its own: a crash or a hang there is an answer, not the end of the tests."""

from __future__ import annotations

import os
import pickle
import signal
from typing import Any, Callable


def outcome(call: Callable[[], Any], seconds: int = 60) -> Any:
    """Returns what ``call`` returned in a fork of this process, which must pickle, or the exception that it raised.

    Raises AssertionError where the child ended by a signal, as it does where it takes longer than ``seconds``.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(seconds)
        try:
            answer: Any = call()
        except Exception as error:
            answer = error
        try:
            data = pickle.dumps(answer)
        except Exception:
            data = pickle.dumps(RuntimeError(f"{type(answer).__name__}: {answer}"))
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(data)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    status = os.waitpid(child, 0)[1]
    ended = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit status {status >> 8}"
    assert status == 0 and data, f"the process ended by {ended}"
    return pickle.loads(data)

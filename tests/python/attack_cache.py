"""Compilations that are killed, and disks that fail, at moments that are drawn: the cache stays whole, and answers right."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

#: Compiles the variants that the arguments name, and compares what they compute. Without torch, which takes seconds.
CHILD = """
import sys
sys.modules["torch"] = None
import numpy as np
import raddle
for name in sys.argv[1:]:
    body = f"struct {name} {{ RADDLE_FN float logits(float s, const Row&, const Key&) const {{ return 2.0f * s; }} }};"
    spec = raddle.AttentionSpec(2, 1, 8, dtype="float32", scale=1.0, variant=[raddle.Variant(name, body)()])
    attention = raddle.Attention(spec)
    q, k = np.full((1, 2, 8), 0.5, np.float32), np.eye(8, dtype=np.float32).reshape(8, 1, 8)
    np.testing.assert_allclose(attention.run(attention.plan(raddle.RaggedKV([0, 1], [0, 8])), q, (k, k)), 0.125, 1e-5)
"""

#: Of the calls that change files in FAULT_IN, number FAULT_AT and those behind it fail, FAULT_FOR in all.
FAULTS = r"""
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>
static int fails(const char* path) {
  static int calls = 0;
  const char* in = getenv("FAULT_IN");
  if (!in || !path || strncmp(path, in, strlen(in)) != 0) return 0;
  const int first = atoi(getenv("FAULT_AT")), number = calls++;
  if (number < first || number >= first + atoi(getenv("FAULT_FOR"))) return 0;
  const int errors[] = {ENOSPC, EIO, EROFS, EDQUOT};
  errno = errors[number % 4];
  return 1;
}
static int fails_at(int fd) {
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t n = readlink(link, path, sizeof path - 1);
  if (n < 0) return 0;
  path[n] = 0;
  return fails(path);
}
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
extern "C" {
ssize_t write(int fd, const void* data, size_t n) { return fails_at(fd) ? -1 : REAL(write)(fd, data, n); }
ssize_t writev(int fd, const struct iovec* parts, int n) { return fails_at(fd) ? -1 : REAL(writev)(fd, parts, n); }
int rename(const char* from, const char* to) { return fails(to) ? -1 : REAL(rename)(from, to); }
int mkdir(const char* path, mode_t mode) { return fails(path) ? -1 : REAL(mkdir)(path, mode); }
char* mkdtemp(char* path) { return fails(path) ? nullptr : REAL(mkdtemp)(path); }
int chmod(const char* path, mode_t mode) { return fails(path) ? -1 : REAL(chmod)(path, mode); }
int unlink(const char* path) { return fails(path) ? -1 : REAL(unlink)(path); }
int rmdir(const char* path) { return fails(path) ? -1 : REAL(rmdir)(path); }
}
"""


class Round:
    """Some processes that compile at once into one cache; then one to which nothing happens."""

    def __init__(self, seed: int, folder: Path, faults: Path) -> None:
        self.rng, self.folder, self.faults = np.random.default_rng(seed), folder, faults
        self.cache, self.work = folder / "cache", folder / "work"
        self.work.mkdir()

    def start(self, *names: str, **variables: Any) -> subprocess.Popen[str]:
        variables = {"RADDLE_CACHE_DIR": self.cache, "TMPDIR": self.work, **variables}
        environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
        return subprocess.Popen(
            [sys.executable, "-c", CHILD, *names],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def faulty(self) -> subprocess.Popen[str]:
        at, length = int(self.rng.integers(0, 14)), int(self.rng.choice([1, 3, 1000]))
        return self.start(*self.names(), LD_PRELOAD=self.faults, FAULT_IN=self.cache, FAULT_AT=at, FAULT_FOR=length)

    def names(self) -> list[str]:
        return [f"V{n}" for n in self.rng.permutation(4)[: int(self.rng.integers(1, 3))]]

    def run(self) -> tuple[Counter[str], list[str]]:
        killed = [self.start(*self.names()) for _ in range(int(self.rng.integers(1, 3)))]
        faulty = [self.faulty() for _ in range(int(self.rng.integers(1, 3)))]
        wrong = []
        for process in killed:
            time.sleep(float(self.rng.uniform(0.0, 4.0)))
            end = os.killpg if self.rng.integers(2) else os.kill  # with its compiler, or alone
            try:
                end(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.communicate()
        for process in [*faulty, self.start("V0", "V1", "V2", "V3", "Last")]:
            try:
                said = process.communicate(timeout=300)[1]
            except subprocess.TimeoutExpired:
                process.kill()
                said = "it did not end"
            if process.returncode != 0:
                wrong.append(f"status {process.returncode}: {said[-2000:]}")
        left = [path.name for path in self.cache.iterdir() if len(path.name) != 32]
        if left:
            wrong.append(f"left in the cache: {left}")
        return Counter(kills=len(killed), faults=len(faulty)), wrong


def attack(seed: int) -> tuple[Counter[str], list[str]]:
    """One round. Returns how many processes were killed and had faults, and what went wrong."""
    with tempfile.TemporaryDirectory(prefix="raddle-attack-") as folder:
        source, faults = Path(folder) / "faults.cpp", Path(folder) / "faults.so"
        source.write_text(FAULTS)
        subprocess.run(["c++", "-shared", "-fPIC", "-O1", "-o", faults, source, "-ldl"], check=True)
        counts, wrong = Round(seed, Path(folder), faults).run()
    return counts, [f"seed {seed}, cache: {each}" for each in wrong]

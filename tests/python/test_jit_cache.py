"""The cache of compiled variants: found again, refused when damaged, and never in the way."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import raddle

# Compiles what the arguments name, or one trivial variant, and says how many were compiled rather than found.
# Without torch, which tvm_ffi would import: seconds that no test here is about.
CHILD = """
import sys
sys.modules["torch"] = None
import numpy as np
import raddle

def variant(name):
    body = f"struct {name} {{ RADDLE_FN float logits(float s, const Row&, const Key&) const {{ return 2.0f * s; }} }};"
    return raddle.Variant(name, body)()

def result(name):
    attention = raddle.Attention(raddle.AttentionSpec(2, 1, 8, dtype="float32", scale=1.0, variant=[variant(name)]))
    q, k = np.full((1, 2, 8), 0.5, np.float32), np.eye(8, dtype=np.float32).reshape(8, 1, 8)
    return attention.run(attention.plan(raddle.RaggedKV([0, 1], [0, 8])), q, (k, k))

for name in sys.argv[1:] or ["Twice"]:
    np.testing.assert_allclose(result(name), 0.125, rtol=1e-5)
print(raddle.cache.num_compiled())
"""


def environment(cache, **variables):
    env = {name: value for name, value in os.environ.items() if name not in ("RADDLE_CXX", "CXX")}
    env.update(RADDLE_CACHE_DIR=str(cache), **{name: str(value) for name, value in variables.items()})
    return env


def start(cache, *names, **variables):
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, *names],
        env=environment(cache, **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    """(number of variants compiled, lines on stderr but those that a busy machine adds)."""
    number, said = finish_saying(process)
    return number, [line for line in said if not line.startswith(("raddle: compiling", "raddle: waiting"))]


def finish_saying(process):
    out, err = process.communicate()
    assert process.returncode == 0, err
    return int(out), err.splitlines()


def compiled(cache, *names, **variables):
    return finish(start(cache, *names, **variables))


def entries(cache):
    return sorted(path for path in Path(cache).iterdir() if len(path.name) == 32)


def all_in(cache):
    """Entries and nothing else: no lock, no leftover."""
    assert sorted(Path(cache).iterdir()) == entries(cache)
    return entries(cache)


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def cache(tmp_path):
    """A cache with one entry."""
    assert compiled(tmp_path / "cache") == (1, [])
    return tmp_path / "cache"


def test_the_second_process_finds_it(cache):
    assert len(all_in(cache)) == 1
    assert compiled(cache) == (0, [])


def truncate(entry):
    binary = entry / "binary"
    binary.write_bytes(binary.read_bytes()[:-100])


def flip(entry):
    binary = entry / "binary"
    data = bytearray(binary.read_bytes())
    data[len(data) // 2] ^= 1
    binary.write_bytes(data)


def empty(entry):
    (entry / "binary").write_bytes(b"")


DAMAGE = {
    "truncated": truncate,
    "corrupted": flip,
    "emptied": empty,
    "without a manifest": lambda entry: (entry / "manifest").unlink(),
    "without a binary": lambda entry: (entry / "binary").unlink(),
    "a file in its place": lambda entry: (entry.rename(entry.with_name("aside")), entry.write_text("no folder")),
    "folder writable by all": lambda entry: entry.chmod(0o777),
    "binary writable by all": lambda entry: (entry / "binary").chmod(0o666),
    "binary writable by its group": lambda entry: (entry / "binary").chmod(0o664),
    "manifest writable by all": lambda entry: (entry / "manifest").chmod(0o666),
    # Links are refused, too: their targets may belong to another user.
    "folder a link": lambda entry: linked(entry, entry.with_name("folder elsewhere")),
    "binary a link": lambda entry: linked(entry / "binary", entry.with_name("binary elsewhere")),
    "manifest a link": lambda entry: linked(entry / "manifest", entry.with_name("manifest elsewhere")),
}


def linked(path, elsewhere):
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def test_damaged_entries_are_refused_and_made_again(tmp_path):
    cache = tmp_path / "cache"
    names = [f"Damaged{n}" for n in range(len(DAMAGE))]
    compiled(cache, *names)
    by_name = {entry_name(entry): entry for entry in entries(cache)}
    for name, damage in zip(names, DAMAGE.values()):
        damage(by_name[name])
    assert compiled(cache, *names, "Twice") == (len(DAMAGE) + 1, [])
    assert compiled(cache, *names, "Twice") == (0, [])


def entry_name(entry):
    return dict(line.split(" ", 1) for line in (entry / "manifest").read_text().splitlines())["name"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")
@pytest.mark.parametrize("part", ["", "binary", "manifest"])
def test_entries_of_another_user_are_refused(cache, part):
    (entry,) = entries(cache)
    os.chown(entry / part, 65534, -1)
    assert compiled(cache) == (1, [])
    assert compiled(cache) == (0, [])


def test_entries_under_other_names_are_refused(tmp_path):
    cache = tmp_path / "cache"
    compiled(cache, "One", "Two")
    one, two = (next(each for each in entries(cache) if entry_name(each) == name) for name in ("One", "Two"))
    aside = tmp_path / "aside"
    for taken, given in ((one, aside), (two, one), (aside, two)):
        taken.rename(given)
    assert compiled(cache, "One", "Two") == (2, [])
    assert compiled(cache, "One", "Two") == (0, [])


def test_entries_of_other_compilers_are_refused_under_this_ones_name(cache):
    """Of the same source, but not what this compiler made of it."""
    (mine,) = entries(cache)
    assert compiled(cache, RADDLE_CXX="c++ -DOTHER") == (1, [])
    (other,) = set(entries(cache)) - {mine}
    mine.rename(mine.with_name("aside"))
    other.rename(mine)
    assert compiled(cache) == (1, [])
    assert compiled(cache) == (0, [])


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757])
def test_folders_that_others_may_write_are_not_trusted(cache, mode):
    """Between the check of an entry and its load another user could exchange it."""
    cache.chmod(mode)
    (before,) = entries(cache)
    number, said = compiled(cache, "One", "Twice")
    assert number == 2 and len(said) == 1
    assert f"{cache} can be written by other users" in said[0] and f"'chmod go-w {cache}'" in said[0]
    assert entries(cache) == [before]
    cache.chmod(0o755)
    assert compiled(cache) == (0, [])
    if os.geteuid() == 0:  # no other user can give folders away
        os.chown(cache, 65534, -1)
        number, said = compiled(cache)
        assert number == 1 and len(said) == 1 and "belongs to another user (65534)" in said[0]


@pytest.mark.parametrize("mask", [0, 0o077])
def test_the_folder_is_made_for_its_owner_alone_whatever_the_umask(tmp_path, mask):
    before = os.umask(mask)
    try:
        compiled(tmp_path / "above" / "cache")
    finally:
        os.umask(before)
    for folder in (tmp_path / "above", tmp_path / "above" / "cache"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert compiled(tmp_path / "above" / "cache") == (0, [])


EXCHANGE = r"""
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
extern "C" void* dlopen(const char* path, int flags) {
  const auto real = (void* (*)(const char*, int))dlsym(RTLD_NEXT, "dlopen");
  const char* entry = getenv("ENTRY");
  const char* other = getenv("OTHER");
  if (entry && other) {
    unlink(entry);
    if (symlink(other, entry) != 0) abort();
  }
  return real(path, flags);
}
"""

EVIL = r"""
#include <unistd.h>
__attribute__((constructor)) static void run() { _exit(66); }
"""


def test_an_entry_exchanged_between_its_check_and_its_load(cache, tmp_path):
    """The library that is loaded is the bytes that were checked, not what lies at their path by then."""
    libraries = {}
    for name, text in {"exchange": EXCHANGE, "evil": EVIL}.items():
        (tmp_path / f"{name}.cpp").write_text(text)
        libraries[name] = tmp_path / f"{name}.so"
        source = tmp_path / f"{name}.cpp"
        subprocess.run(["c++", "-shared", "-fPIC", "-o", libraries[name], source, "-ldl"], check=True)
    (entry,) = entries(cache)
    env = {"LD_PRELOAD": libraries["exchange"], "ENTRY": entry / "binary", "OTHER": libraries["evil"]}
    process = start(cache, **env)
    process.communicate()
    assert process.returncode == 0 and (entry / "binary").is_symlink()


SEALS = """
import fcntl, os
links = {int(fd): os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
(memory,) = [fd for fd, link in links.items() if "memfd:raddle-variant" in link]
wanted = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
assert fcntl.fcntl(memory, fcntl.F_GET_SEALS) & wanted == wanted
"""


def test_what_was_loaded_cannot_be_written_to(cache):
    done = subprocess.run([sys.executable, "-c", CHILD + SEALS], env=environment(cache), capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "0\n", done.stderr


NO_MEMORY = r"""
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <string>
#include <sys/stat.h>
extern "C" int memfd_create(const char*, unsigned) {
  errno = ENOSYS;
  return -1;
}
extern "C" void* dlopen(const char* path, int flags) {
  const auto real = (void* (*)(const char*, int))dlsym(RTLD_NEXT, "dlopen");
  struct stat file, folder;
  if (path && strstr(path, "/.raddle-load-") && stat(path, &file) == 0 &&
      stat(std::string(path, strrchr(path, '/')).c_str(), &folder) == 0)
    fprintf(stderr, "loaded a copy of mode %o in a folder of mode %o\n", file.st_mode & 0777, folder.st_mode & 0777);
  return real(path, flags);
}
"""


def test_without_files_in_memory_a_private_copy_is_loaded(cache, tmp_path):
    (tmp_path / "none.cpp").write_text(NO_MEMORY)
    library, work = tmp_path / "none.so", tmp_path / "work files"
    subprocess.run(["c++", "-shared", "-fPIC", "-o", library, tmp_path / "none.cpp", "-ldl"], check=True)
    work.mkdir()
    before = os.umask(0)
    try:
        number, said = compiled(cache, LD_PRELOAD=library, TMPDIR=work)
    finally:
        os.umask(before)
    assert number == 0 and said == ["loaded a copy of mode 600 in a folder of mode 700"]
    assert list(work.iterdir()) == []


def test_pipes_in_the_place_of_files_are_not_waited_for(cache):
    (entry,) = entries(cache)
    for name in ("binary", "manifest"):
        (entry / name).unlink()
        os.mkfifo(entry / name)
    assert compiled(cache) == (1, [])


def test_entries_are_readable_by_all_and_writable_by_their_owner_alone(tmp_path):
    cache = tmp_path / "cache"
    before = os.umask(0)
    try:
        compiled(cache)
    finally:
        os.umask(before)
    (entry,) = entries(cache)
    assert stat.S_IMODE(entry.stat().st_mode) == 0o755
    assert {stat.S_IMODE(path.stat().st_mode) for path in entry.iterdir()} == {0o644}
    assert compiled(cache) == (0, [])


def test_folders_that_cannot_be_written_leave_everything_in_memory(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for folder in (file, "/proc/raddle"):
        # Two variants: each in memory is its own, and the warning comes once.
        number, said = compiled(folder, "One", "Two")
        assert number == 2
        assert len(said) == 1 and f"{folder} cannot be written" in said[0] and "RADDLE_CACHE_DIR" in said[0]


FULL_DISK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>
static int full(int fd) {
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t n = readlink(link, path, sizeof path - 1);
  if (n < 0) return 0;
  path[n] = 0;
  return strstr(path, "/.raddle-new-") != NULL;
}
ssize_t write(int fd, const void* data, size_t n) {
  if (full(fd)) { errno = ENOSPC; return -1; }
  return ((ssize_t(*)(int, const void*, size_t))dlsym(RTLD_NEXT, "write"))(fd, data, n);
}
ssize_t writev(int fd, const struct iovec* parts, int n) {
  if (full(fd)) { errno = ENOSPC; return -1; }
  return ((ssize_t(*)(int, const struct iovec*, int))dlsym(RTLD_NEXT, "writev"))(fd, parts, n);
}
"""


def test_a_full_disk_leaves_everything_in_memory(tmp_path):
    (tmp_path / "full.cpp").write_text('extern "C" {' + FULL_DISK.replace("#define _GNU_SOURCE", "") + "}")
    library = tmp_path / "full.so"
    subprocess.run(["c++", "-shared", "-fPIC", "-o", library, tmp_path / "full.cpp", "-ldl"], check=True)
    cache = tmp_path / "cache"
    number, said = compiled(cache, "One", "Two", LD_PRELOAD=library)
    assert number == 2
    assert len(said) == 1 and "No space left on device" in said[0]
    assert list(cache.iterdir()) == []
    assert compiled(cache, "One") == (1, [])  # there is room again


def test_processes_that_start_together_compile_once(tmp_path):
    together = [start(tmp_path / "cache") for _ in range(8)]
    numbers = [finish(process)[0] for process in together]
    assert sum(numbers) == 1
    assert len(all_in(tmp_path / "cache")) == 1


def slow_compiler(tmp_path, seconds) -> Path:
    """A compiler that works for a while, the first time. Writes its process into the file "started"."""
    text = f"""case "$1" in -dump*|--version) exec c++ "$@";; esac
[ -e "{tmp_path}/started" ] || {{ echo $$ > "{tmp_path}/started"; sleep {seconds}; }}
exec c++ "$@\""""
    return script(tmp_path / "a slow compiler", text)


def test_a_killed_process_leaves_nothing_that_hurts(tmp_path):
    cache, work, started = tmp_path / "cache", tmp_path / "work files", tmp_path / "started"
    work.mkdir()
    compiler = slow_compiler(tmp_path, 100000)
    process = start(cache, RADDLE_CXX=compiler, TMPDIR=work)
    until(lambda: started.exists() and started.read_text())
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert list(cache.iterdir()) and list(work.iterdir())  # a lock, and a compilation's files
    assert compiled(cache, RADDLE_CXX=compiler, TMPDIR=work) == (1, [])
    assert len(all_in(cache)) == 1 and list(work.iterdir()) == []
    os.killpg(int(started.read_text()), signal.SIGTERM)  # the dead one's compiler: no process waited for it


def until(condition):
    while not condition():
        time.sleep(0.01)


def test_what_takes_longer_than_a_second_says_what_it_does(tmp_path):
    compiler = slow_compiler(tmp_path, 1.5)
    first = start(tmp_path / "cache", RADDLE_CXX=compiler)
    until(lambda: (tmp_path / "started").exists())
    second = start(tmp_path / "cache", RADDLE_CXX=compiler)
    number, said = finish_saying(first)
    assert number == 1 and said == [f"raddle: compiling variant 'Twice' with {compiler}"]
    number, said = finish_saying(second)
    # It may have come late enough to wait for less than a second.
    assert number == 0 and all("waiting for variant 'Twice'" in line for line in said) and len(said) <= 1


FORKED = """
import os, signal, threading, time
from pathlib import Path
import raddle
text = "struct Mine { RADDLE_FN float logits(float s, const Row&, const Key&) const { return 2.0f * s; } };"
spec = raddle.AttentionSpec(2, 1, 8, dtype="float32", variant=[raddle.Variant("Mine", text)()])
thread = threading.Thread(target=raddle.Attention, args=(spec,))
thread.start()
while not Path(os.environ["STARTED"]).exists():
    time.sleep(0.01)
child = os.fork()
if child == 0:
    signal.alarm(1000)
    raddle.Attention(spec)
    os._exit(0)
thread.join()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_a_fork_while_a_thread_compiles_waits_for_nobody_who_is_gone(tmp_path):
    """The child finds what its parent compiles in the cache."""
    compiler = slow_compiler(tmp_path, 1.5)
    env = environment(tmp_path / "cache", RADDLE_CXX=compiler, STARTED=tmp_path / "started")
    subprocess.run([sys.executable, "-c", FORKED], env=env, check=True)


def test_what_takes_less_than_a_second_is_silent(cache, tmp_path):
    (entry,) = entries(cache)
    text = f'for last in "$@"; do :; done\ncase "$1" in -dump*|--version) ;; *) cp "{entry}/binary" "$last";; esac'
    began = time.monotonic()
    process = start(tmp_path / "other", RADDLE_CXX=script(tmp_path / "fast", text))
    number, said = finish_saying(process)
    # A machine may be so busy that even copying a file takes that long.
    assert number == 1 and (said == [] or time.monotonic() - began > 1)


def test_temporary_folders_that_cannot_be_written(tmp_path):
    assert compiled(tmp_path / "cache", TMPDIR="/proc") == (1, [])
    assert compiled(tmp_path / "other", TMPDIR=tmp_path / "is not there") == (1, [])


def test_the_folder_is_looked_up_each_time(tmp_path):
    code = CHILD.replace("for name in", "import os\nfor name in").replace(
        "    np.testing", "    os.environ['RADDLE_CACHE_DIR'] = os.path.join(sys.argv[1], name)\n    np.testing"
    )
    code = code.replace("sys.argv[1:] or [", "sys.argv[2:] or [")
    env = environment(tmp_path / "first")
    subprocess.run([sys.executable, "-c", code, str(tmp_path), "One", "Two"], env=env, check=True, capture_output=True)
    assert [entry_name(*entries(tmp_path / name)) for name in ("One", "Two")] == ["One", "Two"]
    assert not (tmp_path / "first").exists()


THREADS = """
from concurrent.futures import ThreadPoolExecutor
import os, sys, threading
names = sys.argv[1].split()
barrier = threading.Barrier(len(names))
def work(name):
    barrier.wait()
    return result(name)
with ThreadPoolExecutor(len(names)) as pool:
    for found in pool.map(work, names):
        np.testing.assert_allclose(found, 0.125, rtol=1e-5)
print(raddle.cache.num_compiled())
"""


def threads(cache, names, **variables):
    code = CHILD[: CHILD.index("for name in")] + THREADS
    command = [sys.executable, "-c", code, names]
    env = environment(cache, **variables)
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_threads_compile_one_variant_once(tmp_path):
    assert threads(tmp_path / "cache", "Same Same Same Same") == 1


def test_threads_compile_different_variants_side_by_side(tmp_path):
    # Each compiler waits until the other has started.
    text = f"""case "$1" in -dump*|--version) exec c++ "$@";; esac
touch "{tmp_path}/$$.started"
for i in $(seq 20000); do
  [ $(ls "{tmp_path}" | grep -c started) -ge 2 ] && exec c++ "$@"
  sleep 0.05
done
echo error: nobody came; exit 1"""
    assert threads(tmp_path / "cache", "One Two", RADDLE_CXX=script(tmp_path / "c++", text)) == 2


def test_a_warm_cache_needs_no_compiler(cache, tmp_path):
    bare = {"PATH": tmp_path}
    assert compiled(cache, **bare) == (0, [])
    process = start(cache, "Other", **bare)
    _, err = process.communicate()
    assert process.returncode != 0 and "there is no C++ compiler" in err


RADDLE = "import sys; sys.modules['torch'] = None; from raddle.cli import main; main(prog_name='raddle')"


def raddle_command(cache, *words, **variables):
    command = [sys.executable, "-c", RADDLE, *map(str, words)]
    return subprocess.run(command, env=environment(cache, **variables), capture_output=True, text=True)


def test_the_command_line(tmp_path):
    cache = tmp_path / "the cache"
    specs = tmp_path / "specs.py"
    definitions = CHILD[: CHILD.index("def result")]
    specs.write_text(
        definitions + "SPECS = [raddle.AttentionSpec(2, 1, 8, variant=[variant(n)]) for n in ('One', 'Two')]\n"
        "def late(): return SPECS[0]\n"
    )
    assert f"0 entries in {cache}" in raddle_command(cache, "cache", "list").stdout
    assert "2 specs; compiled 2 variants" in raddle_command(cache, "cache", "warm", f"{specs}:SPECS").stdout
    assert "1 spec; nothing left to compile" in raddle_command(cache, "cache", "warm", f"{specs}:late").stdout
    listed = raddle_command(cache, "cache", "list").stdout
    rows = [line.split("│")[1:-1] for line in listed.splitlines() if line.startswith("│")]
    rows = [[cell.strip() for cell in row] for row in rows]
    assert [row[:3] for row in rows] == [[name, "CPU variant", raddle.cpu_isa()] for name in ("One", "Two")]
    assert f"2 entries in {cache}" in listed
    keys = [row[-1] for row in rows]
    assert len(set(keys)) == 2 and all(any(path.name.startswith(key) for path in cache.iterdir()) for key in keys)

    # What is not ours stays, whatever its name.
    for name in ("manifest.d", ".raddle-old-mine!!!", "old-2019", "new-5"):
        (cache / name).mkdir()
        (cache / name / "manifest").write_text("")
    (cache / "poetry.lock").write_text("")
    assert "removed 2 entries" in raddle_command(cache, "cache", "clear").stdout
    left = {".raddle-old-mine!!!", "manifest.d", "new-5", "old-2019", "poetry.lock"}
    assert {path.name for path in cache.iterdir()} == left
    assert "0 entries" in raddle_command(cache, "cache", "list").stdout

    for wrong, words in {
        "specs": "does not name a spec",
        f"{tmp_path}/none.py:SPECS": "there is no file",
        f"{specs}:NONE": "has no 'NONE'",
        "no.such.module:SPECS": "no.such",
    }.items():
        done = raddle_command(cache, "cache", "warm", wrong)
        assert done.returncode == 1 and words in done.stderr and "Traceback" not in done.stderr
    for options, words in (
        (["--all"], "--all is given without --arch"),
        (["--arch", "sm_90"], "arch is 'sm_90'; expected 'sm_90a'"),
        (["--arch", "hopper"], "expected one such as 'sm_80' or 'sm_90a'"),
    ):
        done = raddle_command(cache, "cache", "warm", f"{specs}:late", *options)
        assert done.returncode != 0 and words in done.stderr and "Traceback" not in done.stderr


def test_the_cache_of_this_process(tmp_path, monkeypatch):
    monkeypatch.setenv("RADDLE_CACHE_DIR", str(tmp_path / "mine"))
    assert raddle.cache.folder() == tmp_path / "mine" and raddle.cache.entries() == []
    text = "struct ThisProcess { RADDLE_FN float logits(float s, const Row&, const Key&) const { return s; } };"
    spec = raddle.AttentionSpec(2, 1, 8, variant=[raddle.Variant("ThisProcess", text)()])
    assert raddle.cache.warm([spec, spec]) == 1
    (entry,) = raddle.cache.entries()
    assert entry["name"] == "ThisProcess" and entry["bytes"] == os.path.getsize(f"{entry['path']}/binary")
    assert entry["kind"] == "CPU variant" and entry["key"] == os.path.basename(entry["path"])
    assert entry["time"] == os.path.getmtime(entry["path"])
    assert raddle.cache.clear() == 1 and raddle.cache.entries() == []
    # What is loaded stays loaded.
    q = np.ones((1, 2, 8), raddle._tensors.dtypes.NUMPY["bfloat16"])
    attention = raddle.Attention(spec)
    assert attention.run(attention.plan(raddle.RaggedKV([0, 1], [0, 1])), q, (q[:, :1], q[:, :1])).shape == q.shape


def test_homes_without_raddle_cache_dir(tmp_path):
    code = "import sys; sys.modules['torch'] = None; import raddle; print(raddle.cache.folder())"
    elsewhere = "RADDLE_CACHE_DIR", "XDG_CACHE_HOME", "TMPDIR"
    env = {name: value for name, value in os.environ.items() if name not in elsewhere}

    def folder(**variables):
        done = subprocess.run([sys.executable, "-c", code], env={**env, **variables}, capture_output=True, text=True)
        return done.stdout.strip()

    assert folder(HOME="/home/somebody") == "/home/somebody/.cache/raddle"
    assert folder(HOME="/home/somebody", XDG_CACHE_HOME="/xdg") == "/xdg/raddle"
    assert folder(HOME="") == f"/tmp/raddle-{os.geteuid()}/raddle"
    assert folder(HOME="", TMPDIR="/there") == f"/there/raddle-{os.geteuid()}/raddle"


def test_a_homeless_cache_is_nobody_elses(tmp_path):
    """Among temporary files anybody may make a folder of the name that ours would have."""
    base = tmp_path / f"raddle-{os.geteuid()}"
    homeless = {"HOME": "", "XDG_CACHE_HOME": "", "TMPDIR": tmp_path}
    assert finish(start("", **homeless)) == (1, []) and finish(start("", **homeless)) == (0, [])
    assert stat.S_IMODE(base.stat().st_mode) == 0o700
    base.chmod(0o777)
    count, said = finish(start("", **homeless))
    assert count == 1 and len(said) == 1 and "can be written by other users" in said[0]
    base.chmod(0o700)
    assert finish(start("", **homeless)) == (0, [])
    linked(base, tmp_path / "elsewhere")
    count, said = finish(start("", **homeless))
    assert count == 1 and len(said) == 1 and f"{base} cannot be read" in said[0]


def test_a_compiler_that_ignores_sigchld_around_it(tmp_path):
    """Programs that reap no children, and wrappers that leave a server behind which holds their output open."""
    code = "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n" + CHILD
    server = script(tmp_path / "compiler", 'sleep 100000 & echo $! >> "$0.pids"\nexec c++ "$@"')
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(tmp_path / "cache", RADDLE_CXX=f"env '{server}'".replace("'", "")),
        capture_output=True,
        text=True,
    )
    for pid in Path(f"{server}.pids").read_text().split():
        os.kill(int(pid), signal.SIGTERM)  # raises if it is gone, and it was waited for
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1\n"


INTERRUPTED = """
import os, signal, threading, time
from pathlib import Path
import raddle
signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background of a shell ignore it
def interrupt():
    while not Path(os.environ["STARTED"]).exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt, daemon=True).start()
text = "struct Mine { RADDLE_FN float logits(float s, const Row&, const Key&) const { return 2.0f * s; } };"
spec = raddle.AttentionSpec(2, 1, 8, dtype="float32", variant=[raddle.Variant("Mine", text)()])
before = len(os.listdir("/proc/self/fd"))
try:
    raddle.Attention(spec)
except KeyboardInterrupt:
    print("interrupted")
assert len(os.listdir("/proc/self/fd")) == before
os.environ["RADDLE_CXX"] = "c++"
raddle.Attention(spec)
print(raddle.cache.num_compiled())
"""


def test_an_interrupt_ends_a_compilation_and_leaves_nothing(tmp_path):
    cache, work, started = tmp_path / "cache", tmp_path / "work files", tmp_path / "started"
    work.mkdir()
    # A driver with a child, as compilers are.
    text = f"""case "$1" in -dump*|--version) exec c++ "$@";; esac
[ -e "{started}" ] || {{ sleep 100000 & echo $! > "{tmp_path}/child"; echo $$ > "{started}"; wait; }}
exec c++ "$@\""""
    env = environment(cache, RADDLE_CXX=script(tmp_path / "driver and child", text), STARTED=started, TMPDIR=work)
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.split() == ["interrupted", "1"], done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)
    until(lambda: is_gone(int((tmp_path / "child").read_text())))
    assert list(work.iterdir()) == [] and len(all_in(cache)) == 1


def is_gone(pid):
    """Whether a process has ended; its parent may still have to ask how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


WAITING = """
import os, signal
import raddle
signal.signal(signal.SIGINT, signal.default_int_handler)
before = len(os.listdir("/proc/self/fd"))
try:
    result("Twice")
except KeyboardInterrupt:
    print("interrupted")
assert len(os.listdir("/proc/self/fd")) == before
"""


def test_an_interrupt_ends_the_wait_for_another_process(tmp_path):
    started = tmp_path / "started"
    compiler = slow_compiler(tmp_path, 100000)
    first = start(tmp_path / "cache", RADDLE_CXX=compiler)
    until(lambda: started.exists() and started.read_text())
    code = CHILD[: CHILD.index("for name in")] + WAITING
    second = subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment(tmp_path / "cache", RADDLE_CXX=compiler),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert "waiting for variant 'Twice', which another process compiles" in second.stderr.readline()
        second.send_signal(signal.SIGINT)
        out, err = second.communicate(timeout=300)
        assert second.returncode == 0 and out == "interrupted\n", err
        assert first.poll() is None  # it compiles on
    finally:
        second.kill()
        second.communicate()
        first.send_signal(signal.SIGKILL)
        os.killpg(int(started.read_text()), signal.SIGTERM)
        first.communicate()

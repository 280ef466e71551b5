#!/bin/sh
# Runs a command where there is no GPU as if there were two: kernels by the host's C++ compiler, on
# emulated threads. Slow, so ask for little:
# tests/gpu/emulate.sh python tests/gpu/contract.py --only rope,cascade --cases 3 --longest 100
# tests/gpu/emulate.sh python -m pytest --device cuda tests/python/test_edges.py
set -e
root=$(cd "$(dirname "$0")/../.." && pwd)
built="$root/build/emulated"
mkdir -p "$built"
if ! test -e "$built/libcuda.so.1" || test "$root/tests/gpu/emulator.cpp" -nt "$built/libcuda.so.1"; then
  ${CXX:-c++} -std=c++20 -O2 -Wall -Wextra -Wconversion -Wshadow -fPIC -shared \
    -o "$built/libcuda.so.1.$$" "$root/tests/gpu/emulator.cpp"
  mv "$built/libcuda.so.1.$$" "$built/libcuda.so.1"  # at once: others may be starting
fi
export LD_LIBRARY_PATH="$built${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export RADDLE_NVRTC="$built/libcuda.so.1"
export RADDLE_EMULATOR_INCLUDE="$root/tests/cpp"
# What compiles kernels there is no part of the cache's key.
sum=$(cat "$root/tests/gpu/emulator.cpp" "$root"/tests/cpp/emulated_*.h | cksum | cut -d" " -f1)
# RADDLE_EMULATOR_COMPUTE=90: GPUs of another compute capability than 8.0.
# RADDLE_EMULATOR_HOLLOW=1: kernels do nothing, and compile in no time: for what the host refuses.
export RADDLE_CACHE_DIR="$built/cache${RADDLE_EMULATOR_HOLLOW:+-hollow}-$sum"
exec "$@"

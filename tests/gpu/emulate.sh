#!/bin/sh
# Runs the variant contract where there is no GPU: its kernels by the host's C++ compiler, on emulated
# threads. Slow, so ask for little:
# tests/gpu/emulate.sh --only rope,cascade --cases 3 --longest 100
# PYTHON and RADDLE_LIBRARY as for any test.
set -e
cd "$(dirname "$0")/../.."
mkdir -p build/emulated
${CXX:-c++} -std=c++20 -O2 -Wall -Wextra -Wconversion -Wshadow -fPIC -shared -o build/emulated/libcuda.so.1 tests/gpu/emulator.cpp
export LD_LIBRARY_PATH="$PWD/build/emulated${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export RADDLE_NVRTC="$PWD/build/emulated/libcuda.so.1"
export RADDLE_EMULATOR_INCLUDE="$PWD/tests/cpp"
export RADDLE_CACHE_DIR="$PWD/build/emulated/cache"
exec "${PYTHON:-python3}" tests/gpu/contract.py "$@"

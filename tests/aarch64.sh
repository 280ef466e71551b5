#!/usr/bin/env bash
# Builds for aarch64, where the generic instruction set is all there is, and runs the C++ tests on an emulated
# one. Without Debian's cross compiler or its emulator it says so and ends well.
# Usage: aarch64.sh BUILD_FOLDER [CMAKE_OPTION...]
set -euo pipefail
cd "$(dirname "$0")/.."
build=$1
shift

missing=()
command -v aarch64-linux-gnu-g++ >/dev/null || missing+=(g++-aarch64-linux-gnu)
command -v qemu-aarch64 >/dev/null || missing+=(qemu-user)
# GoogleTest is built along: what is installed is for this machine.
test -f /usr/src/googletest/CMakeLists.txt || missing+=(googletest)
if ((${#missing[@]})); then
  echo "SKIPPED: aarch64 is neither built nor tested without ${missing[*]} (Debian's names)"
  exit 0
fi

cmake -S . -B "$build" -G Ninja -DRADDLE_TESTS=ON -DRADDLE_GOOGLETEST=/usr/src/googletest \
  -DCMAKE_TOOLCHAIN_FILE="$PWD/cmake/aarch64.cmake" "$@"
cmake --build "$build" --target raddle_tests
# Left out: children of fork(), in which the emulator itself does not survive.
filter='-PoolTest.*Fork*:PoolTest.PinsWorkersWhenAsked:PoolTest.ExitJoins*'
qemu-aarch64 -L /usr/aarch64-linux-gnu "$build/raddle_tests" --gtest_brief=1 --gtest_filter="$filter"

#!/usr/bin/env bash
# Installs the C++ library into an empty prefix, moves that elsewhere, and builds and runs
# examples/cpp with what find_package(raddle) finds there.
# Usage: find_package.sh BUILD_FOLDER [CMAKE_OPTION…]
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
build=$1
shift

say() { printf '%s\n' "$*" >&2; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

say "building libraddle in $build"
cmake -S "$root" -B "$build" -G Ninja "$@" >"$work/log" || { cat "$work/log" >&2; exit 1; }
cmake --build "$build" --target raddle_core >"$work/log" || { cat "$work/log" >&2; exit 1; }

# Elsewhere than it was installed: an exported path that only this machine has would be found out.
cmake --install "$build" --component cpp --prefix "$work/first" >/dev/null
mv "$work/first" "$work/prefix"

say "building examples/cpp"
{
  cmake -S "$root/examples/cpp" -B "$work/example" -G Ninja -DCMAKE_PREFIX_PATH="$work/prefix" \
    -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_FLAGS=-Werror -DCMAKE_FIND_USE_PACKAGE_REGISTRY=OFF &&
    cmake --build "$work/example"
} >"$work/log" || { cat "$work/log" >&2; exit 1; }
found=$(sed -n 's/^raddle_DIR:PATH=//p' "$work/example/CMakeCache.txt")
[[ "$found" == "$work/prefix/"* ]] || { say "another raddle was found: $found"; exit 1; }

output=$("$work/example/paged_decode")
# From a computation in fp64 with numpy; instruction sets differ in the digits after these.
expected='checksum 67.218'
[[ "$output" == "$expected"*"work items"* ]] || { say "expected '$expected…', found:"; say "$output"; exit 1; }

say "passed: $(ls "$work"/prefix/lib*/libraddle* | xargs -n1 basename | paste -sd' '), $expected"

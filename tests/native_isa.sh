#!/usr/bin/env bash
# A build with RADDLE_ISAS=native holds the instruction set that a build with all of them chooses on this machine.
# Usage: native_isa.sh FOLDER, that of a python in which raddle is installed with all
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cmake -S . -B "$work" -G Ninja -DRADDLE_ISAS=native >"$work/log" || { cat "$work/log" >&2; exit 1; }
expected=$(env -u RADDLE_CPU_ISA "$1/python" -c 'import raddle; print(raddle.cpu_isa())')
found=$(sed -n 's/^RADDLE_BUILT(\(.*\))$/\1/p' "$work/generated/built_isas.inc" | sort -u)
[[ "$found" == "$(printf 'generic\n%s\n' "$expected" | sort -u)" ]] ||
  { echo "native is built as: ${found//$'\n'/, }; expected generic and $expected" >&2; exit 1; }
echo "passed: native is $expected"

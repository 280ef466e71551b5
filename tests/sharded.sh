#!/usr/bin/env bash
# Runs a GoogleTest program as one process a core, each with its share of the tests.
# Usage: sharded.sh PROGRAM [OPTION...]
set -euo pipefail
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

export GTEST_TOTAL_SHARDS
GTEST_TOTAL_SHARDS=$(nproc)
shards=()
for ((i = 0; i < GTEST_TOTAL_SHARDS; ++i)); do
  GTEST_SHARD_INDEX=$i "$@" --gtest_brief=1 >"$logs/$i" 2>&1 &
  shards+=($!)
done

status=0
for i in "${!shards[@]}"; do
  wait "${shards[i]}" || status=1
  cat "$logs/$i"
done
passed=$(sed -n 's/^\[  PASSED  \] \([0-9]*\) tests\{0,1\}\..*/\1/p' "$logs"/* |
  awk '{ sum += $1 } END { print sum + 0 }')
echo "$(basename "$1"): $passed passed"
exit $status

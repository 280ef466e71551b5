#!/bin/bash
# All that needs a GPU, in at most ten minutes; results go to the folder OUT, default build/gpu/results.
#   tests/gpu/run.sh                              contract, tests and bench
#   tests/gpu/run.sh contract --seed 1            the variant contract alone, with options of contract.py
#   tests/gpu/run.sh tests -k plan                the test suite on the GPU, with options of pytest
#   tests/gpu/run.sh bench --only decode          benchmarks, with options of `raddle bench gpu`
#   tests/gpu/run.sh support                      docs/support.md, made and tried here
#   tests/gpu/run.sh families                     Hopper's kernels of short queries: right, and beside mma's; 8 minutes
#   tests/gpu/run.sh replay --requests 100        a trace under every schedule, with options of `raddle replay`
#   tests/gpu/run.sh formats                      shared prefixes as levels that were chosen, and token trees
# Needs what `make gpu` leaves in build/gpu, Python 3.9 or later with numpy, ml_dtypes and hypothesis (tests: pytest,
# bench: torch and cupy), an NVIDIA driver, and NVRTC (a CUDA toolkit or the wheel nvidia-cuda-nvrtc). With FlashInfer
# (`make gpu PEERS=1`), nvcc and ninja, too, unless its kernels lie in build/gpu/peers (flashinfer-kernels.*).
set -eo pipefail
self=$(readlink -f "$0")
cd "$(dirname "$self")/../.."
OUT=${OUT:-build/gpu/results}
LIMIT=${LIMIT:-570}               # seconds for everything
PREPARE_SECONDS=${PREPARE_SECONDS:-240} # for compiling FlashInfer's kernels, which goes on beside the tests
TEST_SECONDS=${TEST_SECONDS:-150} # of them, for the test suite
AGAINST=${AGAINST-flashinfer,cudnn,flex,fa2} # none, if it is empty
PYTHON=${PYTHON:-python3}
root=$PWD
site=$root/build/gpu/site
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)

kernels_brought() {
  ls build/gpu/peers/flashinfer-kernels.* >/dev/null 2>&1
}

install_wheels() {
  local wheels=()
  "$PYTHON" -c 'import tvm_ffi' 2>/dev/null || wheels+=(build/gpu/wheels/*.whl)
  ls build/gpu/peers/*.whl >/dev/null 2>&1 && wheels+=(build/gpu/peers/*.whl)
  if [ ${#wheels[@]} -gt 0 ] && ! [ -e "$site/complete" ]; then
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$site" "${wheels[@]}"
    # What `keep_kernels` kept of an earlier run, or of one elsewhere: FlashInfer loads NAME/NAME.so from here.
    if kernels_brought; then
      mkdir -p "$site/flashinfer/data/aot"
      cat build/gpu/peers/flashinfer-kernels.* | tar -xz -C "$site/flashinfer/data/aot"
    fi
    touch "$site/complete"
  fi
}

environment() {
  export PYTHONPATH="$root/python:$root/tests/python:$site${PYTHONPATH:+:$PYTHONPATH}"
  export RADDLE_LIBRARY="$root/build/gpu/libraddle_ffi.so"
  export PYTHONUNBUFFERED=1
  export FLASHINFER_WORKSPACE_BASE="$root/build/gpu/flashinfer"
  # A kernel that was not brought with the others is a peer's failure, told at once, rather than minutes of nvcc. Set
  # to nothing, the variable lets FlashInfer compile what is missing.
  if kernels_brought; then export FLASHINFER_DISABLE_JIT=${FLASHINFER_DISABLE_JIT-1}; fi
}

contract() {
  "$PYTHON" tests/gpu/contract.py --out "$OUT/contract.json" "$@" 2>&1 | tee "$OUT/contract.txt"
}

tests() {
  # Most of their time goes into compiling kernels: with pytest-xdist, on all cores, about eight minutes of 16. The
  # rows of the support matrix compile a kernel each.
  local side_by_side=()
  if "$PYTHON" -c 'import xdist' 2>/dev/null; then side_by_side=(-n "$(nproc)" --dist worksteal); fi
  OMP_NUM_THREADS=1 "$PYTHON" -m pytest tests/python --ignore tests/python/test_support_matrix.py --device cuda -q \
    "${side_by_side[@]}" "$@" 2>&1 | tee "$OUT/tests.txt"
}

support() {
  "$PYTHON" -c 'from raddle.cli import main; main()' support >"$OUT/support.md"
  diff docs/support.md "$OUT/support.md"
  "$PYTHON" -m pytest tests/python/test_support_matrix.py --device cuda -q "$@" 2>&1 | tee "$OUT/support.txt"
}

bench() {
  "$PYTHON" -c 'from raddle.cli import main; main()' \
    bench gpu --against "$AGAINST" --out "$OUT/bench.json" \
    --timeline "$OUT/timelines" --timeline-of decode,mixed,prefix "$@" 2>&1 | tee "$OUT/bench.txt"
}

replay() {
  "$PYTHON" -c 'from raddle.cli import main; main()' \
    replay --device cuda --schedule all --pool-tokens 262144 --token-budget 2048 --rate 1000 \
    --json "$OUT/replay.json" "$@" 2>&1 | tee "$OUT/replay.txt"
}

formats() {
  "$PYTHON" -c 'from raddle.cli import main; main()' \
    bench formats --device cuda --json "$OUT/formats.json" "$@" 2>&1 | tee "$OUT/formats.txt"
}

# Hopper's kernels of short queries: first whether they are right, then their times and mma's, in turns. Later parts run
# also where an earlier one fails, or takes too long.
families() {
  local failed=0
  timeout 150 "$PYTHON" -m pytest tests/python/test_short_wgmma.py tests/python/test_kernel_families.py \
    --device cuda -q 2>&1 | tee "$OUT/families-tests.txt" || failed=1
  RADDLE_BACKEND=wgmma timeout 100 "$PYTHON" tests/gpu/contract.py --only decode --cases 12 \
    --out "$OUT/families-contract.json" 2>&1 | tee "$OUT/families-contract.txt" || failed=1
  timeout 230 "$PYTHON" -c 'from raddle.cli import main; main()' bench gpu --against "" --only decode-families \
    --section-seconds 220 --out "$OUT/families.json" "$@" 2>&1 | tee "$OUT/families.txt" || failed=1
  return $failed
}

# FlashInfer's kernels take minutes of nvcc: a process a section compiles them while Raddle is tested.
prepare_peers() {
  [ -z "$FLASHINFER_DISABLE_JIT" ] || return 0
  "$PYTHON" -c 'import flashinfer' 2>/dev/null || return 0
  mkdir -p build/gpu/flashinfer
  for section in decode rope prefill prefill-ragged prefill-dims mixed prefix mla quest; do
    timeout "$PREPARE_SECONDS" nice "$PYTHON" -c 'from raddle.cli import main; main()' \
      bench gpu --against flashinfer --prepare --only "$section" >"build/gpu/flashinfer/$section.txt" 2>&1 &
    preparing+=($!)
  done
}

# In parts of 15 MB: put them into build/gpu/peers, and the next machine need not compile FlashInfer.
keep_kernels() {
  [ -z "$FLASHINFER_DISABLE_JIT" ] || return 0
  local built
  built=$(find build/gpu/flashinfer -type d -name cached_ops 2>/dev/null | head -1)
  [ -n "$built" ] || return 0
  (cd "$built" && find . -name '*.so' -print0 | tar --null -cz -T -) | split -b 15M - "$OUT/flashinfer-kernels."
}

everything() {
  local failed=0 preparing=()
  prepare_peers
  contract --cases 25 || failed=1
  if "$PYTHON" -m pytest tests/python --help 2>/dev/null | grep -q -- '--device'; then
    tests_within "$TEST_SECONDS" || failed=1
  else
    echo "tests: the suite knows no --device yet" | tee "$OUT/tests.txt"
  fi
  for each in "${preparing[@]}"; do wait "$each" || true; done
  (keep_kernels) || true
  bench_within $((LIMIT - SECONDS)) || failed=1
  return $failed
}

# timeout knows no functions of the shell: these run the script again.
tests_within() {
  timeout "$1" "$self" tests || { echo "tests failed, or took more than $1 s"; return 1; }
}

bench_within() {
  timeout "$1" "$self" bench || { echo "bench failed, or took more than $1 s"; return 1; }
}

install_wheels
environment
case ${1:-all} in
  all) everything ;;
  contract | tests | support | bench | families | replay | formats) "$@" ;;
  *) echo "'$1' is none of: contract, tests, support, bench, families, replay, formats" >&2 && exit 2 ;;
esac

#!/bin/sh
# Runs the variant contract on this machine's GPU: tests/gpu/run.sh --seed 1 --out result.json
# Needs what `make gpu` leaves in build/gpu, Python 3.9 or later with numpy, ml_dtypes and hypothesis,
# an NVIDIA driver, and NVRTC (a CUDA toolkit or the wheel nvidia-cuda-nvrtc).
set -e
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
site=build/gpu/site
if ! "$PYTHON" -c 'import tvm_ffi' 2>/dev/null; then
  "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$site" build/gpu/wheels/*.whl
fi
export PYTHONPATH="$PWD/python:$PWD/tests/python:$PWD/$site${PYTHONPATH:+:$PYTHONPATH}"
export RADDLE_LIBRARY="$PWD/build/gpu/libraddle_ffi.so"
exec "$PYTHON" tests/gpu/contract.py "$@"

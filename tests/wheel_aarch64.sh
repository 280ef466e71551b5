#!/usr/bin/env bash
# Builds the wheel for aarch64 with Debian's cross compiler, and runs every shipped variant from it on an emulated
# aarch64: with Debian's Python for that architecture, unpacked into the build folder, and the packages that Raddle
# needs, from their own wheels. Without cross compiler or emulator it says so and ends well.
# Usage: wheel_aarch64.sh BUILD_FOLDER DIST [CMAKE_OPTION...]     (as `make wheel-aarch64` does, in .venv's PATH)
set -euo pipefail
cd "$(dirname "$0")/.."
build=$PWD/$1
dist=$PWD/$2
shift 2

if test "$(uname -m)" = aarch64; then
  echo "this machine is aarch64: make wheel is enough"
  exit 0
fi
rm -rf "$build/wheel" "$dist"/*_aarch64.whl
missing=()
command -v aarch64-linux-gnu-g++ >/dev/null || missing+=(g++-aarch64-linux-gnu)
command -v qemu-aarch64 >/dev/null || missing+=(qemu-user)
command -v apt-get >/dev/null || missing+=(apt)
if ((${#missing[@]})); then
  echo "SKIPPED: no wheel for aarch64 without ${missing[*]} (Debian's names)"
  exit 0
fi

mkdir -p "$build" "$dist"

# --- a Python of that architecture -------------------------------------------------------------
# apt works in folders of its own here: it neither needs to be root nor touches this system.
root=$build/debian
if ! test -x "$root/usr/bin/python3"; then
  mkdir -p "$root/apt/lists/partial" "$root/apt/archives/partial"
  : >"$root/apt/status"
  apt=(apt-get -qq -y -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User=
    -o Dir::State="$root/apt" -o Dir::State::status="$root/apt/status" -o Dir::Cache="$root/apt"
    -o Debug::NoLocking=1 --no-install-recommends)
  "${apt[@]}" update
  "${apt[@]}" --download-only install python3 libstdc++6
  for package in "$root"/apt/archives/*.deb; do dpkg -x "$package" "$root"; done
  test -e "$root/lib" || ln -s usr/lib "$root/lib"  # where all of /lib has moved
fi
emulated=("$(command -v qemu-aarch64)" -L "$root" "$root/usr/bin/python3" -s)
version=$("${emulated[@]}" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
foreign=(--only-binary=:all: --implementation cp --python-version "$version" --platform manylinux2014_aarch64)
for glibc in 17 24 27 28 31 34 35 36; do
  foreign+=(--platform "manylinux_2_${glibc}_aarch64")
done

# --- the wheel ---------------------------------------------------------------------------------
# What libraddle_ffi is linked with must be for aarch64, too, and as old as the headers that are installed here.
tvm_ffi=$(python -c 'from importlib.metadata import version; print(version("apache-tvm-ffi"))')
if ! test -d "$build/tvm_ffi-$tvm_ffi"; then
  rm -rf "$build/download"
  python -m pip download -q --no-deps -d "$build/download" "${foreign[@]}" "apache-tvm-ffi==$tvm_ffi"
  python -m zipfile -e "$build"/download/apache_tvm_ffi-*.whl "$build/tvm_ffi-$tvm_ffi"
fi
library=$build/tvm_ffi-$tvm_ffi/tvm_ffi/lib/libtvm_ffi.so
_PYTHON_HOST_PLATFORM=linux-aarch64 SKBUILD_BUILD_DIR="$build/objects" \
  CMAKE_ARGS="-DCMAKE_TOOLCHAIN_FILE=$PWD/cmake/aarch64.cmake -DRADDLE_TVM_FFI_LIBRARY=$library $*" \
  python -m pip wheel -q --no-build-isolation --no-deps -w "$build/wheel" .
auditwheel repair --exclude libtvm_ffi.so -w "$dist" "$build"/wheel/*.whl

# --- an empty environment ----------------------------------------------------------------------
rm -rf "$build/site-packages"
python -m pip install -q --target "$build/site-packages" "${foreign[@]}" "$dist"/*_aarch64.whl hypothesis
echo "Python $version on an emulated $("${emulated[@]}" -c 'import platform; print(platform.machine())')"
env -i HOME="$HOME" PATH=/nowhere PYTHONPATH="$build/site-packages" "${emulated[@]}" tests/wheel_check.py

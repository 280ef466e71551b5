"""Fixtures of all tests: random numbers that a failure tells how to repeat, and the engine on each device.

Every session draws fresh problems. A failing test prints the command that draws the same ones again.
"""

from __future__ import annotations

import ctypes
import fnmatch
import os
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

#: Modules that say the same on every instruction set: `make test-isas` leaves them out.
ANY_ISA = {
    "test_bench": "what is measured beside peers",
    "test_bench_flex": "what is measured beside peers",
    "test_bench_generate": "what is measured beside peers",
    "test_bench_gpu": "figures of a GPU",
    "test_bench_gpu_command": "figures of a GPU",
    "test_bench_gpu_peers": "figures of a GPU",
    "test_border": "calls of Python",
    "test_cuda": "the driver of a GPU",
    "test_cuda_arch": "kernels of a GPU",
    "test_cuda_torch": "the driver of a GPU",
    "test_emulated": "kernels of a GPU",
    "test_first_use": "kernels of a GPU",
    "test_flex_compile": "PyTorch's compiler around the engine",
    "test_flex_compile_inside": "PyTorch's compiler around the engine",
    "test_flex_transformers": "PyTorch's compiler around the engine",
    "test_imports": "source text",
    "test_isa": "starts a process for each by itself",
    "test_jit_cache": "files and processes",
    "test_kernel_families": "kernels of a GPU",
    "test_kv_nvrtc": "kernels of a GPU",
    "test_nvrtc": "kernels of a GPU",
    "test_parallel": "processes around the engine",
    "test_pickles": "files and processes",
    "test_replay_page": "a page of text",
    "test_short_wgmma": "kernels of a GPU",
    "test_torch_compile": "PyTorch's compiler around the engine",
    "test_version": "a string",
}
#: Modules of `make check`, beside the tests marked every_isa: what a user calls first, in a minute or two.
CHECKED = {"test_api", "test_append", "test_arguments", "test_examples", "test_layouts", "test_page_pool"}
NOT_ON_GPU = Path(__file__).parents[1] / "gpu" / "not_on_gpu.txt"

settings.register_profile(
    "raddle", deadline=None, max_examples=40, print_blob=True, suppress_health_check=list(HealthCheck)
)
settings.load_profile("raddle")


def pytest_addoption(parser):
    seed = os.environ.get("RADDLE_TEST_SEED")
    parser.addoption("--seed", type=int, default=seed, help="draw the problems of an earlier session again")
    parser.addoption("--device", default="cpu", help="where the engine's tests run: cpu, cuda, cuda:1")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    config.addinivalue_line("markers", "every_isa: runs once more on each instruction set (test_isa.py)")
    config.addinivalue_line("markers", "any_isa: says the same on each instruction set (ANY_ISA, conftest.py)")
    config.addinivalue_line("markers", "check: runs in `make check` (CHECKED, conftest.py)")
    if config.option.seed is None:
        config.option.seed = int.from_bytes(os.urandom(4), "little")
    if config.getoption("--hypothesis-seed", None) is None:
        config.option.hypothesis_seed = str(config.option.seed)
    from engine import hold_to_budgets_of

    hold_to_budgets_of(config.option.device)
    if config.option.device != "cpu":
        import draws
        from device_arrays import use_gpu

        use_gpu(config.option.device)
        draws.STAND_IN["float32"] = "float16"


def pytest_report_header(config):
    return f"seed: {config.option.seed}, device: {config.option.device}"


#: How Hopper's kernels refuse what they do not serve, where the whole suite asks for them.
REFUSAL = 'RADDLE_BACKEND is "wgmma"' if os.environ.get("RADDLE_BACKEND") == "wgmma" else None


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    error = str(call.excinfo.value) if call.excinfo else ""
    if report.failed and REFUSAL and REFUSAL in error and "wgmma" not in item.fixturenames:
        path, line, _ = item.location
        report.outcome, report.longrepr = "skipped", (path, line, f"not served: {error}")
    if report.failed:
        isa = os.environ.get("RADDLE_CPU_ISA")
        prefix = f"RADDLE_CPU_ISA={isa} " if isa else ""
        device = "" if item.config.option.device == "cpu" else f" --device {item.config.option.device}"
        command = f"{prefix}python -m pytest '{item.nodeid}' --seed {item.config.option.seed}{device}"
        report.sections.append(("to repeat", command))


@pytest.fixture
def rng(request):
    """Random numbers of the session's seed and this test's name."""
    return np.random.default_rng([request.config.option.seed, zlib.crc32(request.node.nodeid.encode())])


@pytest.fixture(scope="session", autouse=True)
def compiled_anew(tmp_path_factory):
    """torch.compile keeps what it wrote for later processes, by its graphs alone, in which operators are names: what it
    wrote for another version of an operator is not what this version's tests are about."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path_factory.mktemp("inductor"))


@pytest.fixture(scope="session")
def engine(request):
    """Raddle on the device that --device names."""
    from engine import Engine

    return Engine(request.config.option.device)


@pytest.fixture
def gpu(request):
    """The GPU under test."""
    if request.config.option.device == "cpu":
        pytest.skip("needs --device cuda: a GPU, or tests/gpu/emulate.sh")
    return request.config.option.device


@pytest.fixture
def torch_device(request):
    """torch makes its tensors on the device under test; on a GPU in float16, as kernels there take no float32."""
    torch = pytest.importorskip("torch")
    device, dtype = request.config.option.device, torch.get_default_dtype()
    if device != "cpu":
        if not torch.cuda.is_available():
            pytest.skip("torch sees no GPU")
        torch.set_default_dtype(torch.float16)
    torch.set_default_device(device)
    yield torch.device(device)
    torch.set_default_device(None)
    torch.set_default_dtype(dtype)


@pytest.fixture
def wgmma(gpu, monkeypatch):
    """The GPU under test, of which every plan asks for Hopper's family of kernels."""
    import raddle
    from raddle import _cuda
    from small import refuses

    monkeypatch.setenv("RADDLE_BACKEND", "wgmma")
    if not _cuda.driver()["gpus"][0]["arch"].startswith("sm_90"):
        with refuses(ValueError, 'RADDLE_BACKEND is "wgmma"', "sm_90 alone"):
            raddle.Attention(raddle.AttentionSpec(4, 2, 64, dtype="bfloat16"), device=gpu)
        pytest.skip("needs an sm_90 GPU, or RADDLE_EMULATOR_COMPUTE=90")
    return gpu


@pytest.fixture
def emulator(gpu):
    """The emulated driver, as it was, at the end."""
    cuda = ctypes.CDLL("libcuda.so.1")
    if not hasattr(cuda, "raddle_emulator_capture"):
        pytest.skip("asks the emulated driver: tests/gpu/emulate.sh")
    for name in ("capture", "replay", "destroy_stream"):
        getattr(cuda, f"raddle_emulator_{name}").argtypes = [ctypes.c_void_p]
    cuda.raddle_emulator_memory_left.argtypes = [ctypes.c_size_t]
    yield cuda
    cuda.raddle_emulator_order(1)
    cuda.raddle_emulator_together(0)
    cuda.raddle_emulator_capture(None)
    cuda.raddle_emulator_capture_blocks(0)
    cuda.raddle_emulator_events_pass(1)
    cuda.raddle_emulator_launches_fail(0)
    cuda.raddle_emulator_memory_left(2**40)


def pytest_collection_modifyitems(config, items):
    """On a GPU only tests of the engine run, without those that tests/gpu/not_on_gpu.txt lists with reasons."""
    for item in items:
        if item.path.stem in ANY_ISA:
            item.add_marker("any_isa")
        if item.path.stem in CHECKED or item.get_closest_marker("every_isa"):
            item.add_marker("check")
    if config.option.device == "cpu":
        return
    listed = [line.split(maxsplit=1) for line in NOT_ON_GPU.read_text().splitlines() if line and line[0] != "#"]
    kept, dropped = [], []
    for item in items:
        on_device = {"engine", "gpu", "wgmma", "torch_device"} & set(item.fixturenames)
        (kept if on_device else dropped).append(item)
        for pattern, reason in listed:
            if fnmatch.fnmatch(item.nodeid.rpartition("/")[2], pattern):
                item.add_marker(pytest.mark.skip(reason=reason))
    items[:] = kept
    config.hook.pytest_deselected(items=dropped)


@pytest.fixture
def small_problem(rng):
    """Q, K and V for `small.paged()`."""
    return {
        "q": rng.standard_normal((3, 4, 16)).astype(np.float32),
        "k": rng.standard_normal((6, 16, 2, 16)).astype(np.float32),
        "v": rng.standard_normal((6, 16, 2, 16)).astype(np.float32),
    }

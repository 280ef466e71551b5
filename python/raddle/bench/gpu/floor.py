"""The floor under a decode: the shortest time in which this GPU reads as many bytes once, out of a cold L2.

Two kernels that read and do nothing else, compiled by NVRTC through CuPy: 16-byte loads, eight in flight a thread,
and, from sm_90 on, bulk copies into a ring in shared memory. The best of them and of several grids counts. They are
timed as the engines are.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from raddle.bench.timing import Call, GpuClock

_RING_STAGES, _RING_BYTES = 24, 8192  # 192 KiB in flight a multiprocessor
_THREADS = (128, 256, 512)
_BLOCKS_PER_SM = (1, 2, 4, 8, 16)

_LOADS = r"""
extern "C" __global__ void read_loads(const uint4* data, unsigned long long count, unsigned* sink) {
  constexpr int kInFlight = 8;
  unsigned seen = 0;
  const unsigned long long step = (unsigned long long)gridDim.x * blockDim.x * kInFlight;
  unsigned long long at = (unsigned long long)blockIdx.x * blockDim.x * kInFlight + threadIdx.x;
  for (; at + (kInFlight - 1) * blockDim.x < count; at += step) {
    uint4 held[kInFlight];
#pragma unroll
    for (int n = 0; n < kInFlight; ++n) held[n] = __ldcs(data + at + n * blockDim.x);
#pragma unroll
    for (int n = 0; n < kInFlight; ++n) seen |= held[n].x & held[n].y & held[n].z & held[n].w;
  }
  for (int n = 0; n < kInFlight; ++n, at += blockDim.x)  // of the last, cut tile
    if (at < count) seen |= __ldcs(data + at).x;
  if (seen == 0x5eed) *sink = seen;  // or the compiler would drop the loads
}
extern "C" __global__ void nothing() {}
"""

_BULK = r"""
__device__ unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ void fill(unsigned long long* barrier, char* slot, const char* from) {
  const unsigned b = shared_address(barrier), s = shared_address(slot);
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "n"(BYTES) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(s), "l"(from), "n"(BYTES), "r"(b) : "memory");
}
__device__ bool filled(unsigned long long* barrier, unsigned parity) {
  unsigned yes;
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(yes) : "r"(shared_address(barrier)), "r"(parity) : "memory");
  return yes;
}
extern "C" __global__ void read_bulk(const char* data, unsigned long long chunks) {
  extern __shared__ __align__(128) char ring[];
  __shared__ __align__(8) unsigned long long barriers[STAGES];
  if (threadIdx.x != 0) return;
  for (int s = 0; s < STAGES; ++s)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barriers + s)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  const unsigned long long mine =
      chunks > blockIdx.x ? (chunks - blockIdx.x + gridDim.x - 1) / gridDim.x : 0;
  unsigned long long begun = 0;
  for (unsigned long long done = 0; done < mine; ++done) {
    for (; begun < mine && begun < done + STAGES; ++begun) {
      const unsigned slot = begun % STAGES;
      fill(barriers + slot, ring + slot * BYTES, data + (blockIdx.x + begun * gridDim.x) * BYTES);
    }
    while (!filled(barriers + done % STAGES, done / STAGES & 1)) {
    }
  }
}
"""


def source(bulk: bool) -> str:
    """CUDA C++ of the kernels; ``bulk``: those for sm_90 and later, too."""
    ring = f"constexpr int STAGES = {_RING_STAGES}, BYTES = {_RING_BYTES};\n"
    return _LOADS + ring + _BULK if bulk else _LOADS


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // _RING_BYTES) * _RING_BYTES


class Floor:
    """Reads of up to ``most_bytes``. Raises ImportError without CuPy."""

    def __init__(self, device: Any, most_bytes: int) -> None:
        import cupy

        self._cupy, self._device = cupy, torch.device(device)
        properties = torch.cuda.get_device_properties(self._device)
        self._multiprocessors = properties.multi_processor_count
        self._has_bulk = properties.major >= 9
        suffix = "a" if properties.major == 9 else ""
        arch = f"--gpu-architecture=sm_{properties.major}{properties.minor}{suffix}"
        module = cupy.RawModule(code=source(self._has_bulk), backend="nvrtc", options=("-std=c++17", arch))
        self._loads, self._nothing = module.get_function("read_loads"), module.get_function("nothing")
        if self._has_bulk:
            self._bulk = module.get_function("read_bulk")
            self._bulk.max_dynamic_shared_size_bytes = _RING_STAGES * _RING_BYTES
        self._sink = torch.zeros(1, dtype=torch.int32, device=self._device)
        # Random: zeros take less power, and may be read faster.
        self._data = torch.randint(0, 255, (_rounded(most_bytes),), dtype=torch.uint8, device=self._device)

    def _launch(
        self, kernel: Any, blocks: int, threads: int, arguments: tuple[Any, ...], shared: int, step: int
    ) -> None:
        with self._cupy.cuda.ExternalStream(torch.cuda.current_stream(self._device).cuda_stream):
            kernel((blocks,), (threads,), arguments, shared_mem=shared)

    def nothing(self, step: int) -> None:
        """Launches a kernel that does nothing: the time under every time."""
        self._launch(self._nothing, 1, 32, (), 0, step)

    def reads(self, num_bytes: int) -> dict[str, Call]:
        """Launches that read ``num_bytes``, rounded up to whole chunks, by name."""
        whole = _rounded(num_bytes)
        if whole > self._data.numel():
            raise ValueError(f"num_bytes is {num_bytes}; expected at most {self._data.numel()}")
        data, as_count = self._data.data_ptr(), self._cupy.uint64
        found: dict[str, Call] = {}
        for threads in _THREADS:
            for blocks in (self._multiprocessors * each for each in _BLOCKS_PER_SM):
                arguments = (data, as_count(whole // 16), self._sink.data_ptr())
                name = f"loads, {blocks} × {threads} threads"
                found[name] = functools.partial(self._launch, self._loads, blocks, threads, arguments, 0)
        if self._has_bulk:
            arguments = (data, as_count(whole // _RING_BYTES))
            shared = _RING_STAGES * _RING_BYTES
            found["bulk"] = functools.partial(
                self._launch, self._bulk, self._multiprocessors, 32, arguments, shared
            )
        return found


def read_gbps(device: Any, num_bytes: int = 1 << 29) -> float:
    """GB/s of the fastest read of so many bytes. Raises ImportError without CuPy."""
    floor, clock = Floor(device, num_bytes), GpuClock(device)
    return num_bytes / min(clock.turn(call)(0) for call in floor.reads(num_bytes).values()) / 1e3

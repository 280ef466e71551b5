// Runs one plan on the GPU over tensors in host memory: everything goes up, the kernel runs, O and
// LSE come back. For tests and trials; nothing stays on the device.
#pragma once

#include <vector>

#include "device/cuda/driver.h"
#include "plan/planner.h"
#include "raddle/engine/kernel/mma/launch.h"
#include "raddle/layout.h"
#include "raddle/tensor.h"

namespace raddle::cuda {

/// Memory of the host that holds all elements of a tensor.
struct HostSpan {
  void* data = nullptr;
  std::size_t bytes = 0;
};

/// From a tensor's first element to its last; strides are at least 0.
HostSpan span_of(const TensorRef& tensor);

/// A captured tensor that a composition's struct points to.
struct CapturedSpan {
  std::size_t offset;  ///< of the pointer in the struct
  const void* data;
  std::size_t bytes;
};

struct HostRun {
  const Layout* layout;
  const PlanArrays* plan;
  /// The kernel's parameter but for what this file fills in: layout, plan, scratch, addresses.
  /// Views point to host memory.
  MmaLaunch launch;
  std::vector<HostSpan> k, v;  ///< one a level
  HostSpan q, out, lse;
  std::vector<u8> variant;             ///< the composition's struct
  std::vector<CapturedSpan> captured;  ///< what it points to
  i32 dim_vo;
  i32 shared_bytes;
};

/// Name of the kernel in a module.
constexpr const char* kernel_name = "raddle_attention";

/// Uploads, launches one block a worker, waits, downloads O and LSE.
void run(const Module& module, const HostRun& run);

}  // namespace raddle::cuda

#include "backend/cuda/sample.h"

#include "device/cuda/module.h"
#include "jit/made_once.h"
#include "jit/sample_kernel.h"
#include "raddle/engine/kernel/sampling/launch.h"

namespace raddle::cuda {
namespace {

/// Compiled or found, and loaded: once per process and device.
const Kernel& loaded(const Device& device, DType dtype) {
  static auto& all = *new jit::MadeOnce<Kernel>;
  const std::string key =
      std::to_string(device.ordinal()) + " " + std::to_string(static_cast<int>(dtype));
  return all.get(key, [&] {
    return new Kernel(device, jit::sample_cubin(dtype, device.info().arch), jit::sample_entry_point,
                      jit::sample_entry_point, sampling::num_threads, sampling::shared_bytes);
  });
}

}  // namespace

void sample(DeviceId device, void* stream, const SampleView& view, DType dtype) {
  const Device& gpu = Device::get(device.ordinal);
  const ContextScope scope(gpu);
  SampleView parameter = view;
  void* params[] = {&parameter};
  loaded(gpu, dtype).launch(view.num_rows, stream, params);
}

jit::Cubin compile_sample(DType dtype, const std::string& arch) {
  return jit::compile_sample(dtype, arch);
}

}  // namespace raddle::cuda

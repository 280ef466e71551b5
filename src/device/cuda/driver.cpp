#include "device/cuda/driver.h"

#include "raddle/error.h"

namespace raddle::cuda {
namespace {

Driver load() {
  Driver d{};
  std::string reasons;
  d.library = SharedLibrary::open("libcuda.so.1", &reasons);
  if (!d.library)
    fail<DeviceError>("no CUDA driver can be loaded; install NVIDIA's driver:", reasons);
  std::string missing;
  const auto find = [&](auto*& function, const char* symbol) {
    d.library.find(function, symbol);
    if (!function) missing += std::string(missing.empty() ? "" : ", ") + symbol;
  };
  find(d.init, "cuInit");
  find(d.driver_version, "cuDriverGetVersion");
  find(d.device_count, "cuDeviceGetCount");
  find(d.device_get, "cuDeviceGet");
  find(d.device_name, "cuDeviceGetName");
  find(d.device_attribute, "cuDeviceGetAttribute");
  find(d.retain_context, "cuDevicePrimaryCtxRetain");
  find(d.current_context, "cuCtxGetCurrent");
  find(d.current_device, "cuCtxGetDevice");
  find(d.push_context, "cuCtxPushCurrent_v2");
  find(d.pop_context, "cuCtxPopCurrent_v2");
  find(d.memory_info, "cuMemGetInfo_v2");
  find(d.allocate, "cuMemAlloc_v2");
  find(d.release, "cuMemFree_v2");
  find(d.allocate_pinned, "cuMemHostAlloc");
  find(d.copy_to_device, "cuMemcpyHtoDAsync_v2");
  find(d.copy_from_device, "cuMemcpyDtoHAsync_v2");
  find(d.capture_info, "cuStreamGetCaptureInfo_v2");
  find(d.set_bytes, "cuMemsetD8Async");
  find(d.load_module, "cuModuleLoadData");
  find(d.get_function, "cuModuleGetFunction");
  find(d.set_function_attribute, "cuFuncSetAttribute");
  find(d.get_function_attribute, "cuFuncGetAttribute");
  find(d.launch, "cuLaunchKernel");
  find(d.create_stream, "cuStreamCreate");
  find(d.create_event, "cuEventCreate");
  find(d.destroy_event, "cuEventDestroy_v2");
  find(d.record_event, "cuEventRecord");
  find(d.query_event, "cuEventQuery");
  find(d.synchronize_event, "cuEventSynchronize");
  find(d.wait_event, "cuStreamWaitEvent");
  find(d.is_capturing, "cuStreamIsCapturing");
  find(d.exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
  find(d.error_name, "cuGetErrorName");
  find(d.error_string, "cuGetErrorString");
  d.library.find(d.encode_tensor_map, "cuTensorMapEncodeTiled");
  d.library.find(d.launch_with, "cuLaunchKernelEx");
  if (!missing.empty())
    fail<DeviceError>("libcuda.so.1 lacks ", missing,
                      "; expected the driver of CUDA 11 or later: update NVIDIA's driver");
  return d;
}

}  // namespace

const Driver& driver() {
  // Never unloaded: what is freed while the process ends still calls it.
  static const Driver& loaded = *new Driver(load());
  return loaded;
}

std::string error_text(int result) {
  const char *name = nullptr, *text = nullptr;
  driver().error_name(result, &name);
  driver().error_string(result, &text);
  return std::string(name ? name : "unknown error") + " (" +
         (text ? text : std::to_string(result)) + ")";
}

void raise(int result, const std::string& what) {
  fail<DeviceError>("CUDA: ", what, " failed: ", error_text(result));
}

}  // namespace raddle::cuda

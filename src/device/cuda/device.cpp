#include "device/cuda/device.h"

#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>

#include "device/cuda/driver.h"
#include "raddle/error.h"

namespace raddle::cuda {
namespace {

/// The driver, started.
const Driver& started() {
  static const Driver& driver_ = [&]() -> const Driver& {
    check(driver().init(0), "cuInit");
    return driver();
  }();
  return driver_;
}

i32 device_count() {
  int count = 0;
  check(started().device_count(&count), "counting GPUs");
  return count;
}

int handle_of(i32 ordinal) {
  int device = 0;
  check(started().device_get(&device, ordinal), "opening a GPU");
  return device;
}

DeviceInfo info_of(i32 ordinal) {
  const int device = handle_of(ordinal);
  const auto attribute = [device](int which) {
    int value = 0;
    check(started().device_attribute(&value, which, device), "reading a device attribute");
    return value;
  };
  char name[256] = {};
  check(started().device_name(name, sizeof(name), device), "reading a GPU's name");
  DeviceInfo info;
  info.name = name;
  info.compute = 10 * attribute(compute_major) + attribute(compute_minor);
  info.arch = "sm_" + std::to_string(info.compute) + (info.compute >= 90 ? "a" : "");
  info.num_multiprocessors = attribute(multiprocessor_count);
  info.max_shared_bytes = attribute(max_shared_optin);
  return info;
}

}  // namespace

std::vector<DeviceInfo> devices() {
  std::vector<DeviceInfo> all;
  for (i32 i = 0; i < device_count(); ++i) all.push_back(info_of(i));
  return all;
}

std::string target_of(const DeviceInfo& info) {
  constexpr i32 architectures[] = {75, 80, 86, 87, 89, 90, 100, 103, 110, 120, 121};
  const char* value = std::getenv("RADDLE_CUDA_ARCH");
  const std::string wanted = value ? value : "";
  if (wanted.empty() || wanted == std::to_string(info.compute)) return info.arch;
  std::string expected;
  for (const i32 arch : architectures) {
    if (arch >= info.compute) break;
    if (wanted == std::to_string(arch)) return "compute_" + wanted;
    expected += std::to_string(arch) + ", ";
  }
  fail<ValueError>("RADDLE_CUDA_ARCH is \"", wanted, "\"; expected one of ", expected, info.compute,
                   " on ", info.name);
}

int driver_version_number() {
  int version = 0;
  check(driver().driver_version(&version), "reading the driver's version");
  return version;
}

std::string driver_version() {
  const int version = driver_version_number();
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

i32 current_ordinal() {
  // Without a context the question is an error, which is none of the user's when a tool counts it.
  void* context = nullptr;
  int current = 0;
  if (started().current_context(&context) != 0 || !context) return 0;
  if (driver().current_device(&current) != 0) return 0;
  for (i32 i = 0; i < device_count(); ++i)
    if (handle_of(i) == current) return i;
  return 0;
}

Device::Device(i32 ordinal) : ordinal_(ordinal), info_(info_of(ordinal)) {
  if (info_.compute < oldest_compute)
    fail<DeviceError>("device is 'cuda:", ordinal, "', ", info_.name, " of architecture ",
                      info_.arch, "; expected sm_", oldest_compute, " or later");
  info_.arch = target_of(info_);
  check(driver().retain_context(&context_, handle_of(ordinal)), "opening a context");
}

const Device& Device::get(i32 ordinal) {
  static std::mutex mutex;
  static std::map<i32, std::unique_ptr<const Device>>& open =
      *new std::map<i32, std::unique_ptr<const Device>>;
  const std::lock_guard lock(mutex);
  std::unique_ptr<const Device>& device = open[ordinal];
  if (device) return *device;
  const i32 count = device_count();
  if (count == 0) fail<DeviceError>("there is a CUDA driver but no GPU that it may use");
  if (ordinal < 0 || ordinal >= count)
    fail<DeviceError>("CUDA: device is 'cuda:", ordinal, "'; expected 'cuda:0'",
                      count > 1 ? " to 'cuda:" + std::to_string(count - 1) + "'" : "",
                      ": GPUs that the driver shows: ", count);
  device.reset(new Device(ordinal));
  return *device;
}

namespace {
thread_local const Device* scoped = nullptr;  // whose scope is the innermost open one
}  // namespace

ContextScope::ContextScope(const Device& device) : outer_(scoped) {
  if (outer_ == &device) return;
  // Mostly it is current already: reading that is the cheapest call there is.
  void* current = nullptr;
  if (driver().current_context(&current) != 0 || current != device.context()) {
    check(driver().push_context(device.context()), "making a GPU current");
    pushed_ = true;
  }
  scoped = &device;
}

ContextScope::~ContextScope() {
  scoped = outer_;
  void* before = nullptr;
  if (pushed_) driver().pop_context(&before);
}

}  // namespace raddle::cuda

#include "device/cuda/driver.h"

#include "device/library.h"
#include "raddle/error.h"

namespace raddle::cuda {
namespace {

/// The functions used, with the types of cuda.h (which users do not have).
struct Driver {
  SharedLibrary library;
  int (*init)(unsigned flags);
  int (*driver_version)(int*);
  int (*device_count)(int*);
  int (*device_get)(int* device, int ordinal);
  int (*device_name)(char*, int length, int device);
  int (*device_attribute)(int*, int attribute, int device);
  int (*retain_context)(void** context, int device);
  int (*push_context)(void*);
  int (*pop_context)(void**);
  int (*allocate)(u64*, std::size_t);
  int (*release)(u64);
  int (*copy_to_device)(u64, const void*, std::size_t);
  int (*copy_to_host)(void*, u64, std::size_t);
  int (*set_bytes)(u64, unsigned char, std::size_t);
  int (*load_module)(void**, const void* image);
  int (*unload_module)(void*);
  int (*get_function)(void**, void* module, const char* name);
  int (*set_function_attribute)(void* function, int attribute, int value);
  int (*launch)(void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                unsigned shared_bytes, void* stream, void** params, void** extra);
  int (*create_stream)(void**, unsigned flags);
  int (*destroy_stream)(void*);
  int (*synchronize_stream)(void*);
  int (*error_name)(int, const char**);
  int (*error_string)(int, const char**);
};

Driver load() {
  Driver d{};
  std::string reasons;
  d.library = SharedLibrary::open("libcuda.so.1", &reasons);
  if (!d.library) fail<DeviceError>("no CUDA driver can be loaded:", reasons);
  const SharedLibrary& lib = d.library;
  lib.find(d.init, "cuInit");
  lib.find(d.driver_version, "cuDriverGetVersion");
  lib.find(d.device_count, "cuDeviceGetCount");
  lib.find(d.device_get, "cuDeviceGet");
  lib.find(d.device_name, "cuDeviceGetName");
  lib.find(d.device_attribute, "cuDeviceGetAttribute");
  lib.find(d.retain_context, "cuDevicePrimaryCtxRetain");
  lib.find(d.push_context, "cuCtxPushCurrent_v2");
  lib.find(d.pop_context, "cuCtxPopCurrent_v2");
  lib.find(d.allocate, "cuMemAlloc_v2");
  lib.find(d.release, "cuMemFree_v2");
  lib.find(d.copy_to_device, "cuMemcpyHtoD_v2");
  lib.find(d.copy_to_host, "cuMemcpyDtoH_v2");
  lib.find(d.set_bytes, "cuMemsetD8_v2");
  lib.find(d.load_module, "cuModuleLoadData");
  lib.find(d.unload_module, "cuModuleUnload");
  lib.find(d.get_function, "cuModuleGetFunction");
  lib.find(d.set_function_attribute, "cuFuncSetAttribute");
  lib.find(d.launch, "cuLaunchKernel");
  lib.find(d.create_stream, "cuStreamCreate");
  lib.find(d.destroy_stream, "cuStreamDestroy_v2");
  lib.find(d.synchronize_stream, "cuStreamSynchronize");
  lib.find(d.error_name, "cuGetErrorName");
  lib.find(d.error_string, "cuGetErrorString");
  const bool whole = d.init && d.driver_version && d.device_count && d.device_get &&
                     d.device_name && d.device_attribute && d.retain_context && d.push_context &&
                     d.pop_context && d.allocate && d.release && d.copy_to_device &&
                     d.copy_to_host && d.set_bytes && d.load_module && d.unload_module &&
                     d.get_function && d.set_function_attribute && d.launch && d.create_stream &&
                     d.destroy_stream && d.synchronize_stream && d.error_name && d.error_string;
  if (!whole) fail<DeviceError>("libcuda.so.1 lacks functions that every driver since CUDA 4 has");
  return d;
}

const Driver& driver() {
  // Never unloaded: what is freed while the process ends still calls it.
  static const Driver& loaded = *new Driver(load());
  return loaded;
}

void check(int result, const std::string& what) {
  if (result == 0) return;
  const char *name = nullptr, *text = nullptr;
  driver().error_name(result, &name);
  driver().error_string(result, &text);
  fail<DeviceError>("CUDA: ", what, " failed: ", name ? name : "unknown error", " (",
                    text ? text : std::to_string(result), ")");
}

// Attributes of cuda.h.
constexpr int multiprocessor_count = 16, compute_major = 75, compute_minor = 76,
              max_shared_optin = 97, function_max_dynamic_shared = 8;

int attribute(int which, int device) {
  int value = 0;
  check(driver().device_attribute(&value, which, device), "reading a device attribute");
  return value;
}

}  // namespace

Device::Device() {
  check(driver().init(0), "cuInit");
  int count = 0, device = 0;
  check(driver().device_count(&count), "counting GPUs");
  if (count == 0) fail<DeviceError>("there is a CUDA driver but no GPU that it may use");
  check(driver().device_get(&device, 0), "opening GPU 0");
  char name[256] = {};
  check(driver().device_name(name, sizeof(name), device), "reading the GPU's name");
  name_ = name;
  const int major = attribute(compute_major, device), minor = attribute(compute_minor, device);
  // The "a" features of an architecture exist from Hopper on.
  arch_ = "sm_" + std::to_string(major) + std::to_string(minor) + (major >= 9 ? "a" : "");
  num_multiprocessors_ = attribute(multiprocessor_count, device);
  max_shared_bytes_ = attribute(max_shared_optin, device);
  check(driver().driver_version(&driver_version_), "reading the driver's version");
  check(driver().retain_context(&context_, device), "opening a context on " + name_);
}

const Device& Device::instance() {
  static const Device device;
  return device;
}

std::string Device::driver_version() const {
  return std::to_string(driver_version_ / 1000) + "." + std::to_string(driver_version_ % 1000 / 10);
}

ContextScope::ContextScope() {
  check(driver().push_context(Device::instance().context()), "making the context current");
}
ContextScope::~ContextScope() {
  void* before = nullptr;
  driver().pop_context(&before);
}

Buffer::Buffer(std::size_t bytes) : bytes_(bytes) {
  // An empty buffer has an address too: kernels take null for "not given".
  check(driver().allocate(&address_, bytes ? bytes : 16),
        "allocating " + std::to_string(bytes) + " bytes");
}
Buffer::~Buffer() {
  if (address_) driver().release(address_);
}
void Buffer::upload(const void* from, std::size_t bytes) const {
  if (bytes) check(driver().copy_to_device(address_, from, bytes), "copying to the GPU");
}
void Buffer::download(void* to, std::size_t bytes) const {
  if (bytes) check(driver().copy_to_host(to, address_, bytes), "copying from the GPU");
}
void Buffer::fill(u8 value) const {
  if (bytes_) check(driver().set_bytes(address_, value, bytes_), "filling device memory");
}

Stream::Stream() {
  // Ordered with the synchronous copies, which are on the default stream.
  constexpr unsigned blocking = 0;
  check(driver().create_stream(&handle_, blocking), "creating a stream");
}
Stream::~Stream() {
  if (handle_) driver().destroy_stream(handle_);
}
void Stream::synchronize() const {
  check(driver().synchronize_stream(handle_), "running the kernel");
}

Module::Module(const std::string& cubin) {
  check(driver().load_module(&handle_, cubin.data()), "loading the kernel");
}
Module::~Module() {
  if (handle_) driver().unload_module(handle_);
}

void Module::launch(const char* kernel, i32 num_blocks, i32 num_threads, i32 shared_bytes,
                    const Stream& stream, void** params) const {
  void* function = nullptr;
  check(driver().get_function(&function, handle_, kernel), std::string("finding ") + kernel);
  check(driver().set_function_attribute(function, function_max_dynamic_shared, shared_bytes),
        "asking for " + std::to_string(shared_bytes) + " bytes of shared memory");
  check(driver().launch(function, static_cast<unsigned>(num_blocks), 1, 1,
                        static_cast<unsigned>(num_threads), 1, 1,
                        static_cast<unsigned>(shared_bytes), stream.handle(), params, nullptr),
        "launching the kernel");
}

}  // namespace raddle::cuda

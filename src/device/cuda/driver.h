// The CUDA driver's functions, loaded when first needed (libcuda.so.1), never linked. Types are
// those of cuda.h, which users do not have. Only this folder includes this file.
#pragma once

#include <cstddef>
#include <string>

#include "device/library.h"
#include "raddle/engine/core/config.h"

namespace raddle::cuda {

/// CUlaunchAttribute: its value is a union of 64 bytes, of which an int stands first.
struct LaunchAttribute {
  int id;
  alignas(8) int value;
  int rest[15];
};
/// CUlaunchConfig.
struct LaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  const LaunchAttribute* attributes;
  unsigned num_attributes;
};

struct Driver {
  SharedLibrary library;
  int (*init)(unsigned flags);
  int (*driver_version)(int*);
  int (*device_count)(int*);
  int (*device_get)(int* device, int ordinal);
  int (*device_name)(char*, int length, int device);
  int (*device_attribute)(int*, int attribute, int device);
  int (*retain_context)(void** context, int device);
  int (*current_context)(void**);
  int (*current_device)(int*);
  int (*push_context)(void*);
  int (*pop_context)(void**);
  int (*memory_info)(std::size_t* free, std::size_t* total);
  int (*allocate)(u64*, std::size_t);
  int (*release)(u64);
  int (*allocate_pinned)(void**, std::size_t, unsigned flags);
  int (*copy_to_device)(u64, const void*, std::size_t, void* stream);
  int (*copy_from_device)(void*, u64, std::size_t, void* stream);
  int (*set_bytes)(u64, unsigned char, std::size_t, void* stream);
  int (*load_module)(void**, const void* image);
  int (*get_function)(void**, void* module, const char* name);
  int (*set_function_attribute)(void* function, int attribute, int value);
  int (*get_function_attribute)(int* value, int attribute, void* function);
  int (*launch)(void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                unsigned shared_bytes, void* stream, void** params, void** extra);
  /// Null in drivers older than CUDA 11.8.
  int (*launch_with)(const LaunchConfig*, void* function, void** params, void** extra);
  int (*create_stream)(void**, unsigned flags);
  int (*create_event)(void**, unsigned flags);
  int (*destroy_event)(void*);
  int (*record_event)(void* event, void* stream);
  int (*query_event)(void*);
  int (*synchronize_event)(void*);
  int (*wait_event)(void* stream, void* event, unsigned flags);
  int (*is_capturing)(void* stream, int* status);
  int (*capture_info)(void* stream, int* status, u64* id, void* graph, void* nodes, void* count);
  int (*exchange_capture_mode)(int* mode);
  /// Null in drivers older than CUDA 12.
  int (*encode_tensor_map)(void* map, int type, unsigned rank, u64 data, const u64* size,
                           const u64* stride, const unsigned* box, const unsigned* element_stride,
                           int interleave, int swizzle, int promotion, int fill);
  int (*error_name)(int, const char**);
  int (*error_string)(int, const char**);
};

/// The driver of this machine. Raises DeviceError where there is none, naming what is missing.
const Driver& driver();

/// "CUDA_ERROR_OUT_OF_MEMORY (out of memory)".
std::string error_text(int result);

/// Raises DeviceError with the driver's own words: "CUDA: <what> failed: …".
[[noreturn]] void raise(int result, const std::string& what);
inline void check(int result, const char* what) {
  if (result != 0) [[unlikely]]
    raise(result, what);
}

static_assert(sizeof(LaunchAttribute) == 72 && sizeof(LaunchConfig) == 56);

// Results and attributes of cuda.h.
constexpr int out_of_memory = 2, not_ready = 600, capture_implicit = 906;
constexpr int multiprocessor_count = 16, compute_major = 75, compute_minor = 76,
              max_shared_optin = 97, function_max_threads = 0, function_max_dynamic_shared = 8,
              launch_in_clusters = 4, launch_may_begin_early = 6;

}  // namespace raddle::cuda

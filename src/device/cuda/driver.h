// The CUDA driver: loaded when first needed (libcuda.so.1), never linked. Every failure is an error
// with the driver's own text.
#pragma once

#include <cstddef>
#include <string>
#include <utility>

#include "raddle/engine/core/config.h"

namespace raddle::cuda {

/// The first GPU of the process. Its primary context is kept for the life of the process and is the
/// one that other libraries use too.
class Device {
 public:
  /// Raises DeviceError where there is no driver or no GPU.
  static const Device& instance();

  const std::string& name() const { return name_; }
  /// "sm_90a": what kernels are compiled for.
  const std::string& arch() const { return arch_; }
  i32 num_multiprocessors() const { return num_multiprocessors_; }
  i32 max_shared_bytes() const { return max_shared_bytes_; }
  /// "13.0": the newest CUDA that the driver runs.
  std::string driver_version() const;
  void* context() const { return context_; }

 private:
  Device();
  std::string name_, arch_;
  i32 num_multiprocessors_ = 0, max_shared_bytes_ = 0, driver_version_ = 0;
  void* context_ = nullptr;
};

/// Makes the device's context current on this thread, and the one before it again at the end.
class ContextScope {
 public:
  ContextScope();
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;
};

/// Device memory. Needs a ContextScope, as all that follows.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::size_t bytes);
  Buffer(Buffer&& other) noexcept
      : address_(std::exchange(other.address_, 0)), bytes_(other.bytes_) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(address_, other.address_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Buffer();

  void* data() const { return reinterpret_cast<void*>(address_); }
  std::size_t bytes() const { return bytes_; }
  void upload(const void* from, std::size_t bytes) const;
  void download(void* to, std::size_t bytes) const;
  void fill(u8 value) const;

 private:
  u64 address_ = 0;
  std::size_t bytes_ = 0;
};

class Stream {
 public:
  Stream();
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  void* handle() const { return handle_; }
  /// Waits for all that was launched; raises what went wrong on the way.
  void synchronize() const;

 private:
  void* handle_ = nullptr;
};

/// A loaded cubin.
class Module {
 public:
  explicit Module(const std::string& cubin);
  ~Module();
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  /// Launches `kernel` with one parameter list and waits for nothing.
  void launch(const char* kernel, i32 num_blocks, i32 num_threads, i32 shared_bytes,
              const Stream& stream, void** params) const;

 private:
  void* handle_ = nullptr;
};

}  // namespace raddle::cuda

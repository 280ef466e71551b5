// Streams are the caller's, and only handles here; events say how far one has come.
#pragma once

#include <utility>

#include "raddle/engine/core/config.h"

namespace raddle::cuda {

/// A CUstream, or null for the default one. torch's and the runtime API's are the same handles.
using StreamHandle = void*;

/// Whether the stream's work is being recorded for a graph instead of run.
bool is_capturing(StreamHandle stream);

/// A number of the capture that records the stream's work; 0: it is run.
u64 capture_of(StreamHandle stream);

/// A point in a stream's work.
class Event {
 public:
  Event();
  ~Event();
  Event(Event&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Event& operator=(Event&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }

  void record(StreamHandle stream) const;
  /// Whether the work before it is done.
  bool has_passed() const;
  /// Waits on the host.
  void synchronize() const;
  /// Work that `stream` is given from now on starts after it; the host does not wait.
  void delay(StreamHandle stream) const;

 private:
  void* handle_ = nullptr;
};

/// While another thread captures a graph, the driver refuses allocations and queries of all
/// threads, since they might belong to it. Ours never do: in this scope it allows them. Scopes may
/// nest.
class OutsideCapture {
 public:
  OutsideCapture();
  ~OutsideCapture();
  OutsideCapture(const OutsideCapture&) = delete;
  OutsideCapture& operator=(const OutsideCapture&) = delete;

 private:
  int mode_;
};

}  // namespace raddle::cuda

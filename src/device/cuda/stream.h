// Streams are the caller's, and only handles here; events say how far one has come. A caller may
// destroy a stream at any time, and nothing may be asked of a destroyed one: a handle is used in
// calls that name it, and is a mere number afterwards.
#pragma once

#include <atomic>
#include <mutex>
#include <optional>
#include <utility>

#include "raddle/engine/core/config.h"

namespace raddle::cuda {

/// A CUstream, or null for the default one. torch's and the runtime API's are the same handles.
using StreamHandle = void*;

/// Which stream a handle means. That of CUDA's per-thread default stream (2) is another one in each
/// thread; its number here is never given again.
struct StreamId {
  StreamHandle handle = nullptr;
  u64 thread = 0;  ///< 0 for streams of all threads
  bool operator==(const StreamId&) const = default;
};
/// Of a handle that this thread was given.
StreamId id_of(StreamHandle stream);

/// Whether the stream's work is being recorded for a graph instead of run. Raises ValueError for
/// the default stream where another one that it waits for is captured: any work on it would end
/// that capture.
bool is_capturing(StreamHandle stream);

/// Before work is given to a stream: raises ValueError as is_capturing() does.
void check_takes_work(StreamHandle stream);

/// Whether an event that is recorded on the stream now says something of its work: it is not being
/// captured, nor is another one that it waits for.
bool can_be_marked(StreamHandle stream);

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

/// How far one stream has come with work on memory that was given back since. Whoever gives memory
/// back takes a ticket; the next call that names the stream marks its end, for all tickets so far.
/// Until then nothing is known, and where the stream was destroyed, nothing ever is.
class StreamProgress {
 public:
  explicit StreamProgress(StreamId id) : id_(id) {}
  const StreamId& id() const { return id_; }

  /// A ticket for all work that the stream was given so far.
  u64 take_ticket() { return ++tickets_; }
  /// In a call that names the stream, before its own work: marks the work before, if there are
  /// tickets for it.
  void mark();
  /// Work that `later` is given from now on starts after the work of a ticket. Returns false where
  /// that has no mark.
  bool delay(StreamHandle later, u64 ticket) const;
  /// Whether the work of a ticket has a mark.
  bool has_mark(u64 ticket) const;

 private:
  const StreamId id_;
  std::atomic<u64> tickets_ = 0, marked_ = 0;
  mutable std::mutex mutex_;
  std::optional<Event> event_;
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

// Compilations on threads of their own. A caller may wait for one later, or never.
#pragma once

#include <atomic>
#include <functional>
#include <memory>

namespace raddle::jit {

/// Shared between a compilation and the callers that wait for it.
struct Watch {
  std::atomic<bool> stop = false;  ///< no caller wants it any more: it raises CompileError soon
  std::atomic<bool> compiling = false;  ///< it has begun, and does not wait for another process
};

/// Runs `work`, which raises nothing, on a thread of its own.
void in_background(std::shared_ptr<Watch> watch, std::function<void()> work);

/// Stops all compilations and waits until they have ended. For a process that is about to end: the
/// end destroys what a compiler uses, and one that still runs crashes, or takes all memory.
void stop_background();

/// Registers stop_background for the end of the program. What is registered last ends first, so
/// call this when everything that the work uses has registered itself. Does nothing where the
/// program has promised to call stop_background itself, as Python's package does: it ends before
/// any library.
void stop_at_exit();
void promise_to_stop();
bool is_promised_to_stop();

}  // namespace raddle::jit

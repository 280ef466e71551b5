// Compilations on threads of their own, which somebody waits for later, or nobody.
#pragma once

#include <atomic>
#include <functional>
#include <memory>

namespace raddle::jit {

/// What a compilation and those who wait for it tell each other.
struct Watch {
  std::atomic<bool> stop = false;       ///< nobody wants it any more: it raises CompileError soon
  std::atomic<bool> compiling = false;  ///< it has begun, and does not wait for another process
};

/// Runs `work`, which raises nothing, on a thread of its own.
void in_background(std::shared_ptr<Watch> watch, std::function<void()> work);

/// Stops all that was started and waits until it has ended. For a process that is about to end:
/// what a compiler uses goes then, and one that still works crashes, or takes all memory.
void stop_background();

/// Has the end of the program stop what was started. What is registered last ends first: to be
/// called when all that the work uses has registered itself. Nothing where the program has promised
/// to call stop_background, as Python's package does, which ends before any library.
void stop_at_exit();
void promise_to_stop();
bool is_promised_to_stop();

}  // namespace raddle::jit

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
/// what a compiler uses goes then. The end of the program does so, too, but other libraries may
/// have ended before.
void stop_background();

}  // namespace raddle::jit

// The pause of a spinning loop.
#pragma once

#include "raddle/engine/core/config.h"

RADDLE_ENGINE_BEGIN

namespace simd {

/// Tells the core that this is a spinning loop: it saves power, and leaves the core's other thread
/// more of it.
RADDLE_FN void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace simd

RADDLE_ENGINE_END

// How one kernel of a stream follows another: the launch of the second may let its blocks begin
// while the first still runs (programmatic dependent launch, from compute capability 9.0 on).
#pragma once

#include "raddle/engine/core/config.h"

RADDLE_ENGINE_BEGIN

namespace ptx {

/// Waits until all work before this kernel in its stream has ended and its writes are visible. A
/// kernel that is launched to begin early touches no memory of the device before, other than to
/// prefetch it. Does nothing where the kernel began when that work had ended.
RADDLE_DEVICE void wait_for_earlier_work() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Lets the stream's next kernel begin, if it may begin early, once all blocks of this one have
/// called this or ended. What it does before it waits costs no time then.
RADDLE_DEVICE void let_next_kernel_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace ptx

RADDLE_ENGINE_END

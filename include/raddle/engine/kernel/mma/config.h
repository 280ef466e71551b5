// How large the mma.sync kernel's tiles and rings are: a pure function of head dimensions and
// architecture, so that a kernel can be compiled, and a plan made, where that GPU is not.
#pragma once

#include "raddle/engine/core/config.h"

namespace raddle::mma {

struct KernelConfig {
  i32 short_rows;    ///< Tq of short queries: every warp computes them against keys of its own
  i32 long_rows;     ///< Tq of long queries: every warp computes rows of its own
  i32 short_stages;  ///< KV tiles of short queries in shared memory
  i32 long_stages;
  i32 shared_bytes;  ///< dynamic shared memory of a block
  i32 blocks_per_multiprocessor;
};

}  // namespace raddle::mma

// What the host knows of a GPU kernel before it is compiled: its family, and how large its tiles
// are and what it takes of a multiprocessor.
#pragma once

#include "raddle/engine/core/config.h"

namespace raddle {

/// A folder of kernel/ with kernels of its own.
enum class KernelFamily : i32 { mma, wgmma };
constexpr i32 num_families = 2;

struct KernelConfig {
  i32 short_rows;   ///< Tq of short queries: each warp computes all rows against its own keys
  i32 short_keys;   ///< Tkv of short queries
  i32 long_rows;    ///< Tq of long queries: each warp computes its own rows against all keys
  i32 long_keys;    ///< Tkv of long queries
  i32 short_slots;  ///< slots of the ring: each holds K or V of a tile, loaded or being loaded
  i32 long_slots;
  i32 shared_bytes;               ///< dynamic shared memory of a worker's team
  i32 blocks_per_multiprocessor;  ///< 0: no tiles fit
  i32 team_threads;               ///< threads that compute a worker's queue together
  i32 most_teams;                 ///< teams in a block
};

}  // namespace raddle

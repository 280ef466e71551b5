// How large the mma.sync kernel's tiles and rings are: a pure function of head dimensions and
// architecture, so that a kernel can be compiled, and a plan made, where that GPU is not.
#pragma once

#include "raddle/engine/tile/shared_rows.h"

RADDLE_ENGINE_BEGIN

namespace mma {

struct KernelConfig {
  i32 short_rows;    ///< Tq of short queries: every warp has keys of its own
  i32 long_rows;     ///< Tq of long queries: every warp has rows of its own
  i32 long_keys;     ///< Tkv of long queries
  i32 short_stages;  ///< KV tiles of short queries that are in shared memory, or on their way
  i32 long_stages;
  i32 shared_bytes;  ///< dynamic shared memory of a block
  i32 blocks_per_multiprocessor;
};

constexpr i32 num_warps = 4;
constexpr i32 num_threads = 32 * num_warps;
constexpr i32 short_rows = 16;
constexpr i32 short_keys = 16 * num_warps;  ///< Tkv of short queries
constexpr i32 max_stages = 6;
constexpr i32 slab_columns = 64;  ///< of outputs that warps add up at a time,
constexpr i32 slab_pitch = slab_columns + 4;
constexpr i32 slab_rows = 8;  ///< and rows

/// Bytes of a row of Q, K or V in shared memory.
RADDLE_FN constexpr i32 row_bytes(i32 dim) {
  const i32 chunks = 2 * ceil_div(dim, 16);
  return 16 * (chunks % 8 == 0 ? chunks : chunks + 1);
}

/// Shared memory of a block for a tile shape: Q or O, the ring of KV tiles, what is known of their
/// keys (index, position, column, and a word a warp), and the warps' states on their way to one.
RADDLE_FN constexpr i32 shared_bytes(i32 dim_qk, i32 dim_vo, i32 rows, i32 tile_keys, i32 stages) {
  const i32 stage = tile_keys * (row_bytes(dim_qk) + row_bytes(dim_vo));
  const i32 keys = (stages + 1) * (3 * tile_keys + num_warps) * 4;
  const i32 merge = (num_warps * slab_rows * slab_pitch + 2 * num_warps * short_rows) * 4;
  constexpr i32 walks = num_warps * 176 + 16;
  return rows * row_bytes(max(dim_qk, dim_vo)) + stages * stage + keys + merge + walks;
}

/// Shared memory of a multiprocessor of an architecture (75, 80, 90 …), of which every block takes
/// 1 KiB more than it asks for.
RADDLE_FN constexpr i32 shared_bytes_of(i32 arch) {
  return 1024 * (arch == 75                 ? 64
                 : arch == 80 || arch == 87 ? 164
                 : arch == 86 || arch == 89 ? 100
                 : arch >= 120              ? 100
                                            : 228);
}

/// As many stages, at most `limit`, as fit `bytes`.
RADDLE_FN constexpr i32 stages_in(i32 bytes, i32 dim_qk, i32 dim_vo, i32 rows, i32 keys,
                                  i32 limit) {
  i32 n = 0;
  while (n < limit && shared_bytes(dim_qk, dim_vo, rows, keys, n + 1) <= bytes) ++n;
  return n;
}

/// Two blocks share a multiprocessor where their rings fit, so that one computes while the other
/// waits. A thread's accumulators bound the rows of a tile: 128 rows up to heads 128 wide.
RADDLE_FN constexpr KernelConfig kernel_config(i32 dim_qk, i32 dim_vo, i32 arch) {
  constexpr i32 shapes[][2] = {{128, 64}, {64, 64}, {64, 32}};
  for (i32 blocks = 2; blocks >= 1; --blocks) {
    const i32 bytes = shared_bytes_of(arch) / blocks - 1024;
    const i32 stages = stages_in(bytes, dim_qk, dim_vo, short_rows, short_keys, max_stages);
    for (const auto& [rows, keys] : shapes) {
      const i32 long_stages = stages_in(bytes, dim_qk, dim_vo, rows, keys, 2);
      if (stages == 0 || long_stages == 0 || (rows > 64 && dim_vo > 128)) continue;
      return KernelConfig{short_rows,
                          rows,
                          keys,
                          stages,
                          long_stages,
                          max(shared_bytes(dim_qk, dim_vo, short_rows, short_keys, stages),
                              shared_bytes(dim_qk, dim_vo, rows, keys, long_stages)),
                          blocks};
    }
  }
  return KernelConfig{};
}

static_assert(kernel_config(128, 128, 90).blocks_per_multiprocessor == 2);
static_assert(kernel_config(128, 128, 90).short_stages == 3);
static_assert(kernel_config(256, 256, 86).long_stages == 1,
              "the smallest architecture since sm_80");

}  // namespace mma

RADDLE_ENGINE_END

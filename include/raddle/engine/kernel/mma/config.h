// Sizes of tiles and rings of the mma.sync kernel: a pure function of head dimensions and
// architecture, so that a kernel can be compiled, and a plan made, on a machine without that GPU.
#pragma once

#include "raddle/engine/kernel/gpu/config.h"
#include "raddle/engine/kernel/mma/shared_map.h"

RADDLE_ENGINE_BEGIN

namespace mma {

constexpr i32 most_teams = 2;  ///< teams in a block (warp_states.h)
constexpr i32 max_slots = 8;

/// Shared memory of a multiprocessor of an architecture (75, 80, 90 …).
RADDLE_FN constexpr i32 shared_bytes_of(i32 arch) {
  return 1024 * (arch == 75                 ? 64
                 : arch == 80 || arch == 87 ? 164
                 : arch == 86 || arch == 89 ? 100
                 : arch >= 120              ? 100
                                            : 228);
}

/// Shared memory that a block can ask for where `blocks` blocks share a multiprocessor: from sm_80
/// on each takes 1 KiB more.
RADDLE_FN constexpr i32 shared_bytes_of_block(i32 arch, i32 blocks) {
  return shared_bytes_of(arch) / blocks - (arch >= 80 ? 1024 : 0);
}

/// Bytes that rings leave free in a team's shared memory. Tiles were measured as they are chosen
/// with these: without them, 8-bit heads of 128 would have tiles of 128 rows on sm_80.
constexpr i32 spare_bytes = 128, spare_bytes_scaled = 160;

/// The largest number of slots, at most `limit`, with which a loop's shared memory fits `bytes`.
RADDLE_FN constexpr i32 slots_in(i32 bytes, LoopShape loop, i32 limit) {
  const i32 usable = bytes - (loop.ring.scaled ? spare_bytes_scaled : spare_bytes);
  loop.slots = 0;
  while (loop.slots < limit) {
    ++loop.slots;
    if (SharedMap(loop).end > usable) return loop.slots - 1;
  }
  return limit;
}
/// The slots of a ring of long queries, where K and V have the same number.
RADDLE_FN constexpr i32 long_slots_in(i32 bytes, const LoopShape& loop) {
  return slots_in(bytes, loop, 4) / 2 * 2;
}

/// The configuration of two loops. A block's shared memory serves one after the other.
RADDLE_FN constexpr KernelConfig config_of(const LoopShape& short_loop, const LoopShape& long_loop,
                                           i32 blocks) {
  return {.short_rows = short_loop.rows,
          .short_keys = short_loop.keys,
          .long_rows = long_loop.rows,
          .long_keys = long_loop.keys,
          .short_slots = short_loop.slots,
          .long_slots = long_loop.slots,
          .shared_bytes = round_up(max(SharedMap(short_loop).end, SharedMap(long_loop).end), 128),
          .blocks_per_multiprocessor = blocks,
          .team_threads = num_threads,
          .most_teams = most_teams};
}

/// Two blocks share a multiprocessor where their rings fit, so that one computes while the other
/// waits. Accumulators in registers bound the rows of a tile: 128 rows for heads up to 128 wide. A
/// ring has at least three slots, one in use and two being loaded; the ring of long queries has an
/// even number. On sm_75 loads are synchronous: one slot and small tiles will do.
RADDLE_FN constexpr KernelConfig widened_config(i32 dim_qk, i32 dim_vo, i32 arch, bool scaled) {
  constexpr TileShape long_tiles[] = {{128, 64}, {64, 64}, {64, 32}, {64, 16}};
  const RingRows ring{2, 2, scaled};
  for (i32 blocks = 2; blocks >= 1; --blocks) {
    const i32 bytes = shared_bytes_of_block(arch, blocks);
    const i32 fewest = arch >= 80 || blocks == 2 ? 2 : 1;
    for (i32 least = blocks == 2 ? 3 : 2; least >= fewest; --least) {
      LoopShape short_loop{dim_qk, dim_vo, short_rows, 128, 0, ring};
      short_loop.slots = slots_in(bytes, short_loop, max_slots);
      if (short_loop.slots < least) {
        short_loop.keys = 64;
        short_loop.slots = slots_in(bytes, short_loop, max_slots);
      }
      for (const TileShape& tile : long_tiles) {
        LoopShape long_loop{dim_qk, dim_vo, tile.rows, tile.keys, 0, ring};
        long_loop.slots = long_slots_in(bytes, long_loop);
        if (short_loop.slots < least || long_loop.slots == 0) continue;
        if (tile.rows > 64 && dim_vo > 128) continue;
        return config_of(short_loop, long_loop, blocks);
      }
    }
  }
  return KernelConfig{};
}

/// A ring has at least two slots, one in use and one being loaded. Registers bound the rows of long
/// queries: a thread holds 128 elements of O. Small key tiles beat one block a multiprocessor,
/// because a lone block waits for itself.
RADDLE_FN constexpr KernelConfig wide_head_config(i32 dim_qk, i32 dim_vo, i32 arch, RingRows ring) {
  constexpr TileShape long_tiles[] = {{32, 32}, {32, 16}};
  for (i32 blocks = 2; blocks >= 1; --blocks) {
    const i32 bytes = shared_bytes_of_block(arch, blocks);
    LoopShape short_loop{dim_qk, dim_vo, short_rows, 32, 0, ring};
    short_loop.slots = slots_in(bytes, short_loop, max_slots);
    for (const TileShape& tile : long_tiles) {
      LoopShape long_loop{dim_qk, dim_vo, tile.rows, tile.keys, 0, ring};
      long_loop.slots = slots_in(bytes, long_loop, max_slots);
      if (short_loop.slots < 2 || long_loop.slots < 2) continue;
      return config_of(short_loop, long_loop, blocks);
    }
  }
  return KernelConfig{};
}

/// Only the kernel's compiler knows whether the variant's parts need quantised K or V widened in
/// the ring. So the tiles are always those of 16-bit rows, and so is the memory of a block; rows of
/// bytes give it more slots.
RADDLE_FN constexpr KernelConfig kernel_config(i32 dim_qk, i32 dim_vo, i32 arch,
                                               RingRows ring = {}) {
  if (ring.k_extends_v || is_wide(dim_qk, dim_vo))
    return wide_head_config(dim_qk, dim_vo, arch, {2, 2, ring.scaled, ring.k_extends_v});
  KernelConfig config = widened_config(dim_qk, dim_vo, arch, ring.scaled);
  if (!ring.scaled || config.blocks_per_multiprocessor == 0) return config;
  const i32 bytes = shared_bytes_of_block(arch, config.blocks_per_multiprocessor);
  config.shared_bytes = bytes;
  const LoopShape short_loop{dim_qk, dim_vo, config.short_rows, config.short_keys, 0, ring};
  const LoopShape long_loop{dim_qk, dim_vo, config.long_rows, config.long_keys, 0, ring};
  config.short_slots = slots_in(bytes, short_loop, max_slots);
  config.long_slots = long_slots_in(bytes, long_loop);
  return config;
}

static_assert(kernel_config(128, 128, 90).blocks_per_multiprocessor == 2);
static_assert(kernel_config(128, 128, 90).short_keys == 128);
static_assert(kernel_config(128, 128, 90).short_slots == 3);
static_assert(kernel_config(128, 128, 90).long_slots == 4);
static_assert(kernel_config(256, 256, 86).long_slots == 2, "the smallest architecture since sm_80");
static_assert(kernel_config(64, 64, 75).blocks_per_multiprocessor == 2);
static_assert(kernel_config(256, 256, 75).long_slots == 2);
static_assert(kernel_config(128, 128, 90, {1, 1, true}).short_slots == 5);
static_assert(kernel_config(128, 128, 90, {2, 1, true}).short_slots == 3);
static_assert(kernel_config(256, 256, 86, {2, 2, true}).long_slots == 2);
static_assert(kernel_config(256, 256, 75, {2, 2, true}).long_slots == 2);
static_assert(kernel_config(576, 512, 80).blocks_per_multiprocessor == 1);
static_assert(kernel_config(576, 512, 80).long_keys == 32);
static_assert(kernel_config(576, 512, 89).short_slots == 2);
static_assert(kernel_config(576, 512, 90).blocks_per_multiprocessor == 2);
static_assert(kernel_config(576, 512, 90).long_slots == 3);
static_assert(kernel_config(576, 512, 90, {2, 2, true}).long_slots == 3);
static_assert(kernel_config(576, 512, 89, {2, 2, true}).short_slots == 2);

}  // namespace mma

RADDLE_ENGINE_END

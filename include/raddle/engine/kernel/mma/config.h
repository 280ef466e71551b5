// Sizes of tiles and rings of the mma.sync kernel: a pure function of head dimensions and
// architecture, so that a kernel can be compiled, and a plan made, on a machine without that GPU.
#pragma once

#include "raddle/engine/kernel/gpu/config.h"
#include "raddle/engine/tile/shared_rows.h"

RADDLE_ENGINE_BEGIN

namespace mma {

constexpr i32 num_warps = 4;
constexpr i32 num_threads =
    32 * num_warps;            ///< threads of a team, which computes one worker's queue
constexpr i32 most_teams = 2;  ///< teams in a block (warp_states.h)
constexpr i32 short_rows = 16;
constexpr i32 max_slots = 8;
constexpr i32 slab_columns = 32;  ///< columns of O that the warps of a team add up at a time
constexpr i32 slab_pitch = slab_columns + 4;
constexpr i32 slab_rows = 8;  ///< rows of O that they add up at a time

/// Tq and Tkv.
struct TileRows {
  i32 rows, keys;
};

/// How K and V are stored in the ring: bytes an element, and whether keys have scales.
struct RingRows {
  i32 key_bytes = 2;
  i32 value_bytes = 2;
  bool scaled = false;
};

/// Bytes of a row of Q, K or V in shared memory.
RADDLE_FN constexpr i32 row_bytes(i32 dim, i32 element_bytes = 2) {
  const i32 chunks = 2 * ceil_div(dim * element_bytes, 32);
  return 16 * (chunks % 8 == 0 ? chunks : chunks + 1);
}

/// Number of tables that say where the rows of a tile of long queries lie; one more than needed,
/// because a power of two makes the index cheap.
constexpr i32 found_slots = 4;

/// Number of tiles whose key facts are in shared memory, for a ring of `slots` slots. Short queries
/// keep the facts of tiles whose K has been loaded and whose V is still needed; 3 is rounded up to
/// 4, whose index is cheaper. Long queries keep the facts of tiles that have been found and of the
/// one being computed.
RADDLE_FN constexpr i32 key_slots(i32 rows, i32 slots) {
  if (rows != short_rows) return found_slots;
  return slots / 2 == 2 ? 4 : slots / 2 + 1;
}

RADDLE_FN constexpr i32 barrier_bytes(i32 rows, i32 slots) {
  return 16 * slots + (rows != short_rows ? round_up(8 * found_slots, 16) : 0);
}

/// Shared memory of a block for a tile shape: Q or O, the ring, facts about its keys (index,
/// position, column, two scales, and a word a warp), tables of row addresses, the key source of
/// each warp, barriers, and scratch.
RADDLE_FN constexpr i32 shared_bytes(i32 dim_qk, i32 dim_vo, i32 rows, i32 tile_keys, i32 slots,
                                     RingRows ring = {}) {
  const i32 row = max(row_bytes(dim_qk), row_bytes(dim_vo));
  const i32 ring_row = max(row_bytes(dim_qk, ring.key_bytes), row_bytes(dim_vo, ring.value_bytes));
  const i32 keys = key_slots(rows, slots) * ((ring.scaled ? 5 : 3) * tile_keys + num_warps) * 4;
  const i32 statistics = 2 * num_warps * short_rows * 4;
  const i32 outputs = num_warps * slab_rows * slab_pitch * 4;
  const i32 row_facts = ring.scaled ? 36 : 32;
  const i32 item = row_facts * rows + 4 * num_warps * max(dim_qk, dim_vo) + 32;
  const i32 scratch = max(item, outputs) + statistics;
  const i32 tables = (rows != short_rows ? found_slots : 1) * 16 * tile_keys;
  const i32 sources = num_warps * (ring.scaled ? 224 : 160) + 16;
  return rows * row + slots * tile_keys * ring_row + keys + tables + sources +
         barrier_bytes(rows, slots) + scratch;
}

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

/// The largest number of slots, at most `limit`, that fits `bytes`.
RADDLE_FN constexpr i32 slots_in(i32 bytes, i32 dim_qk, i32 dim_vo, i32 rows, i32 keys, i32 limit,
                                 RingRows ring) {
  i32 n = 0;
  while (n < limit && shared_bytes(dim_qk, dim_vo, rows, keys, n + 1, ring) <= bytes) ++n;
  return n;
}

/// Two blocks share a multiprocessor where their rings fit, so that one computes while the other
/// waits. Accumulators in registers bound the rows of a tile: 128 rows for heads up to 128 wide. A
/// ring has at least three slots, one in use and two being loaded; the ring of long queries has an
/// even number. On sm_75 loads are synchronous: one slot and small tiles will do.
RADDLE_FN constexpr KernelConfig widened_config(i32 dim_qk, i32 dim_vo, i32 arch, bool scaled) {
  constexpr i32 long_shapes[][2] = {{128, 64}, {64, 64}, {64, 32}, {64, 16}};
  const RingRows ring{2, 2, scaled};
  for (i32 blocks = 2; blocks >= 1; --blocks) {
    const i32 bytes = shared_bytes_of_block(arch, blocks);
    const i32 fewest = arch >= 80 || blocks == 2 ? 2 : 1;
    for (i32 least = blocks == 2 ? 3 : 2; least >= fewest; --least) {
      i32 short_keys = 128;
      i32 slots = slots_in(bytes, dim_qk, dim_vo, short_rows, short_keys, max_slots, ring);
      if (slots < least) {
        short_keys = 64;
        slots = slots_in(bytes, dim_qk, dim_vo, short_rows, short_keys, max_slots, ring);
      }
      for (const auto& [rows, keys] : long_shapes) {
        const i32 long_slots = slots_in(bytes, dim_qk, dim_vo, rows, keys, 4, ring) / 2 * 2;
        if (slots < least || long_slots == 0 || (rows > 64 && dim_vo > 128)) continue;
        return KernelConfig{
            short_rows,
            short_keys,
            rows,
            keys,
            slots,
            long_slots,
            round_up(max(shared_bytes(dim_qk, dim_vo, short_rows, short_keys, slots, ring),
                         shared_bytes(dim_qk, dim_vo, rows, keys, long_slots, ring)),
                     128),
            blocks,
            num_threads,
            most_teams};
      }
    }
  }
  return KernelConfig{};
}

/// For wider heads one warp cannot hold a row of O in registers: the warps of a block share rows
/// (wide_queries.h).
constexpr i32 widest_of_a_warp = 256;
RADDLE_FN constexpr bool is_wide(i32 dim_qk, i32 dim_vo) {
  return max(dim_qk, dim_vo) > widest_of_a_warp;
}

/// 16-bit elements in a line of shared memory, 128 bytes. Rows of wide heads are whole lines.
constexpr i32 line = 64;

/// Columns of O that one warp computes.
RADDLE_FN constexpr i32 wide_columns(i32 dim_vo) {
  return round_up(ceil_div(dim_vo, num_warps), line);
}

/// Elements of a row of the ring, which holds K or V.
RADDLE_FN constexpr i32 wide_row(i32 dim_qk, i32 dim_vo) {
  return max(round_up(dim_qk, line), num_warps * wide_columns(dim_vo));
}

/// shared_bytes for wide heads. The warps' parts of the logits, and a row in fp32 a warp for
/// transforms, lie behind Q; where Q stays in registers, they take its place.
RADDLE_FN constexpr i32 wide_shared_bytes(i32 dim_qk, i32 dim_vo, i32 rows, i32 tile_keys,
                                          i32 slots) {
  const i32 queries = 2 * rows * round_up(dim_qk, line);
  const i32 parts = 4 * num_warps * (rows * tile_keys + max(dim_qk, dim_vo));
  const i32 front = rows == short_rows ? max(queries, parts) : queries + parts;
  const i32 ring = slots * tile_keys * 2 * wide_row(dim_qk, dim_vo);
  const i32 keys = slots * (3 * tile_keys + num_warps) * 4;
  const i32 sources = num_warps * 160 + 16;
  return round_up(front, 128) + ring + keys + 16 * tile_keys + sources + 32 * rows + 16;
}

/// The largest number of slots, at most `limit`, that fits `bytes`.
RADDLE_FN constexpr i32 wide_slots_in(i32 bytes, i32 dim_qk, i32 dim_vo, TileRows tile, i32 limit) {
  i32 n = 0;
  while (n < limit && wide_shared_bytes(dim_qk, dim_vo, tile.rows, tile.keys, n + 1) <= bytes) ++n;
  return n;
}

/// A ring has at least two slots, one in use and one being loaded. Registers bound the rows of long
/// queries: a thread holds 128 elements of O. Small key tiles beat one block a multiprocessor,
/// because a lone block waits for itself.
RADDLE_FN constexpr KernelConfig wide_head_config(i32 dim_qk, i32 dim_vo, i32 arch) {
  constexpr TileRows short_tile{short_rows, 32}, long_tiles[] = {{32, 32}, {32, 16}};
  for (i32 blocks = 2; blocks >= 1; --blocks) {
    const i32 bytes = shared_bytes_of_block(arch, blocks);
    const i32 slots = wide_slots_in(bytes, dim_qk, dim_vo, short_tile, max_slots);
    for (const TileRows& tile : long_tiles) {
      const i32 long_slots = wide_slots_in(bytes, dim_qk, dim_vo, tile, max_slots);
      if (slots < 2 || long_slots < 2) continue;
      return KernelConfig{short_rows,
                          short_tile.keys,
                          tile.rows,
                          tile.keys,
                          slots,
                          long_slots,
                          max(wide_shared_bytes(dim_qk, dim_vo, short_rows, short_tile.keys, slots),
                              wide_shared_bytes(dim_qk, dim_vo, tile.rows, tile.keys, long_slots)),
                          blocks,
                          num_threads,
                          most_teams};
    }
  }
  return KernelConfig{};
}

/// Only the kernel's compiler knows whether the variant's parts need quantised K or V widened in
/// the ring. So the tiles are always those of 16-bit rows, and so is the memory of a block; rows of
/// bytes give it more slots.
RADDLE_FN constexpr KernelConfig kernel_config(i32 dim_qk, i32 dim_vo, i32 arch,
                                               RingRows ring = {}) {
  if (is_wide(dim_qk, dim_vo)) return wide_head_config(dim_qk, dim_vo, arch);
  KernelConfig config = widened_config(dim_qk, dim_vo, arch, ring.scaled);
  if (!ring.scaled || config.blocks_per_multiprocessor == 0) return config;
  const i32 bytes = shared_bytes_of_block(arch, config.blocks_per_multiprocessor);
  config.shared_bytes = bytes;
  config.short_slots =
      slots_in(bytes, dim_qk, dim_vo, config.short_rows, config.short_keys, max_slots, ring);
  config.long_slots =
      slots_in(bytes, dim_qk, dim_vo, config.long_rows, config.long_keys, 4, ring) / 2 * 2;
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

}  // namespace mma

RADDLE_ENGINE_END

// What a kernel on Hopper's wgmma is compiled for, and how its block shares the work: two
// warpgroups compute what a third loads.
#pragma once

#include "raddle/engine/kernel/gpu/team.h"
#include "raddle/engine/kernel/wgmma/config.h"
#include "raddle/engine/kernel/wgmma/launch.h"
#include "raddle/engine/ptx/hopper.h"
#include "raddle/engine/variant/parts.h"

RADDLE_ENGINE_BEGIN

namespace wgmma {

using namespace gpu_kernel;  // what all families share

constexpr i32 group_warps = group_threads / 32;
static_assert(group_rows * consumer_groups == long_rows);
/// Registers of a thread: what the launch gives each, and how the warpgroups divide them. More than
/// the launch gave can never be taken: the block would wait for ever.
constexpr i32 launch_registers = 168, loader_registers = 56, consumer_registers = 224;
/// The same where the warp that loads keys asks about parts of tiles.
constexpr i32 asking_loader_registers = 72, served_consumer_registers = 216;
/// The same of short queries, where the warps that compute take some.
constexpr i32 short_loader_registers = 88, short_consumer_registers = 208;
static_assert(consumer_groups * consumer_registers + loader_registers <=
              (consumer_groups + 1) * launch_registers);
static_assert(consumer_groups * served_consumer_registers + asking_loader_registers <=
              (consumer_groups + 1) * launch_registers);
static_assert(consumer_groups * short_consumer_registers + short_loader_registers <=
              (consumer_groups + 1) * launch_registers);
static_assert(65536 / num_threads / 8 * 8 == launch_registers);

/// Numbers of the block's barriers; 0 is ptx::sync_block. Those of turns and those of a group's own
/// threads belong to different kernels.
enum BarrierId : i32 {
  turn_of_group_0 = 1,
  turn_of_group_1 = 2,
  group_0 = 1,
  group_1 = 2,
  consumers = 3,
  state_is_there = 4,
  state_is_taken = 5
};

/// The warps of both consumer warpgroups: the team that composes states.
struct ConsumerTeam : TeamVotes<ConsumerTeam> {
  static constexpr i32 num_warps = consumer_groups * group_warps;
  static constexpr i32 num_threads = 32 * num_warps;
  static constexpr i32 num_teams = 1;
  RADDLE_DEVICE static i32 warp() { return ptx::warp_index(); }
  RADDLE_DEVICE static i32 thread() { return ptx::thread_index(); }
  RADDLE_DEVICE static i32 worker() { return ptx::block_index(); }
  RADDLE_DEVICE static void sync() { ptx::sync_threads(consumers, num_threads); }
};

/// The same where a worker is a cluster of `size` blocks. Of two, each computes half of an item's
/// rows, and copies half of every KV tile to both; the first draws items, and composes.
template <i32 size>
struct ClusterTeam : ConsumerTeam {
  RADDLE_DEVICE static i32 worker() { return ptx::block_index() / size; }
};

/// What all kernels have; `Element` is the dtype of Q, K, V and O.
template <class Element, i32 qk, i32 vo, class Variant>
struct AnyKernel {
  using T = Element;
  using Stored = Element;
  using Team = ConsumerTeam;
  static constexpr Scan scan = scan_of<Variant>();
  static constexpr bool quantized = false;
  static constexpr i32 dim_qk = qk;
  static constexpr i32 dim_vo = vo;
  /// Heads are stored in halves of 64 columns; a product's depth is 16, its width 64 columns of O.
  static constexpr i32 qk_halves = ceil_div(qk, 64);
  static constexpr i32 vo_halves = ceil_div(vo, 64);
  /// Whether the facts of keys are read where no mask cuts a tile.
  static constexpr bool asks_for_keys = has_logits<Variant>;
};

/// For long queries: both warpgroups use every KV tile, each for 64 of an item's 128 rows.
template <class Element, i32 qk, i32 vo, Serves serves, class Variant>
struct Kernel : AnyKernel<Element, qk, vo, Variant> {
  static constexpr i32 cluster_size = serves.clusters ? 2 : 1;  ///< blocks of a worker
  using Team = ClusterTeam<cluster_size>;
  static constexpr bool may_have_levels = true;
  static constexpr bool copies_rows = serves.rows;
  static constexpr i32 tile_rows = long_rows;
  static constexpr bool is_tight = has_tight_tiles(qk, vo, has_output<Variant>);
  static constexpr i32 tile_keys = long_keys(qk, vo, has_output<Variant>);
  /// The next item is described when the last but two has been sent; in tight memory, the last but
  /// one.
  static constexpr i32 item_slots = is_tight ? 2 : 4;
  static constexpr i32 rings = 1;
  static constexpr i32 slots = 2;  ///< of all rings of K, and of V
  static constexpr i32 query_slots = long_query_slots(qk, vo, has_output<Variant>);
  /// Parts of a slot of Q, each free when those that use it are done with it. In an only slot each
  /// warpgroup's rows are a part: those of the next item come while the other warpgroup, half a
  /// step behind, still multiplies its own.
  static constexpr i32 query_parts = query_slots == 1 ? consumer_groups : 1;
  static constexpr i32 fact_slots = 4;  ///< of the facts about tiles
  static constexpr i32 out_fragments = 8 * ceil_div(vo, 64);
  /// Whether the loop knows of items by the flags of their tiles alone: each has one then, and one
  /// that is none follows the last.
  static constexpr bool tiles_end_items = true;
  /// How a mask's pairs are found: by the interval of columns that each row keeps, where kv_span
  /// bounds it; else by coverage of parts of a tile.
  static constexpr bool finds_intervals = keeps_spans<Variant>();
  static constexpr bool asks_parts =
      has_mask<Variant> && has_coverage<Variant> && (!finds_intervals || may_lack_spans<Variant>);
  /// Whether an item's last tile comes first. Rows choose their references at their first tile, and
  /// scores that favour near keys, as ALiBi's, are largest at the last.
  static constexpr bool reads_from_end = has_logits<Variant>;
  static constexpr i32 widest = max(qk, vo), key_fragments = tile_keys / 8;
  /// How many of a tile's key fragments a step weighs before it waits for P·V of the tile before;
  /// it weighs the others afterwards, while it rounds. For each width the fastest of those measured
  /// (docs/lab/hopper.md). Variants with scores change and weigh a tile at once.
  static constexpr i32 early_fragments = has_logits<Variant> ? key_fragments
                                         : widest <= 64      ? key_fragments / 8
                                         : widest <= 128     ? key_fragments
                                                             : key_fragments / 2;
  /// Whether a step waits for the next tile's keys at its end, rather than before it waits for P·V:
  /// keys of wide heads are more bytes, and come later.
  static constexpr bool waits_for_keys_last = widest > 128;
  /// Whether all tiles but a worker's first one of keys are asked for after its first queries: the
  /// keys and values of a long tile fill the path to memory for microseconds.
  static constexpr bool queries_first = true;
  /// Whether whole tiles of O leave by way of the slot of their queries, as a box: with two slots,
  /// of which the next item has the other one.
  static constexpr bool stages_output =
      query_slots == 2 && ceil_div(vo, 64) <= ceil_div(qk, 64) && !has_output<Variant>;
  /// How many boxes of a tile are started in a row, without a loop: one at a time is slower, but
  /// takes fewer instructions from the warps that compute.
  static constexpr i32 boxes_at_once = 1;
  RADDLE_DEVICE static ptx::Keep keeps(const Launch&) { return ptx::Keep::again; }
};

/// For short queries, at most `rows`: the warpgroups use KV tiles of 64 keys in turns, each for all
/// rows.
template <class Element, i32 qk, i32 vo, i32 rows, Serves serves, class Variant>
struct ShortKernel : AnyKernel<Element, qk, vo, Variant> {
  static constexpr i32 cluster_size = 1;
  static constexpr bool may_have_levels = serves.levels;
  static constexpr bool copies_rows = serves.rows;
  static constexpr i32 tile_rows = rows;
  static constexpr i32 tile_keys = short_keys;
  static constexpr bool is_tight = false;
  static constexpr i32 item_slots = 4;
  static constexpr i32 rings = consumer_groups;  ///< of tiles: each group has its own
  static constexpr i32 slots = short_slots(qk, vo, rows);
  static constexpr i32 query_slots = rows < 64 ? 2 : 1;  ///< two would not fit beside the ring
  static constexpr i32 query_parts = 1;
  static constexpr i32 fact_slots = max(2 * slots, 8);
  static constexpr i32 row_fragments = rows / 8;
  /// Whether the warps that compute take registers of those that load: of 64 rows, Sᵀ and Oᵀ take
  /// 96, references and sums 32.
  static constexpr bool takes_registers = rows >= 64;
  static constexpr bool tiles_end_items = false;
  static constexpr bool finds_intervals = false;
  static constexpr bool asks_parts = false;
  static constexpr bool reads_from_end = false;
  static constexpr bool queries_first = false;
  static constexpr bool stages_output = false;
  static constexpr i32 boxes_at_once = 4;
  RADDLE_DEVICE static ptx::Keep keeps(const Launch& launch) {
    return launch.keys_leave_first ? ptx::Keep::once : ptx::Keep::usual;
  }
};

/// This block's number in its worker's cluster.
template <class Kernel>
RADDLE_DEVICE i32 rank_in_cluster() {
  return Kernel::cluster_size > 1 ? ptx::cluster_rank() : 0;
}

/// For items of at most 8 rows in a kernel for more: a request's own keys beside a shared prefix.
/// Their products, weights and outputs are those of one fragment; memory is the kernel's.
template <class ShortKernel>
struct OfFewRows : ShortKernel {
  static constexpr i32 row_fragments = 1;
};

}  // namespace wgmma

RADDLE_ENGINE_END

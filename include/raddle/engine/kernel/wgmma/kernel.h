// What a kernel on Hopper's wgmma is compiled for, and how its block shares the work: two
// warpgroups compute, each 64 of an item's 128 rows; a third loads what they need.
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
constexpr i32 group_rows = long_tile.rows / consumer_groups;  ///< of an item
/// Registers of a thread: what the launch gives each, and how the warpgroups divide them. More than
/// the launch gave can never be taken: the block would wait for ever.
constexpr i32 launch_registers = 168, loader_registers = 40, consumer_registers = 232;
static_assert(consumer_groups * consumer_registers + loader_registers <=
              (consumer_groups + 1) * launch_registers);
static_assert(65536 / num_threads / 8 * 8 == launch_registers);

/// Numbers of the block's barriers; 0 is ptx::sync_block.
enum BarrierId : i32 { turn_of_group_0 = 1, turn_of_group_1 = 2, consumers = 3 };

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

/// `Element` is the dtype of Q, K, V and O.
template <class Element, i32 qk, i32 vo, class Variant>
struct Kernel {
  using T = Element;
  using Stored = Element;
  using Team = ConsumerTeam;
  static constexpr Scan scan = scan_of<Variant>();
  static constexpr bool quantized = false;
  static constexpr i32 dim_qk = qk;
  static constexpr i32 dim_vo = vo;
  static constexpr i32 long_rows = long_tile.rows;
  static constexpr i32 long_keys = long_tile.keys;
  static constexpr i32 slots = 2;  ///< of K's ring, of V's, and of Q
  /// Heads are stored in halves of 64 columns; a product's depth is 16, its width 64 columns of O.
  static constexpr i32 qk_halves = ceil_div(qk, 64);
  static constexpr i32 vo_halves = ceil_div(vo, 64);
  static constexpr i32 out_fragments = 8 * vo_halves;
  /// Whether the facts of keys are read where no mask cuts a tile.
  static constexpr bool asks_for_keys = has_logits<Variant>;
  static_assert(vo_halves <= 2, "wider heads have fewer keys a tile");
};

}  // namespace wgmma

RADDLE_ENGINE_END

// What the host hands to the mma.sync kernel, by value as its parameter; pointers are the device's.
// Plain data, laid out alike by the host's compiler and NVRTC.
#pragma once

#include "raddle/engine/kernel/mma/config.h"
#include "raddle/engine/kernel/run.h"
#include "raddle/engine/plan/plan.h"

namespace raddle {

/// What a worker has come to: first its start, then these of every item.
enum class TimelineStage : i32 { started, opened, computed, stored, finished };

/// When each worker did what, for those who ask.
struct TimelineView {
  /// The GPU's clock in ns, of which 32 bits are kept, and a TimelineStage with the item's number
  /// above it.
  struct Mark {
    i32 time, what;
  };
  Mark* marks;  ///< [num_workers, capacity]; null: nobody asks
  i32 capacity;
};

struct MmaLaunch : RunView {
  LayoutView layout;  ///< its `levels` is not used:
  LevelView levels[max_levels];
  PlanView plan;
  const u8* arrays;  ///< the memory in which all of layout and plan lies
  i64 array_bytes;
  TimelineView timeline;
};

// Both compilers see these numbers, so neither can lay the parameter out in its own way.
static_assert(sizeof(LevelView) == 104 && sizeof(LayoutView) == 56 && sizeof(PlanView) == 136);
static_assert(sizeof(KvView) == 64 && sizeof(KvScales) == 80);
static_assert(sizeof(RunView) == 1256 && sizeof(MmaLaunch) == 2312);

}  // namespace raddle

RADDLE_ENGINE_BEGIN

namespace mma {

/// What a kernel is compiled for: the matrix dtype, head dimensions, and KernelConfig's choices.
template <class Element, i32 qk, i32 vo, i32 keys_short, i32 slots_short, i32 rows_long,
          i32 keys_long, i32 slots_long>
struct Kernel {
  using T = Element;
  static constexpr i32 dim_qk = qk;
  static constexpr i32 dim_vo = vo;
  static constexpr i32 short_keys = keys_short;
  static constexpr i32 short_slots = slots_short;
  static constexpr i32 long_rows = rows_long;
  static constexpr i32 long_keys = keys_long;
  static constexpr i32 long_slots = slots_long;
  using QkRows = SharedRows<qk>;
  using VoRows = SharedRows<vo>;
  static constexpr i32 k_steps = QkRows::chunks / 2;  ///< products of 16 elements in a logit
  static constexpr i32 out_tiles = VoRows::chunks;    ///< fragments 8 wide of an output row
};

}  // namespace mma

RADDLE_ENGINE_END

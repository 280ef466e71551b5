// What the host hands to the mma.sync kernel, by value as its parameter; pointers are the device's.
// Plain data, laid out alike by the host's compiler and NVRTC.
#pragma once

#include "raddle/engine/kernel/mma/config.h"
#include "raddle/engine/kernel/run.h"
#include "raddle/engine/plan/plan.h"
#include "raddle/engine/variant/parts.h"

namespace raddle {

/// What a worker has come to: first its start, then the next four of every item, and at last the
/// end of what it composed of other workers' states.
enum class TimelineStage : i32 { started, opened, computed, stored, finished, contracted };

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
  i32 query_rows;  ///< that q has
  TimelineView timeline;
};

// Both compilers see these numbers, so neither can lay the parameter out in its own way.
static_assert(sizeof(LevelView) == 104 && sizeof(LayoutView) == 56 && sizeof(PlanView) == 136);
static_assert(sizeof(KvView) == 64 && sizeof(KvScales) == 80);
static_assert(sizeof(RunView) == 1264 && sizeof(MmaLaunch) == 2328);

}  // namespace raddle

RADDLE_ENGINE_BEGIN

namespace mma {

template <bool condition, class A, class B>
struct Either {
  using Type = A;
};
template <class A, class B>
struct Either<false, A, B> {
  using Type = B;
};

/// What a kernel is compiled for: the dtype of Q and O, that in which K and V are stored, head
/// dimensions, an architecture, for KernelConfig's choices, and a variant.
///
/// Quantised K and V are multiplied as bytes lie in the ring, in f16, which holds them exactly.
/// Where a part of the variant changes them, they become rows of T in the ring first.
/// `only_short`: of plans without long queries.
template <class Element, class StoredElement, i32 qk, i32 vo, i32 arch, class V,
          bool only_short = false>
struct Kernel {
  using T = Element;
  using Stored = StoredElement;
  static constexpr Scan scan = scan_of<V>();
  static constexpr bool quantized = is_quantized<Stored>;
  static constexpr bool narrow_keys = quantized && !has_key<V>;
  static constexpr bool narrow_values = quantized && !has_value<V>;
  static constexpr bool wide = is_wide(qk, vo);  ///< heads that the warps of a block share
  static_assert(!(wide && quantized));
  static constexpr KernelConfig config =
      kernel_config(qk, vo, arch, {narrow_keys ? 1 : 2, narrow_values ? 1 : 2, quantized});
  /// Two blocks of short queries that share a multiprocessor are one of two teams, which compose
  /// the halves of a unit (team.h). Not where an output part sees rows that one team has put
  /// together, nor where the variant changes keys, or O is wide: there registers are short.
  static constexpr bool spare_registers = !has_key<V> && !has_value<V> && vo <= 128;
  static constexpr bool short_only = only_short;
  static constexpr bool joins = short_only && !wide && config.blocks_per_multiprocessor == 2 &&
                                !has_output<V> && spare_registers;
  static constexpr i32 teams = joins ? 2 : 1;
  static constexpr i32 block_threads = teams * num_threads;
  static constexpr i32 blocks = config.blocks_per_multiprocessor / teams;  ///< of a multiprocessor
  static constexpr i32 dim_qk = qk;
  static constexpr i32 dim_vo = vo;
  static constexpr i32 short_keys = config.short_keys;
  static constexpr i32 short_slots = config.short_slots;
  static constexpr i32 long_rows = config.long_rows;
  static constexpr i32 long_keys = config.long_keys;
  static constexpr i32 long_slots = config.long_slots;
  using QueryRows = SharedRows<wide ? round_up(qk, line) : qk>;
  using WideRows = SharedRows<wide_row(qk, vo)>;
  using KeyRows =  ///< counted in 16 bits
      typename Either<wide, WideRows, SharedRows<narrow_keys ? qk / 2 : qk>>::Type;
  using ValueRows = typename Either<wide, WideRows, SharedRows<narrow_values ? vo / 2 : vo>>::Type;
  /// The matrix dtypes of logits and of outputs. Weights of a sum are of any size, and need T's
  /// range.
  using QkElement = typename Either<narrow_keys, f16, T>::Type;
  using VoElement = typename Either<narrow_values && scan == Scan::softmax, f16, T>::Type;
  /// A warp's products of 16 elements in a logit, and fragments 8 wide of an output row.
  static constexpr i32 k_steps = ceil_div(qk, wide ? line : 16);
  static constexpr i32 out_tiles = wide ? wide_columns(vo) / 8 : 2 * ceil_div(vo, 16);
};

}  // namespace mma

RADDLE_ENGINE_END

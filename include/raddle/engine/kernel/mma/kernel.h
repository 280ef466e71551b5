// What a kernel on mma.sync is compiled for.
#pragma once

#include "raddle/engine/kernel/gpu/team.h"
#include "raddle/engine/kernel/mma/config.h"
#include "raddle/engine/variant/parts.h"

RADDLE_ENGINE_BEGIN

namespace mma {

/// How a kernel is told that K extends V: in place of the dtype in which both are stored. A
/// template argument of its own would be a part of all kernels' names, and NVRTC assigns registers
/// by these.
template <class Element>
struct KExtendsV;

template <class StoredElement>
struct Storage {
  using Type = StoredElement;
  static constexpr bool k_extends_v = false;
};
template <class Element>
struct Storage<KExtendsV<Element>> {
  using Type = Element;
  static constexpr bool k_extends_v = true;
};

/// What a kernel is compiled for: the dtype of Q and O, the dtype in which K and V are stored, head
/// dimensions, an architecture, from which KernelConfig follows, and a variant.
///
/// Quantised K and V stay bytes in the ring and are multiplied as f16, which holds them exactly.
/// Where a part of the variant changes them, or heads are wide, they become rows of T in the ring
/// first. `only_short`: for plans without long queries.
template <class Element, class StoredElement, i32 qk, i32 vo, i32 arch, class Variant,
          bool only_short = false>
struct Kernel {
  using T = Element;
  using Stored = typename Storage<StoredElement>::Type;
  static constexpr Scan scan = scan_of<Variant>();
  static constexpr bool quantized = is_quantized<Stored>;
  static constexpr bool k_extends_v = Storage<StoredElement>::k_extends_v;
  static constexpr bool wide =
      k_extends_v || is_wide(qk, vo);  ///< the warps of a block share the columns of a head
  static constexpr bool narrow_keys = quantized && !wide && !has_key<Variant>;
  static constexpr bool narrow_values = quantized && !wide && !has_value<Variant>;
  static constexpr RingRows ring_rows{narrow_keys ? 1 : 2, narrow_values ? 1 : 2, quantized,
                                      k_extends_v};
  static constexpr KernelConfig config = kernel_config(qk, vo, arch, ring_rows);
  /// Whether the loop of short queries has registers to spare: not where the variant changes keys
  /// or values, or O is wide.
  static constexpr bool spare_registers = !has_key<Variant> && !has_value<Variant> && vo <= 128;
  static constexpr bool short_only = only_short;
  /// Where two blocks of short queries would share a multiprocessor, one block of two teams takes
  /// their place; the teams can compose the two halves of a unit (warp_states.h). Not for output
  /// parts, which see rows that one team has put together.
  static constexpr bool pairs_teams = short_only && !wide &&
                                      config.blocks_per_multiprocessor == 2 &&
                                      !has_output<Variant> && spare_registers;
  static constexpr i32 teams = pairs_teams ? 2 : 1;
  using Team = BlockTeam<num_warps, teams>;
  static constexpr i32 block_threads = teams * Team::num_threads;
  static constexpr i32 blocks =
      config.blocks_per_multiprocessor / teams;  ///< blocks a multiprocessor
  static constexpr i32 dim_qk = qk;
  static constexpr i32 dim_vo = vo;
  static constexpr i32 short_keys = config.short_keys;
  static constexpr i32 short_slots = config.short_slots;
  static constexpr i32 long_rows = config.long_rows;
  static constexpr i32 long_keys = config.long_keys;
  static constexpr i32 long_slots = config.long_slots;
  using QueryRows = SharedRows<wide ? round_up(qk, line) : qk>;
  using WideRows = SharedRows<wide_row(qk, vo)>;
  using KeyRows =  ///< in elements of 16 bits
      typename Either<wide, WideRows, SharedRows<narrow_keys ? qk / 2 : qk>>::Type;
  using ValueRows = typename Either<wide, WideRows, SharedRows<narrow_values ? vo / 2 : vo>>::Type;
  /// The matrix dtypes of the products for logits and outputs. Weights of a sum have any size and
  /// need T's range.
  using QkElement = typename Either<narrow_keys, f16, T>::Type;
  using VoElement = typename Either<narrow_values && scan == Scan::softmax, f16, T>::Type;
  /// Products of depth 16 for a logit, of one warp; and fragments of 8 columns of an output row.
  static constexpr i32 k_steps = ceil_div(qk, wide ? line : 16);
  static constexpr i32 out_fragments = wide ? wide_columns(vo) / 8 : 2 * ceil_div(vo, 16);
};

}  // namespace mma

RADDLE_ENGINE_END

// Sending the rows of a short item to memory: the states of a team's warps are added up, and
// written to partial rows or to the caller's tensors.
#pragma once

#include "raddle/engine/kernel/mma/warp_states.h"

RADDLE_ENGINE_BEGIN

namespace mma {

/// Writes the rows of one item, whose statistics lie in the merge buffer.
template <class Kernel, class Variant>
class ShortOutput {
  using T = typename Kernel::T;
  using Memory = ShortMemory<Kernel>;
  static constexpr Scan scan = scan_of<Variant>();

 public:
  RADDLE_DEVICE ShortOutput(const GpuLaunch& launch, const Variant& variant, const WorkItem& item,
                            float to_log2)
      : launch_(launch), variant_(variant), item_(item), to_log2_(to_log2) {}

  /// Row m over all warps of the team.
  RADDLE_DEVICE MergedRow merged(i32 m) const {
    return merged_row<scan>(Memory::statistics(), m, to_log2_);
  }

  /// Where a row's elements are written, in fp32 or in the matrix dtype; both null: the row is
  /// padding.
  struct MergedTo {
    float* wide = nullptr;
    T* narrow = nullptr;
    float factor = 1.0f;
  };

  /// Finds where row m is written. The thread of the row with `first` stores its LSE.
  RADDLE_DEVICE MergedTo begin_row(i32 m, bool first) const {
    MergedTo to;
    if (item_.partial_row >= 0) {
      const i64 row = i64{item_.partial_row} + m;
      to.wide = launch_.partial_o + row * Kernel::dim_vo;
      if (first) launch_.partial_lse[row] = merged(m).lse;
      return to;
    }
    if (has_output<Variant> && !launch_.state_only) {
      to.wide = whole_row(m);
      return to;
    }
    const Row row = row_of(m);
    float lse = first || has_sink<Variant> ? merged(m).lse : 0.0f;
    to.factor = apply_sink(launch_, variant_, row, lse);
    if (first) store_lse(launch_, row, lse);
    const i64 at = out_offset(launch_, row);
    if (launch_.state_only)
      to.wide = static_cast<float*>(launch_.out.data) + at;
    else
      to.narrow = static_cast<T*>(launch_.out.data) + at;
    return to;
  }

  /// Adds up elements d … d + 3 of a row, which the warps left `stride` floats apart, and writes
  /// them.
  RADDLE_DEVICE static void put_four(const MergedTo& to, const float* from, i32 stride, i32 d) {
    Four o = sum_of_warps(from, stride);
    if (to.wide) *reinterpret_cast<Four*>(to.wide + d) = o;
    if constexpr (has_sink<Variant>)
      for (i32 e = 0; e < 4; ++e) o.x[e] *= to.factor;
    if (to.narrow) store_four(to.narrow + d, o);
  }

  /// Writes all rows through an output part of the variant, which sees whole rows.
  RADDLE_DEVICE void write_rows(i32 num_rows) const {
    for (i32 m = ptx::warp_index(); m < num_rows; m += num_warps) {
      LaneRow<Kernel::dim_vo> o;
      o.every([&](i32 i, i32 d) { o.of[i] = *reinterpret_cast<const Four*>(whole_row(m) + d); });
      const float lse = merged(m).lse;
      write_row<Kernel>(launch_, variant_, row_of(m), o, lse, whole_row(m));
    }
    Kernel::Team::sync();
  }

 private:
  RADDLE_DEVICE Row row_of(i32 m) const {
    const QueryTile& tile = launch_.plan.query_tiles[item_.query_tile];
    return make_row(launch_.layout, launch_.levels[tile.level], tile.group, tile.row_begin + m,
                    item_.kv_head, launch_.plan.group_size);
  }

  /// A whole row, in the memory of the ring.
  RADDLE_DEVICE static float* whole_row(i32 m) {
    static_assert(short_rows * Kernel::dim_vo * 4 <= Memory::slot_bytes);
    return reinterpret_cast<float*>(Memory::slot_memory(0)) + m * Kernel::dim_vo;
  }

  const GpuLaunch& launch_;
  const Variant& variant_;
  const WorkItem& item_;
  const float to_log2_;
};

}  // namespace mma

RADDLE_ENGINE_END

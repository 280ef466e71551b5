// The loop for work items of heads wider than 256, such as MLA's 576 of K and 512 of V: O has more
// columns than the registers of a warp hold.
//
// Every warp has all rows of the tile and a quarter of the heads' elements. It multiplies its part
// of Q and K. The warps add up their partial logits through shared memory, so that each has the
// logits of the whole tile, and computes the weights in registers. Then each warp multiplies the
// weights with its own columns of V. Where V is the first columns of K, it is read in the slot of
// K, and memory is read once. Where K extends V, a slot of K is filled from both, so that this
// holds there, too. K and V of bytes become rows of T in the ring; scales multiply logits and
// weights.
#pragma once

#include "raddle/engine/kernel/gpu/arrive.h"
#include "raddle/engine/kernel/gpu/scales.h"
#include "raddle/engine/kernel/gpu/softmax.h"
#include "raddle/engine/kernel/gpu/variant.h"
#include "raddle/engine/kernel/mma/key_ring.h"

RADDLE_ENGINE_BEGIN

namespace mma {

template <class Kernel, class Variant, i32 row_fragments>
class WideQueries {
  using T = typename Kernel::T;
  using Memory =
      typename Either<row_fragments == 1, ShortWideMemory<Kernel>, LongWideMemory<Kernel>>::Type;
  using Rows = typename Kernel::KeyRows;
  static constexpr Scan scan = scan_of<Variant>();
  static constexpr i32 key_fragments = Memory::tile_keys / 8;
  static constexpr i32 columns = 8 * Kernel::out_fragments;
  /// Keys that the variant has changed cannot serve as values.
  static constexpr bool may_share = !has_key<Variant> && Kernel::dim_vo <= Kernel::dim_qk;
  /// Where a part of the variant sees keys or values, it sees them multiplied by their scales.
  static constexpr bool scales_keys = Kernel::quantized && !has_key<Variant>;
  static constexpr bool scales_values = Kernel::quantized && !has_value<Variant>;
  /// Whether the two parts of a key have scales of their own; then it begins with whole lines of V.
  static constexpr bool scales_parts = Kernel::quantized && Kernel::k_extends_v;
  static constexpr i32 lines_of_v = Kernel::dim_vo / line;
  static_assert(!scales_parts || (scales_keys && Kernel::dim_vo % line == 0));

 public:
  /// For one item; the caller makes another object for the next item of the queue.
  RADDLE_DEVICE WideQueries(const GpuLaunch& launch, const Variant& variant, i32 item, i32 = 0)
      : launch_(launch),
        variant_(variant),
        item_(item),
        warp_(ptx::warp_index()),
        lane_(ptx::lane_index()),
        ring_(launch, item),
        halves_(row_fragments == 1 && tile().num_rows <= 8 ? 1 : 2),
        q_address_(
            ptx::shared_address(Memory::query_memory()) +
            Kernel::QueryRows::step_from(a_offset<typename Kernel::QueryRows>(lane_), warp_)),
        k_offset_(Rows::step_from(b_offset<Rows>(lane_), warp_)),
        v_offset_(a_offset<Rows>(lane_) + static_cast<u32>(2 * columns * warp_)) {
    ring_.start();
  }

  /// Returns the number of the next item.
  RADDLE_DEVICE i32 run() {
    compute();
    return item_ + 1;
  }
  /// Whether its rows may be composed in shares; that is looked up where a queue ends.
  RADDLE_DEVICE bool leaves_shares() const { return true; }
  /// Returns the result of next(item), which one thread calls.
  template <class Next>
  RADDLE_DEVICE i32 run(Next next) {
    auto& facts = Memory::facts();
    compute();
    if (ptx::thread_index() == 0) facts.next = next(item_);
    ptx::sync_block();
    return facts.next;
  }

 private:
  RADDLE_DEVICE void compute() {
    // Transforms of queries use the memory of the ring.
    if constexpr (has_query<Variant>) load_queries();
    if constexpr (has_query<Variant>) ptx::sync_block();
    ring_.fill(may_share && values_are_keys());
    if constexpr (!has_query<Variant>) load_queries();
    mark<Kernel>(launch_, TimelineStage::opened, item_);
    clear(o_);
    stats_.clear();
    if constexpr (scales_values) value_scales_.clear();
    ptx::sync_block();  // all warps have stored their queries
    if constexpr (Memory::keeps_queries) {
      RADDLE_UNROLL
      for (i32 i = 0; i < Kernel::k_steps; ++i) load_fragment(i, 0, q_[i]);
    }
    RADDLE_ROLLED
    while (!step()) {
    }
    mark<Kernel>(launch_, TimelineStage::computed, item_);
    ptx::sync_block();  // rows of O overwrite the ring
    finish();
    mark<Kernel>(launch_, TimelineStage::finished, item_);
    ptx::sync_block();  // the next item overwrites shared memory
  }

  // Read again where they are needed: in the loop, O takes the registers.
  RADDLE_DEVICE const WorkItem& item() const { return launch_.plan.items[item_]; }
  RADDLE_DEVICE const QueryTile& tile() const {
    return launch_.plan.query_tiles[item().query_tile];
  }

  RADDLE_DEVICE bool values_are_keys() const {
    if constexpr (Kernel::k_extends_v) return true;
    const KeySource& source = Memory::source(warp_);
    return source.row[0] == source.row[1] && source.page_stride[0] == source.page_stride[1] &&
           source.row_stride[0] == source.row_stride[1];
  }

  RADDLE_DEVICE void load_queries() const {
    constexpr i32 share = 16 / num_warps;
    auto& facts = Memory::facts();
    describe_item(request_of_keys(launch_, tile().level, tile().group), item().kv_head, facts);
    RADDLE_ROLLED
    for (i32 r = 0; r < row_fragments; ++r) {
      const i32 first = 16 * r + share * warp_;
      QueryRows<share, Kernel> rows;
      rows.fetch(launch_, tile(), item().kv_head, first);
      rows.store(variant_, first, Memory::query_memory(), facts);
      if constexpr (has_query<Variant>) {
        for (i32 m = first; m < min(first + share, tile().num_rows); ++m)
          transform_stored_row<T, T, typename Kernel::QueryRows, Kernel::dim_qk>(
              Memory::query_memory(), m, Memory::query_vector(warp_), 1.0f,
              [&](WarpVector& x) { variant_.query(x, facts.row[m]); });
      }
    }
  }

  /// Loads this warp's step of a line of Q.
  RADDLE_DEVICE void load_fragment(i32 i, i32 r, u32 (&a)[4]) const {
    ptx::load_matrices(a,
                       q_address_ + static_cast<u32>(128 * i + r * 16 * Kernel::QueryRows::pitch));
  }

  /// Computes one KV tile. Returns whether it is the item's last.
  RADDLE_DEVICE bool step() {
    const ApplyVariant<Variant, row_fragments, key_fragments> apply(launch_, variant_, item_);
    ring_.wait_k_and_load_next();
    const auto& keys = ring_.keys();
    const i32 flags = keys.flags[warp_];
    if (flags & TileFlags::empty) return true;
    if constexpr (has_key<Variant>)
      transform_keys<Kernel::dim_qk, 0>(
          ring_.slot(), keys, [&](WarpVector& x, const Key& key) { variant_.key(x, key); });
    Logits<row_fragments, key_fragments> s;
    if constexpr (scales_parts)
      multiply_scaled_parts(s, Memory::slot_address(ring_.slot()) + k_offset_, keys);
    else
      multiply_part(s, Memory::slot_address(ring_.slot()) + k_offset_);
    put_part(s);
    ring_.wait_v_and_load_next();
    add_parts(s);
    if constexpr (scales_keys && !scales_parts) scale_part(s, keys.scale[0]);
    apply(
        s, keys, 0, flags, Memory::facts(), [&](i32 r) { return 16 * r + lane_ / 4; }, halves_,
        stats_);
    softmax<Kernel>(s, stats_, o_, apply.to_log2(), halves_);
    if constexpr (has_value<Variant>)
      transform_keys<Kernel::dim_vo, 1>(
          ring_.slot(), keys, [&](WarpVector& x, const Key& key) { variant_.value(x, key); });
    if constexpr (scales_values) {
      value_scales_.rebase(keys.scale[1], Memory::tile_keys, o_);
      value_scales_.apply(s, keys.scale[1] + lane_ % 4 * 2);
    }
    Weights<row_fragments, key_fragments> p;
    round_weights<T>(s, p);
    ValueOperand<Kernel, row_fragments>::multiply(o_, p,
                                                  Memory::slot_address(ring_.slot()) + v_offset_);
    ring_.next_tile();
    return (flags & TileFlags::last) != 0;
  }

  /// Changes the rows of K (`which` 0) or V in a slot that this warp loaded, one at a time;
  /// afterwards every warp may use the slot.
  template <i32 dim, i32 which, class Keys, class F>
  RADDLE_DEVICE void transform_keys(i32 slot, const Keys& keys, F transform) const {
    const auto& facts = Memory::facts();
    for (i32 i = 0; i < Memory::warp_keys; ++i) {
      const i32 j = Memory::warp_keys * warp_ + i;
      if (keys.column[j] < 0) continue;
      const Key key{facts.request, keys.kv_index[j], keys.kv_pos[j], facts.kv_head};
      float scale = 1.0f;
      if constexpr (Kernel::quantized) scale = keys.scale[which][j];
      transform_stored_row<T, T, Rows, dim>(Memory::slot_memory(slot), j, Memory::key_vector(warp_),
                                            scale, [&](WarpVector& x) { transform(x, key); });
    }
    ptx::sync_block();
  }

  /// S over this warp's steps: one step of every line of a row, so that the next line is 128 bytes
  /// further.
  RADDLE_DEVICE void multiply_part(Logits<row_fragments, key_fragments>& s, u32 keys) const {
    clear(s);
    multiply_lines<0, Kernel::k_steps>(s, keys);
  }

  /// The same where the parts of a key, V's columns and K's, have scales of their own.
  template <class Keys>
  RADDLE_DEVICE void multiply_scaled_parts(Logits<row_fragments, key_fragments>& s, u32 keys,
                                           const Keys& facts) const {
    Logits<row_fragments, key_fragments> of_k;
    clear(s);
    multiply_lines<0, lines_of_v>(s, keys);
    scale_part(s, facts.scale[1]);
    clear(of_k);
    multiply_lines<lines_of_v, Kernel::k_steps>(of_k, keys);
    scale_part(of_k, facts.scale[0]);
    RADDLE_UNROLL
    for (i32 i = 0; i < 4 * row_fragments * key_fragments; ++i) {
      const i32 r = i / 4 / key_fragments, n = i / 4 % key_fragments;
      s[r][n][i % 4] += of_k[r][n][i % 4];
    }
  }

  /// S *= scale of the key.
  RADDLE_DEVICE void scale_part(Logits<row_fragments, key_fragments>& s, const float* scale) const {
    scale_logits<Kernel, row_fragments, key_fragments>(
        s, scale + lane_ % 4 * 2, [](i32, i32) { return 1.0f; }, halves_);
  }

  /// S += this warp's steps of lines [begin, end).
  template <i32 begin, i32 end>
  RADDLE_DEVICE void multiply_lines(Logits<row_fragments, key_fragments>& s, u32 keys) const {
    RADDLE_UNROLL
    for (i32 i = begin; i < end; ++i) {
      u32 a[row_fragments][4];
      RADDLE_UNROLL
      for (i32 r = 0; r < row_fragments; ++r) {
        if constexpr (!Memory::keeps_queries) load_fragment(i, r, a[r]);
        RADDLE_UNROLL
        for (i32 e = 0; Memory::keeps_queries && e < 4; ++e) a[r][e] = q_[i][e];
      }
      RADDLE_UNROLL
      for (i32 n = 0; n < key_fragments; n += 2) {
        u32 b[4];
        ptx::load_matrices(b, keys + static_cast<u32>(128 * i + 8 * n * Rows::pitch));
        RADDLE_UNROLL
        for (i32 r = 0; r < row_fragments; ++r) {
          ptx::multiply_add(s[r][n], a[r], b[0], b[1], T{});
          ptx::multiply_add(s[r][n + 1], a[r], b[2], b[3], T{});
        }
      }
    }
  }

  RADDLE_DEVICE void put_part(const Logits<row_fragments, key_fragments>& s) const {
    RADDLE_UNROLL
    for (i32 i = 0; i < row_fragments * key_fragments; ++i) {
      const float(&x)[4] = s[i / key_fragments][i % key_fragments];
      Memory::part_of_logits(warp_, i) = Four{{x[0], x[1], x[2], x[3]}};
    }
  }
  /// Every warp adds the parts in one order, so that all warps have equal bits.
  RADDLE_DEVICE void add_parts(Logits<row_fragments, key_fragments>& s) const {
    RADDLE_UNROLL
    for (i32 i = 0; i < row_fragments * key_fragments; ++i) {
      Four part[num_warps];
      RADDLE_UNROLL
      for (i32 w = 0; w < num_warps; ++w) part[w] = Memory::part_of_logits(w, i);
      RADDLE_UNROLL
      for (i32 e = 0; e < 4; ++e)
        s[i / key_fragments][i % key_fragments][e] =
            (part[0].x[e] + part[1].x[e]) + (part[2].x[e] + part[3].x[e]);
    }
  }
  static_assert(num_warps == 4);

  RADDLE_DEVICE void finish() {
    put_columns();
    ptx::sync_block();
    write_rows();
    mark<Kernel>(launch_, TimelineStage::stored, item_);
    if (item().partial_row >= 0)
      arrive<Kernel>(launch_, variant_, item(),
                     look_up_ticket(launch_, item(), ptx::thread_index()), Memory::completed_bits(),
                     Memory::vector(warp_));
  }

  /// Writes this warp's columns of O / Σ to shared memory; the first warp writes the LSE. A row
  /// that kept nothing becomes (0, -inf).
  RADDLE_DEVICE void put_columns() {
    const float to_log2 =
        ApplyVariant<Variant, row_fragments, key_fragments>(launch_, variant_, item_).to_log2();
    const i32 g = lane_ / 4, t = lane_ % 4;
    RADDLE_UNROLL
    for (i32 r = 0; r < row_fragments; ++r) {
      RADDLE_UNROLL
      for (i32 half = 0; half < 2; ++half) {
        float* row = Memory::out_row(16 * r + g + 8 * half);
        auto [factor, lse] = end_row<scan>(stats_, r, half, to_log2);
        factor *= output_scale(launch_);
        if constexpr (scales_values) factor *= value_scales_.unit();
        RADDLE_UNROLL
        for (i32 n = 0; n < Kernel::out_fragments; ++n) {
          const i32 d = columns * warp_ + 8 * n + 2 * t;
          if (Kernel::dim_vo != num_warps * columns && d >= Kernel::dim_vo) continue;
          ptx::store_two(row + d, scaled(o_[r][n][2 * half], factor),
                         scaled(o_[r][n][2 * half + 1], factor));
        }
        if (warp_ == 0 && t == 0) row[Kernel::dim_vo] = lse;
      }
    }
  }

  /// Sends the rows from there to memory: every fourth row is this warp's.
  RADDLE_DEVICE void write_rows() const {
    const auto number = [&](i32 i) { return warp_ + num_warps * i; };
    send_rows<Kernel, 16 * row_fragments / num_warps>(
        launch_, variant_, tile().num_rows, item().partial_row, Memory::facts().row,
        Memory::vector(warp_), number, [&](i32 i) { return Memory::out_row(number(i)); });
  }

  const GpuLaunch& launch_;
  const Variant& variant_;
  const i32 item_, warp_, lane_;
  BlockRing<Kernel, Memory> ring_;
  const i32 halves_;  ///< 1 where the second half of the rows is padding
  // Addresses and offsets at which this lane loads matrix fragments.
  const u32 q_address_, k_offset_, v_offset_;
  u32 q_[Memory::keeps_queries ? Kernel::k_steps : 1][4];  // this warp's steps of Q
  Output<Kernel, row_fragments> o_;
  RowStats<row_fragments> stats_;
  ValueScales<Kernel, row_fragments> value_scales_;  // where values have them
};

}  // namespace mma

RADDLE_ENGINE_END

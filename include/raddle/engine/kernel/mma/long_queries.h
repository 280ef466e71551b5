// A work item of many fused rows: prefilling, or rows that share a prefix. What counts is to keep
// the tensor cores busy.
//
// Warp w holds rows 16 w … of every 64, `blocks` times 16 rows, and computes them against whole KV
// tiles, which all warps load together. Two barriers a tile say when K, and when V, is there and
// the slot before it is free.
#pragma once

#include "raddle/engine/kernel/mma/key_stream.h"
#include "raddle/engine/kernel/mma/rows.h"
#include "raddle/engine/kernel/mma/softmax.h"

RADDLE_ENGINE_BEGIN

namespace mma {

template <class K, class V, i32 blocks>
class LongQueries {
  using T = typename K::T;
  using Layout = LongLayout<K>;
  static constexpr Scan scan = scan_of<V>();
  static constexpr i32 tiles = Layout::tile_keys / 8;
  static constexpr i32 block_rows = 16 * num_warps;

 public:
  RADDLE_DEVICE LongQueries(const MmaLaunch& launch, const V& variant, i32 item)
      : launch_(launch),
        variant_(variant),
        item_(launch.plan.items[item]),
        tile_(launch.plan.query_tiles[item_.query_tile]),
        warp_(ptx::warp_index()),
        stream_(launch, item, item + 1, tile_.shape) {}

  RADDLE_DEVICE void run() {
    RADDLE_ROLLED
    for (i32 r = 0; r < blocks; ++r)
      load_queries<16, K>(launch_, variant_, tile_, item_.kv_head, first_row(r),
                          Layout::query_memory(), Layout::scratch().row, Layout::vector(warp_));
    clear(o_);
    stats_.clear();

    ApplyVariant<V, blocks, tiles> apply{variant_,
                                         launch_,
                                         tile_,
                                         Layout::scratch().row,
                                         {},
                                         request_of_keys(launch_, tile_),
                                         item_.kv_head,
                                         launch_.scale};
    RADDLE_UNROLL
    for (i32 r = 0; r < blocks; ++r) apply.first_row[r] = first_row(r) + ptx::lane_index() / 4;
    to_log2_ = (apply.scales() ? 1.0f : launch_.scale) * math::log2e;
    ptx::sync_warp();
    while (!step(apply)) {
    }
    ptx::sync_block();  // rows of O take the place of the ring
    put_rows();
    ptx::sync_warp();
    write_rows();
    if (item_.partial_row >= 0)
      arrive<K>(launch_, variant_, tile_, item_.kv_head, Layout::completed_bits(),
                Layout::vector(warp_));
    ptx::sync_block();  // the next item reuses shared memory
  }

 private:
  RADDLE_DEVICE i32 first_row(i32 r) const { return block_rows * r + 16 * warp_; }

  /// One KV tile, whose slots then take what is a ring further on. The first steps only fill the
  /// ring. Returns whether the tile is the item's last.
  template <class Apply>
  RADDLE_DEVICE bool step(const Apply& apply) {
    constexpr i32 pending = Layout::slots - 2;
    static_assert(Layout::slots % 2 == 0);
    const auto& keys = Layout::keys_at(computing_);
    const i32 next = Layout::after(slot_, Layout::slots);
    const i32 before = slot_ == 0 ? Layout::slots - 1 : slot_ - 1;
    u8* k = Layout::slot_memory(slot_);
    u8* v = Layout::slot_memory(next);
    float* vector = Layout::vector(warp_);
    Logits<blocks, tiles> s;
    Weights<blocks, tiles> p;
    i32 flags = TileFlags::empty;
    if (step_ == 0) {
      ptx::copy_wait<pending>();
      ptx::sync_warp();
      flags = keys.flags[warp_];
      if constexpr (has_key<V>)
        if (!(flags & TileFlags::empty))
          transform_keys<T, typename K::QkRows, K::dim_qk>(
              k, keys, apply.request, apply.kv_head, vector,
              [&](WarpVector& x, const Key& key) { variant_.key(x, key); });
      ptx::sync_block();  // K is there; the tile before is computed, and its V's slot is free
    }
    const bool computes = !(flags & TileFlags::empty);
    if (step_ > first_step) stream_.load(Layout::slots - 1, before);
    if (computes) {
      const u32 q = a_address<typename K::QkRows>(Layout::query_memory()) +
                    static_cast<u32>(first_row(0) * K::QkRows::pitch);
      multiply_qk<K, blocks, tiles>(s, k, [&](i32 at, i32 r, u32(&a)[4]) {
        ptx::load_matrices(
            a, K::QkRows::step_from(q, at) + static_cast<u32>(r * block_rows * K::QkRows::pitch));
      });
      apply(s, keys, 0, flags);
      if constexpr (scan == Scan::softmax) softmax<K>(s, stats_, o_, to_log2_, 2);
      round_weights<T>(s, p);
      ptx::copy_wait<pending>();
      ptx::sync_warp();
      if constexpr (has_value<V>)
        transform_keys<T, typename K::VoRows, K::dim_vo>(
            v, keys, apply.request, apply.kv_head, vector,
            [&](WarpVector& x, const Key& key) { variant_.value(x, key); });
      ptx::sync_block();  // V is there; K's slot is free
    }
    stream_.load(Layout::slots, slot_);
    if (computes) multiply_pv<K, blocks, tiles>(o_, p, v);
    slot_ = Layout::after(next, Layout::slots);
    if (step_ < 0) {
      ++step_;
      return false;
    }
    computing_ = Layout::after(computing_, Layout::key_slots);
    return (flags & TileFlags::last) != 0;
  }

  /// A row of O on its way out, in fp32, and its LSE behind it.
  static constexpr i32 row_floats = round_up(K::dim_vo, 8) + 4;
  static_assert(K::long_rows * row_floats * 4 <= Layout::walks);  // ring and keys are free by then
  RADDLE_DEVICE static float* out_row(i32 m) {
    return reinterpret_cast<float*>(Layout::base()) + m * row_floats;
  }

  /// O / Σ and LSE to shared memory; a row with nothing kept becomes (0, -inf).
  RADDLE_DEVICE void put_rows() {
    const i32 g = ptx::lane_index() / 4, t = ptx::lane_index() % 4;
    RADDLE_UNROLL
    for (i32 r = 0; r < blocks; ++r) {
      RADDLE_UNROLL
      for (i32 half = 0; half < 2; ++half) {
        float* row = out_row(first_row(r) + g + 8 * half);
        float factor = 1.0f, lse = 0.0f;
        if constexpr (scan == Scan::softmax) {
          float sum = stats_.sum[r][half];
          sum += ptx::shuffle_xor(sum, 1);
          sum += ptx::shuffle_xor(sum, 2);
          const float top = stats_.top[r][half];
          lse = top == -math::infinity ? top : (top * to_log2_ + math::log2(sum)) * math::ln2;
          factor = sum == 0.0f ? 0.0f : 1.0f / sum;
        }
        RADDLE_UNROLL
        for (i32 n = 0; n < K::dim_vo / 8; ++n) {
          row[8 * n + 2 * t] = o_[r][n][2 * half] * factor;
          row[8 * n + 2 * t + 1] = o_[r][n][2 * half + 1] * factor;
        }
        if (t == 0) row[K::dim_vo] = lse;
      }
    }
  }

  /// This warp's rows from there to where they belong.
  RADDLE_DEVICE void write_rows() {
    RADDLE_ROLLED
    for (i32 i = 0; i < 16 * blocks; ++i) {
      const i32 m = first_row(i / 16) + i % 16;
      if (m >= tile_.num_rows) continue;
      const float* row = out_row(m);
      LaneRow<K::dim_vo> o;
      o.each([&](i32 step, i32 d) { o.of[step] = *reinterpret_cast<const Four*>(row + d); });
      const float lse = row[K::dim_vo];
      if (item_.partial_row >= 0)
        store_partial<K>(launch_, i64{item_.partial_row} + m, o, lse);
      else
        write_row<K>(launch_, variant_, Layout::scratch().row[m], o, lse, Layout::vector(warp_));
    }
  }

  const MmaLaunch& launch_;
  const V& variant_;
  const WorkItem& item_;
  const QueryTile& tile_;
  const i32 warp_;
  KeyStream<K, Layout, false> stream_;
  static constexpr i32 first_step = -Layout::slots / 2;
  i32 step_ = first_step;  // 0 once the ring is full
  i32 slot_ = 0;           // of what is used next;
  i32 computing_ = 0;      // where its keys are spoken of
  float to_log2_;
  Output<K, blocks> o_;
  RowStats<blocks> stats_;
};

}  // namespace mma

RADDLE_ENGINE_END

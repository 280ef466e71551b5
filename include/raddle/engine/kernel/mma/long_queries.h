// A work item of many fused rows: prefilling, or rows that share a prefix. What counts is to keep
// the tensor cores busy.
//
// Warp w holds rows 16 w … of every 64, `blocks` times 16 rows, and computes them against whole KV
// tiles, which all warps load together. Two barriers a tile say when K, and when V, is there and
// the stage before it is free.
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
        lane_(ptx::lane_index()),
        stream_(launch, item, item + 1, tile_.shape) {}

  RADDLE_DEVICE void run() {
    RADDLE_UNROLL
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
    for (i32 r = 0; r < blocks; ++r) apply.first_row[r] = row_in_tile(r, 0);
    to_log2_ = (apply.scales() ? 1.0f : launch_.scale) * math::log2e;
    ptx::sync_warp();
    while (!step(apply)) {
    }
    ptx::sync_block();  // O takes Q's place, and vectors that of the ring
    normalize();
    if (item_.partial_row >= 0 || launch_.state_only)
      store_states();
    else if constexpr (has_output<V>)
      emit_through_output();
    else
      emit_rounded();
    if (item_.partial_row >= 0)
      arrive<K>(launch_, variant_, tile_, item_.kv_head, Layout::completed_flag(),
                Layout::vector(warp_));
    ptx::sync_block();  // the next item reuses shared memory
  }

 private:
  RADDLE_DEVICE i32 first_row(i32 r) const { return block_rows * r + 16 * warp_; }
  RADDLE_DEVICE i32 row_in_tile(i32 r, i32 half) const {
    return first_row(r) + lane_ / 4 + 8 * half;
  }
  RADDLE_DEVICE Row row_of(i32 m) const {
    return make_row(launch_.layout, launch_.levels[tile_.level], tile_.group, tile_.row_begin + m,
                    item_.kv_head, launch_.plan.group_size);
  }

  /// One KV tile, and the loads of the one that takes its place; returns whether it is the item's
  /// last.
  template <class Apply>
  RADDLE_DEVICE bool step(const Apply& apply) {
    constexpr i32 pending = 2 * Layout::stages - 2;
    const auto& keys = Layout::keys_at(slot_);
    u8* k = Layout::key_memory(stage_);
    u8* v = Layout::value_memory(stage_);
    float* vector = Layout::vector(warp_);
    Logits<blocks, tiles> s;
    Weights<blocks, tiles> p;
    i32 flags = 0;
    bool computes = false;
    const bool filling = stream_.filling();
    if (!filling) {
      ptx::copy_wait<pending>();
      ptx::sync_warp();
      flags = keys.flags[warp_];
      computes = !(flags & TileFlags::empty);
      if constexpr (has_key<V>)
        if (computes)
          transform_keys<T, typename K::QkRows, K::dim_qk>(
              k, keys, apply.request, apply.kv_head, vector,
              [&](WarpVector& x, const Key& key) { variant_.key(x, key); });
      ptx::sync_block();  // K is there; the tile before is computed, its V's stage is free
    }
    stream_.load_values(Layout::before(stage_, Layout::stages));
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
      ptx::sync_block();  // V is there; K's stage is free
    }
    stream_.load_keys(stage_, Layout::before(slot_, Layout::key_slots));
    if (computes) multiply_pv<K, blocks, tiles>(o_, p, v);
    stage_ = Layout::after(stage_, Layout::stages);
    slot_ = Layout::after(slot_, Layout::key_slots);
    return (flags & TileFlags::last) != 0;
  }

  /// O / Σ and LSE; a row with nothing kept becomes (0, -inf). `top` holds the LSE from here on.
  RADDLE_DEVICE void normalize() {
    if (scan == Scan::sum) return;
    RADDLE_UNROLL
    for (i32 r = 0; r < blocks; ++r) {
      RADDLE_UNROLL
      for (i32 half = 0; half < 2; ++half) {
        float sum = stats_.sum[r][half];
        sum += ptx::shuffle_xor(sum, 1);
        sum += ptx::shuffle_xor(sum, 2);
        float& top = stats_.top[r][half];
        if (top != -math::infinity) top = (top * to_log2_ + math::log2(sum)) * math::ln2;
        scale_rows(r, half, sum == 0.0f ? 0.0f : 1.0f / sum);
      }
    }
  }

  RADDLE_DEVICE void scale_rows(i32 r, i32 half, float factor) {
    RADDLE_UNROLL
    for (i32 n = 0; n < K::out_tiles; ++n) {
      o_[r][n][2 * half] *= factor;
      o_[r][n][2 * half + 1] *= factor;
    }
  }

  /// f(r, half, m) for the rows of the tile that this lane holds.
  template <class F>
  RADDLE_DEVICE void each_row(F f) {
    RADDLE_UNROLL
    for (i32 r = 0; r < blocks; ++r) {
      RADDLE_UNROLL
      for (i32 half = 0; half < 2; ++half) {
        const i32 m = row_in_tile(r, half);
        if (m < tile_.num_rows) f(r, half, m);
      }
    }
  }

  /// This lane's elements of a row, in fp32.
  RADDLE_DEVICE void store_floats(i32 r, i32 half, float* to) const {
    const i32 t = lane_ % 4;
    RADDLE_UNROLL
    for (i32 n = 0; n < K::out_tiles; ++n) {
      if (8 * n >= K::dim_vo) continue;
      to[8 * n + 2 * t] = o_[r][n][2 * half];
      to[8 * n + 2 * t + 1] = o_[r][n][2 * half + 1];
    }
  }

  /// Rows in fp32: partial states, or the state that the caller asked for.
  RADDLE_DEVICE void store_states() {
    each_row([&](i32 r, i32 half, i32 m) {
      float* to;
      if (item_.partial_row >= 0) {
        const i64 row = i64{item_.partial_row} + m;
        to = launch_.partial_o + row * K::dim_vo;
        if (lane_ % 4 == 0) launch_.partial_lse[row] = stats_.top[r][half];
      } else {
        const Row row = row_of(m);
        to = static_cast<float*>(launch_.out.data) + out_offset(launch_, row);
        if (lane_ % 4 == 0) store_lse(launch_, row, stats_.top[r][half]);
      }
      store_floats(r, half, to);
    });
  }

  /// Rounds the rows where their queries were, and stores them whole.
  RADDLE_DEVICE void emit_rounded() {
    using Rows = typename K::VoRows;
    u8* shared = Layout::query_memory();
    each_row([&](i32 r, i32 half, i32 m) {
      if (!has_sink<V> && !launch_.lse) return;
      const Row row = row_of(m);
      float lse = stats_.top[r][half];
      const float factor = apply_sink(launch_, variant_, row, lse);
      if constexpr (has_sink<V>) scale_rows(r, half, factor);
      if (lane_ % 4 == 0) store_lse(launch_, row, lse);
    });
    RADDLE_UNROLL
    for (i32 r = 0; r < blocks; ++r) {
      RADDLE_UNROLL
      for (i32 half = 0; half < 2; ++half) {
        RADDLE_UNROLL
        for (i32 n = 0; n < K::out_tiles; ++n)
          *reinterpret_cast<u32*>(shared + Rows::at(row_in_tile(r, half), n) + 4 * (lane_ % 4)) =
              ptx::pack(o_[r][n][2 * half], o_[r][n][2 * half + 1], T{});
      }
    }
    ptx::sync_warp();
    for (i32 r = 0; r < blocks; ++r) {
      const i32 first = first_row(r), rows = min(16, tile_.num_rows - first);
      T* mine = nullptr;
      if (lane_ < rows)
        mine = static_cast<T*>(launch_.out.data) + out_offset(launch_, row_of(first + lane_));
      RADDLE_UNROLL
      for (i32 i = 0; i < Rows::chunks / 2; ++i) {
        const i32 unit = 32 * i + lane_;
        const i32 m = unit / Rows::chunks, chunk = unit % Rows::chunks;
        T* to = ptx::shuffle(mine, m);
        if (m < rows && 8 * chunk < K::dim_vo)
          *reinterpret_cast<Packed8*>(to + 8 * chunk) =
              *reinterpret_cast<const Packed8*>(shared + Rows::at(first + m, chunk));
      }
    }
  }

  /// Row after row through the warp's vector, where the output part sees it.
  RADDLE_DEVICE void emit_through_output() {
    float* vector = Layout::vector(warp_);
    RADDLE_UNROLL
    for (i32 r = 0; r < blocks; ++r) {
      RADDLE_UNROLL
      for (i32 half = 0; half < 2; ++half) {
        for (i32 g = 0; g < 8; ++g) {
          const i32 m = first_row(r) + 8 * half + g;
          if (m >= tile_.num_rows) continue;
          if (g == lane_ / 4) store_floats(r, half, vector);
          const float lse = ptx::shuffle(stats_.top[r][half], 4 * g);
          ptx::sync_warp();
          LaneRow<K::dim_vo> o;
          o.each([&](i32 i, i32 d) { o.of[i] = *reinterpret_cast<const Four*>(vector + d); });
          ptx::sync_warp();
          write_row<K>(launch_, variant_, row_of(m), o, lse, vector);
        }
      }
    }
  }

  const MmaLaunch& launch_;
  const V& variant_;
  const WorkItem& item_;
  const QueryTile& tile_;
  const i32 warp_, lane_;
  KeyStream<K, Layout, false> stream_;
  i32 stage_ = 0, slot_ = 0;
  float to_log2_;
  Output<K, blocks> o_;
  RowStats<blocks> stats_;
};

}  // namespace mma

RADDLE_ENGINE_END

// Attention on a CPU: FlashAttention-2's loop over KV tiles (algorithm 1) with the variant's parts
// as stages between the matrix products. Long queries one work item at a time; short_queries.h
// takes the others.
#pragma once

#include "raddle/engine/kernel/cpu/finish.h"
#include "raddle/engine/tile/mask.h"
#include "raddle/engine/tile/walk.h"

RADDLE_ENGINE_BEGIN

namespace cpu {

/// Rounds a transformed row once to the matrix dtype, in place.
inline void round_row(DType dtype, float* x, i32 dim) {
  dispatch_dtype(dtype, [&](auto t) { raddle::round_row<decltype(t)>(x, dim); });
}

/// T is the element type of K and V. That of Q and O, which the loops over keys don't meet, is a
/// run-time value.
template <class T>
class ItemKernel {
 public:
  ItemKernel(const CpuLaunch& launch, const WorkItem& item, const Scratch<T>& scratch)
      : launch_(launch),
        plan_(*launch.plan),
        item_(&item),
        tile_(plan_.query_tiles[item.query_tile]),
        level_(launch.layout->levels[tile_.level]),
        stages_(*launch.stages),
        scales_(launch.kv_scales[tile_.level]),
        x_(scratch) {}

  void run() {
    load_queries();
    TileWalk walk(plan_, *item_);
    Span span, upcoming;
    bool more = walk.next(upcoming);
    if (more) gather(upcoming, x_.tiles[0]);
    for (i32 current = 0; more; current ^= 1) {
      span = upcoming;
      KeyTile<T>& keys = x_.tiles[current];
      KeyTile<T>& next = x_.tiles[current ^ 1];
      next.n = 0;
      more = walk.next(upcoming);
      if (more) gather(upcoming, next);
      if (keys.n == 0) continue;
      logits(keys, next);
      apply_variant(keys, span.partial);
      if (stages_.scan == Scan::softmax) softmax(keys.n);
      accumulate(keys, next);
    }
    finish();
  }

 protected:
  void load_queries() {
    for (i32 m = 0; m < tile_.num_rows; ++m) {
      Row& row = x_.rows[m];
      row = make_row(*launch_.layout, level_, tile_.group, tile_.row_begin + m, item_->kv_head,
                     plan_.group_size);
      float* q = x_.q + m * x_.ldq;
      const i64 at = row.row * launch_.q.row_stride + row.q_head * launch_.q.head_stride;
      dispatch_dtype(launch_.dtype, [&](auto t) {
        widen_row(static_cast<const decltype(t)*>(launch_.q.data) + at, q, launch_.dim_qk, x_.ldq);
      });
      for (i32 i = 0; i < stages_.num_query; ++i)
        stages_.query[i].ops->query(stages_.query[i].self, q, launch_.dim_qk, row);
      if (stages_.num_query > 0) round_row(launch_.dtype, q, launch_.dim_qk);
      x_.state[m] = RowState{-math::infinity, 0.0f};
      x_.lse[m] = 0.0f;
      for (i32 d = 0; d < x_.ldo; ++d) x_.o[m * x_.ldo + d] = 0.0f;
    }
  }

  void finish() {
    normalize(launch_, x_, tile_.num_rows);
    if (item_->partial_row >= 0)
      return store_partial(launch_, x_, tile_.num_rows, item_->partial_row);
    for (i32 m = 0; m < tile_.num_rows; ++m)
      write_row(launch_, x_.rows[m], x_.o + m * x_.ldo, x_.lse[m]);
  }

  void gather(const Span& span, KeyTile<T>& keys) const {
    const KvView& kv = launch_.kv[tile_.level];
    gather_keys(level_, kv.k, kv.v, tile_.group, item_->kv_head, max(span.begin, tile_.col_begin),
                min(span.end, tile_.col_end), keys);
    if constexpr (is_quantized<T>) gather_scales(keys);
  }

  void gather_scales(KeyTile<T>& keys) const {
    raddle::gather_scales(level_, scales_.k, tile_.group, item_->kv_head, keys.column, keys.n,
                          keys.k_scale);
    raddle::gather_scales(level_, scales_.v, tile_.group, item_->kv_head, keys.column, keys.n,
                          keys.v_scale);
  }

  /// The request of the tile's keys; -1 on a level whose groups hold rows of several.
  i32 key_request() const { return level_.keys_are_shared ? -1 : x_.rows[0].request; }

  /// Copies rows to fp32 scratch, runs `stages` on them, and rounds what they changed to the matrix
  /// dtype. Stages see values: what is quantised is multiplied by its `scale` before them.
  template <void (*VariantOps::*part)(const void*, float*, i32, const Key&)>
  void stage_rows(const BoundStage* stages, i32 num_stages, const T* const* from,
                  const float* scale, const KeyTile<T>& keys, i32 dim, i32 padded, float* to,
                  Upcoming<T> next) const {
    for (i32 j = 0; j < keys.n; ++j) {
      next.fetch(j, 1, dim);
      float* row = to + j * padded;
      widen_row(from[j], row, dim, padded);
      const Key key{key_request(), keys.kv_index[j], keys.kv_pos[j], item_->kv_head};
      if (is_quantized<T> && num_stages > 0) scale_row(row, padded, scale[j]);
      for (i32 i = 0; i < num_stages; ++i) (stages[i].ops->*part)(stages[i].self, row, dim, key);
      if (num_stages > 0) round_row(launch_.dtype, row, dim);
    }
  }

  /// S = scale · f_q(Q) · f_k(K)ᵀ
  void logits(const KeyTile<T>& keys, const KeyTile<T>& next) {
    multiply_logits(keys, next);
    scale_logits(keys);
  }

  /// The scales of K, where nothing has multiplied the keys by them.
  void scale_logits(const KeyTile<T>& keys) {
    if (!is_quantized<T> || stages_.num_key > 0 || is_one(scales_.k)) return;
    for (i32 m = 0; m < tile_.num_rows; ++m) multiply_row(x_.s + m * x_.lds, keys.k_scale, keys.n);
  }

  /// The same of V, on the weights.
  void scale_weights(const KeyTile<T>& keys) {
    if (!is_quantized<T> || stages_.num_value > 0 || is_one(scales_.v)) return;
    for (i32 m = 0; m < tile_.num_rows; ++m) multiply_row(x_.s + m * x_.lds, keys.v_scale, keys.n);
  }

  void multiply_logits(const KeyTile<T>& keys, const KeyTile<T>& next) {
    const Upcoming<T> ahead{next.k, next.n};
    if (stages_.num_key == 0 && launch_.dim_qk % lanes == 0)
      return multiply_qk(x_.q, x_.ldq, tile_.num_rows, keys.k, keys.n, x_.ldq, launch_.scale, x_.s,
                         x_.lds, ahead, x_.panel);
    stage_rows<&VariantOps::key>(stages_.key, stages_.num_key, keys.k, keys.k_scale, keys,
                                 launch_.dim_qk, x_.ldq, x_.k, ahead);
    multiply_qk(x_.q, x_.ldq, tile_.num_rows, x_.rows_k, keys.n, x_.ldq, launch_.scale, x_.s,
                x_.lds, Upcoming<float>{nullptr, 0}, x_.panel);
  }

  /// f_logits, then f_mask: a dropped pair becomes -inf, or 0 under a plain sum.
  void apply_variant(const KeyTile<T>& keys, bool partial) {
    const KeyLanes lanes_of_tile{keys.kv_index, keys.kv_pos, key_request(), item_->kv_head};
    const float dropped = stages_.scan == Scan::softmax ? -math::infinity : 0.0f;
    for (i32 m = 0; m < tile_.num_rows; ++m) {
      float* s = x_.s + m * x_.lds;
      for (i32 i = 0; i < stages_.num_logits; ++i)
        stages_.logits[i].ops->logits(stages_.logits[i].self, s, keys.n, x_.rows[m], lanes_of_tile);
      if (partial) {
        u8 keep[max_tile_keys];
        evaluate_mask(stages_, x_.rows[m], lanes_of_tile, keys.n, keep);
        if (level_.mask_bits)
          apply_mask_bits(level_, tile_.group, (tile_.row_begin + m) / plan_.group_size,
                          keys.column, keys.n, keep);
        for (i32 j = 0; j < keys.n; ++j) s[j] = keep[j] ? s[j] : dropped;
      }
      pad_row(s, keys.n, dropped);
    }
  }

  void softmax(i32 n) {
    for (i32 m = 0; m < tile_.num_rows; ++m) {
      const float rescale = softmax_step(x_.s + m * x_.lds, n, x_.state[m]);
      if (rescale != 1.0f) scale_row(x_.o + m * x_.ldo, x_.ldo, rescale);
    }
  }

  /// O += P · f_v(V)
  void accumulate(const KeyTile<T>& keys, const KeyTile<T>& next) {
    const Upcoming<T> ahead{next.v, next.n};
    scale_weights(keys);
    // Many query rows read each V row many times: widen it once.
    const bool reused = tile_.num_rows > 2 * block_rows && sizeof(T) < sizeof(float);
    if (stages_.num_value == 0 && launch_.dim_vo % lanes == 0 && !reused)
      return multiply_pv(x_.s, x_.lds, tile_.num_rows, keys.v, keys.n, x_.ldo, x_.o, x_.ldo, ahead);
    stage_rows<&VariantOps::value>(stages_.value, stages_.num_value, keys.v, keys.v_scale, keys,
                                   launch_.dim_vo, x_.ldo, x_.v, ahead);
    multiply_pv(x_.s, x_.lds, tile_.num_rows, x_.rows_v, keys.n, x_.ldo, x_.o, x_.ldo,
                Upcoming<float>{nullptr, 0});
  }

  const CpuLaunch& launch_;
  const PlanView& plan_;
  const WorkItem* item_;
  const QueryTile& tile_;
  const LevelView& level_;
  const Stages& stages_;
  const KvScales& scales_;
  Scratch<T> x_;
};

}  // namespace cpu

RADDLE_ENGINE_END

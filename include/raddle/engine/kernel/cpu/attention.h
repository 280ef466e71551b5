// Attention on a CPU: FlashAttention-2's loop over KV tiles (algorithm 1) with the variant's parts
// as stages between the matrix products, one work item at a time on fp32 lanes. short_queries.h and
// bf16_long_queries.h build other kernels of the same steps; attend.h chooses.
#pragma once

#include "raddle/engine/kernel/cpu/finish.h"
#include "raddle/engine/kernel/cpu/mask.h"
#include "raddle/engine/tile/walk.h"

RADDLE_ENGINE_BEGIN

namespace cpu {

/// Rounds a transformed row once to the matrix dtype, in place.
inline void round_row(DType dtype, float* x, i32 dim) {
  dispatch_dtype(dtype, [&](auto t) { raddle::round_row<decltype(t)>(x, dim); });
}

/// s[j] becomes `dropped` where the pair is not kept.
RADDLE_FN void drop(float* s, const u8* keep, i32 n, float dropped) {
  for (i32 j = 0; j < n; ++j) s[j] = keep[j] ? s[j] : dropped;
}

/// One past the last of n keys that is kept; 0: none is.
RADDLE_FN i32 kept_end(const u8* keep, i32 n) {
  constexpr i32 word = sizeof(u64);
  for (u64 eight = 0; n >= word; n -= word) {
    __builtin_memcpy(&eight, keep + n - word, word);
    if (eight != 0) break;
  }
  while (n > 0 && keep[n - 1] == 0) --n;
  return n;
}

/// T is the element type of K and V. The element type of Q and O is a run-time value: no loop over
/// keys depends on it.
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
        scratch_(scratch) {}

  void run() {
    load_queries();
    for_tiles([&](const KeyTile<T>& keys, const KeyTile<T>& next, bool partial) {
      const u8* keep = partial ? evaluate_keep(keys) : nullptr;
      const i32* ends = partial ? ends_of_rows(keep, keys.n) : nullptr;
      logits(keys, next, ends);
      apply_variant(keys, keep);
      if (stages_.scan == Scan::softmax) softmax(keys.n);
      accumulate(keys, next, ends);
    });
    finish();
  }

 protected:
  /// Calls f(keys, next, partial) for the item's KV tiles in order, with the tile after each. The
  /// tile before stays valid until the next call, so there are three. after_last(next) may fill in
  /// the tile after the last, which is only prefetched.
  template <class F, class After>
  void for_tiles(F f, After after_last) {
    TileWalk walk(plan_, *item_);
    bool partial = gather_next(walk, scratch_.tiles[0]);
    for (i32 current = 0; scratch_.tiles[current].n > 0;) {
      KeyTile<T>& keys = scratch_.tiles[current];
      current = (current + 1) % 3;
      KeyTile<T>& next = scratch_.tiles[current];
      const bool next_is_partial = gather_next(walk, next);
      const bool is_last = next.n == 0;
      if (is_last) after_last(next);
      f(keys, next, partial);
      if (is_last) return;
      partial = next_is_partial;
    }
  }
  template <class F>
  void for_tiles(F f) {
    for_tiles(f, [](const KeyTile<T>&) {});
  }

  /// Writes O / Σ and LSE to the caller's tensors, or as a partial state.
  void finish() {
    if (stages_.scan == Scan::sum) clear_empty_rows();
    normalize(launch_, scratch_, tile_.num_rows);
    if (item_->partial_row >= 0)
      return store_partial(launch_, scratch_, tile_.num_rows, item_->partial_row);
    for (i32 m = 0; m < tile_.num_rows; ++m)
      write_row(launch_, scratch_.rows[m], scratch_.o + m * scratch_.stride_o, scratch_.lse[m]);
  }

  /// Under a plain sum no Σ says which rows kept nothing. Where O isn't finite, masks are asked
  /// again: a row that kept nothing is 0, whatever the values of dropped keys have left there.
  void clear_empty_rows() {
    for (i32 m = 0; m < tile_.num_rows; ++m) {
      float* o = scratch_.o + m * scratch_.stride_o;
      simd::Vec none{};  // x - x is 0, or NaN
      for (i32 d = 0; d < scratch_.ldo; d += lanes) {
        const simd::Vec x = simd::load(o + d);
        none = none + (x - x);
      }
      if (simd::reduce_sum(none) == 0.0f || keeps_any(m)) continue;
      for (i32 d = 0; d < scratch_.ldo; ++d) o[d] = 0.0f;
    }
  }

  /// Whether row m keeps any of the item's keys.
  bool keeps_any(i32 m) {
    TileWalk walk(plan_, *item_);
    KeyTile<T>& keys = scratch_.tiles[0];
    for (;;) {
      const bool partial = gather_next(walk, keys);
      if (keys.n == 0) return false;
      if (!partial) return true;
      evaluate_keep(m, keys, 0, keys.n, scratch_.keep);
      if (kept_end(scratch_.keep, keys.n) > 0) return true;
    }
  }

  void load_queries() {
    for (i32 m = 0; m < tile_.num_rows; ++m) {
      start_row(m);
      load_query(m);
    }
  }

  /// Describes row m and sets its state to that of no key.
  void start_row(i32 m) {
    scratch_.rows[m] = make_row(*launch_.layout, level_, tile_.group, tile_.row_begin + m,
                                item_->kv_head, plan_.group_size);
    scratch_.state[m] = RowState{-math::infinity, 0.0f};
    scratch_.lse[m] = 0.0f;
    for (i32 d = 0; d < scratch_.ldo; ++d) scratch_.o[m * scratch_.stride_o + d] = 0.0f;
  }

  /// Where row m lies in Q, in elements.
  i64 offset_in_q(i32 m) const { return offset_in(launch_.q, scratch_.rows[m]); }

  /// f_q(Q) of row m, in fp32.
  void load_query(i32 m) {
    float* q = scratch_.q + m * scratch_.ldq;
    dispatch_dtype(launch_.dtype, [&](auto t) {
      widen_row(static_cast<const decltype(t)*>(launch_.q.data) + offset_in_q(m), q, launch_.dim_qk,
                scratch_.ldq);
    });
    for (i32 i = 0; i < stages_.num_query; ++i)
      stages_.query[i].ops->query(stages_.query[i].self, q, launch_.dim_qk, scratch_.rows[m]);
    if (stages_.num_query > 0) round_row(launch_.dtype, q, launch_.dim_qk);
  }

  /// The walk's next tile, whose n is 0 at the end; tiles without a key are passed over. Returns
  /// whether it is partial.
  bool gather_next(TileWalk& walk, KeyTile<T>& keys) const {
    Span span{0, 0, false};
    keys.n = 0;
    while (keys.n == 0 && walk.next(span)) gather(span, keys);
    return span.partial;
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

  /// The request of the tile's keys; -1 on a level whose groups have rows of several requests.
  i32 key_request() const { return level_.keys_are_shared ? -1 : scratch_.rows[0].request; }

  /// Whether K extends V: a key's row is read from both.
  bool keys_extend() const { return launch_.k_begin > 0; }
  /// Columns of the rows of K.
  i32 k_columns() const { return launch_.dim_qk - launch_.k_begin; }

  /// Row j of a tile's keys in fp32, padded to ldq. Stages see values: what is quantised is
  /// multiplied by its scale before them, and where K extends V always, since each part has its
  /// own.
  void load_key(const KeyTile<T>& keys, i32 j, float* row) const {
    const i32 begin = launch_.k_begin, rest = scratch_.ldq - begin;
    const bool scales = is_quantized<T> && (keys_extend() || stages_.num_key > 0);
    if (keys_extend()) {
      widen_row(keys.v[j], row, begin, begin);
      if (scales) multiply_each(row, begin, keys.v_scale[j]);
    }
    widen_row(keys.k[j], row + begin, k_columns(), rest);
    if (scales) multiply_each(row + begin, rest, keys.k_scale[j]);
  }

  void load_value(const KeyTile<T>& keys, i32 j, i32 padded, float* row) const {
    widen_row(keys.v[j], row, launch_.dim_vo, padded);
    if (is_quantized<T> && stages_.num_value > 0) scale_row(row, padded, keys.v_scale[j]);
  }

  /// f_k(K) of a tile in fp32 scratch, rows of ldq.
  void stage_keys(const KeyTile<T>& keys, Upcoming<T> next) const {
    const auto load = [&](i32 j, float* row) {
      next.fetch(j, 1, k_columns());
      load_key(keys, j, row);
    };
    stage_rows<&VariantOps::key>(stages_.key, stages_.num_key, keys, launch_.dim_qk, scratch_.ldq,
                                 scratch_.k, load);
  }

  /// f_v(V) of a tile in fp32 scratch, rows of `padded`.
  void stage_values(const KeyTile<T>& keys, i32 padded, Upcoming<T> next) const {
    const auto load = [&](i32 j, float* row) {
      next.fetch(j, 1, launch_.dim_vo);
      load_value(keys, j, padded, row);
    };
    stage_rows<&VariantOps::value>(stages_.value, stages_.num_value, keys, launch_.dim_vo, padded,
                                   scratch_.v, load);
  }

  /// Rows that load(j, row) leaves in fp32 scratch, changed by `stages`; then they are rounded to
  /// the matrix dtype.
  template <void (*VariantOps::*part)(const void*, float*, i32, const Key&), class Load>
  void stage_rows(const BoundStage* stages, i32 num_stages, const KeyTile<T>& keys, i32 dim,
                  i32 padded, float* to, Load load) const {
    for (i32 j = 0; j < keys.n; ++j) {
      float* row = to + j * padded;
      load(j, row);
      const Key key{key_request(), keys.kv_index[j], keys.kv_pos[j], item_->kv_head};
      for (i32 i = 0; i < num_stages; ++i) (stages[i].ops->*part)(stages[i].self, row, dim, key);
      if (num_stages > 0) round_row(launch_.dtype, row, dim);
    }
  }

  /// S = scale · f_q(Q) · f_k(K)ᵀ; a row's logits from ends[row] on may be anything.
  void logits(const KeyTile<T>& keys, const KeyTile<T>& next, const i32* ends) {
    multiply_logits(keys, next, ends);
    scale_logits(keys);
  }

  /// The scales of K, where nothing has multiplied the keys by them.
  void scale_logits(const KeyTile<T>& keys) {
    if (!is_quantized<T> || keys_extend() || stages_.num_key > 0 || is_one(scales_.k)) return;
    for (i32 m = 0; m < tile_.num_rows; ++m)
      multiply_row(scratch_.s + m * scratch_.lds, keys.k_scale, keys.n);
  }

  /// The scales of V, on the weights: where the logits were.
  void scale_weights(const KeyTile<T>& keys) {
    if (!is_quantized<T> || stages_.num_value > 0 || is_one(scales_.v)) return;
    for (i32 m = 0; m < tile_.num_rows; ++m)
      multiply_row(scratch_.s + m * scratch_.lds, keys.v_scale, keys.n);
  }

  void multiply_logits(const KeyTile<T>& keys, const KeyTile<T>& next, const i32* ends) {
    const Upcoming<T> ahead{next.k, next.n};
    if (stages_.num_key == 0 && !keys_extend() && launch_.dim_qk % lanes == 0)
      return multiply_qk(scratch_.q, scratch_.ldq, tile_.num_rows, keys.k, keys.n, scratch_.ldq,
                         launch_.scale, scratch_.s, scratch_.lds, ahead, scratch_.panel, ends);
    stage_keys(keys, ahead);
    multiply_qk(scratch_.q, scratch_.ldq, tile_.num_rows, scratch_.rows_k, keys.n, scratch_.ldq,
                launch_.scale, scratch_.s, scratch_.lds, Upcoming<float>{nullptr, 0},
                scratch_.panel, ends);
  }

  /// Keys of a tile from number `first` on, as stages see them.
  KeyLanes lanes_of(const KeyTile<T>& keys, i32 first) const {
    return {keys.kv_index + first, keys.kv_pos + first, key_request(), item_->kv_head};
  }

  /// What a dropped pair's logit becomes: -inf, or 0 under a plain sum.
  float dropped() const { return stages_.scan == Scan::softmax ? -math::infinity : 0.0f; }

  /// f_logits of some rows; logits.scale is applied by the first stage alone.
  void apply_logits(LogitRows logits, const KeyLanes& keys) const {
    for (i32 i = 0; i < stages_.num_logits; ++i, logits.scale = 1.0f)
      stages_.logits[i].ops->logits(stages_.logits[i].self, logits, keys);
  }

  /// f_mask of row m, for n keys of a tile from number `first` on.
  void evaluate_keep(i32 m, const KeyTile<T>& keys, i32 first, i32 n, u8* keep) const {
    evaluate_mask(stages_, scratch_.rows[m], lanes_of(keys, first), n, keep);
    if (level_.mask_bits)
      apply_mask_bits(level_, tile_.group, (tile_.row_begin + m) / plan_.group_size,
                      keys.column + first, n, keep);
  }

  /// f_mask of all rows and keys: [rows, max_tile_keys].
  const u8* evaluate_keep(const KeyTile<T>& keys) {
    for (i32 m = 0; m < tile_.num_rows; ++m)
      evaluate_keep(m, keys, 0, keys.n, scratch_.keep + m * max_tile_keys);
    return scratch_.keep;
  }

  /// The number of keys that each row has to be multiplied with: up to the last that it keeps.
  const i32* ends_of_rows(const u8* keep, i32 n) {
    for (i32 m = 0; m < tile_.num_rows; ++m)
      scratch_.ends[m] = kept_end(keep + m * max_tile_keys, n);
    return scratch_.ends;
  }

  /// `keep` is null where the tile is full.
  void apply_variant(const KeyTile<T>& keys, const u8* keep) {
    apply_logits({.s = scratch_.s,
                  .stride = scratch_.lds,
                  .n = keys.n,
                  .rows = scratch_.rows,
                  .num_rows = tile_.num_rows,
                  .scale = 1.0f},
                 lanes_of(keys, 0));
    for (i32 m = 0; m < tile_.num_rows; ++m) {
      float* s = scratch_.s + m * scratch_.lds;
      if (keep) drop(s, keep + m * max_tile_keys, keys.n, dropped());
      pad_row(s, keys.n, dropped());
    }
  }

  void softmax(i32 n) {
    for (i32 m = 0; m < tile_.num_rows; ++m) {
      const float rescale = softmax_step(scratch_.s + m * scratch_.lds, n, scratch_.state[m]);
      if (rescale != 1.0f) scale_row(scratch_.o + m * scratch_.stride_o, scratch_.ldo, rescale);
    }
  }

  /// O += P · f_v(V); a row's weights from ends[row] on are 0.
  void accumulate(const KeyTile<T>& keys, const KeyTile<T>& next, const i32* ends) {
    const Upcoming<T> ahead{next.v, next.n};
    scale_weights(keys);
    if (stages_.num_value == 0 && launch_.dim_vo % lanes == 0)
      return multiply_pv(scratch_.s, scratch_.lds, tile_.num_rows, keys.v, keys.n, scratch_.ldo,
                         scratch_.o, scratch_.stride_o, ahead, scratch_.panel, ends);
    stage_values(keys, scratch_.ldo, ahead);
    multiply_pv(scratch_.s, scratch_.lds, tile_.num_rows, scratch_.rows_v, keys.n, scratch_.ldo,
                scratch_.o, scratch_.stride_o, Upcoming<float>{nullptr, 0}, scratch_.panel, ends);
  }

  const CpuLaunch& launch_;
  const PlanView& plan_;
  const WorkItem* item_;
  const QueryTile& tile_;
  const LevelView& level_;
  const Stages& stages_;
  const KvScales& scales_;
  Scratch<T> scratch_;
};

}  // namespace cpu

RADDLE_ENGINE_END

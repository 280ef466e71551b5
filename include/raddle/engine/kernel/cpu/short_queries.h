// Short queries (decode): computes the KV heads of a request in turns, tile by tile, so that memory
// is read in the order of its addresses.
//
// Where the heads of a token lie side by side, one head's keys are pieces of a few hundred bytes
// with gaps between them, which are read half as fast as whole rows. So work items that differ only
// in the head are computed together, as a run: a tile of keys for all heads, then the next tile. An
// item's arithmetic and its order do not depend on the run.
#pragma once

#include "raddle/engine/kernel/cpu/ahead.h"
#include "raddle/engine/kernel/cpu/attention.h"
#include "raddle/engine/kernel/cpu/short_products.h"

RADDLE_ENGINE_BEGIN

namespace cpu {

/// Bytes of a run's rows of K: half a page of the system, so that K and V of two tiles of 64 keys
/// take a quarter of a second-level cache of 2 MiB.
constexpr i32 max_run_bytes = 2048;

inline i32 max_run_heads(const CpuLaunch& launch) {
  return max(1, max_run_bytes / (launch.dim_qk * dtype_bytes(launch.kv_dtype)));
}

/// The number of items from `first` on, before `end`, that form one run.
inline i32 run_length(const CpuLaunch& launch, i32 first, i32 end) {
  const PlanView& plan = *launch.plan;
  const WorkItem& item = plan.items[first];
  const QueryTile& tile = plan.query_tiles[item.query_tile];
  if (tile.shape != short_queries) return 1;
  // The rows of all heads have room in the scratch of one long tile.
  const i32 most_rows =
      max(plan.shapes[short_queries].rows, plan.shapes[long_queries].rows) / tile.num_rows;
  const i32 most = min(end - first, min(max_run_heads(launch), most_rows));
  i32 n = 1;
  while (n < most) {
    const WorkItem& next = plan.items[first + n];
    if (next.query_tile != item.query_tile || next.kv_head != item.kv_head + n ||
        next.col_begin != item.col_begin || next.col_end != item.col_end)
      break;
    ++n;
  }
  return n;
}

/// Products is LaneProducts or TileProducts.
template <class T, class Products>
class ShortRun : private ItemKernel<T> {
  using Base = ItemKernel<T>;
  using Base::item_;
  using Base::launch_;
  using Base::plan_;
  using Base::scratch_;
  using Base::stages_;
  using Base::tile_;

 public:
  /// Items [first, first + heads), and the one after them that is likely to come next; -1: none.
  ShortRun(const CpuLaunch& launch, i32 first, i32 heads, i32 next, const Scratch<T>& scratch,
           const Products& products)
      : Base(launch, launch.plan->items[first], scratch),
        all_(scratch),
        items_(launch.plan->items + first),
        heads_(heads),
        next_(next),
        products_(products),
        direct_k_(stages_.num_key == 0 && products.takes_k()),
        direct_v_(stages_.num_value == 0 && products.takes_v()) {}

  void run() {
    products_.begin();
    for (i32 h = 0; h < heads_; ++h) {
      go_to(h);
      Base::load_queries();
      if (direct_k_) products_.load_queries(h, scratch_.q, scratch_.ldq, tile_.num_rows);
    }
    go_to(0);
    Base::for_tiles(
        [&](KeyTile<T>& keys, const KeyTile<T>& next, bool partial) { step(keys, next, partial); },
        [&](KeyTile<T>& next) { gather_next_item(next); });
    products_.end();
    for (i32 h = 0; h < heads_; ++h) {
      go_to(h);
      if (direct_v_) products_.finish_output(scratch_.o, scratch_.stride_o, tile_.num_rows);
      Base::finish();
    }
  }

 private:
  void go_to(i32 head) {
    item_ = items_ + head;
    scratch_ = all_.from_row(head * tile_.num_rows);
  }

  const KvView& kv() const { return launch_.kv[tile_.level]; }

  /// Gathers the keys of the first tile of the item after this run, to be prefetched.
  void gather_next_item(KeyTile<T>& keys) const {
    if (next_ < 0) return;
    const WorkItem& item = plan_.items[next_];
    const QueryTile& tile = plan_.query_tiles[item.query_tile];
    TileWalk walk(plan_, item);
    Span span;
    if (!walk.next(span)) return;
    const KvView& kv = launch_.kv[tile.level];
    gather_keys(launch_.layout->levels[tile.level], kv.k, kv.v, tile.group, item.kv_head,
                max(span.begin, tile.col_begin), min(span.end, tile.col_end), keys);
  }

  /// Whether V is a part of K's rows (MLA): then reading K has brought V, too.
  bool v_is_in_k(const KeyTile<T>& keys) const {
    return keys.v[0] >= keys.k[0] && keys.v[0] + launch_.dim_vo <= keys.k[0] + launch_.dim_qk;
  }

  /// One tile of keys: K of all heads while V is prefetched, then V of all heads while the next
  /// tile's K is prefetched. Where V is in K, both prefetch the next K, a line for two that are
  /// used; where K extends V, both prefetch the next V so, and K's columns those of the next K.
  void step(KeyTile<T>& keys, const KeyTile<T>& next, bool partial) {
    Ahead ahead_k = ahead(next.k, next.n, kv().k.head_stride, Base::k_columns());
    if (Base::keys_extend()) {
      Ahead ahead_v = ahead(next.v, next.n, kv().v.head_stride, launch_.dim_vo);
      ahead_v.prefetch_half();
      weigh(keys, partial, ahead_v, ahead_k);
      add_values(keys, ahead_v);
    } else if (v_is_in_k(keys)) {
      ahead_k.prefetch_half();
      weigh(keys, partial, ahead_k, ahead_k);
      add_values(keys, ahead_k);
    } else {
      Ahead ahead_v = ahead(keys.v, keys.n, kv().v.head_stride, launch_.dim_vo);
      weigh(keys, partial, ahead_v, ahead_v);
      ahead_v.finish();
      add_values(keys, ahead_k);
    }
    ahead_k.finish();
    go_to(0);
  }

  /// All heads' weights; `ahead` and `ahead_k` as of multiply_qk.
  void weigh(KeyTile<T>& keys, bool partial, Ahead& ahead, Ahead& ahead_k) {
    for_heads(keys, true, Base::keys_extend(), [&](i32 h) {
      if constexpr (is_quantized<T>) Base::gather_scales(keys);
      multiply_qk(h, keys, ahead, ahead_k);
      Base::scale_logits(keys);
      Base::apply_variant(keys, partial ? Base::evaluate_keep(keys) : nullptr);
      if (stages_.scan == Scan::softmax) Base::softmax(keys.n);
      Base::scale_weights(keys);
    });
  }

  /// All heads' O += P · f_v(V).
  void add_values(KeyTile<T>& keys, Ahead& ahead) {
    for_heads(keys, false, true, [&](i32) {
      if constexpr (is_quantized<T>) Base::gather_scales(keys);
      multiply_pv(keys, ahead);
    });
  }

  /// Calls f(head) for all heads in turns, with the rows of K, of V or of both moved to that head.
  template <class F>
  void for_heads(KeyTile<T>& keys, bool moves_k, bool moves_v, F f) {
    const auto move = [&](i32 heads) {
      for (i32 j = 0; moves_k && j < keys.n; ++j) keys.k[j] += heads * kv().k.head_stride;
      for (i32 j = 0; moves_v && j < keys.n; ++j) keys.v[j] += heads * kv().v.head_stride;
    };
    for (i32 h = 0; h < heads_; ++h) {
      go_to(h);
      if (h > 0) move(1);
      f(h);
    }
    if (heads_ > 1) move(1 - heads_);
  }

  Ahead ahead(const T* const* rows, i32 n, i64 head_stride, i32 dim) const {
    constexpr i64 bytes = sizeof(T);
    return Ahead(reinterpret_cast<const void* const*>(rows), n, heads_, head_stride * bytes,
                 dim * static_cast<i32>(bytes), launch_.prefetch_into_l2);
  }

  /// S = scale · f_q(Q) · f_k(K)ᵀ. Prefetches by `ahead`; where K extends V, by `ahead_k` while it
  /// reads K's columns.
  void multiply_qk(i32 head, const KeyTile<T>& keys, Ahead& ahead, Ahead& ahead_k) {
    if (direct_k_ && Base::keys_extend()) return multiply_extended(head, keys, ahead, ahead_k);
    if (direct_k_)
      return products_.qk(head, 0, launch_.dim_qk, scratch_.q, scratch_.ldq, tile_.num_rows, keys.k,
                          keys.n, launch_.scale, scratch_.s, scratch_.lds, ahead);
    Base::stage_keys(keys, Upcoming<T>{nullptr, 0});
    short_qk(scratch_.q, scratch_.ldq, tile_.num_rows, scratch_.rows_k, keys.n, scratch_.ldq,
             launch_.scale, scratch_.s, scratch_.lds, ahead);
  }

  /// The same where K extends V: the product with V's rows, and that with K's.
  void multiply_extended(i32 head, const KeyTile<T>& keys, Ahead& ahead, Ahead& ahead_k) {
    const i32 begin = launch_.k_begin, rows = tile_.num_rows, lds = scratch_.lds;
    products_.qk(head, 0, begin, scratch_.q, scratch_.ldq, rows, keys.v, keys.n, launch_.scale,
                 scratch_.s, lds, ahead);
    products_.qk(head, begin, launch_.dim_qk, scratch_.q, scratch_.ldq, rows, keys.k, keys.n,
                 launch_.scale, all_.s_of_k, lds, ahead_k);
    for (i32 m = 0; m < rows; ++m) {
      float* s = scratch_.s + m * lds;
      float* of_k = all_.s_of_k + m * lds;
      if (is_quantized<T>) {
        multiply_row(s, keys.v_scale, keys.n);
        multiply_row(of_k, keys.k_scale, keys.n);
      }
#pragma GCC ivdep
      for (i32 j = 0; j < keys.n; ++j) s[j] += of_k[j];
    }
  }

  /// O += P · f_v(V)
  void multiply_pv(const KeyTile<T>& keys, Ahead& ahead) {
    if (direct_v_)
      return products_.pv(scratch_.s, scratch_.lds, tile_.num_rows, keys.v, keys.n, scratch_.o,
                          scratch_.stride_o, ahead);
    Base::stage_values(keys, scratch_.ldo, Upcoming<T>{nullptr, 0});
    short_pv(scratch_.s, scratch_.lds, tile_.num_rows, scratch_.rows_v, keys.n, scratch_.ldo,
             scratch_.o, scratch_.stride_o, ahead);
  }

  const Scratch<T> all_;  ///< from the first head's rows on
  const WorkItem* items_;
  const i32 heads_;
  const i32 next_;
  const Products products_;
  const bool direct_k_, direct_v_;  ///< no stage changes the rows, and Products takes them
};

}  // namespace cpu

RADDLE_ENGINE_END

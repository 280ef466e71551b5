// A work item of heads wider than 256, as MLA's 576 of K and 512 of V: more of O than a warp's
// registers hold.
//
// Every warp has all rows of the tile, and a quarter of the heads' elements. It multiplies its
// steps of Q and K; the warps' sums meet in shared memory, where each takes all of them, so that
// all know the whole tile's logits, and weights go on in registers. Then each multiplies them with
// columns of V that are its own. Where V is the first columns of K, it is used where K lies, and
// memory is read once.
#pragma once

#include "raddle/engine/kernel/mma/arrive.h"
#include "raddle/engine/kernel/mma/key_stream.h"
#include "raddle/engine/kernel/mma/rows.h"
#include "raddle/engine/kernel/mma/softmax.h"
#include "raddle/engine/kernel/mma/wide_layout.h"

RADDLE_ENGINE_BEGIN

namespace mma {

template <class K, class V, i32 blocks>
class WideQueries {
  using T = typename K::T;
  using Layout = typename Either<blocks == 1, ShortWideLayout<K>, LongWideLayout<K>>::Type;
  using Rows = typename K::KeyRows;
  static constexpr Scan scan = scan_of<V>();
  static constexpr i32 tiles = Layout::tile_keys / 8;
  static constexpr i32 columns = 8 * K::out_tiles;
  /// Keys that the variant changes are no values any more.
  static constexpr bool may_share = !has_key<V> && K::dim_vo <= K::dim_qk;

 public:
  /// One item; others of a queue are computed by others.
  RADDLE_DEVICE WideQueries(const MmaLaunch& launch, const V& variant, i32 item, i32 = 0)
      : launch_(launch),
        variant_(variant),
        item_(item),
        warp_(ptx::warp_index()),
        lane_(ptx::lane_index()),
        stream_(launch, item, item + 1),
        halves_(blocks == 1 && tile().num_rows <= 8 ? 1 : 2),
        q_address_(ptx::shared_address(Layout::query_memory()) +
                   K::QueryRows::step_from(a_offset<typename K::QueryRows>(lane_), warp_)),
        k_offset_(Rows::step_from(b_offset<Rows>(lane_), warp_)),
        v_offset_(a_offset<Rows>(lane_) + static_cast<u32>(2 * columns * warp_)) {
    stream_.start();
    shares_ = may_share && values_are_keys();
  }

  /// Returns the item after it.
  RADDLE_DEVICE i32 run() {
    compute();
    return item_ + 1;
  }
  /// Whether its rows are composed in shares: looked up where a queue ends.
  RADDLE_DEVICE bool leaves_shares() const { return true; }
  /// Returns what next(item) says to the one thread that asks.
  template <class Next>
  RADDLE_DEVICE i32 run(Next next) {
    auto& facts = Layout::scratch();
    compute();
    if (ptx::thread_index() == 0) facts.next = next(item_);
    ptx::sync_block();
    return facts.next;
  }

 private:
  RADDLE_DEVICE void compute() {
    // Queries that are transformed take the ring's memory for it.
    if constexpr (has_query<V>) load_queries();
    if constexpr (has_query<V>) ptx::sync_block();
    RADDLE_ROLLED
    for (i32 n = 0; n < Layout::slots - 1; ++n) load();
    if constexpr (!has_query<V>) load_queries();
    mark<K>(launch_, TimelineStage::opened, item_);
    clear(o_);
    stats_.clear();
    ptx::sync_block();  // all have stored their queries
    if constexpr (Layout::keeps_queries) {
      RADDLE_UNROLL
      for (i32 i = 0; i < K::k_steps; ++i) load_fragment(i, 0, q_[i]);
    }
    RADDLE_ROLLED
    while (!step()) {
    }
    mark<K>(launch_, TimelineStage::computed, item_);
    ptx::sync_block();  // rows of O take the place of the ring
    finish();
    mark<K>(launch_, TimelineStage::finished, item_);
    ptx::sync_block();  // the next item reuses shared memory
  }

  // Looked up anew where they are asked for: in the loop, registers are O's.
  RADDLE_DEVICE const WorkItem& item() const { return launch_.plan.items[item_]; }
  RADDLE_DEVICE const QueryTile& tile() const {
    return launch_.plan.query_tiles[item().query_tile];
  }

  RADDLE_DEVICE bool values_are_keys() const {
    const KeySource& source = Layout::source(warp_);
    return source.row[0] == source.row[1] && source.block_stride[0] == source.block_stride[1] &&
           source.row_stride[0] == source.row_stride[1];
  }

  RADDLE_DEVICE void load_queries() const {
    constexpr i32 share = 16 / num_warps;
    auto& facts = Layout::scratch();
    describe_item(request_of_keys(launch_, tile()), item().kv_head, facts);
    RADDLE_ROLLED
    for (i32 r = 0; r < blocks; ++r) {
      const i32 first = 16 * r + share * warp_;
      QueryRows<share, K> rows;
      rows.fetch(launch_, tile(), item().kv_head, first);
      rows.store(variant_, first, Layout::query_memory(), facts);
      if constexpr (has_query<V>) {
        for (i32 m = first; m < min(first + share, tile().num_rows); ++m)
          transform_stored_row<T, T, typename K::QueryRows, K::dim_qk>(
              Layout::query_memory(), m, Layout::query_vector(warp_), 1.0f,
              [&](WarpVector& x) { variant_.query(x, facts.row[m]); });
      }
    }
  }

  /// This warp's step of a line of Q.
  RADDLE_DEVICE void load_fragment(i32 i, i32 r, u32 (&a)[4]) const {
    ptx::load_matrices(a, q_address_ + static_cast<u32>(128 * i + r * 16 * K::QueryRows::pitch));
  }

  /// Starts the next load: K and V in turns, or K alone.
  RADDLE_DEVICE void load() {
    if (loads_values_) {
      stream_.load_values(loading_);
    } else {
      stream_.load_keys(loading_, loading_keys_);
      loading_keys_ = Layout::after(loading_keys_, Layout::key_slots);
      if (shares_) stream_.skip_values();
    }
    ptx::copy_commit();
    loads_values_ = !shares_ && !loads_values_;
    loading_ = Layout::after(loading_, Layout::slots);
  }

  /// The next slot, filled. All warps have used the one before, which is loaded anew.
  RADDLE_DEVICE i32 next_slot() {
    ptx::copy_wait<Layout::slots - 2>();
    ptx::sync_block();
    load();
    const i32 slot = slot_;
    slot_ = Layout::after(slot_, Layout::slots);
    return slot;
  }

  /// One KV tile. Returns whether it is the item's last.
  RADDLE_DEVICE bool step() {
    const ApplyVariant<V, blocks, tiles> apply(launch_, variant_, item_);
    const auto& facts = Layout::scratch();
    i32 slot = next_slot();
    const auto& keys = Layout::keys_at(computing_);
    const i32 flags = keys.flags[warp_];
    if (flags & TileFlags::empty) return true;
    if constexpr (has_key<V>)
      transform_keys<K::dim_qk>(slot, keys,
                                [&](WarpVector& x, const Key& key) { variant_.key(x, key); });
    Logits<blocks, tiles> s;
    multiply_part(s, Layout::slot_address(slot) + k_offset_);
    put_part(s);
    if (shares_)
      ptx::sync_block();
    else
      slot = next_slot();
    add_parts(s);
    apply(
        s, keys, 0, flags, facts, [&](i32 r) { return 16 * r + lane_ / 4; }, halves_);
    if constexpr (scan == Scan::softmax) softmax<K>(s, stats_, o_, apply.to_log2(), halves_);
    if constexpr (has_value<V>)
      transform_keys<K::dim_vo>(slot, keys,
                                [&](WarpVector& x, const Key& key) { variant_.value(x, key); });
    Weights<blocks, tiles> p;
    round_weights<T>(s, p);
    multiply_pv<K, blocks, tiles>(o_, p, Layout::slot_address(slot) + v_offset_);
    computing_ = Layout::after(computing_, Layout::key_slots);
    return (flags & TileFlags::last) != 0;
  }

  /// Changes the rows of a slot that this warp loaded, one at a time; then all may be used.
  template <i32 dim, class Keys, class F>
  RADDLE_DEVICE void transform_keys(i32 slot, const Keys& keys, F transform) const {
    const auto& facts = Layout::scratch();
    for (i32 i = 0; i < Layout::warp_keys; ++i) {
      const i32 j = Layout::warp_keys * warp_ + i;
      if (keys.column[j] < 0) continue;
      const Key key{facts.request, keys.kv_index[j], keys.kv_pos[j], facts.kv_head};
      transform_stored_row<T, T, Rows, dim>(Layout::slot_memory(slot), j, Layout::key_vector(warp_),
                                            1.0f, [&](WarpVector& x) { transform(x, key); });
    }
    ptx::sync_block();
  }

  /// S of this warp's steps: one of every line of a row, so that a line further on is 128 bytes.
  RADDLE_DEVICE void multiply_part(Logits<blocks, tiles>& s, u32 keys) const {
    clear(s);
    RADDLE_UNROLL
    for (i32 i = 0; i < K::k_steps; ++i) {
      u32 a[blocks][4];
      RADDLE_UNROLL
      for (i32 r = 0; r < blocks; ++r) {
        if constexpr (!Layout::keeps_queries) load_fragment(i, r, a[r]);
        RADDLE_UNROLL
        for (i32 e = 0; Layout::keeps_queries && e < 4; ++e) a[r][e] = q_[i][e];
      }
      RADDLE_UNROLL
      for (i32 n = 0; n < tiles; n += 2) {
        u32 b[4];
        ptx::load_matrices(b, keys + static_cast<u32>(128 * i + 8 * n * Rows::pitch));
        RADDLE_UNROLL
        for (i32 r = 0; r < blocks; ++r) {
          ptx::multiply_add(s[r][n], a[r], b[0], b[1], T{});
          ptx::multiply_add(s[r][n + 1], a[r], b[2], b[3], T{});
        }
      }
    }
  }

  RADDLE_DEVICE void put_part(const Logits<blocks, tiles>& s) const {
    RADDLE_UNROLL
    for (i32 i = 0; i < blocks * tiles; ++i) {
      const float(&x)[4] = s[i / tiles][i % tiles];
      Layout::part_of_logits(warp_, i) = Four{{x[0], x[1], x[2], x[3]}};
    }
  }
  /// In the same order in every warp: all find the same bits.
  RADDLE_DEVICE void add_parts(Logits<blocks, tiles>& s) const {
    RADDLE_UNROLL
    for (i32 i = 0; i < blocks * tiles; ++i) {
      Four part[num_warps];
      RADDLE_UNROLL
      for (i32 w = 0; w < num_warps; ++w) part[w] = Layout::part_of_logits(w, i);
      RADDLE_UNROLL
      for (i32 e = 0; e < 4; ++e)
        s[i / tiles][i % tiles][e] = (part[0].x[e] + part[1].x[e]) + (part[2].x[e] + part[3].x[e]);
    }
  }
  static_assert(num_warps == 4);

  RADDLE_DEVICE void finish() {
    put_columns();
    ptx::sync_block();
    write_rows();
    mark<K>(launch_, TimelineStage::stored, item_);
    if (item().partial_row >= 0)
      arrive<K>(launch_, variant_, item(), look_up_awaiting(launch_, item(), ptx::thread_index()),
                Layout::completed_bits(), Layout::vector(warp_));
  }

  /// This warp's columns of O / Σ to shared memory, and the first one's LSE; a row with nothing
  /// kept becomes (0, -inf).
  RADDLE_DEVICE void put_columns() {
    const float to_log2 = ApplyVariant<V, blocks, tiles>(launch_, variant_, item_).to_log2();
    const i32 g = lane_ / 4, t = lane_ % 4;
    RADDLE_UNROLL
    for (i32 r = 0; r < blocks; ++r) {
      RADDLE_UNROLL
      for (i32 half = 0; half < 2; ++half) {
        float* row = Layout::out_row(16 * r + g + 8 * half);
        const auto [factor, lse] = end_row<scan>(stats_, r, half, to_log2);
        RADDLE_UNROLL
        for (i32 n = 0; n < K::out_tiles; ++n) {
          const i32 d = columns * warp_ + 8 * n + 2 * t;
          if (K::dim_vo != num_warps * columns && d >= K::dim_vo) continue;
          ptx::store_two(row + d, o_[r][n][2 * half] * factor, o_[r][n][2 * half + 1] * factor);
        }
        if (warp_ == 0 && t == 0) row[K::dim_vo] = lse;
      }
    }
  }

  /// Rows from there to where they belong: every fourth is this warp's.
  RADDLE_DEVICE void write_rows() const {
    const auto number = [&](i32 i) { return warp_ + num_warps * i; };
    send_rows<K, 16 * blocks / num_warps>(launch_, variant_, tile().num_rows, item().partial_row,
                                          Layout::scratch().row, Layout::vector(warp_), number,
                                          [&](i32 i) { return Layout::out_row(number(i)); });
  }

  const MmaLaunch& launch_;
  const V& variant_;
  const i32 item_, warp_, lane_;
  KeyStream<K, Layout> stream_;
  bool shares_;       ///< V is the first columns of K
  const i32 halves_;  ///< 1 where the second half of the rows is padding
  bool loads_values_ = false;
  i32 loading_ = 0;       // the slot that is loaded next,
  i32 loading_keys_ = 0;  // and where its keys are spoken of
  i32 slot_ = 0;          // that is used next
  i32 computing_ = 0;     // where its keys are spoken of
  // Where this lane takes its matrices.
  const u32 q_address_, k_offset_, v_offset_;
  u32 q_[Layout::keeps_queries ? K::k_steps : 1][4];  // this warp's steps of Q
  Output<K, blocks> o_;
  RowStats<blocks> stats_;
};

}  // namespace mma

RADDLE_ENGINE_END

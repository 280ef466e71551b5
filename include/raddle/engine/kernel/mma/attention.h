// Attention for GPUs with mma.sync (sm_80 on): FlashAttention-2's loop over KV tiles (algorithm 1),
// written for correctness: one tile in flight, K and V in turns through one buffer.
//
// A block walks one worker's queue. A warp holds 16 fused rows of the query tile; lane 4·g + t
// holds of them rows g and g + 8, and of a row's 8-wide column tiles elements 2t and 2t + 1
// (ptx/mma.h). All warps load; in the small tile shape one computes.
#pragma once

#include "raddle/engine/kernel/mma/finish.h"
#include "raddle/engine/tile/walk.h"

RADDLE_ENGINE_BEGIN

namespace mma {

struct alignas(16) Bytes16 {
  u32 x[4];
};

template <class T, i32 dim_qk, i32 dim_vo>
struct Shared {
  static constexpr i32 wider = max(dim_qk, dim_vo);
  alignas(16) T q[tile_rows * pitch(dim_qk)];
  alignas(16) T kv[tile_keys * pitch(wider)];  ///< K, then V, each with its own pitch
  float vector[num_warps][wider];              ///< a row in fp32, for the variant's transforms
  i64 k_at[tile_keys];                         ///< where a key's rows begin in the pools
  i64 v_at[tile_keys];
  i32 column[tile_keys];  ///< -1: no key
  i32 kv_index[tile_keys];
  i32 kv_pos[tile_keys];
  i32 completed;  ///< whether this block brings a contraction its last state
};

/// All that a block knows while it works on one item.
template <class T, i32 dim_qk, i32 dim_vo, class V>
class ItemKernel {
  using Memory = Shared<T, dim_qk, dim_vo>;
  static_assert(sizeof(Memory) == shared_bytes(dim_qk, dim_vo));
  static constexpr Scan scan = scan_of<V>();
  static constexpr i32 k_steps = (dim_qk + 15) / 16;
  static constexpr i32 out_tiles = 2 * ((dim_vo + 15) / 16);
  static constexpr i32 key_tiles = tile_keys / 8;

 public:
  RADDLE_DEVICE ItemKernel(const MmaLaunch& launch, const V& variant, const WorkItem& item,
                           Memory& shared)
      : launch_(launch),
        variant_(variant),
        item_(item),
        tile_(launch.plan.query_tiles[item.query_tile]),
        level_(launch.levels[tile_.level]),
        x_(shared),
        warp_(ptx::thread_index() / 32),
        lane_(ptx::thread_index() % 32),
        g_(lane_ / 4),
        t_(lane_ % 4),
        vector_(shared.vector[warp_]) {}

  RADDLE_DEVICE void run() {
    load_queries();
    TileWalk walk(launch_.plan, item_);
    for (Span span; walk.next(span);) {
      find_keys(span);
      ptx::sync_block();
      load_keys();
      ptx::sync_block();
      if (computes()) {
        logits();
        apply_variant(span.partial);
        if (scan == Scan::softmax) softmax();
      }
      ptx::sync_block();
      load_values();
      ptx::sync_block();
      if (computes()) accumulate();
      ptx::sync_block();
    }
    if (computes()) {
      normalize();
      emit_rows();
    }
    if (item_.partial_row >= 0) arrive();
    ptx::sync_block();  // the next item reuses shared memory
  }

 private:
  RADDLE_DEVICE bool computes() const { return 16 * warp_ < tile_.num_rows; }

  RADDLE_DEVICE Row row_of(i32 m) const {
    return make_row(launch_.layout, level_, tile_.group, tile_.row_begin + m, item_.kv_head,
                    launch_.plan.group_size);
  }

  RADDLE_DEVICE Key key_of(i32 j) const {
    // On a level whose groups hold rows of several requests a key has none.
    const i32 request = level_.keys_are_shared ? -1
                                               : request_of(launch_.layout, level_, tile_.group,
                                                            query_row(level_, tile_.group, 0));
    return Key{request, x_.kv_index[j], x_.kv_pos[j], item_.kv_head};
  }

  /// Copies a row to shared memory, zero past `dim`; zero all over where there is none.
  template <i32 dim>
  RADDLE_DEVICE void copy_row(const T* from, T* to) const {
    for (i32 d = 8 * lane_; d < (dim + 15) / 16 * 16; d += 256) {
      Bytes16 x{};
      if (from && d < dim) x = *reinterpret_cast<const Bytes16*>(from + d);
      *reinterpret_cast<Bytes16*>(to + d) = x;
    }
  }

  /// The same through fp32: transform(vector) changes the row, which is rounded once.
  template <i32 dim, class F>
  RADDLE_DEVICE void transform_row(const T* from, T* to, F transform) const {
    if (!from) return copy_row<dim>(from, to);
    for (i32 d = lane_; d < dim; d += 32) vector_[d] = to_float(from[d]);
    ptx::sync_warp();
    WarpVector vector(vector_, dim);
    transform(vector);
    for (i32 d = lane_; d < (dim + 15) / 16 * 16; d += 32)
      to[d] = d < dim ? from_float<T>(vector_[d]) : T{};
    ptx::sync_warp();
  }

  RADDLE_DEVICE void load_queries() {
    for (i32 m = warp_; m < tile_rows; m += num_warps) {
      T* to = x_.q + m * pitch(dim_qk);
      if (m >= tile_.num_rows) {
        copy_row<dim_qk>(nullptr, to);
        continue;
      }
      const Row row = row_of(m);
      const T* from = static_cast<const T*>(launch_.q.data) + row.row * launch_.q.row_stride +
                      row.q_head * launch_.q.head_stride;
      if constexpr (has_query<V>)
        transform_row<dim_qk>(from, to, [&](WarpVector& q) { variant_.query(q, row); });
      else
        copy_row<dim_qk>(from, to);
    }
    for (i32 half = 0; half < 2; ++half) {
      const i32 m = row_in_tile(half);
      rows_[half] = m < tile_.num_rows ? row_of(m) : Row{};
      top_[half] = -math::infinity;
      sum_[half] = 0.0f;
      lse_[half] = 0.0f;
    }
    for (i32 n = 0; n < out_tiles; ++n)
      for (i32 e = 0; e < 4; ++e) o_[n][e] = 0.0f;
  }

  /// Where the tile's columns lie; threads past the keys have nothing to do.
  RADDLE_DEVICE void find_keys(const Span& span) {
    const i32 j = ptx::thread_index();
    if (j >= tile_keys) return;
    const i32 c = span.begin + j;
    x_.column[j] = -1;
    if (c < max(span.begin, tile_.col_begin) || c >= min(span.end, tile_.col_end)) return;
    const Column at = column_at(level_, tile_.group, c);
    if (!at.valid) return;
    const KvView& kv = launch_.kv[tile_.level];
    x_.k_at[j] = at.block * kv.k.block_stride + at.offset * kv.k.row_stride +
                 item_.kv_head * kv.k.head_stride;
    x_.v_at[j] = at.block * kv.v.block_stride + at.offset * kv.v.row_stride +
                 item_.kv_head * kv.v.head_stride;
    x_.column[j] = c;
    x_.kv_index[j] = at.kv_index;
    x_.kv_pos[j] = at.kv_pos;
  }

  RADDLE_DEVICE void load_keys() {
    const T* pool = static_cast<const T*>(launch_.kv[tile_.level].k.data);
    for (i32 j = warp_; j < tile_keys; j += num_warps) {
      const T* from = x_.column[j] < 0 ? nullptr : pool + x_.k_at[j];
      T* to = x_.kv + j * pitch(dim_qk);
      if constexpr (has_key<V>)
        transform_row<dim_qk>(from, to, [&](WarpVector& k) { variant_.key(k, key_of(j)); });
      else
        copy_row<dim_qk>(from, to);
    }
  }

  RADDLE_DEVICE void load_values() {
    const T* pool = static_cast<const T*>(launch_.kv[tile_.level].v.data);
    for (i32 j = warp_; j < tile_keys; j += num_warps) {
      const T* from = x_.column[j] < 0 ? nullptr : pool + x_.v_at[j];
      T* to = x_.kv + j * pitch(dim_vo);
      if constexpr (has_value<V>)
        transform_row<dim_vo>(from, to, [&](WarpVector& v) { variant_.value(v, key_of(j)); });
      else
        copy_row<dim_vo>(from, to);
    }
  }

  /// S = f_q(Q) · f_k(K)ᵀ
  RADDLE_DEVICE void logits() {
    for (i32 n = 0; n < key_tiles; ++n)
      for (i32 e = 0; e < 4; ++e) s_[n][e] = 0.0f;
    const T* q = x_.q + (16 * warp_ + lane_ % 16) * pitch(dim_qk) + lane_ / 16 * 8;
    const T* k = x_.kv + (lane_ % 8 + lane_ / 16 * 8) * pitch(dim_qk) + lane_ / 8 % 2 * 8;
    RADDLE_UNROLL
    for (i32 step = 0; step < k_steps; ++step) {
      u32 a[4];
      ptx::load_matrices(a, q + 16 * step);
      RADDLE_UNROLL
      for (i32 n = 0; n < key_tiles; n += 2) {
        u32 b[4];
        ptx::load_matrices(b, k + 8 * n * pitch(dim_qk) + 16 * step);
        ptx::multiply_add(s_[n], a, b[0], b[1], T{});
        ptx::multiply_add(s_[n + 1], a, b[2], b[3], T{});
      }
    }
  }

  /// Scale, f_logits, then f_mask: a dropped pair becomes -inf, or 0 under a plain sum. Pairs that
  /// do not exist are never shown to the variant.
  RADDLE_DEVICE void apply_variant(bool partial) {
    constexpr float dropped = scan == Scan::softmax ? -math::infinity : 0.0f;
    RADDLE_UNROLL
    for (i32 n = 0; n < key_tiles; ++n) {
      RADDLE_UNROLL
      for (i32 e = 0; e < 4; ++e) {
        const i32 j = 8 * n + 2 * t_ + e % 2;
        const i32 half = e / 2;
        float s = dropped;
        if (row_in_tile(half) < tile_.num_rows && x_.column[j] >= 0 &&
            (!partial || keeps(half, j))) {
          s = launch_.scale * s_[n][e];
          if constexpr (has_logits<V>) s = variant_.logits(s, rows_[half], key_of(j));
        }
        s_[n][e] = s;
      }
    }
  }

  RADDLE_DEVICE bool keeps(i32 half, i32 j) const {
    if constexpr (has_mask<V>)
      if (!variant_.mask(rows_[half], key_of(j))) return false;
    const i32 row = (tile_.row_begin + row_in_tile(half)) / launch_.plan.group_size;
    return !level_.mask_bits || mask_bit(level_, tile_.group, row, x_.column[j]);
  }

  /// S -> exp(S - max); rescales what O and the row's sum (of this lane's keys) hold so far.
  RADDLE_DEVICE void softmax() {
    RADDLE_UNROLL
    for (i32 half = 0; half < 2; ++half) {
      float top = top_[half];
      for (i32 n = 0; n < key_tiles; ++n) top = max(max(top, s_[n][2 * half]), s_[n][2 * half + 1]);
      top = max(top, ptx::shuffle_xor(top, 1));
      top = max(top, ptx::shuffle_xor(top, 2));
      // A row with nothing kept so far: subtracting 0 leaves every logit at -inf, every weight 0.
      const float shift = top == -math::infinity ? 0.0f : top;
      const float rescale = ptx::exp2((top_[half] - shift) * math::log2e);
      top_[half] = top;
      sum_[half] *= rescale;
      for (i32 n = 0; n < key_tiles; ++n)
        for (i32 e = 2 * half; e < 2 * half + 2; ++e) {
          s_[n][e] = ptx::exp2((s_[n][e] - shift) * math::log2e);
          sum_[half] += s_[n][e];
        }
      for (i32 n = 0; n < out_tiles; ++n) {
        o_[n][2 * half] *= rescale;
        o_[n][2 * half + 1] *= rescale;
      }
    }
  }

  /// O += P · f_v(V), with P rounded to the matrix dtype: S's fragments are P's as they lie.
  RADDLE_DEVICE void accumulate() {
    const T* v = x_.kv + lane_ % 16 * pitch(dim_vo) + lane_ / 16 * 8;
    RADDLE_UNROLL
    for (i32 n = 0; n < key_tiles; n += 2) {
      const u32 a[4] = {ptx::pack(s_[n][0], s_[n][1], T{}), ptx::pack(s_[n][2], s_[n][3], T{}),
                        ptx::pack(s_[n + 1][0], s_[n + 1][1], T{}),
                        ptx::pack(s_[n + 1][2], s_[n + 1][3], T{})};
      RADDLE_UNROLL
      for (i32 d = 0; d < out_tiles; d += 2) {
        u32 b[4];
        ptx::load_matrices_transposed(b, v + 8 * n * pitch(dim_vo) + 8 * d);
        ptx::multiply_add(o_[d], a, b[0], b[1], T{});
        ptx::multiply_add(o_[d + 1], a, b[2], b[3], T{});
      }
    }
  }

  /// O / Σ and LSE = max + ln Σ; a row with nothing kept becomes (0, -inf).
  RADDLE_DEVICE void normalize() {
    if (scan == Scan::sum) return;
    RADDLE_UNROLL
    for (i32 half = 0; half < 2; ++half) {
      float sum = sum_[half];
      sum += ptx::shuffle_xor(sum, 1);
      sum += ptx::shuffle_xor(sum, 2);
      lse_[half] = top_[half] + math::log(sum);
      for (i32 n = 0; n < out_tiles; ++n)
        for (i32 e = 2 * half; e < 2 * half + 2; ++e)
          o_[n][e] = sum == 0.0f ? 0.0f : o_[n][e] * (1.0f / sum);
    }
  }

  /// Stores the warp's rows, each through the fp32 vector: as partial states or as results.
  RADDLE_DEVICE void emit_rows() {
    RADDLE_UNROLL
    for (i32 half = 0; half < 2; ++half)
      for (i32 g = 0; g < 8; ++g) {
        const i32 m = 16 * warp_ + 8 * half + g;
        if (m >= tile_.num_rows) return;
        if (g == g_)
          for (i32 n = 0; n < out_tiles; ++n)
            for (i32 e = 0; e < 2; ++e)
              if (8 * n + 2 * t_ + e < dim_vo) vector_[8 * n + 2 * t_ + e] = o_[n][2 * half + e];
        const float lse = ptx::shuffle(lse_[half], 4 * g);
        ptx::sync_warp();
        if (item_.partial_row >= 0)
          store_partial(i64{item_.partial_row} + m, lse);
        else
          write_row<T, dim_vo>(launch_, variant_, row_of(m), vector_, lse);
        ptx::sync_warp();
      }
  }

  RADDLE_DEVICE void store_partial(i64 row, float lse) {
    for (i32 d = lane_; d < dim_vo; d += 32) launch_.partial_o[row * dim_vo + d] = vector_[d];
    if (lane_ == 0) launch_.partial_lse[row] = lse;
  }

  /// Counts the item up at every contraction that waits for it, and composes those it completes.
  RADDLE_DEVICE void arrive() {
    ptx::fence_device();  // this thread's part of the state, before the block's arrival
    ptx::sync_block();
    for (i32 i = tile_.dependents_begin; i < tile_.dependents_end; ++i) {
      const i32 which = launch_.plan.dependents[i];
      const i32 at = which * launch_.plan.num_kv_heads + item_.kv_head;
      if (ptx::thread_index() == 0) {
        x_.completed = ptx::atomic_add(&launch_.arrived[at], 1) + 1 == launch_.plan.expected[at];
        if (x_.completed) launch_.arrived[at] = 0;
      }
      ptx::sync_block();
      const bool completed = x_.completed != 0;
      ptx::fence_device();  // the others' states, after their arrival
      if (completed)
        contract<T, dim_vo>(launch_, variant_, launch_.plan.contractions[which], item_.kv_head,
                            vector_);
      ptx::sync_block();
    }
  }

  RADDLE_DEVICE i32 row_in_tile(i32 half) const { return 16 * warp_ + g_ + 8 * half; }

  const MmaLaunch& launch_;
  const V& variant_;
  const WorkItem& item_;
  const QueryTile& tile_;
  const LevelView& level_;
  Memory& x_;
  const i32 warp_, lane_, g_, t_;
  float* const vector_;
  Row rows_[2];            // the lane's two rows,
  float top_[2], sum_[2];  // their maxima, their sums over this lane's keys
  float lse_[2];
  float s_[key_tiles][4];  // logits, then weights
  float o_[out_tiles][4];  // unnormalised output
};

/// One worker's queue.
template <class T, i32 dim_qk, i32 dim_vo, class V>
RADDLE_DEVICE void attend(const MmaLaunch& launch, const V& variant) {
  auto& shared = *static_cast<Shared<T, dim_qk, dim_vo>*>(ptx::shared_memory());
  const i32 worker = ptx::block_index();
  const i32 end = launch.plan.queue_indptr[worker + 1];
  for (i32 i = launch.plan.queue_indptr[worker]; i < end; ++i)
    ItemKernel<T, dim_qk, dim_vo, V>(launch, variant, launch.plan.items[i], shared).run();
}

}  // namespace mma

RADDLE_ENGINE_END

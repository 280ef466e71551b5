// Long queries in bf16 on tile registers: FlashAttention-2's loop over KV tiles, and inside of it
// one over strips of 32 query rows, whose logits and weights never leave the L1 cache:
//
//   S = Q·Kᵀ in tiles → f_logits, masks → P = exp(S - max), rounded to bf16 → O += P·V in tiles
#pragma once

#include "raddle/engine/kernel/cpu/amx_products.h"
#include "raddle/engine/kernel/cpu/attention.h"

RADDLE_ENGINE_BEGIN

namespace cpu {

/// What the kernel needs besides a worker's other scratch.
struct TileScratch {
  i32 dim_qk, dim_vo;  ///< padded to whole tiles
  bf16* q;             ///< [Tq, dim_qk]
  bf16* k;             ///< squares, see amx_products.h
  bf16* v;
  bf16* p;            ///< [strip_rows, max_tile_keys] weights of a strip
  bf16* staged;       ///< [Tkv, dim] rows of K or V that stages have changed, or that were padded
  const bf16** rows;  ///< [Tkv] where they lie
  float* max;         ///< [Tq] of the logits so far
  float* sum;         ///< [Tq] Σ exp(s - max)
  u8* keep;           ///< [strip_rows, max_tile_keys]
  i64 bytes;

  TileScratch(const CpuLaunch& launch, void* base) {
    const TileShape& shape = launch.plan->shapes[1];
    const i32 rows_q = round_up(shape.rows, strip_rows);
    const i32 keys = round_up(shape.keys, padded_unit);
    dim_qk = round_up(launch.dim_qk, padded_unit);
    dim_vo = round_up(launch.dim_vo, padded_unit);
    Carver carve(base);
    q = carve.take<bf16>(rows_q * dim_qk);
    k = carve.take<bf16>(keys * dim_qk);
    v = carve.take<bf16>(keys * dim_vo);
    p = carve.take<bf16>(strip_rows * max_tile_keys);
    staged = carve.take<bf16>(keys * raddle::max(dim_qk, dim_vo));
    rows = carve.take<const bf16*>(keys);
    max = carve.take<float>(rows_q);
    sum = carve.take<float>(rows_q);
    keep = carve.take<u8>(strip_rows * max_tile_keys);
    bytes = carve.used();
  }
};

class TiledItem : ItemKernel<bf16> {
 public:
  TiledItem(const CpuLaunch& launch, const WorkItem& item, Scratch<bf16>& scratch,
            TileScratch& tiles)
      : ItemKernel<bf16>(launch, item, scratch), t_(tiles) {}

  void run() {
    simd::configure_tiles();
    load_rows();
    for_tiles([&](const KeyTile<bf16>& keys, const KeyTile<bf16>& next, bool partial) {
      rearrange(keys, next);
      for (i32 m = 0; m < tile_.num_rows; m += strip_rows)
        if (tile_.num_rows - m > tile_rows)
          strip<2>(m, keys, partial);
        else
          strip<1>(m, keys, partial);
    });
    simd::release_tiles();
    for (i32 m = 0; m < tile_.num_rows; ++m) x_.state[m] = RowState{t_.max[m], t_.sum[m]};
    finish();
  }

 private:
  /// Keys [begin, end) of a tile; multiples of 32.
  struct Keys {
    i32 begin, end;
  };

  /// Rows past the last one, up to a whole strip, are zero.
  void load_rows() {
    const i32 padded = round_up(tile_.num_rows, strip_rows);
    for (i32 m = 0; m < tile_.num_rows; ++m) {
      start_row(m);
      bf16* to = t_.q + m * t_.dim_qk;
      if (stages_.num_query == 0) {
        const bf16* from = static_cast<const bf16*>(launch_.q.data) + offset_in_q(m);
        __builtin_memcpy(to, from, static_cast<u64>(launch_.dim_qk) * sizeof(bf16));
      } else {
        load_query(m);
        narrow_row(x_.q + m * x_.ldq, to, launch_.dim_qk);
      }
      for (i32 d = launch_.dim_qk; d < t_.dim_qk; ++d) to[d] = bf16{0};
    }
    __builtin_memset(t_.q + tile_.num_rows * t_.dim_qk, 0,
                     static_cast<u64>((padded - tile_.num_rows) * t_.dim_qk) * sizeof(bf16));
    for (i32 m = 0; m < padded; ++m) {
      t_.max[m] = -math::infinity;
      t_.sum[m] = 0.0f;
    }
  }

  /// f_k(K) and f_v(V) as squares.
  void rearrange(const KeyTile<bf16>& keys, const KeyTile<bf16>& next) const {
    const bf16* const* k = keys.k;
    if (stages_.num_key > 0 || launch_.dim_qk != t_.dim_qk) {
      stage_rows<&VariantOps::key>(stages_.key, stages_.num_key, keys.k, keys.k_scale, keys,
                                   launch_.dim_qk, x_.ldq, x_.k, {next.k, 0});
      k = narrow(x_.k, x_.ldq, keys.n, launch_.dim_qk, t_.dim_qk);
    }
    rearrange_k(k, keys.n, t_.dim_qk, t_.k, {next.k, next.n});
    const bf16* const* v = keys.v;
    if (stages_.num_value > 0 || launch_.dim_vo != t_.dim_vo) {
      stage_rows<&VariantOps::value>(stages_.value, stages_.num_value, keys.v, keys.v_scale, keys,
                                     launch_.dim_vo, x_.ldo, x_.v, {next.v, 0});
      v = narrow(x_.v, x_.ldo, keys.n, launch_.dim_vo, t_.dim_vo);
    }
    rearrange_v(v, keys.n, t_.dim_vo, t_.v, {next.v, next.n});
  }

  /// Staged rows, which are rounded already, as bf16, padded with zeros.
  const bf16* const* narrow(const float* from, i32 stride, i32 n, i32 dim, i32 padded) const {
    for (i32 j = 0; j < n; ++j) {
      bf16* to = t_.staged + j * padded;
      t_.rows[j] = to;
      narrow_row(from + j * stride, to, dim);
      for (i32 d = dim; d < padded; ++d) to[d] = bf16{0};
    }
    return t_.rows;
  }

  /// Rows [first, first + 16 · tiles) against one tile of keys.
  template <i32 tiles>
  void strip(i32 first, const KeyTile<bf16>& keys, bool partial) {
    const i32 rows = min(tiles * tile_rows, tile_.num_rows - first);
    const Keys kept =
        partial ? evaluate_masks(first, rows, keys) : Keys{0, round_up(keys.n, padded_unit)};
    if (kept.begin >= kept.end) return;
    strip_qk<tiles>(t_.q + first * t_.dim_qk, t_.dim_qk, t_.k, kept.begin, kept.end, x_.s, x_.lds);
    const float scale = apply_variant(first, rows, keys, kept, partial);
    for (i32 i = 0; i < tiles * tile_rows; i += tile_rows)
      if (stages_.scan == Scan::softmax)
        softmax(first + i, x_.s + i * x_.lds, kept, scale, t_.p + i * max_tile_keys);
      else
        round_weights(x_.s + i * x_.lds, kept, t_.p + i * max_tile_keys);
    strip_pv<tiles>(t_.p, max_tile_keys, t_.v, kept.begin, kept.end, x_.ldo, x_.o + first * x_.ldo,
                    x_.ldo);
  }

  /// The masks of a strip's rows, and the keys that any of them keeps.
  Keys evaluate_masks(i32 first, i32 rows, const KeyTile<bf16>& keys) const {
    u64 any[max_tile_keys / 8] = {};
    for (i32 m = 0; m < rows; ++m) {
      u8* keep = t_.keep + m * max_tile_keys;
      evaluate_keep(first + m, keys, keep);
      for (i32 j = keys.n; j < round_up(keys.n, padded_unit); ++j) keep[j] = 0;
      u64 row[max_tile_keys / 8];
      __builtin_memcpy(row, keep, sizeof(row));
      for (i32 j = 0; j < max_tile_keys / 8; ++j) any[j] |= row[j];
    }
    const auto is_kept = [&](i32 unit) {
      const u64* of = any + unit * (padded_unit / 8);
      return (of[0] | of[1] | of[2] | of[3]) != 0;
    };
    Keys kept{0, ceil_div(keys.n, padded_unit)};
    while (kept.begin < kept.end && !is_kept(kept.begin)) ++kept.begin;
    while (kept.begin < kept.end && !is_kept(kept.end - 1)) --kept.end;
    return {kept.begin * padded_unit, kept.end * padded_unit};
  }

  /// Scale, f_logits and masks of a strip. Returns the scale where nothing looks at scaled logits,
  /// so that the softmax may take it up; else 1.
  float apply_variant(i32 first, i32 rows, const KeyTile<bf16>& keys, Keys kept, bool partial) {
    const i32 n = min(kept.end, keys.n) - kept.begin;
    const bool scaled_later =
        stages_.num_logits == 0 && stages_.scan == Scan::softmax && launch_.scale > 0.0f;
    const bool ragged = kept.begin + n < kept.end;
    if (scaled_later && !partial && !ragged) return launch_.scale;
    for (i32 m = 0; m < rows; ++m) {
      float* s = x_.s + m * x_.lds + kept.begin;
      if (!scaled_later) {
        scale_row(s, kept.end - kept.begin, launch_.scale);
        apply_logits(first + m, s, n, lanes_of(keys, kept.begin));
      }
      if (partial) drop(s, t_.keep + m * max_tile_keys + kept.begin, n, dropped());
      for (i32 j = n; j < kept.end - kept.begin; ++j) s[j] = dropped();
    }
    return scaled_later ? launch_.scale : 1.0f;
  }

  /// A step of the online softmax for 16 rows at `s`, numbers `first` and on: P to `p`.
  void softmax(i32 first, const float* s, Keys kept, float scale, bf16* p) {
    Vec tops[tile_rows];
#pragma GCC unroll 16
    for (i32 i = 0; i < tile_rows; ++i) {
      const float* row = s + i * x_.lds;
      tops[i] = simd::load(row + kept.begin);
      for (i32 j = kept.begin + lanes; j < kept.end; j += lanes)
        tops[i] = simd::max(simd::load(row + j), tops[i]);
    }
    const Vec before = simd::load(t_.max + first);
    const Vec top = simd::max(simd::max_each(tops) * scale, before);
    // A row with nothing kept so far: subtracting 0 leaves every logit at -inf.
    const Vec shift = top == -math::infinity ? Vec{} : top;
    const Vec rescale = simd::exp2_nonpositive((before - shift) * math::log2e);
    simd::store(t_.max + first, top);
    rescale_rows(first, rescale);

    float minus_shift[tile_rows];
    simd::store(minus_shift, shift * -math::log2e);
    const Vec factor = simd::broadcast(scale * math::log2e);
    Vec totals[tile_rows];
    for (i32 i = 0; i < tile_rows; ++i) {
      const float* row = s + i * x_.lds;
      const Vec minus = simd::broadcast(minus_shift[i]);
      Vec total{};
      for (i32 j = kept.begin; j < kept.end; j += 2 * lanes) {
        const Vec low = simd::exp2_nonpositive(simd::fma(simd::load(row + j), factor, minus));
        const Vec high =
            simd::exp2_nonpositive(simd::fma(simd::load(row + j + lanes), factor, minus));
        total = total + (low + high);
        simd::store_words(p + i * max_tile_keys + j, simd::round_to_bf16(low, high));
      }
      totals[i] = total;
    }
    simd::store(t_.sum + first,
                simd::fma(simd::load(t_.sum + first), rescale, simd::sum_each(totals)));
  }

  /// O of 16 rows times `factor`, where that isn't 1.
  void rescale_rows(i32 first, Vec factor) {
    float of[tile_rows];
    simd::store(of, factor);
    for (i32 i = 0; i < tile_rows; ++i)
      if (of[i] != 1.0f) scale_row(x_.o + (first + i) * x_.ldo, x_.ldo, of[i]);
  }

  void round_weights(const float* s, Keys kept, bf16* p) const {
    for (i32 i = 0; i < tile_rows; ++i)
      for (i32 j = kept.begin; j < kept.end; j += 2 * lanes)
        simd::store_words(p + i * max_tile_keys + j,
                          simd::round_to_bf16(simd::load(s + i * x_.lds + j),
                                              simd::load(s + i * x_.lds + j + lanes)));
  }

  TileScratch& t_;
};

}  // namespace cpu

RADDLE_ENGINE_END

// Long queries in bf16 on tile registers: FlashAttention-2's loop over KV tiles, and inside of it
// one over strips of 32 query rows, whose logits and weights never leave the L1 cache:
//
//   S = Q·Kᵀ in tiles → f_logits, masks → P = exp(S - max), rounded to bf16 → O += P·V in tiles
//
// Strips form one pipeline through all KV tiles: while the vector units compute a strip's softmax,
// the tile unit multiplies P·V of the strip before it and Q·Kᵀ of the one after.
#pragma once

#include "raddle/engine/kernel/cpu/amx_products.h"
#include "raddle/engine/kernel/cpu/amx_softmax.h"
#include "raddle/engine/kernel/cpu/attention.h"

RADDLE_ENGINE_BEGIN

namespace cpu {

/// What the kernel needs besides a worker's other scratch.
struct TileScratch {
  i32 dim_qk, dim_vo;  ///< padded to whole tiles
  bf16* q;             ///< [Tq, dim_qk]
  bf16* k[2];          ///< squares of this KV tile and the one before, see amx_products.h
  bf16* v[2];
  bf16* staged;       ///< [Tkv, dim] rows of K or V that stages have changed, or that were padded
  const bf16** rows;  ///< [Tkv] where they lie
  float* max;         ///< [Tq] of the logits so far
  float* rescale[2];  ///< [strip_rows] what O is multiplied by before P·V
  float* sum;         ///< [Tq] Σ exp(s - max)
  u8* keep[2];        ///< [strip_rows, max_tile_keys] masks of this strip and the next one
  i64 bytes;

  TileScratch(const CpuLaunch& launch, void* base) {
    const TileShape& shape = launch.plan->shapes[1];
    const i32 rows_q = round_up(shape.rows, strip_rows);
    const i32 keys = round_up(shape.keys, padded_unit);
    dim_qk = round_up(launch.dim_qk, padded_unit);
    dim_vo = round_up(launch.dim_vo, padded_unit);
    Carver carve(base);
    q = carve.take<bf16>(rows_q * dim_qk);
    for (i32 i = 0; i < 2; ++i) {
      k[i] = carve.take<bf16>(keys * dim_qk);
      v[i] = carve.take<bf16>(keys * dim_vo);
      rescale[i] = carve.take<float>(strip_rows);
      keep[i] = carve.take<u8>(strip_rows * max_tile_keys);
    }
    staged = carve.take<bf16>(keys * raddle::max(dim_qk, dim_vo));
    rows = carve.take<const bf16*>(keys);
    max = carve.take<float>(rows_q);
    sum = carve.take<float>(rows_q);
    bytes = carve.used();
  }
};

class TiledItem : ItemKernel<bf16> {
 public:
  TiledItem(const CpuLaunch& launch, const WorkItem& item, const Scratch<bf16>& scratch,
            TileScratch& tiles)
      : ItemKernel<bf16>(launch, item, scratch), t_(tiles) {}

  void run() {
    simd::configure_tiles();
    load_rows();
    for_tiles([&](const KeyTile<bf16>& keys, const KeyTile<bf16>& next, bool partial) {
      rearrange(keys, next);
      ahead_ = Ahead{next.k, next.v, 2 * next.n,
                     ceil_div(2 * next.n, round_up(tile_.num_rows, tile_rows))};
      for (i32 m = 0; m < tile_.num_rows; m += strip_rows) take(strip_of(m, keys, partial));
      // What a strip in the pipeline reads stays for one more tile only.
      if (current_.keys != &keys) drain();
    });
    drain();
    simd::release_tiles();
    for (i32 m = 0; m < tile_.num_rows; ++m) x_.state[m] = RowState{t_.max[m], t_.sum[m]};
    finish();
  }

 private:
  /// Some query rows against keys [begin, end) of one KV tile, multiples of 32.
  struct Strip {
    const KeyTile<bf16>* keys = nullptr;  ///< null: no strip, one that isn't there
    i32 first = 0, rows = 0;
    i32 begin = 0, end = 0;
    bool partial = false;
    i32 slot = 0, squares = 0;  ///< which of two buffers it uses

    i32 padded_rows() const { return round_up(rows, tile_rows); }
  };

  /// Rows of the next tile's K and V, a few of which are asked for at every turn: all at once they
  /// would fill the buffers that loads of this tile need. They are to wait in the L2 cache.
  struct Ahead {
    const bf16* const* k = nullptr;
    const bf16* const* v = nullptr;
    i32 rows = 0;  ///< of both that are left
    i32 rows_a_turn = 0;

    void fetch(i32 dim_qk, i32 dim_vo) {
      for (i32 i = 0; i < rows_a_turn && rows > 0; ++i) {
        --rows;
        const bf16* row = rows % 2 == 0 ? k[rows / 2] : v[rows / 2];
        const i32 dim = rows % 2 == 0 ? dim_qk : dim_vo;
        for (i32 d = 0; d < dim; d += 32) __builtin_prefetch(row + d, 0, 2);
      }
    }
  };

  /// Moves the pipeline on by one strip: the one that comes gets its logits, the one before its
  /// weights, and the one before that its output.
  void take(const Strip& next) {
    if (next.keys && next.begin == next.end) return;
    Products products(pv_of(before_), qk_of(next), strip_rows);
    if (current_.keys) weigh(current_, products);
    products.finish();
    before_ = current_;
    current_ = next;
    if (next.keys) slot_ ^= 1;
  }

  void drain() {
    take(Strip{});
    take(Strip{});
  }

  float* logits_of(const Strip& strip) const { return x_.s + strip.slot * strip_rows * x_.lds; }

  /// A row's weights take the place of its logits, which are read before.
  bf16* weights_of(const Strip& strip) const { return reinterpret_cast<bf16*>(logits_of(strip)); }

  Product qk_of(const Strip& s) const {
    if (!s.keys) return {};
    return Product::qk(s.rows, t_.q + s.first * t_.dim_qk, t_.dim_qk, t_.k[s.squares], s.begin,
                       s.end, logits_of(s), x_.lds);
  }

  /// Brings O to the strip's new maximum first.
  Product pv_of(const Strip& s) const {
    if (!s.keys) return {};
    if (stages_.scan == Scan::softmax) rescale_rows(s);
    return Product::pv(s.rows, weights_of(s), 2 * x_.lds, t_.v[s.squares], s.begin, s.end, x_.ldo,
                       x_.o + s.first * x_.ldo, x_.ldo);
  }

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

  /// f_k(K) and f_v(V) as squares, while the strip before the last one gets its output.
  void rearrange(const KeyTile<bf16>& keys, const KeyTile<bf16>& next) {
    squares_ ^= 1;
    Products products(pv_of(before_), {}, strip_rows);
    const bf16* const* k = keys.k;
    if (stages_.num_key > 0 || launch_.dim_qk != t_.dim_qk) {
      stage_rows<&VariantOps::key>(stages_.key, stages_.num_key, keys.k, keys.k_scale, keys,
                                   launch_.dim_qk, x_.ldq, x_.k, {next.k, 0});
      k = narrow(x_.k, x_.ldq, keys.n, launch_.dim_qk, t_.dim_qk);
    }
    rearrange_k(k, keys.n, t_.dim_qk, t_.k[squares_], {next.k, 0}, [&] { products.turn(); });
    products.finish();  // it may read the squares of V that come now
    before_ = Strip{};
    const bf16* const* v = keys.v;
    if (stages_.num_value > 0 || launch_.dim_vo != t_.dim_vo) {
      stage_rows<&VariantOps::value>(stages_.value, stages_.num_value, keys.v, keys.v_scale, keys,
                                     launch_.dim_vo, x_.ldo, x_.v, {next.v, 0});
      v = narrow(x_.v, x_.ldo, keys.n, launch_.dim_vo, t_.dim_vo);
    }
    rearrange_v(v, keys.n, t_.dim_vo, t_.v[squares_], {next.v, 0});
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

  /// Rows from `first` on against one tile of keys.
  Strip strip_of(i32 first, const KeyTile<bf16>& keys, bool partial) const {
    Strip strip;
    strip.keys = &keys;
    strip.first = first;
    strip.rows = min(strip_rows, tile_.num_rows - first);
    strip.end = round_up(keys.n, padded_unit);
    strip.partial = partial;
    strip.slot = slot_;
    strip.squares = squares_;
    if (partial) evaluate_masks(strip);
    return strip;
  }

  /// The masks of a strip's rows, and the keys that any of them keeps.
  void evaluate_masks(Strip& strip) const {
    const i32 n = strip.keys->n;
    u64 any[max_tile_keys / 8] = {};
    for (i32 m = 0; m < strip.rows; ++m) {
      u8* keep = t_.keep[strip.slot] + m * max_tile_keys;
      evaluate_keep(strip.first + m, *strip.keys, keep);
      for (i32 j = n; j < strip.end; ++j) keep[j] = 0;
      u64 row[max_tile_keys / 8];
      __builtin_memcpy(row, keep, sizeof(row));
      for (i32 j = 0; j < max_tile_keys / 8; ++j) any[j] |= row[j];
    }
    const auto is_kept = [&](i32 key) {
      const u64* of = any + key / 8;
      return (of[0] | of[1] | of[2] | of[3]) != 0;
    };
    while (strip.begin < strip.end && !is_kept(strip.begin)) strip.begin += padded_unit;
    while (strip.begin < strip.end && !is_kept(strip.end - padded_unit)) strip.end -= padded_unit;
  }

  /// From logits to weights.
  void weigh(const Strip& strip, Products& products) {
    const float scale = apply_variant(strip);
    const auto turn = [&] {
      products.turn();
      ahead_.fetch(launch_.dim_qk, launch_.dim_vo);
    };
    for (i32 i = 0; i < strip.padded_rows(); i += tile_rows) {
      const float* s = logits_of(strip) + i * x_.lds;
      bf16* p = weights_of(strip) + i * 2 * x_.lds;
      const i32 m = strip.first + i;
      if (stages_.scan == Scan::sum)
        round_weights(s, x_.lds, strip.begin, strip.end, p, 2 * x_.lds);
      else
        simd::store(t_.rescale[strip.slot] + i,
                    softmax_step_16(s, x_.lds, strip.begin, strip.end, scale, t_.max + m,
                                    t_.sum + m, p, 2 * x_.lds, turn));
    }
  }

  /// Scale, f_logits and masks of a strip. Returns the scale where nothing looks at scaled logits,
  /// so that the softmax may take it up; else 1.
  float apply_variant(const Strip& strip) const {
    const KeyTile<bf16>& keys = *strip.keys;
    const i32 padded = strip.end - strip.begin;
    const i32 n = min(strip.end, keys.n) - strip.begin;
    const bool scaled_later =
        stages_.num_logits == 0 && stages_.scan == Scan::softmax && launch_.scale > 0.0f;
    if (scaled_later && !strip.partial && n == padded) return launch_.scale;
    for (i32 m = 0; m < strip.rows; ++m) {
      float* s = logits_of(strip) + m * x_.lds + strip.begin;
      if (!scaled_later) {
        scale_row(s, padded, launch_.scale);
        apply_logits(strip.first + m, s, n, lanes_of(keys, strip.begin));
      }
      if (strip.partial)
        drop(s, t_.keep[strip.slot] + m * max_tile_keys + strip.begin, n, dropped());
      for (i32 j = n; j < padded; ++j) s[j] = dropped();
    }
    return scaled_later ? launch_.scale : 1.0f;
  }

  /// O of a strip's rows times their factors, where those aren't 1.
  void rescale_rows(const Strip& strip) const {
    const float* factor = t_.rescale[strip.slot];
    for (i32 i = 0; i < strip.rows; ++i)
      if (factor[i] != 1.0f) scale_row(x_.o + (strip.first + i) * x_.ldo, x_.ldo, factor[i]);
  }

  TileScratch& t_;
  Strip before_, current_;  ///< strips in the pipeline: with weights, with logits
  Ahead ahead_;
  i32 slot_ = 0, squares_ = 0;
};

}  // namespace cpu

RADDLE_ENGINE_END

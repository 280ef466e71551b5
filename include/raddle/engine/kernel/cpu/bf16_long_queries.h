// Long queries in bf16, in tile registers or vectors of pairs: FlashAttention-2's loops, over
// stretches of KV tiles, inside of it over strips of 32 query rows, and inside of that over slices
// of keys, so that a strip's logits, weights and O stay in the L1 cache:
//
//   S = Q·Kᵀ → f_logits, masks → P = exp(S - shift), rounded to bf16 → O += P·V
//
// Strips and slices form one pipeline: while the vector units compute a block's softmax, a tile
// unit multiplies P·V of the block before it and Q·Kᵀ of the one after.
#pragma once

#include "raddle/engine/kernel/cpu/attention.h"
#include "raddle/engine/kernel/cpu/bf16_softmax.h"
#include "raddle/engine/kernel/cpu/bf16_stretch.h"
#include "raddle/engine/kernel/cpu/strip_products.h"
#include "raddle/engine/variant/fold_masks.h"

RADDLE_ENGINE_BEGIN

namespace cpu {

/// What the kernel needs besides a worker's other scratch.
struct Bf16Scratch {
  i32 dim_qk, dim_vo;  ///< padded to whole squares
  bf16* q;             ///< [Tq, dim_qk]
  float* o;            ///< [Tq, dim_vo]
  Squares squares;
  Stretch stretches[2];  ///< this one and the next one
  bf16* staged;       ///< [Tkv, dim] rows of K or V that stages have changed, or that were padded
  const bf16** rows;  ///< [Tkv] where they lie
  RowShifts shifts;   ///< of Tq rows
  float* s[2];        ///< [strip_rows, slice_keys] logits, then weights, of two blocks
  Rescaling rescaling[2];
  u8* keep[2];  ///< [strip_rows, slice_keys] masks
  i64 bytes;

  Bf16Scratch(const CpuLaunch& launch, void* base)
      : dim_qk(round_up(launch.dim_qk, padded_unit)),
        dim_vo(round_up(launch.dim_vo, padded_unit)),
        squares(dim_qk, dim_vo) {
    const TileShape& shape = launch.plan->shapes[1];
    const i32 rows_q = round_up(shape.rows, strip_rows);
    const i32 keys = round_up(shape.keys, padded_unit);
    Carver carve(base);
    q = carve.take<bf16>(rows_q * dim_qk);
    o = carve.take<float>(rows_q * dim_vo);
    squares.base = carve.take<bf16>(squares.elements());
    for (i32 i = 0; i < 2; ++i) {
      stretches[i].tiles = carve.take<KeyTile<bf16>>(squares.num_tiles());
      s[i] = carve.take<float>(strip_rows * slice_keys);
      rescaling[i].factors = carve.take<float>(strip_rows);
      keep[i] = carve.take<u8>(strip_rows * slice_keys);
    }
    staged = carve.take<bf16>(keys * raddle::max(dim_qk, dim_vo));
    rows = carve.take<const bf16*>(keys);
    shifts.minus = carve.take<float>(rows_q);
    shifts.sums = carve.take<float>(rows_q * lanes);
    bytes = carve.used();
  }
};

class Bf16Item : ItemKernel<bf16> {
 public:
  Bf16Item(const CpuLaunch& launch, const WorkItem& item, const Scratch<bf16>& scratch,
           Bf16Scratch& tiles)
      : ItemKernel<bf16>(launch, item, scratch), bf16_(tiles) {
    scratch_.o = bf16_.o;
    scratch_.ldo = scratch_.stride_o = bf16_.dim_vo;
  }

  void run() {
    begin_products();
    load_rows();
    TileWalk walk(plan_, *item_);
    gather_stretch(walk, bf16_.stretches[0]);
    for (i32 i = 0; bf16_.stretches[i].num_tiles > 0; i ^= 1) {
      gather_stretch(walk, bf16_.stretches[i ^ 1]);
      rearrange(bf16_.stretches[i]);
      const i32 turns = ceil_div(tile_.num_rows, rows_a_turn) * num_slices_;
      ahead_ = RowsAhead(bf16_.stretches[i ^ 1], turns);
      for (i32 m = 0; m < tile_.num_rows; m += strip_rows) {
        const Strip strip = strip_of(m);
        for (i32 j = 0; j < num_slices_; ++j) take(block_of(strip, j));
      }
      // What blocks in the pipeline read is about to be replaced.
      take(Block{});
      take(Block{});
    }
    end_products();
    for (i32 m = 0; m < tile_.num_rows; ++m) scratch_.state[m] = state_of(m);
    finish();
  }

 private:
  /// Rows of softmax between two turns of the tile unit.
  static constexpr i32 rows_a_turn = 2;

  struct Strip {
    i32 first, rows;
    Tile hull;  ///< of the rows; those of keys are open
  };

  /// Some query rows against keys [begin, end) of one slice, multiples of 32.
  struct Block {
    const Slice* slice = nullptr;  ///< null: no block
    i32 first = 0, rows = 0;
    i32 begin = 0, end = 0;
    bool partial = false;
    bool opens_strip = false;
    i32 slot = 0;  ///< which of two buffers it uses
  };

  /// Moves the pipeline on by one block: the one that comes gets its logits, the one before its
  /// weights, and the one before that its output.
  void take(const Block& next) {
    if (next.slice && next.begin == next.end) return;
    Products products(pv_of(before_), qk_of(next), ceil_div(strip_rows, rows_a_turn));
    if (current_.slice) weigh(current_, products);
    products.finish();
    before_ = current_;
    current_ = next;
    if (next.slice) slot_ ^= 1;
  }

  /// A row's weights take the place of its logits, which are read before.
  bf16* weights_of(const Block& b) const { return reinterpret_cast<bf16*>(bf16_.s[b.slot]); }

  KeyProduct qk_of(const Block& b) const {
    if (!b.slice) return {};
    return multiply_keys(b.rows, bf16_.q + b.first * bf16_.dim_qk, bf16_.dim_qk, b.slice->k,
                         b.begin, b.end, bf16_.s[b.slot], slice_keys);
  }

  /// Brings O to the rows' new shifts first.
  ValueProduct pv_of(const Block& b) const {
    if (!b.slice) return {};
    if (bf16_.rescaling[b.slot].needed) rescale_rows(b);
    return multiply_values(b.rows, weights_of(b), 2 * slice_keys, b.slice->v, b.begin, b.end,
                           bf16_.dim_vo, scratch_.o + b.first * scratch_.stride_o);
  }

  /// Rows past the last one, up to a whole strip, are zero.
  void load_rows() {
    const i32 padded = round_up(tile_.num_rows, strip_rows);
    for (i32 m = 0; m < tile_.num_rows; ++m) {
      start_row(m);
      bf16* to = bf16_.q + m * bf16_.dim_qk;
      if (stages_.num_query == 0) {
        const bf16* from = static_cast<const bf16*>(launch_.q.data) + offset_in_q(m);
        __builtin_memcpy(to, from, static_cast<u64>(launch_.dim_qk) * sizeof(bf16));
      } else {
        load_query(m);
        narrow_row(scratch_.q + m * scratch_.ldq, to, launch_.dim_qk);
      }
      for (i32 d = launch_.dim_qk; d < bf16_.dim_qk; ++d) to[d] = bf16{0};
    }
    __builtin_memset(bf16_.q + tile_.num_rows * bf16_.dim_qk, 0,
                     static_cast<u64>((padded - tile_.num_rows) * bf16_.dim_qk) * sizeof(bf16));
    for (i32 m = 0; m < padded; ++m) {
      bf16_.shifts.minus[m] = no_shift;
      simd::store(bf16_.shifts.sums + m * lanes, Vec{});
    }
    for (Rescaling& rescaling : bf16_.rescaling) rescaling.needed = false;
  }

  RowState state_of(i32 m) const {
    const float minus = bf16_.shifts.minus[m];
    return RowState{is_shift(minus) ? -minus * math::ln2 : -math::infinity,
                    simd::reduce_sum(simd::load(bf16_.shifts.sums + m * lanes))};
  }

  void gather_stretch(TileWalk& walk, Stretch& stretch) const {
    i32& n = stretch.num_tiles;
    for (n = 0; n < bf16_.squares.num_tiles(); ++n) {
      stretch.partial[n] = gather_next(walk, stretch.tiles[n]);
      if (stretch.tiles[n].n == 0) return;
    }
  }

  /// f_k(K) and f_v(V) of a stretch as squares. While K of a tile is rearranged, its V is asked
  /// for, and during that the next tile's K.
  void rearrange(const Stretch& stretch) {
    num_slices_ = 0;
    for (i32 i = 0; i < stretch.num_tiles; ++i) {
      const KeyTile<bf16>& keys = stretch.tiles[i];
      const i32 slices = ceil_div(keys.n, slice_keys);
      const bf16* const* k = staged_keys(keys);
      for (i32 j = 0; j < slices; ++j) {
        const i32 first = j * slice_keys;
        Slice& slice = slices_[num_slices_ + j];
        bf16* to = bf16_.squares.k(num_slices_ + j);
        slice = slice_of(keys, first, stretch.partial[i]);
        slice.k = to;
        rearrange_k(k + first, slice.n, bf16_.dim_qk, to, {keys.v + first, slice.n});
      }
      const bf16* const* v = staged_values(keys);
      for (i32 j = 0; j < slices; ++j) {
        const i32 first = j * slice_keys;
        Slice& slice = slices_[num_slices_ + j];
        bf16* to = bf16_.squares.v(num_slices_ + j);
        slice.v = to;
        const bool is_last = i + 1 == stretch.num_tiles;
        const KeyTile<bf16>& next = stretch.tiles[is_last ? i : i + 1];
        rearrange_v(v + first, slice.n, bf16_.dim_vo, to,
                    {next.k + first, is_last ? 0 : next.n - first});
      }
      num_slices_ += slices;
    }
  }

  const bf16* const* staged_keys(const KeyTile<bf16>& keys) const {
    if (stages_.num_key == 0 && launch_.dim_qk == bf16_.dim_qk) return keys.k;
    stage_rows<&VariantOps::key>(stages_.key, stages_.num_key, keys.k, keys.k_scale, keys,
                                 launch_.dim_qk, scratch_.ldq, scratch_.k, {keys.k, 0});
    return narrow(scratch_.k, scratch_.ldq, keys.n, launch_.dim_qk, bf16_.dim_qk);
  }

  const bf16* const* staged_values(const KeyTile<bf16>& keys) const {
    if (stages_.num_value == 0 && launch_.dim_vo == bf16_.dim_vo) return keys.v;
    const i32 ldv = round_up(launch_.dim_vo, lanes);
    stage_rows<&VariantOps::value>(stages_.value, stages_.num_value, keys.v, keys.v_scale, keys,
                                   launch_.dim_vo, ldv, scratch_.v, {keys.v, 0});
    return narrow(scratch_.v, ldv, keys.n, launch_.dim_vo, bf16_.dim_vo);
  }

  /// Staged rows, which are rounded already, as bf16, padded with zeros.
  const bf16* const* narrow(const float* from, i32 stride, i32 n, i32 dim, i32 padded) const {
    for (i32 j = 0; j < n; ++j) {
      bf16* to = bf16_.staged + j * padded;
      bf16_.rows[j] = to;
      narrow_row(from + j * stride, to, dim);
      for (i32 d = dim; d < padded; ++d) to[d] = bf16{0};
    }
    return bf16_.rows;
  }

  static Slice slice_of(const KeyTile<bf16>& keys, i32 first, bool partial) {
    Slice slice{&keys, first, min(slice_keys, keys.n - first), partial, {}, {}, nullptr, nullptr};
    if (!partial) return slice;
    slice.kv_index = slice.kv_pos = Range{int_max, int_min};
    for (i32 j = first; j < first + slice.n; ++j) {
      slice.kv_index = hull(slice.kv_index, Range{keys.kv_index[j], keys.kv_index[j]});
      slice.kv_pos = hull(slice.kv_pos, Range{keys.kv_pos[j], keys.kv_pos[j]});
    }
    return slice;
  }

  Strip strip_of(i32 first) const {
    Strip strip{first, min(strip_rows, tile_.num_rows - first), {}};
    const auto of = [&](i32 Row::*member) {
      Range range{int_max, int_min};
      for (i32 m = first; m < first + strip.rows; ++m)
        range = hull(range, Range{scratch_.rows[m].*member, scratch_.rows[m].*member});
      return range;
    };
    strip.hull = Tile{of(&Row::request), of(&Row::q_index), of(&Row::q_pos),
                      of(&Row::q_head),  everything,        everything};
    return strip;
  }

  Block block_of(const Strip& strip, i32 nth) const {
    const Slice& slice = slices_[nth];
    Block block;
    block.slice = &slice;
    block.first = strip.first;
    block.rows = strip.rows;
    block.end = slice.padded_keys();
    block.opens_strip = nth == 0;
    block.slot = slot_;
    switch (slice.partial ? coverage_of(strip, slice) : Coverage::full) {
      case Coverage::empty:
        block.end = 0;
        break;
      case Coverage::partial:
        block.partial = true;
        evaluate_masks(block);
        break;
      case Coverage::full:
        break;
    }
    return block;
  }

  /// Tiles are long: most strips keep all or nothing of a slice, and hulls say so in less time than
  /// masks.
  Coverage coverage_of(const Strip& strip, const Slice& slice) const {
    Tile tile = strip.hull;
    tile.kv_index = slice.kv_index;
    tile.kv_pos = slice.kv_pos;
    const Coverage kept = coverage_of_masks(stages_, tile);
    return level_.mask_bits ? min(kept, Coverage::partial) : kept;
  }

  /// The masks of a block's rows, and the keys that any of them keeps.
  void evaluate_masks(Block& block) const {
    constexpr i32 words = slice_keys / 8;
    const i32 n = block.slice->n;
    u64 any[words] = {};
    for (i32 m = 0; m < block.rows; ++m) {
      u8* keep = bf16_.keep[block.slot] + m * slice_keys;
      evaluate_keep(block.first + m, *block.slice->keys, block.slice->first, n, keep);
      for (i32 j = n; j < slice_keys; ++j) keep[j] = 0;
      u64 row[words];
      __builtin_memcpy(row, keep, sizeof(row));
      for (i32 j = 0; j < words; ++j) any[j] |= row[j];
    }
    const auto is_kept = [&](i32 key) {
      const u64* of = any + key / 8;
      return (of[0] | of[1] | of[2] | of[3]) != 0;
    };
    while (block.begin < block.end && !is_kept(block.begin)) block.begin += padded_unit;
    while (block.begin < block.end && !is_kept(block.end - padded_unit)) block.end -= padded_unit;
  }

  /// From logits to weights.
  void weigh(const Block& block, Products& products) {
    const float factor = apply_variant(block) * math::log2e;
    float* s = bf16_.s[block.slot];
    Rescaling& rescaling = bf16_.rescaling[block.slot];
    if (stages_.scan == Scan::softmax)
      for (i32 i = 0; i < block.rows; i += tile_rows)
        start_shifts(s + i * slice_keys, factor, bf16_.shifts, block.first + i);
    for (i32 i = 0; i < block.rows; i += rows_a_turn) {
      products.turn();
      ahead_.fetch(launch_.dim_qk, launch_.dim_vo);
      if (block.opens_strip) fetch_o(block.first + i);
      for (i32 r = i; r < i + rows_a_turn; ++r) {
        float* row = s + r * slice_keys;
        bf16* p = reinterpret_cast<bf16*>(row);
        if (stages_.scan == Scan::sum)
          round_weights(row, block.begin, block.end, p);
        else
          softmax_row(row, factor, bf16_.shifts, block.first + r, rescaling, r, p);
      }
    }
  }

  /// O of a strip's first P·V, which comes next.
  void fetch_o(i32 m) const {
    const float* o = scratch_.o + m * scratch_.stride_o;
    for (i32 d = 0; d < rows_a_turn * scratch_.stride_o; d += lanes) simd::prefetch(o + d);
  }

  /// Scale, f_logits and masks of a block. Returns the scale where nothing looks at scaled logits,
  /// so that the softmax may take it up; else 1.
  float apply_variant(const Block& block) const {
    const Slice& slice = *block.slice;
    const i32 n = min(block.end, slice.n) - block.begin;
    const bool scaled_later =
        stages_.num_logits == 0 && stages_.scan == Scan::softmax && launch_.scale > 0.0f;
    const float rest = scaled_later ? launch_.scale : 1.0f;
    if (!scaled_later) scale_and_apply(block, n);
    if (!block.partial && n == slice_keys) return rest;
    for (i32 m = 0; m < block.rows; ++m) {
      float* row = bf16_.s[block.slot] + m * slice_keys;
      float* s = row + block.begin;
      if (block.partial)
        drop(s, bf16_.keep[block.slot] + m * slice_keys + block.begin, n, dropped());
      // The softmax takes whole slices.
      for (i32 j = 0; j < block.begin; ++j) row[j] = dropped();
      for (i32 j = block.begin + n; j < slice_keys; ++j) row[j] = dropped();
    }
    return rest;
  }

  /// Scale and f_logits of a block's first n keys.
  void scale_and_apply(const Block& block, i32 n) const {
    float* s = bf16_.s[block.slot] + block.begin;
    if (stages_.num_logits == 0)
      for (i32 m = 0; m < block.rows; ++m)
        scale_row(s + m * slice_keys, round_up(n, lanes), launch_.scale);
    apply_logits({.s = s,
                  .stride = slice_keys,
                  .n = n,
                  .rows = scratch_.rows + block.first,
                  .num_rows = block.rows,
                  .scale = launch_.scale},
                 lanes_of(*block.slice->keys, block.slice->first + block.begin));
  }

  /// O of a block's rows times their factors, where those aren't 1.
  void rescale_rows(const Block& block) const {
    Rescaling& rescaling = bf16_.rescaling[block.slot];
    for (i32 i = 0; i < block.rows; ++i)
      if (rescaling.factors[i] != 1.0f)
        scale_row(scratch_.o + (block.first + i) * scratch_.stride_o, scratch_.ldo,
                  rescaling.factors[i]);
    rescaling.needed = false;
  }

  Bf16Scratch& bf16_;
  Block before_, current_;  ///< blocks in the pipeline: with weights, with logits
  RowsAhead ahead_;
  Slice slices_[max_stretch_tiles * tile_slices];
  i32 num_slices_ = 0;
  i32 slot_ = 0;
};

}  // namespace cpu

RADDLE_ENGINE_END

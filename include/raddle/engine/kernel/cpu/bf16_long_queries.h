// Long queries in bf16, in tile registers or vectors of pairs. FlashAttention-2's loops run over KV
// panels, for each of these over row blocks of 32 query rows, and for each of those over key blocks
// of 128 keys, so that a row block's logits, weights and O stay in the L1 cache:
//
//   S = Q·Kᵀ → f_logits, masks → P = exp(S - shift), rounded to bf16 → O += P·V
//
// Logit blocks (row block × key block) form one pipeline: while the vector units compute the
// softmax of one, a tile unit computes P·V of the one before it and Q·Kᵀ of the one after.
#pragma once

#include "raddle/engine/kernel/cpu/attention.h"
#include "raddle/engine/kernel/cpu/bf16_panel.h"
#include "raddle/engine/kernel/cpu/bf16_softmax.h"
#include "raddle/engine/kernel/cpu/row_block_products.h"
#include "raddle/engine/variant/fold_masks.h"

RADDLE_ENGINE_BEGIN

namespace cpu {

/// Scratch memory that this kernel needs besides Scratch.
struct Bf16Scratch {
  i32 dim_qk, dim_vo;  ///< padded to whole packed blocks
  bf16* q;             ///< [Tq, dim_qk]
  float* o;            ///< [Tq, dim_vo]
  PackedPanel packed;
  KvPanel panels[2];  ///< this one and the next
  bf16* staged;       ///< [Tkv, dim] rows of K or V that stages have changed, or that were padded
  const bf16** rows;  ///< [Tkv] where they lie
  RowShifts shifts;   ///< of Tq rows
  float* s[2];  ///< [row_block_rows, key_block_keys] logits, then weights, of two logit blocks
  Rescaling rescaling[2];
  u8* keep[2];  ///< [row_block_rows, key_block_keys] masks
  i64 bytes;

  Bf16Scratch(const CpuLaunch& launch, void* base)
      : dim_qk(round_up(launch.dim_qk, padded_unit)),
        dim_vo(round_up(launch.dim_vo, padded_unit)),
        packed(dim_qk, dim_vo) {
    const TileShape& shape = launch.plan->shapes[long_queries];
    const i32 rows_q = round_up(shape.rows, row_block_rows);
    const i32 keys = round_up(shape.keys, padded_unit);
    Carver carve(base);
    q = carve.take<bf16>(rows_q * dim_qk);
    o = carve.take<float>(rows_q * dim_vo);
    packed.base = carve.take<bf16>(packed.elements());
    for (i32 i = 0; i < 2; ++i) {
      panels[i].tiles = carve.take<KeyTile<bf16>>(packed.num_tiles());
      s[i] = carve.take<float>(row_block_rows * key_block_keys);
      rescaling[i].factors = carve.take<float>(row_block_rows);
      keep[i] = carve.take<u8>(row_block_rows * key_block_keys);
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
    gather_panel(walk, bf16_.panels[0]);
    for (i32 i = 0; bf16_.panels[i].num_tiles > 0; i ^= 1) {
      gather_panel(walk, bf16_.panels[i ^ 1]);
      pack(bf16_.panels[i]);
      const i32 turns = ceil_div(tile_.num_rows, rows_per_turn) * num_key_blocks_;
      next_panel_ = RowsAhead(bf16_.panels[i ^ 1], turns);
      for (i32 m = 0; m < tile_.num_rows; m += row_block_rows) {
        const RowBlock row_block = row_block_of(m);
        for (i32 j = 0; j < num_key_blocks_; ++j) advance(logit_block_of(row_block, j));
      }
      // Drain the pipeline: the next pack() replaces what its logit blocks read.
      advance(LogitBlock{});
      advance(LogitBlock{});
    }
    end_products();
    for (i32 m = 0; m < tile_.num_rows; ++m) scratch_.state[m] = state_of(m);
    finish();
  }

 private:
  /// Rows of softmax from one turn of the tile unit to the next.
  static constexpr i32 rows_per_turn = 2;

  struct RowBlock {
    i32 first, rows;
    Tile hull;  ///< of the rows; its intervals of keys are unbounded
  };

  /// A row block × keys [begin, end), multiples of 32, of a key block.
  struct LogitBlock {
    const KeyBlock* key_block = nullptr;  ///< null: none
    i32 first = 0, rows = 0;
    i32 begin = 0, end = 0;
    bool partial = false;
    bool starts_row_block = false;
    i32 slot = 0;  ///< which of two buffers it uses
  };

  /// Advances the pipeline by one logit block: computes the logits of `next`, the weights of the
  /// current one, and P·V of the one before.
  void advance(const LogitBlock& next) {
    if (next.key_block && next.begin == next.end) return;
    Products products(pv_of(before_), qk_of(next), ceil_div(row_block_rows, rows_per_turn));
    if (current_.key_block) weigh(current_, products);
    products.finish();
    before_ = current_;
    current_ = next;
    if (next.key_block) slot_ ^= 1;
  }

  /// A row's weights replace its logits, once these are read.
  bf16* weights_of(const LogitBlock& b) const { return reinterpret_cast<bf16*>(bf16_.s[b.slot]); }

  KeyProduct qk_of(const LogitBlock& b) const {
    if (!b.key_block) return {};
    return multiply_keys(b.rows, bf16_.q + b.first * bf16_.dim_qk, bf16_.dim_qk, b.key_block->k,
                         b.begin, b.end, bf16_.s[b.slot], key_block_keys);
  }

  /// Rescales O to the rows' new shifts first.
  ValueProduct pv_of(const LogitBlock& b) const {
    if (!b.key_block) return {};
    if (bf16_.rescaling[b.slot].needed) rescale_rows(b);
    return multiply_values(b.rows, weights_of(b), 2 * key_block_keys, b.key_block->v, b.begin,
                           b.end, bf16_.dim_vo, scratch_.o + b.first * scratch_.stride_o);
  }

  /// Rows past the last, up to a whole row block, are zero.
  void load_rows() {
    const i32 padded = round_up(tile_.num_rows, row_block_rows);
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

  void gather_panel(TileWalk& walk, KvPanel& panel) const {
    i32& n = panel.num_tiles;
    for (n = 0; n < bf16_.packed.num_tiles(); ++n) {
      panel.partial[n] = gather_next(walk, panel.tiles[n]);
      if (panel.tiles[n].n == 0) return;
    }
  }

  /// Packs f_k(K) and f_v(V) of a panel. While K of a tile is packed, its V is prefetched, and
  /// meanwhile the next tile's K.
  void pack(const KvPanel& panel) {
    num_key_blocks_ = 0;
    for (i32 i = 0; i < panel.num_tiles; ++i) {
      const KeyTile<bf16>& keys = panel.tiles[i];
      const i32 key_blocks = ceil_div(keys.n, key_block_keys);
      const bf16* const* k = staged_keys(keys);
      for (i32 j = 0; j < key_blocks; ++j) {
        const i32 first = j * key_block_keys;
        KeyBlock& key_block = key_blocks_[num_key_blocks_ + j];
        bf16* to = bf16_.packed.k(num_key_blocks_ + j);
        key_block = key_block_of(keys, first, panel.partial[i]);
        key_block.k = to;
        // Where K extends V, V has been read with K.
        pack_k(k + first, key_block.n, bf16_.dim_qk, to,
               {keys.v + first, keys_extend() ? 0 : key_block.n});
      }
      const bf16* const* v = staged_values(keys);
      for (i32 j = 0; j < key_blocks; ++j) {
        const i32 first = j * key_block_keys;
        KeyBlock& key_block = key_blocks_[num_key_blocks_ + j];
        bf16* to = bf16_.packed.v(num_key_blocks_ + j);
        key_block.v = to;
        const bool is_last = i + 1 == panel.num_tiles;
        const KeyTile<bf16>& next = panel.tiles[is_last ? i : i + 1];
        pack_v(v + first, key_block.n, bf16_.dim_vo, to,
               {(keys_extend() ? next.v : next.k) + first, is_last ? 0 : next.n - first});
      }
      num_key_blocks_ += key_blocks;
    }
  }

  const bf16* const* staged_keys(const KeyTile<bf16>& keys) const {
    if (stages_.num_key == 0 && keys_extend())
      return join_rows(keys.v, launch_.k_begin, keys.k, k_columns(), keys.n, bf16_.dim_qk,
                       bf16_.staged, bf16_.rows);
    if (stages_.num_key == 0 && launch_.dim_qk == bf16_.dim_qk) return keys.k;
    stage_keys(keys, {keys.k, 0});
    return narrow(scratch_.k, scratch_.ldq, keys.n, launch_.dim_qk, bf16_.dim_qk);
  }

  const bf16* const* staged_values(const KeyTile<bf16>& keys) const {
    if (stages_.num_value == 0 && launch_.dim_vo == bf16_.dim_vo) return keys.v;
    const i32 ldv = round_up(launch_.dim_vo, lanes);
    stage_values(keys, ldv, {keys.v, 0});
    return narrow(scratch_.v, ldv, keys.n, launch_.dim_vo, bf16_.dim_vo);
  }

  /// Staged rows, already rounded, as bf16, padded with zeros.
  const bf16* const* narrow(const float* from, i32 stride, i32 n, i32 dim, i32 padded) const {
    for (i32 j = 0; j < n; ++j) {
      bf16* to = bf16_.staged + j * padded;
      bf16_.rows[j] = to;
      narrow_row(from + j * stride, to, dim);
      for (i32 d = dim; d < padded; ++d) to[d] = bf16{0};
    }
    return bf16_.rows;
  }

  RowBlock row_block_of(i32 first) const {
    RowBlock row_block{first, min(row_block_rows, tile_.num_rows - first), {}};
    const auto of = [&](i32 Row::*member) {
      Range range{int_max, int_min};
      for (i32 m = first; m < first + row_block.rows; ++m)
        range = hull(range, Range{scratch_.rows[m].*member, scratch_.rows[m].*member});
      return range;
    };
    row_block.hull = Tile{of(&Row::request), of(&Row::q_index), of(&Row::q_pos),
                          of(&Row::q_head),  everything,        everything};
    return row_block;
  }

  LogitBlock logit_block_of(const RowBlock& row_block, i32 nth) const {
    const KeyBlock& key_block = key_blocks_[nth];
    LogitBlock block;
    block.key_block = &key_block;
    block.first = row_block.first;
    block.rows = row_block.rows;
    block.end = key_block.padded_keys();
    block.starts_row_block = nth == 0;
    block.slot = slot_;
    switch (key_block.partial ? coverage_of(row_block, key_block) : Coverage::full) {
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

  /// Most row blocks keep all or nothing of a key block, and hulls show that faster than masks do.
  Coverage coverage_of(const RowBlock& row_block, const KeyBlock& key_block) const {
    Tile tile = row_block.hull;
    tile.kv_index = key_block.kv_index;
    tile.kv_pos = key_block.kv_pos;
    const Coverage kept = coverage_of_masks(stages_, tile);
    return level_.mask_bits ? min(kept, Coverage::partial) : kept;
  }

  /// Evaluates the masks of a logit block, and narrows it to the keys that any row keeps.
  void evaluate_masks(LogitBlock& block) const {
    constexpr i32 words = key_block_keys / 8;
    const i32 n = block.key_block->n;
    u64 any[words] = {};
    for (i32 m = 0; m < block.rows; ++m) {
      u8* keep = bf16_.keep[block.slot] + m * key_block_keys;
      evaluate_keep(block.first + m, *block.key_block->keys, block.key_block->first, n, keep);
      for (i32 j = n; j < key_block_keys; ++j) keep[j] = 0;
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
  void weigh(const LogitBlock& block, Products& products) {
    const float factor = apply_variant(block) * math::log2e;
    float* s = bf16_.s[block.slot];
    Rescaling& rescaling = bf16_.rescaling[block.slot];
    if (stages_.scan == Scan::softmax)
      for (i32 i = 0; i < block.rows; i += tile_rows)
        start_shifts(s + i * key_block_keys, factor, bf16_.shifts, block.first + i);
    for (i32 i = 0; i < block.rows; i += rows_per_turn) {
      products.turn();
      next_panel_.fetch(k_columns(), launch_.dim_vo);
      if (block.starts_row_block) fetch_o(block.first + i);
      for (i32 r = i; r < i + rows_per_turn; ++r) {
        float* row = s + r * key_block_keys;
        bf16* p = reinterpret_cast<bf16*>(row);
        if (stages_.scan == Scan::sum)
          round_weights(row, block.begin, block.end, p);
        else
          softmax_row(row, factor, bf16_.shifts, block.first + r, rescaling, r, p);
      }
    }
  }

  /// Prefetches O for a row block's first P·V, which comes next.
  void fetch_o(i32 m) const {
    const float* o = scratch_.o + m * scratch_.stride_o;
    for (i32 d = 0; d < rows_per_turn * scratch_.stride_o; d += lanes) simd::prefetch(o + d);
  }

  /// Scale, f_logits and masks of a logit block. Where no part reads scaled logits it leaves the
  /// scale to the softmax and returns it; else it returns 1.
  float apply_variant(const LogitBlock& block) const {
    const KeyBlock& key_block = *block.key_block;
    const i32 n = min(block.end, key_block.n) - block.begin;
    const bool scaled_later =
        stages_.num_logits == 0 && stages_.scan == Scan::softmax && launch_.scale > 0.0f;
    const float rest = scaled_later ? launch_.scale : 1.0f;
    if (!scaled_later) scale_and_apply(block, n);
    if (!block.partial && n == key_block_keys) return rest;
    for (i32 m = 0; m < block.rows; ++m) {
      float* row = bf16_.s[block.slot] + m * key_block_keys;
      float* s = row + block.begin;
      if (block.partial)
        drop(s, bf16_.keep[block.slot] + m * key_block_keys + block.begin, n, dropped());
      // The softmax computes whole key blocks.
      for (i32 j = 0; j < block.begin; ++j) row[j] = dropped();
      for (i32 j = block.begin + n; j < key_block_keys; ++j) row[j] = dropped();
    }
    return rest;
  }

  /// Scale and f_logits of a logit block's first n keys.
  void scale_and_apply(const LogitBlock& block, i32 n) const {
    float* s = bf16_.s[block.slot] + block.begin;
    if (stages_.num_logits == 0)
      for (i32 m = 0; m < block.rows; ++m)
        scale_row(s + m * key_block_keys, round_up(n, lanes), launch_.scale);
    apply_logits({.s = s,
                  .stride = key_block_keys,
                  .n = n,
                  .rows = scratch_.rows + block.first,
                  .num_rows = block.rows,
                  .scale = launch_.scale},
                 lanes_of(*block.key_block->keys, block.key_block->first + block.begin));
  }

  /// Multiplies O of a logit block's rows by their factors, where those aren't 1.
  void rescale_rows(const LogitBlock& block) const {
    Rescaling& rescaling = bf16_.rescaling[block.slot];
    for (i32 i = 0; i < block.rows; ++i)
      if (rescaling.factors[i] != 1.0f)
        scale_row(scratch_.o + (block.first + i) * scratch_.stride_o, scratch_.ldo,
                  rescaling.factors[i]);
    rescaling.needed = false;
  }

  Bf16Scratch& bf16_;
  LogitBlock before_, current_;  ///< in the pipeline: its weights are known; its logits are
  RowsAhead next_panel_;
  KeyBlock key_blocks_[max_panel_tiles * tile_key_blocks];
  i32 num_key_blocks_ = 0;
  i32 slot_ = 0;
};

}  // namespace cpu

RADDLE_ENGINE_END

// Finding the keys of a tile: row pointers, indices and positions of a span of columns.
#pragma once

#include "raddle/engine/core/scale.h"
#include "raddle/engine/layout/layout.h"

RADDLE_ENGINE_BEGIN

/// The longest KV tile of any shape.
constexpr i32 max_tile_keys = 128;

/// The keys of a span of columns, holes left out.
template <class T>
struct KeyTile {
  i32 n = 0;
  const T* k[max_tile_keys];
  const T* v[max_tile_keys];
  i32 kv_index[max_tile_keys];
  i32 kv_pos[max_tile_keys];
  i32 column[max_tile_keys];
  float k_scale[max_tile_keys];  ///< where they are gathered; see gather_scales
  float v_scale[max_tile_keys];
};

/// Whether a level's lists are plain: whole blocks in order, positions equal to indices.
RADDLE_FN bool is_plain(const LevelView& level) {
  return !level.block_index && !level.block_pos && !level.block_first && !level.block_count;
}

template <class T>
RADDLE_FN void add_key(KeyTile<T>& tile, const T* k, const T* v, i32 index, i32 pos, i32 column) {
  tile.k[tile.n] = k;
  tile.v[tile.n] = v;
  tile.kv_index[tile.n] = index;
  tile.kv_pos[tile.n] = pos;
  tile.column[tile.n] = column;
  ++tile.n;
}

/// Gathers columns [begin, end) of a group's list for one KV head; end - begin <= max_tile_keys.
template <class T>
inline void gather_keys(const LevelView& level, const PoolView& pool_k, const PoolView& pool_v,
                        i32 group, i32 kv_head, i32 begin, i32 end, KeyTile<T>& tile) {
  tile.n = 0;
  const T* k = static_cast<const T*>(pool_k.data) + kv_head * pool_k.head_stride;
  const T* v = static_cast<const T*>(pool_v.data) + kv_head * pool_v.head_stride;
  if (!is_plain(level)) {
    for (i32 c = begin; c < end; ++c) {
      const Column at = column_at(level, group, c);
      if (!at.valid) continue;
      add_key(tile, k + at.block * pool_k.block_stride + at.offset * pool_k.row_stride,
              v + at.block * pool_v.block_stride + at.offset * pool_v.row_stride, at.kv_index,
              at.kv_pos, c);
    }
    return;
  }
  const i32 base = level.kv_begin ? level.kv_begin[group] : 0;
  if (!level.blocks) {
    const i64 first = level.block_begin[group];
    for (i32 c = begin; c < end; ++c)
      add_key(tile, k + (first + c) * pool_k.block_stride, v + (first + c) * pool_v.block_stride,
              base + c, base + c, c);
    return;
  }
  // Page by page: one division and one table look-up a page, additions for its rows.
  i32 nth = begin / level.block_size;
  i32 offset = begin - nth * level.block_size;
  for (i32 c = begin; c < end; ++nth, offset = 0) {
    const i64 block = level.blocks[level.block_begin[group] + nth];
    const T* kr = k + block * pool_k.block_stride + offset * pool_k.row_stride;
    const T* vr = v + block * pool_v.block_stride + offset * pool_v.row_stride;
    for (const i32 stop = c + min(end - c, level.block_size - offset); c < stop; ++c) {
      add_key(tile, kr, vr, base + c, base + c, c);
      kr += pool_k.row_stride;
      vr += pool_v.row_stride;
    }
  }
}

/// The scales of the first n keys at columns `column`.
RADDLE_FN void gather_scales(const LevelView& level, const ScaleView& scale, i32 group, i32 kv_head,
                             const i32* column, i32 n, float* to) {
  if (!by_token(scale)) {
    const float all = scale_at(scale, 0, 0, kv_head);
    for (i32 j = 0; j < n; ++j) to[j] = all;
    return;
  }
  for (i32 j = 0; j < n; ++j) {
    const Column at = column_at(level, group, column[j]);
    to[j] = scale_at(scale, at.block, at.offset, kv_head);
  }
}

RADDLE_ENGINE_END

// A worker's scratch memory, carved from one block.
#pragma once

#include "raddle/engine/core/carve.h"
#include "raddle/engine/kernel/cpu/keys.h"
#include "raddle/engine/kernel/cpu/launch.h"
#include "raddle/engine/kernel/cpu/panel_products.h"
#include "raddle/engine/kernel/cpu/softmax.h"

RADDLE_ENGINE_BEGIN

namespace cpu {

/// Each array begins on a cache line of its own.
using Carver = raddle::Carver<64>;

/// Floats from row to row of an array of which a piece of 16 rows is used at a time. An L1 cache
/// finds a line by its address modulo 4 KiB, so rows 2 KiB apart (MLA) would share two of its sets:
/// rows of whole KiB lie one line further apart than they are long.
inline i32 spread_stride(i32 length) {
  constexpr i32 kib = 1024 / sizeof(float), line = 64 / sizeof(float);
  return length % kib == 0 ? length + line : length;
}

/// T is the element type of K and V.
template <class T>
struct Scratch {
  i32 ldq, ldo, lds;     ///< row lengths of q, o, s in floats: whole vectors, whole panels
  i32 stride_o;          ///< floats from a row of o to the next
  float* q;              ///< [Tq, ldq]
  float* s;              ///< [Tq, lds] logits, then weights
  float* o;              ///< [Tq, ldo], rows stride_o apart: unnormalised output
  float* s_of_k;         ///< [short Tq, lds] where K extends V: the part of S of K's columns
  float* lse;            ///< [Tq]
  float* k;              ///< [Tkv, ldq] keys staged in fp32
  float* v;              ///< [Tkv, ldo]
  float* panel;          ///< [max(ldq, Tkv), panel_keys]: K of some keys, or some columns of V
  const float** rows_k;  ///< [Tkv] rows of `k` and `v`
  const float** rows_v;
  u8* keep;           ///< [Tq, max_tile_keys] which pairs of a partial tile are kept
  i32* ends;          ///< [Tq] how many of its keys a row needs
  Row* rows;          ///< [Tq]
  RowState* state;    ///< [Tq]
  KeyTile<T>* tiles;  ///< [3] keys of this tile, the next one and the one before
  i64 bytes;
  i32 max_rows;  ///< Tq

  Scratch(const CpuLaunch& launch, void* base) {
    const TileShape* shapes = launch.plan->shapes;
    const i32 tq = max(shapes[short_queries].rows, shapes[long_queries].rows);
    const i32 tkv = max(shapes[short_queries].keys, shapes[long_queries].keys);
    ldq = round_up(launch.dim_qk, lanes);
    ldo = round_up(launch.dim_vo, lanes);
    stride_o = spread_stride(ldo);
    lds = round_up(tkv, panel_keys);
    Carver carve(base);
    q = carve.take<float>(tq * ldq);
    s = carve.take<float>(tq * lds);
    s_of_k = carve.take<float>(launch.k_begin > 0 ? shapes[short_queries].rows * lds : 0);
    o = carve.take<float>(tq * stride_o);
    lse = carve.take<float>(tq);
    k = carve.take<float>(tkv * ldq);
    v = carve.take<float>(tkv * ldo);
    panel = carve.take<float>(max(ldq, tkv) * panel_keys);
    rows_k = carve.take<const float*>(tkv);
    rows_v = carve.take<const float*>(tkv);
    keep = carve.take<u8>(tq * max_tile_keys);
    ends = carve.take<i32>(tq);
    rows = carve.take<Row>(tq);
    state = carve.take<RowState>(tq);
    tiles = carve.take<KeyTile<T>>(3);
    bytes = carve.used();
    max_rows = tq;
    if (!base) return;
    for (i32 j = 0; j < tkv; ++j) {
      rows_k[j] = k + j * ldq;
      rows_v[j] = v + j * ldo;
    }
  }

  /// This scratch from row m on.
  Scratch from_row(i32 m) const {
    Scratch rest = *this;
    rest.q += m * ldq;
    rest.s += m * lds;
    rest.o += m * stride_o;
    rest.lse += m;
    rest.keep += m * max_tile_keys;
    rest.ends += m;
    rest.rows += m;
    rest.state += m;
    return rest;
  }
};

}  // namespace cpu

RADDLE_ENGINE_END

// Rotary position embedding by the caller's own cosines and sines: one row per position.
#pragma once

#include "raddle/engine/variant/rotation.h"

RADDLE_ENGINE_BEGIN

template <Pairs pairs>
struct RopeTablesOf {
  Tensor<const float, 2> cos;   ///< [positions, rotary_dim / 2]
  Tensor<const float, 2> sin;   ///< [positions, rotary_dim / 2]
  Tensor<const i32, 1> offset;  ///< [1] or [requests], added to every position

  template <class Vec>
  RADDLE_FN void query(Vec& q, const Row& r) const {
    turn(q, r.q_pos + offset_of(offset, r.request));
  }

  template <class Vec>
  RADDLE_FN void key(Vec& k, const Key& c) const {
    turn(k, c.kv_pos + offset_of(offset, c.request));
  }

  // The host refuses batches with positions beyond the tables (src/variant/batch_checks.cpp).
  // Positions are clamped nevertheless, because the device may know lengths that the host has not
  // checked.
  template <class Vec>
  RADDLE_FN void turn(Vec& x, i32 pos) const {
    const i64 row = min(max(pos, 0), cos.extent[0] - 1);
    const float* __restrict c = cos.data + row * cos.extent[1];
    const float* __restrict s = sin.data + row * cos.extent[1];
    rotate<pairs>(x, 2 * cos.extent[1], [=](i32 i) { return math::SinCos{s[i], c[i]}; });
  }
};

using RopeTables = RopeTablesOf<Pairs::half>;

#define RADDLE_ROPE_TABLES_MEMBERS(V)                                                           \
  RADDLE_RUN_TENSOR(V, cos, any, half_head_dim), RADDLE_RUN_TENSOR(V, sin, any, half_head_dim), \
      RADDLE_RUN_TENSOR(V, offset, one_or_requests)
RADDLE_VARIANT(RopeTables, "rope_tables", RADDLE_ROPE_TABLES_MEMBERS(RopeTables));

RADDLE_ENGINE_END

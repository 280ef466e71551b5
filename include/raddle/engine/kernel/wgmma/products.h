// The products of a KV tile, issued and not waited for.
#pragma once

#include "raddle/engine/kernel/gpu/fragments.h"
#include "raddle/engine/kernel/gpu/keys.h"
#include "raddle/engine/kernel/wgmma/row_copies.h"

RADDLE_ENGINE_BEGIN

namespace wgmma {

/// Starts S = Q · Kᵀ of a warpgroup's rows, which begin at `queries`. Addresses are ptx::uniform.
template <class Kernel, i32 key_fragments>
RADDLE_DEVICE void multiply_keys(Logits<1, key_fragments>& s, u32 queries, u32 keys) {
  ptx::products_begin();
  RADDLE_UNROLL
  for (i32 k = 0; k < 4 * Kernel::qk_halves; ++k)
    ptx::multiply<ptx::Major::k, ptx::Major::k>(s[0], Memory<Kernel>::Queries::columns(queries, k),
                                                Memory<Kernel>::Keys::columns(keys, k), k > 0,
                                                typename Kernel::T{});
  ptx::products_end();
}

/// Starts O += P · V; O begins anew if `keep` is 0.
template <class Kernel, i32 key_fragments>
RADDLE_DEVICE void multiply_values(Output<Kernel, 1>& o, const Weights<1, key_fragments>& p,
                                   u32 values, i32 keep) {
  ptx::products_begin();
  RADDLE_UNROLL
  for (i32 k = 0; k < key_fragments / 2; ++k)
    ptx::multiply<ptx::Major::other>(o[0], p[0][k], Memory<Kernel>::Values::rows_of(values, k),
                                     k > 0 ? 1 : keep, typename Kernel::T{});
  ptx::products_end();
}

/// Starts Sᵀ = K · Qᵀ of a tile of short queries.
template <class Kernel>
RADDLE_DEVICE void multiply_short_keys(float (&s)[Kernel::row_fragments][4], u32 keys,
                                       u32 queries) {
  ptx::products_begin();
  RADDLE_UNROLL
  for (i32 k = 0; k < 4 * Kernel::qk_halves; ++k)
    ptx::multiply<ptx::Major::k, ptx::Major::k>(s, Memory<Kernel>::Keys::columns(keys, k),
                                                Memory<Kernel>::Queries::columns(queries, k), k > 0,
                                                typename Kernel::T{});
  ptx::products_end();
}

/// Starts Oᵀ += Vᵀ · Pᵀ, 64 columns of V after another; `weights` is where a row of P has its keys.
template <class Kernel>
RADDLE_DEVICE void multiply_short_values(float (&o)[Kernel::vo_halves][Kernel::row_fragments][4],
                                         u32 values, u32 weights) {
  using Values = typename Memory<Kernel>::Values;
  ptx::products_begin();
  RADDLE_UNROLL
  for (i32 half = 0; half < Kernel::vo_halves; ++half) {
    RADDLE_UNROLL
    for (i32 k = 0; k < Kernel::tile_keys / 16; ++k)
      ptx::multiply<ptx::Major::other, ptx::Major::k>(
          o[half], Values::rows_of(values, k) + static_cast<u32>(half * Values::half_bytes),
          Slot<Kernel::tile_rows, 1>::columns(weights, k), 1, typename Kernel::T{});
  }
  ptx::products_end();
}

/// S = Q · Kᵀ once more, by each warp for its 16 rows, which begin at `first_row`: without wgmma,
/// which must not be issued behind a branch, and from device memory, because the slots of the keys
/// and of the queries may be others' by now. Seldom needed: S comes by way of local memory, so that
/// this takes few registers.
template <class Kernel, class Variant, i32 key_fragments>
RADDLE_DEVICE void multiply_keys_again(Logits<1, key_fragments>& s, const GpuLaunch& launch,
                                       const ItemFacts<Kernel>& item, i32 begin, i32 first_row) {
  using T = typename Kernel::T;
  const KeySource& source = item.source[0];
  const i32 lane = ptx::lane_index();
  const T* row_of[2];
  RADDLE_UNROLL
  for (i32 half = 0; half < 2; ++half)
    row_of[half] =
        query_address<T>(launch, item.row[first_row + lane / 4 + 8 * half]) + lane % 4 * 2;
  const Span tile{begin, begin + 8 * key_fragments, false};
  float products[4 * key_fragments];
  RADDLE_ROLLED
  for (i32 n = 0; n < key_fragments; ++n) {
    const i32 column = begin + 8 * n + lane / 4;
    const Column key = find_key(launch, source, tile, column, look_up_page(source, tile, column));
    const u8* row = row_address<Kernel>(source, 0, key) + lane % 4 * 4;
    float x[4] = {};
    RADDLE_ROLLED
    for (i32 k = 0; k < ceil_div(Kernel::dim_qk, 16); ++k) {
      const bool whole = 16 * k + 8 < Kernel::dim_qk;
      u32 a[4] = {};
      RADDLE_UNROLL
      for (i32 i = 0; i < 4; ++i)
        if (i < 2 || whole)
          a[i] = *reinterpret_cast<const u32*>(row_of[i % 2] + 16 * k + i / 2 * 8);
      RADDLE_UNROLL
      for (i32 i = 0; turns_queries<Variant>(launch) && i < 4; ++i) a[i] = turned(launch, a[i]);
      ptx::multiply_add(x, a, *reinterpret_cast<const u32*>(row + 32 * k),
                        whole ? *reinterpret_cast<const u32*>(row + 32 * k + 16) : 0u, T{});
    }
    RADDLE_UNROLL
    for (i32 i = 0; i < 4; ++i) products[4 * n + i] = x[i];
  }
  RADDLE_UNROLL
  for (i32 i = 0; i < 4 * key_fragments; ++i) s[0][i / 4][i % 4] = products[i];
}

}  // namespace wgmma

RADDLE_ENGINE_END

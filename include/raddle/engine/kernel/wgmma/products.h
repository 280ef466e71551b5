// The products of a KV tile, issued and not waited for.
#pragma once

#include "raddle/engine/kernel/gpu/fragments.h"
#include "raddle/engine/kernel/wgmma/memory.h"

RADDLE_ENGINE_BEGIN

namespace wgmma {

/// Starts S = Q · Kᵀ of a warpgroup's rows, which begin at `queries`.
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

}  // namespace wgmma

RADDLE_ENGINE_END

// The products of one row block and one key block, in tile registers where there are any.
#pragma once

#if defined(__AMX_BF16__)
#include "raddle/engine/kernel/cpu/amx_products.h"
#else
#include "raddle/engine/kernel/cpu/bf16_products.h"
#endif

RADDLE_ENGINE_BEGIN

namespace cpu {

using KeyProduct = Product<false>;
using ValueProduct = Product<true>;

/// S = Q · Kᵀ, not yet scaled, for keys [begin, end) of a key block, multiples of 32.
RADDLE_FN KeyProduct multiply_keys(i32 rows, const bf16* q, i32 dim, const bf16* k, i32 begin,
                                   i32 end, float* s, i32 lds) {
  return KeyProduct({.rows = rows,
                     .a = q,
                     .lda = dim,
                     .b = k + i64{begin} * dim,
                     .depth = dim / tile_depth,
                     .c = s + begin,
                     .ldc = lds,
                     .column_blocks = (end - begin) / padded_unit});
}

/// O += P · V for keys [begin, end) of a key block. `dim` is a multiple of 32.
RADDLE_FN ValueProduct multiply_values(i32 rows, const bf16* p, i32 ldp, const bf16* v, i32 begin,
                                       i32 end, i32 dim, float* o) {
  return ValueProduct({.rows = rows,
                       .a = p + begin,
                       .lda = ldp,
                       .b = v + i64{begin} * 2 * tile_rows,
                       .skip = i64{key_block_keys - (end - begin)} * 2 * tile_rows,
                       .depth = (end - begin) / tile_depth,
                       .c = o,
                       .ldc = dim,
                       .column_blocks = dim / padded_unit});
}

}  // namespace cpu

RADDLE_ENGINE_END

// A mask given bit by bit: a matrix of query rows × keys for each request, packed as FlashInfer
// packs its custom masks.
#pragma once

#include "raddle/engine/variant/contract.h"

RADDLE_ENGINE_BEGIN

struct PackedMask {
  Tensor<const u8, 1> bits;     ///< request i's bits begin at byte indptr[i], LSB first
  Tensor<const i32, 1> indptr;  ///< [requests + 1] in bytes

  /// Bit (row in the request) · kv_len + kv_index. A level of a cascade may claim keys beyond
  /// kv_len: they are dropped, and their bits are not read.
  RADDLE_FN bool mask(const Row& r, const Key& c) const {
    if (c.kv_index < 0 || c.kv_index >= r.kv_len) return false;
    const i64 row = r.q_index - (r.kv_len - r.qo_len);
    const i64 bit = row * r.kv_len + c.kv_index;
    return ((bits.data[indptr.data[r.request] + (bit >> 3)] >> (bit & 7)) & 1) != 0;
  }
};
RADDLE_VARIANT(PackedMask, "packed_mask", RADDLE_PLAN_TENSOR(PackedMask, bits, mask_bytes),
               RADDLE_PLAN_TENSOR(PackedMask, indptr, request_offsets));

RADDLE_ENGINE_END

// Rows of Q, K and V of a replay's step, written from the hash.
#pragma once

#include "raddle/tensor.h"
#include "replay/hash.h"

namespace raddle::replay {

/// Writes one row of head_dim elements.
template <class T>
void fill_row(const RowId& id, i32 head_dim, T* out);

/// The owner of the keys and values at a position. Prompts begin with whole blocks of tokens, some
/// of them alike: a block owns its keys and values, whichever request computes them. The rest of a
/// prompt belongs to the request, and what is generated to the sample: request r's sample s goes by
/// the number s * requests + r. Queries are always the sample's own, so that no two have the same
/// outputs.
struct SharedPrompts {
  i32 block_tokens = 0;  ///< 0: nothing is shared
  i32 requests = 0;
  const i64* indptr = nullptr;  ///< of blocks, [requests + 1]
  const i64* blocks = nullptr;  ///< [indptr[requests]], numbers from 0
  const i64* tokens = nullptr;  ///< of each prompt, [requests]

  constexpr i64 owner(Stream stream, i32 sample, i32 position) const {
    if (block_tokens == 0 || stream == Stream::query) return sample;
    const i32 request = sample % requests;
    const i64 block = indptr[request] + position / block_tokens;
    if (block < indptr[request + 1]) return ~blocks[block];  // below 0: no sample's number
    return position < tokens[request] ? request : sample;
  }
};

struct Rows {
  u64 seed;
  i32 layer;
  const i32* request;   ///< [rows]
  const i32* position;  ///< [rows]
  SharedPrompts prompts = {};
};

/// out [rows, heads, D] of the stream: row r is what request[r] holds at position[r].
void fill(Stream stream, const Rows& rows, const TensorRef& out);

}  // namespace raddle::replay

// Rows of Q, K and V of a replay's step, written from the hash.
#pragma once

#include "raddle/tensor.h"
#include "replay/hash.h"

namespace raddle::replay {

/// Writes one row of head_dim elements.
template <class T>
void fill_row(const RowId& id, i32 head_dim, T* out);

/// Prompts begin with whole blocks of tokens, some of them alike. Keys and values in a block belong
/// to it, whoever computes them, and those behind a request's blocks to the request. Queries are
/// always the request's own, so that no two have the same outputs.
struct SharedBlocks {
  i32 tokens = 0;               ///< of a block; 0: nothing is shared
  const i64* indptr = nullptr;  ///< [requests + 1]
  const i64* ids = nullptr;     ///< [indptr[requests]], from 0

  constexpr i64 owner(Stream stream, i32 request, i32 position) const {
    if (tokens == 0 || stream == Stream::query) return request;
    const i64 block = indptr[request] + position / tokens;
    return block < indptr[request + 1] ? ~ids[block] : request;  // below 0: no request's number
  }
};

struct Rows {
  u64 seed;
  i32 layer;
  const i32* request;   ///< [rows]
  const i32* position;  ///< [rows]
  SharedBlocks blocks = {};
};

/// out [rows, heads, D] of the stream: row r is what request[r] holds at position[r].
void fill(Stream stream, const Rows& rows, const TensorRef& out);

}  // namespace raddle::replay

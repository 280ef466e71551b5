// Rows of Q, K and V of a replay's step, written from the hash.
#pragma once

#include "raddle/tensor.h"
#include "replay/hash.h"

namespace raddle::replay {

/// Writes one row of head_dim elements.
template <class T>
void fill_row(const RowId& id, i32 head_dim, T* out);

struct Rows {
  u64 seed;
  i32 layer;
  const i32* request;   ///< [rows]
  const i32* position;  ///< [rows]
};

/// out [rows, heads, D] of the stream: row r is what request[r] holds at position[r].
void fill(Stream stream, const Rows& rows, const TensorRef& out);

}  // namespace raddle::replay

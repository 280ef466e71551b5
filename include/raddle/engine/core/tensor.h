// Strided views. Offsets are 64-bit: a KV pool may hold more than 2^31 elements.
#pragma once

#include "raddle/engine/core/config.h"

namespace raddle {

/// The most dimensions of a captured tensor.
constexpr i32 max_tensor_rank = 4;

/// A captured tensor of a variant: contiguous, row-major, with its extents, as a member of the
/// variant's struct.
template <class T, i32 rank>
struct Tensor {
  static_assert(rank >= 1 && rank <= max_tensor_rank);
  T* data;
  i32 extent[rank];
};

/// A captured tensor whose values coverage reads: a Tensor with a pyramid of minima and maxima over
/// the flattened elements (core/span.h), and the order that elements are in (core/ordered.h). The
/// host finds both when it sets the member.
template <class T, i32 rank>
struct SpanTensor {
  static_assert(rank >= 1 && rank <= max_tensor_rank);
  T* data;
  T* hull;
  /// Along the last dimension: 1 where no element is below the one before it, -1 where none is
  /// above it, 0 elsewhere.
  i32 order;
  i32 extent[rank];
};

/// Rows of heads: element (row, head, d) of request r lies at
/// data[row * row_stride + r * request_stride + head * head_stride + d].
struct RowsView {
  void* data;
  i64 row_stride;          ///< in elements
  i64 head_stride;         ///< in elements
  i64 request_stride = 0;  ///< in elements: how much further apart rows are from request to request
};

/// A pool of KV blocks: element (block, offset, head, d) at block * block_stride + offset *
/// row_stride + head * head_stride + d, in elements. Ragged tensors are pools whose blocks are one
/// row high.
struct PoolView {
  const void* data;
  i64 block_stride;
  i64 row_stride;
  i64 head_stride;
};

/// K and V of one level.
struct KvView {
  PoolView k;
  PoolView v;
};

}  // namespace raddle

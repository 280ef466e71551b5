// A tensor of tests that has memory of its own.
#pragma once

#include <cstddef>
#include <vector>

#include "raddle/tensor.h"

namespace raddle::testing_tensors {

/// `gap` elements lie unused after each index of every dimension but the last. All bytes are `fill`
/// at first, by default NaN in every dtype.
struct OwnedTensor {
  std::vector<u8> bytes;
  TensorRef ref;

  OwnedTensor(DType dtype, const std::vector<i64>& shape, i64 gap = 0, u8 fill = 0xff) {
    ref.dtype = dtype;
    ref.rank = static_cast<int>(shape.size());
    i64 step = 1;
    for (std::size_t i = shape.size(); i-- > 0;) {
      ref.shape[i] = shape[i];
      ref.stride[i] = step;
      step = step * shape[i] + gap;
    }
    bytes.assign(static_cast<std::size_t>(step * dtype_bytes(dtype)), fill);
    ref.data = bytes.data();
  }
  OwnedTensor(const OwnedTensor& other) : bytes(other.bytes), ref(other.ref) {
    ref.data = bytes.data();
  }
};

}  // namespace raddle::testing_tensors

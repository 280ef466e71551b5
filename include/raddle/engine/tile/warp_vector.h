// A head vector as the contract's query, key, value and output see it on a GPU.
#pragma once

#include "raddle/engine/core/math.h"
#include "raddle/engine/ptx/instructions.h"

RADDLE_ENGINE_BEGIN

/// A head vector in shared memory that the lanes of a warp share: each method decides which lane
/// handles element i. After every method all lanes see the complete vector.
class WarpVector : public math::SameBits {
 public:
  RADDLE_DEVICE WarpVector(float* data, i32 size)
      : data_(data), size_(size), lane_(ptx::lane_index()) {}
  RADDLE_DEVICE i32 size() const { return size_; }

  /// x[i] = f(x[i], i) for every element.
  template <class F>
  RADDLE_DEVICE void map(F f) {
    for (i32 i = lane_; i < size_; i += 32) data_[i] = f(data_[i], i);
    ptx::sync_warp();
  }

  /// Half-split pairs (x[i], x[i + n/2]) of the first n elements: f(a, b, i) changes both in place.
  template <class F>
  RADDLE_DEVICE void half_pairs(i32 n, F f) {
    for (i32 i = lane_; i < n / 2; i += 32) f(data_[i], data_[n / 2 + i], i);
    ptx::sync_warp();
  }

  /// Interleaved pairs (x[2i], x[2i + 1]) of the first n elements.
  template <class F>
  RADDLE_DEVICE void interleaved_pairs(i32 n, F f) {
    for (i32 i = lane_; i < n / 2; i += 32) f(data_[2 * i], data_[2 * i + 1], i);
    ptx::sync_warp();
  }

  /// Sum of f(x[i]) over all elements, by lanes and then by a butterfly: the same in every lane.
  template <class F>
  RADDLE_DEVICE float sum(F f) const {
    float total = 0.0f;
    for (i32 i = lane_; i < size_; i += 32) total += f(data_[i]);
    for (i32 step = 16; step > 0; step /= 2) total += ptx::shuffle_xor(total, step);
    return total;
  }

 private:
  float* data_;
  i32 size_, lane_;
};

RADDLE_ENGINE_END

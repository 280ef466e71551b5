// Asking for the KV tile after this one, a few lines at a time while this one is computed.
#pragma once

#include "raddle/engine/simd/vec.h"
#include "raddle/engine/tile/keys.h"

RADDLE_ENGINE_BEGIN

namespace cpu {

/// Walks the lines of a coming tile, all KV heads of a run together, as four streams side by side:
/// each half of the rows of K and of V, every stream in the order of addresses. Memory is read
/// fastest so: hardware prefetchers follow a stream within 4 KiB at most and take a few lines to
/// start, which four streams hide from each other.
template <class T>
class Ahead {
 public:
  Ahead() = default;

  /// `tile` holds the rows of the first of `heads` heads, which lie head_stride elements apart.
  Ahead(const KeyTile<T>& tile, i32 heads, i64 stride_k, i64 stride_v, i32 dim_qk, i32 dim_vo)
      : k_(tile.k), v_(tile.v), n_(tile.n), half_((tile.n + 1) / 2) {
    // Heads that touch are one long row.
    const bool touch = stride_k == dim_qk && stride_v == dim_vo;
    planes_ = touch ? 1 : heads;
    lines_k_ = lines(touch ? heads * dim_qk : dim_qk);
    lines_v_ = lines(touch ? heads * dim_vo : dim_vo);
    lines_ = max(lines_k_, lines_v_);
    stride_k_ = stride_k * static_cast<i64>(sizeof(T));
    stride_v_ = stride_v * static_cast<i64>(sizeof(T));
    left_ = planes_ * half_ * lines_;
    if (left_ > 0) find_rows();
  }

  i32 left() const { return left_; }

  /// The next lines of each stream.
  RADDLE_FN void step(i32 count) {
    for (count = min(count, left_); count > 0;) {
      const i32 some = min(count, lines_ - line_);
      for (i32 i = line_; i < line_ + some; ++i) {
        const i32 at = i * 64;
        if (i < lines_k_) {
          simd::prefetch_l2(row_[0] + at);
          simd::prefetch_l2(row_[1] + at);
        }
        if (i < lines_v_) {
          simd::prefetch_l2(row_[2] + at);
          simd::prefetch_l2(row_[3] + at);
        }
      }
      line_ += some;
      left_ -= some;
      count -= some;
      if (line_ == lines_ && left_ > 0) {
        line_ = 0;
        if (++nth_ == half_) {
          nth_ = 0;
          ++plane_;
        }
        find_rows();
      }
    }
  }

 private:
  static i32 lines(i32 elements) { return ceil_div(elements * static_cast<i32>(sizeof(T)), 64); }

  RADDLE_FN void find_rows() {
    const i32 other = min(nth_ + half_, n_ - 1);
    row_[0] = reinterpret_cast<const u8*>(k_[nth_]) + plane_ * stride_k_;
    row_[1] = reinterpret_cast<const u8*>(k_[other]) + plane_ * stride_k_;
    row_[2] = reinterpret_cast<const u8*>(v_[nth_]) + plane_ * stride_v_;
    row_[3] = reinterpret_cast<const u8*>(v_[other]) + plane_ * stride_v_;
  }

  const T* const* k_ = nullptr;
  const T* const* v_ = nullptr;
  i32 n_ = 0, half_ = 0, planes_ = 0;
  i32 lines_k_ = 0, lines_v_ = 0, lines_ = 0;  ///< of a row, or of a row of all heads
  i64 stride_k_ = 0, stride_v_ = 0;            ///< from head to head, in bytes
  i32 nth_ = 0, plane_ = 0, line_ = 0, left_ = 0;
  const u8* row_[4] = {};
};

}  // namespace cpu

RADDLE_ENGINE_END

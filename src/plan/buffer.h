// Grow-only memory, kept between plans: a plan of a familiar size allocates nothing but its result.
#pragma once

#include <cstddef>
#include <cstring>
#include <memory>

#include "raddle/engine/core/config.h"

namespace raddle {

template <class T>
class Buffer {
 public:
  T* data() const { return data_.get(); }
  T& operator[](i64 i) const { return data_[static_cast<std::size_t>(i)]; }

  /// Room for `count` entries, of which the first `used` are kept.
  T* grow(i64 count, i64 used = 0) {
    if (count > capacity_) {
      const i64 capacity = max(count, 2 * capacity_);
      auto data = std::make_unique_for_overwrite<T[]>(static_cast<std::size_t>(capacity));
      if (data_ && used > 0) {
        std::memcpy(data.get(), data_.get(), static_cast<std::size_t>(used) * sizeof(T));
      }
      data_ = std::move(data);
      capacity_ = capacity;
    }
    return data_.get();
  }

 private:
  std::unique_ptr<T[]> data_;
  i64 capacity_ = 0;
};

}  // namespace raddle

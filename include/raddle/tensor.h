// How callers hand tensors to Raddle: borrowed, strided, typed. The caller keeps the memory alive
// for the call.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "raddle/engine/core/dtype.h"

namespace raddle {

/// Where memory lies, and what computes.
struct DeviceId {
  enum class Kind { cpu, cuda };
  Kind kind = Kind::cpu;
  std::int32_t ordinal = 0;  ///< of a GPU, as the CUDA driver counts them

  static DeviceId cuda(std::int32_t ordinal) { return {Kind::cuda, ordinal}; }
  bool operator==(const DeviceId&) const = default;
};

/// A borrowed tensor of rank 0 to 5. Strides are in elements.
struct TensorRef {
  void* data = nullptr;
  DType dtype = DType::float32;
  int rank = 0;
  std::array<std::int64_t, 5> shape{};
  std::array<std::int64_t, 5> stride{};
  DeviceId device{};  ///< that `data` is an address of

  /// A contiguous tensor of the given shape.
  template <class... N>
  static TensorRef contiguous(void* data, DType dtype, N... n) {
    TensorRef t;
    t.data = data;
    t.dtype = dtype;
    t.rank = sizeof...(N);
    t.shape = {static_cast<std::int64_t>(n)...};
    std::int64_t step = 1;
    for (int i = t.rank - 1; i >= 0; --i) {
      t.stride[static_cast<std::size_t>(i)] = step;
      step *= t.shape[static_cast<std::size_t>(i)];
    }
    return t;
  }
};

/// What K or V is multiplied by: an element's value is what is stored times its scale. Nothing: 1.
/// Where K and V have no 8 bits, attention takes one number, or one element on the host.
struct ScaleRef {
  std::optional<float> value;  ///< of all
  /// fp32, where K or V lies. Of rank 0: of all; [Hkv]: of each KV head; or of each token and head:
  /// the pool's shape without its last dimension.
  TensorRef tensor;

  ScaleRef() = default;
  ScaleRef(float of_all) : value(of_all) {}              // NOLINT: a scale is a number
  ScaleRef(const TensorRef& scales) : tensor(scales) {}  // NOLINT: or a tensor of them
  bool is_given() const { return value || tensor.data; }
};

/// A borrowed array of 32- or 64-bit integers of rank 1 or 2 (lengths, row pointers, page tables):
/// on the host, but for the layouts that say otherwise.
struct IndexRef {
  const void* data = nullptr;
  bool is_64bit = false;
  int rank = 1;
  std::array<std::int64_t, 2> shape{};
  std::array<std::int64_t, 2> stride{1, 1};
  DeviceId device{};  ///< that `data` is an address of

  IndexRef() = default;
  IndexRef(const std::int32_t* p, std::int64_t n) : data(p), shape{n, 1} {}
  IndexRef(const std::int64_t* p, std::int64_t n) : data(p), is_64bit(true), shape{n, 1} {}
  /// Rows of a padded table.
  IndexRef(const std::int32_t* p, std::int64_t rows, std::int64_t width, std::int64_t row_stride)
      : data(p), rank(2), shape{rows, width}, stride{row_stride, 1} {}

  bool empty() const { return data == nullptr; }
  std::int64_t at(std::int64_t i) const {
    return is_64bit ? static_cast<const std::int64_t*>(data)[i * stride[0]]
                    : static_cast<const std::int32_t*>(data)[i * stride[0]];
  }
};

}  // namespace raddle

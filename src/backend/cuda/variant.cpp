#include "backend/cuda/variant.h"

#include <algorithm>
#include <cstring>

namespace raddle::cuda {
namespace {

/// As many layers as a model has may each bring arrays of their own.
constexpr std::size_t most_recent = 256;
/// Larger arrays are not compared, and not kept for the sake of a next run.
constexpr std::size_t small_bytes = 64 * 1024;

bool is_same_array(const Capture& a, const Capture& b) {
  return a.data == b.data && a.bytes == b.bytes;
}

bool has_same_contents(const Capture& a, const Capture& b) {
  return a.bytes == b.bytes && std::memcmp(a.data, b.data, a.bytes) == 0;
}

}  // namespace

std::shared_ptr<const CudaVariant> CapturedArrays::variant(const BoundVariant& bound,
                                                           const CudaVariant* like,
                                                           StreamHandle stream) {
  auto made = std::make_shared<CudaVariant>();
  const auto bytes = static_cast<std::size_t>(bound.memory_bytes());
  made->struct_.resize(std::max<std::size_t>(1, bytes / sizeof(VariantSlot)));
  auto* to = reinterpret_cast<u8*>(made->struct_.data());
  if (bytes > 0) std::memcpy(to, bound.memory(), bytes);
  for (const Capture& capture : bound.captures()) {
    auto array = find(capture, like);
    if (!array) array = send(capture, stream);
    const void* address = array->block.data();
    std::memcpy(to + capture.offset, &address, sizeof(address));
    made->arrays_.push_back(std::move(array));
  }
  return made;
}

std::shared_ptr<const CapturedArray> CapturedArrays::find(const Capture& capture,
                                                          const CudaVariant* like) {
  if (like)
    for (const auto& array : like->arrays_)
      if (is_same_array(array->host, capture)) return array;
  if (capture.bytes > small_bytes) return nullptr;
  const std::lock_guard lock(mutex_);
  for (const auto& array : recent_)
    if (has_same_contents(array->host, capture)) return array;
  return nullptr;
}

std::shared_ptr<const CapturedArray> CapturedArrays::send(const Capture& capture,
                                                          StreamHandle stream) {
  auto array = std::make_shared<CapturedArray>();
  array->host = capture;
  array->block = DevicePool::of(*device_).take(capture.bytes, stream, "a captured tensor");
  Upload upload(*device_, capture.bytes);
  if (capture.bytes > 0) std::memcpy(upload.data(), capture.data, capture.bytes);
  upload.send(array->block, {{0, capture.bytes}}, stream);
  if (capture.bytes > small_bytes) return array;
  const std::lock_guard lock(mutex_);
  if (recent_.size() < most_recent) {
    recent_.push_back(array);
  } else {
    recent_[next_] = array;
    next_ = (next_ + 1) % most_recent;
  }
  return array;
}

}  // namespace raddle::cuda

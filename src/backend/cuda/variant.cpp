#include "backend/cuda/variant.h"

#include <algorithm>
#include <cstring>

#include "raddle/error.h"

namespace raddle::cuda {
namespace {

/// As many layers as a model has may each bring arrays of their own.
constexpr std::size_t most_recent = 256;
/// Larger arrays are not compared, and not kept for the sake of a next run.
constexpr std::size_t small_bytes = 64 * 1024;

/// Empty arrays of several members may have one address: theirs on the device differ.
bool is_same_array(const Capture& a, const Capture& b) {
  return a.offset == b.offset && a.data == b.data && a.bytes == b.bytes;
}

bool has_same_contents(const Capture& a, const Capture& b) {
  return a.bytes == b.bytes && std::memcmp(a.data, b.data, a.bytes) == 0;
}

/// Bytes of an array of a batch within the maxima.
std::size_t room_of(const Capture& capture, const Maxima& maxima) {
  const std::size_t most = capture.extent == Extent::mask_bytes
                               ? static_cast<std::size_t>(most_mask_bytes(maxima))
                               : (static_cast<std::size_t>(maxima.max_requests) + 1) * sizeof(i32);
  return std::max(most, capture.bytes);
}

}  // namespace

BatchArrays::BatchArrays(const Device& device, const BoundVariant& bound, const Maxima& maxima,
                         StreamHandle stream)
    : device_(&device) {
  const std::vector<Capture> captures = bound.captures();
  for (std::size_t n = 0; n < captures.size(); ++n) {
    if (!is_of_batch(captures[n].extent)) continue;
    rooms_.resize(captures.size());
    rooms_[n] = std::make_shared<const Block>(DevicePool::of(device).take(
        room_of(captures[n], maxima), stream, "the masks of this reservation"));
  }
}

BatchArrays::Staged BatchArrays::stage(const BoundVariant& bound) const {
  Staged staged(rooms_.size());
  const std::vector<Capture> captures = empty() ? std::vector<Capture>{} : bound.captures();
  for (std::size_t n = 0; n < rooms_.size(); ++n) {
    const Capture& capture = captures[n];
    if (!rooms_[n]) continue;
    if (capture.bytes > rooms_[n]->bytes())  // the spec's, which were not those of the first update
      fail<ValueError>("a mask's array takes ", capture.bytes,
                       " bytes; the reservation has room for ", rooms_[n]->bytes());
    staged[n] = std::make_unique<Upload>(*device_, capture.bytes);
    if (capture.bytes > 0) std::memcpy(staged[n]->data(), capture.data, capture.bytes);
  }
  return staged;
}

std::shared_ptr<const CudaVariant> BatchArrays::send(const Staged& staged,
                                                     const BoundVariant& bound,
                                                     const CudaVariant& like,
                                                     StreamHandle stream) const {
  const std::vector<Capture> captures = bound.captures();
  auto made = std::make_shared<CudaVariant>(like);
  auto* to = reinterpret_cast<u8*>(made->struct_.data());
  for (std::size_t n = 0; n < rooms_.size(); ++n) {
    if (!rooms_[n]) continue;
    const void* address = rooms_[n]->data();
    std::memcpy(to + captures[n].offset, &address, sizeof(address));
    made->arrays_[n] = std::make_shared<const CapturedArray>(CapturedArray{captures[n], rooms_[n]});
    rooms_[n]->use_on(stream);
    staged[n]->send(*rooms_[n], {{0, captures[n].bytes}}, stream);
  }
  return made;
}

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
    const void* address = array->block->data();
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
  array->block = std::make_shared<const Block>(
      DevicePool::of(*device_).take(capture.bytes, stream, "a captured tensor"));
  Upload upload(*device_, capture.bytes);
  if (capture.bytes > 0) std::memcpy(upload.data(), capture.data, capture.bytes);
  upload.send(*array->block, {{0, capture.bytes}}, stream);
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

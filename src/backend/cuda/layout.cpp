#include "backend/cuda/layout.h"

#include <cstring>
#include <type_traits>

#include "layout/copies.h"

namespace raddle {
namespace cuda {

LayoutOnDevice::LayoutOnDevice(const Device& device, const Layout& layout, StreamHandle stream)
    : device_(&device), layout_(layout.view()), level_(layout.view().levels[0]) {
  layout_.levels = nullptr;  // kernels have them by value
  const Level& level = layout.levels()[0];
  std::size_t total = 0;
  const auto add = [&total](const auto* pointer, std::size_t bytes, Of) {
    if (pointer) total += aligned(bytes);
  };
  visit_arrays(layout_, add);
  visit_arrays(level_, level, add);
  block_ = DevicePool::of(device).take(total, stream, "a layout");
  Upload upload(device, total);
  std::size_t at = 0;
  const auto move = [&](auto*& pointer, std::size_t bytes, Of) {
    if (!pointer) return;
    if (bytes > 0) std::memcpy(upload.data() + at, pointer, bytes);
    auto* there = static_cast<std::byte*>(block_.data()) + at;
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(there);
    at += aligned(bytes);
  };
  visit_arrays(layout_, move);
  visit_arrays(level_, level, move);
  upload.send(block_, {{0, total}}, stream);
}

}  // namespace cuda

std::shared_ptr<LayoutCopies> make_layout_copies() { return std::make_shared<LayoutCopies>(); }

std::shared_ptr<const cuda::LayoutOnDevice> LayoutCopies::on(const cuda::Device& device,
                                                             const Layout& layout,
                                                             cuda::StreamHandle stream) {
  const std::lock_guard lock(mutex_);
  for (const auto& copy : copies_)
    if (&copy->device() == &device) return copy;
  copies_.push_back(std::make_shared<const cuda::LayoutOnDevice>(device, layout, stream));
  return copies_.back();
}

}  // namespace raddle

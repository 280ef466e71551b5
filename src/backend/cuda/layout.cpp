#include "backend/cuda/layout.h"

#include "layout/copies.h"

namespace raddle {
namespace cuda {

LayoutOnDevice::LayoutOnDevice(const Device& device, const Layout& layout, StreamHandle stream)
    : device_(&device), layout_(layout.view()), level_(layout.view().levels[0]) {
  layout_.levels = nullptr;  // kernels have them by value
  const Level& level = layout.levels()[0];
  const auto arrays = [&](const auto& visit) {
    visit_arrays(layout_, visit);
    visit_arrays(level_, level, visit);
  };
  ArrayCarver room, places;
  carve_arrays(arrays, room);
  const auto total = static_cast<std::size_t>(room.used());
  block_ = DevicePool::of(device).take(total, stream, "a layout");
  Upload upload(device, total);
  stage_arrays(arrays, places, upload.data(), static_cast<std::byte*>(block_.data()));
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

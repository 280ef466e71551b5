#include "api/cuda_plan.h"

#include <array>
#include <cstring>

#include "api/cuda_layout.h"

namespace raddle::cuda {
namespace {

/// Calls visit(pointer, bytes) for each array of the layout that `launch` has views of.
template <class Visit>
void visit_arrays(MmaLaunch& launch, const Layout& layout, const Visit& visit) {
  visit_arrays(launch.layout, visit);
  for (std::size_t i = 0; i < layout.levels().size(); ++i)
    visit_arrays(launch.levels[i], layout.levels()[i], visit);
}

}  // namespace

CudaPlan::CudaPlan(const Kernel& kernel, const Layout& layout, const PlanArrays& arrays,
                   std::shared_ptr<const CudaVariant> variant, StreamHandle stream)
    : kernel_(&kernel), variant_(std::move(variant)) {
  launch_.layout = layout.view();
  for (std::size_t i = 0; i < layout.levels().size(); ++i)
    launch_.levels[i] = layout.view().levels[i];
  launch_.layout.levels = nullptr;  // the kernel has them by value

  std::size_t total = aligned(arrays.bytes());
  visit_arrays(launch_, layout, [&total](const auto* pointer, std::size_t bytes) {
    if (pointer) total += aligned(bytes);
  });
  block_ = DevicePool::of(kernel.device()).take(total, stream, "a plan");
  Upload upload(kernel.device(), total);
  auto* base = static_cast<std::byte*>(block_.data());
  if (arrays.bytes() > 0) std::memcpy(upload.data(), arrays.data(), arrays.bytes());
  std::size_t at = aligned(arrays.bytes());
  visit_arrays(launch_, layout, [&](auto*& pointer, std::size_t bytes) {
    if (!pointer) return;
    if (bytes > 0) std::memcpy(upload.data() + at, pointer, bytes);
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(base + at);
    at += aligned(bytes);
  });
  launch_.plan = arrays.view_of_copy(base);
  upload.send(block_, total, stream);
}

DeviceId CudaPlan::device() const { return DeviceId::cuda(kernel_->device().ordinal()); }

std::string CudaPlan::explain() const {
  const bool any = launch_.plan.num_items > 0;
  return kernel_->label() + " for " + kernel_->device().info().arch + " on " +
         kernel_->device().info().name + "; a run is " +
         (any ? "1 launch of " + std::to_string(launch_.plan.num_workers) + " blocks of " +
                    std::to_string(kernel_->num_threads()) + " threads"
              : "0 launches");
}

}  // namespace raddle::cuda

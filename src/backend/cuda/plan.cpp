#include "backend/cuda/plan.h"

#include <cstring>

#include "backend/cuda/launch.h"

namespace raddle::cuda {

CudaPlan::CudaPlan(const Kernel& kernel, const Layout& layout, const PlanArrays& arrays,
                   std::shared_ptr<const CudaVariant> variant, StreamHandle stream)
    : kernel_(&kernel),
      variant_(std::move(variant)),
      launch_(launch_of(layout)),
      joins_(arrays.stats().pairs_halves) {
  const auto of_layout = [&](const auto& visit) { visit_arrays(launch_, layout, visit); };
  const std::size_t plan_bytes = aligned(arrays.bytes());
  const std::size_t total = plan_bytes + bytes_of_arrays(of_layout);
  const OutsideCapture outside;  // once for both kinds of memory
  block_ = DevicePool::of(kernel.device()).take(total, stream, "a plan");
  Upload upload(kernel.device(), total);
  auto* base = static_cast<std::byte*>(block_.data());
  if (arrays.bytes() > 0) std::memcpy(upload.data(), arrays.data(), arrays.bytes());
  stage_arrays(of_layout, upload.data() + plan_bytes, base + plan_bytes);
  launch_.plan = arrays.view_of_copy(base);
  launch_.arrays = reinterpret_cast<const u8*>(base);
  launch_.array_bytes = static_cast<i64>(total);
  upload.send(block_, {{0, total}}, stream);
}

CudaPlan::CudaPlan(const Kernel& kernel, CudaReservation& reservation, const GpuLaunch& launch)
    : kernel_(&kernel),
      variant_(reservation.variant()),
      reservation_(reservation.shared_from_this()),
      launch_(launch) {}

CudaPlan::CudaPlan(const Kernel& kernel, CudaReservation& reservation, const GpuLaunch& launch,
                   DeviceLayoutPtr layout, u64 capture)
    : CudaPlan(kernel, reservation, launch) {
  layout_ = std::move(layout);
  capture_ = capture;
}

DeviceId CudaPlan::device() const { return DeviceId::cuda(kernel_->device().ordinal()); }

std::string CudaPlan::explain() const {
  const bool launches = launch_.plan.num_items > 0 || reservation_;
  const std::string plan =
      made_on_device() ? reservation_->planner()->kernel().label() + " (1 launch an update), " : "";
  return plan + kernel_->label() + " for " + kernel_->device().info().arch + " on " +
         kernel_->device().info().name + "; a run is " +
         (launches ? "1 launch of " + kernel_->describe_teams(launch_.plan.num_workers, joins())
                   : "0 launches");
}

}  // namespace raddle::cuda

#include "device/cuda/module.h"

#include <algorithm>

#include "device/cuda/device.h"
#include "device/cuda/driver.h"

namespace raddle::cuda {
namespace {

/// Whether graphs, too, can hold kernels that begin early.
bool can_begin_early() {
  constexpr int cuda_12_3 = 12030;
  return driver().launch_with && driver_version_number() >= cuda_12_3;
}

}  // namespace

Kernel::Kernel(const Device& device, const std::string& cubin, const char* entry_point,
               std::string label, i32 num_threads, i32 shared_bytes, i32 most_teams, Begin begin)
    : device_(&device),
      label_(std::move(label)),
      num_threads_(num_threads),
      shared_bytes_(shared_bytes),
      teams_(1),
      begins_early_(begin == Begin::early && can_begin_early()) {
  const ContextScope context(device);
  const OutsideCapture outside;
  void* module = nullptr;
  if (const int result = driver().load_module(&module, cubin.data()))
    raise(result, "loading the kernel " + label_ + " on " + device.info().name);
  if (const int result = driver().get_function(&function_, module, entry_point))
    raise(result, std::string("finding ") + entry_point + " in the kernel " + label_);
  int threads = num_threads;
  if (const int result = driver().get_function_attribute(&threads, function_max_threads, function_))
    raise(result, "asking for the threads of the kernel " + label_);
  teams_ = std::clamp(threads / num_threads, 1, most_teams);
  if (const int result = driver().set_function_attribute(function_, function_max_dynamic_shared,
                                                         teams_ * shared_bytes))
    raise(result, "asking for the shared memory of the kernel " + label_);
}

void Kernel::launch(const Grid& grid, StreamHandle stream, void** params) const {
  const auto blocks = static_cast<unsigned>(grid.blocks);
  const auto threads = static_cast<unsigned>(grid.threads);
  const auto teams = static_cast<unsigned>(grid.teams);
  const auto shared_bytes = static_cast<unsigned>(grid.shared_bytes);
  int result = 0;
  if (begins_early_ || grid.cluster > 1) {
    LaunchAttribute attributes[2];
    unsigned count = 0;
    if (begins_early_) attributes[count++] = {launch_may_begin_early, 1, {}};
    if (grid.cluster > 1) attributes[count++] = {launch_in_clusters, grid.cluster, {1, 1}};
    const LaunchConfig config{{blocks, 1, 1}, {threads, teams, 1}, shared_bytes,
                              stream,         attributes,          count};
    result = driver().launch_with(&config, function_, params, nullptr);
  } else {
    result = driver().launch(function_, blocks, 1, 1, threads, teams, 1, shared_bytes, stream,
                             params, nullptr);
  }
  if (result != 0) [[unlikely]]
    raise(result, "launching the kernel " + label_ + " (" + describe(grid) + " with " +
                      std::to_string(grid.shared_bytes) + " bytes of shared memory, on 'cuda:" +
                      std::to_string(device_->ordinal()) + "', " + device_->info().name + ")");
}

Kernel::Grid Kernel::grid_of(i32 num_teams, bool join) const {
  const i32 teams = join && num_teams > device_->info().num_multiprocessors ? teams_ : 1;
  return {(num_teams + teams - 1) / teams, teams, num_threads_, teams * shared_bytes_};
}

std::string Kernel::describe(const Grid& grid) const {
  const std::string teams = grid.teams > 1 ? std::to_string(grid.teams) + " x " : "";
  const std::string clusters =
      grid.cluster > 1 ? " in clusters of " + std::to_string(grid.cluster) + "," : "";
  return std::to_string(grid.blocks) + " blocks" + clusters + " of " + teams +
         std::to_string(grid.threads) + " threads";
}

}  // namespace raddle::cuda

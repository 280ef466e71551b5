// A layout in the parameter of the attention kernel.
#pragma once

#include "backend/cuda/layout.h"
#include "raddle/engine/kernel/gpu/launch.h"

namespace raddle::cuda {

/// A launch whose layout is the host's.
inline GpuLaunch launch_of(const Layout& layout) {
  GpuLaunch launch{};
  launch.layout = layout.view();
  for (std::size_t i = 0; i < layout.levels().size(); ++i)
    launch.levels[i] = layout.view().levels[i];
  launch.layout.levels = nullptr;  // the kernel has them by value
  return launch;
}

/// Calls visit(pointer, bytes, of) for each array of the layout that `launch` has a view of: the
/// layout's own, then each level's.
template <class Visit>
void visit_arrays(GpuLaunch& launch, const Layout& layout, const Visit& visit) {
  visit_arrays(launch.layout, visit);
  for (std::size_t i = 0; i < layout.levels().size(); ++i)
    visit_arrays(launch.levels[i], layout.levels()[i], visit);
}

}  // namespace raddle::cuda

// A layout's arrays in a GPU's memory.
#pragma once

#include <cstring>
#include <memory>
#include <mutex>
#include <type_traits>
#include <vector>

#include "device/cuda/memory.h"
#include "raddle/engine/core/carve.h"
#include "raddle/engine/kernel/gpu/launch.h"
#include "raddle/layout.h"

namespace raddle {
namespace cuda {

/// What bounds the length of an array: entries are those of block lists.
enum class Of { groups, rows, entries, requests };

/// Calls visit(pointer, bytes, of) for each array of a level, in an order that never changes;
/// absent ones are null.
template <class Visit>
void visit_arrays(LevelView& view, const Level& level, const Visit& visit) {
  const auto array = [&visit](auto*& pointer, const auto& list, Of of) {
    visit(pointer, list.size() * sizeof(list[0]), of);
  };
  array(view.row_indptr, level.row_indptr, Of::groups);
  array(view.rows, level.rows, Of::rows);
  array(view.columns, level.columns, Of::groups);
  array(view.kv_begin, level.kv_begin, Of::groups);
  array(view.block_begin, level.block_begin, Of::groups);
  array(view.blocks, level.blocks, Of::entries);
  array(view.block_index, level.block_index, Of::entries);
  array(view.block_pos, level.block_pos, Of::entries);
  array(view.block_first, level.block_first, Of::entries);
  array(view.block_count, level.block_count, Of::entries);
  array(view.mask_bits, level.mask_bits, Of::entries);
}

/// The same for a layout's own arrays.
template <class Visit>
void visit_arrays(LayoutView& view, const Visit& visit) {
  const auto requests = static_cast<std::size_t>(view.num_requests);
  const auto rows = static_cast<std::size_t>(view.num_rows);
  visit(view.qo_indptr, (requests + 1) * sizeof(i32), Of::requests);
  visit(view.kv_len, requests * sizeof(i32), Of::requests);
  visit(view.qo_pos, rows * sizeof(i32), Of::rows);
  visit(view.row_request, rows * sizeof(i32), Of::rows);
}

/// The same for each array of the layout that `launch` has a view of: the layout's own, then each
/// level's.
template <class Visit>
void visit_arrays(GpuLaunch& launch, const Layout& layout, const Visit& visit) {
  visit_arrays(launch.layout, visit);
  for (std::size_t i = 0; i < layout.levels().size(); ++i)
    visit_arrays(launch.levels[i], layout.levels()[i], visit);
}

/// A launch whose layout is the host's.
inline GpuLaunch launch_of(const Layout& layout) {
  GpuLaunch launch{};
  launch.layout = layout.view();
  for (std::size_t i = 0; i < layout.levels().size(); ++i)
    launch.levels[i] = layout.view().levels[i];
  launch.layout.levels = nullptr;  // the kernel has them by value
  return launch;
}

/// How arrays lie in a block.
using ArrayCarver = Carver<16>;

/// Room for arrays. `arrays(visit)` calls visit_arrays for the views.
template <class Arrays>
void carve_arrays(const Arrays& arrays, ArrayCarver& carve) {
  arrays([&carve](const auto* pointer, std::size_t bytes, Of) {
    if (pointer) carve.place<u8>(static_cast<i64>(bytes));
  });
}

/// Copies the same arrays to their places in `staging`, and lets the views point to where they will
/// lie in the block at `device`.
template <class Arrays>
void stage_arrays(const Arrays& arrays, ArrayCarver& carve, std::byte* staging, std::byte* device) {
  arrays([&](auto*& pointer, std::size_t bytes, Of) {
    if (!pointer) return;
    const i64 at = carve.place<u8>(static_cast<i64>(bytes));
    if (bytes > 0) std::memcpy(staging + at, pointer, bytes);
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(device + at);
  });
}

/// A layout of one level on one GPU.
class LayoutOnDevice {
 public:
  /// Sends everything up in one asynchronous copy on `stream`. Needs a ContextScope.
  LayoutOnDevice(const Device& device, const Layout& layout, StreamHandle stream);

  const Device& device() const { return *device_; }
  const LayoutView& layout() const { return layout_; }
  const LevelView& level() const { return level_; }
  /// Before a launch on `stream`.
  void use_on(StreamHandle stream) const { block_.use_on(stream); }

 private:
  const Device* device_;
  LayoutView layout_;
  LevelView level_;
  Block block_;
};

}  // namespace cuda

/// The copies of a layout, made when first asked for: a step's layers share one.
class LayoutCopies {
 public:
  std::shared_ptr<const cuda::LayoutOnDevice> on(const cuda::Device& device, const Layout& layout,
                                                 cuda::StreamHandle stream);

 private:
  std::mutex mutex_;
  std::vector<std::shared_ptr<const cuda::LayoutOnDevice>> copies_;
};

}  // namespace raddle

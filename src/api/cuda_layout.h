// The arrays of a layout, one after another: what goes up with a plan.
#pragma once

#include "raddle/engine/kernel/mma/launch.h"
#include "raddle/layout.h"

namespace raddle::cuda {

constexpr std::size_t aligned(std::size_t bytes) { return (bytes + 15) / 16 * 16; }

/// A launch whose layout is the host's.
inline MmaLaunch launch_of(const Layout& layout) {
  MmaLaunch launch{};
  launch.layout = layout.view();
  for (std::size_t i = 0; i < layout.levels().size(); ++i)
    launch.levels[i] = layout.view().levels[i];
  launch.layout.levels = nullptr;  // the kernel has them by value
  return launch;
}

/// What bounds the length of an array: entries are those of block lists.
enum class Of { groups, rows, entries, requests };

/// Calls visit(pointer, bytes, of) for each array of the layout that `launch` has a view of; absent
/// ones are null. The order never changes.
template <class Visit>
void visit_arrays(MmaLaunch& launch, const Layout& layout, const Visit& visit) {
  const auto requests = static_cast<std::size_t>(launch.layout.num_requests);
  const auto rows = static_cast<std::size_t>(launch.layout.num_rows);
  visit(launch.layout.qo_indptr, (requests + 1) * sizeof(i32), Of::requests);
  visit(launch.layout.kv_len, requests * sizeof(i32), Of::requests);
  visit(launch.layout.qo_pos, rows * sizeof(i32), Of::rows);
  visit(launch.layout.row_request, rows * sizeof(i32), Of::rows);
  for (std::size_t i = 0; i < layout.levels().size(); ++i) {
    const Level& level = layout.levels()[i];
    LevelView& view = launch.levels[i];
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
}

}  // namespace raddle::cuda

#include "backend/cuda/tensor_maps.h"

#include <algorithm>

#include "backend/kv_tensors.h"
#include "plan/kernel_choice.h"
#include "raddle/engine/kernel/wgmma/config.h"

namespace raddle::cuda {

std::size_t TensorMaps::Hash::operator()(const BoxedTensor& tensor) const {
  u64 hash = tensor.data;
  const auto add = [&hash](u64 value) {
    hash = (hash ^ value) * 0x9e3779b97f4a7c15 + (hash >> 29);
  };
  for (const u64 size : tensor.size) add(size);
  for (const u64 stride : tensor.stride) add(stride);
  for (const u32 size : tensor.box) add(size);
  return static_cast<std::size_t>(hash);
}

namespace {

/// The pages or blocks that a tensor holds; 0 where its last block is cut short, which no map can
/// describe.
i64 whole_blocks(const TensorRef& tensor, const Level& level) {
  if (level.storage == KvStorage::paged) return dim(tensor, 0);
  const i64 slots = slots_of(tensor, level.order);
  return slots % level.block_size == 0 ? slots / level.block_size : 0;
}

/// A box has 128 bytes of a row, and so many elements of the next two dimensions.
BoxedTensor boxed_tensor(const void* data, i32 element_bytes, const i64 (&size)[4],
                         const i64 (&stride)[3], const i32 (&box)[2]) {
  BoxedTensor boxed;
  boxed.data = reinterpret_cast<u64>(data);
  boxed.element_bytes = element_bytes;
  // What has one element alone may have any stride, also one that no map can have.
  const u64 least = static_cast<u64>(round_up(size[0] * element_bytes, i64{16}));
  for (i32 i = 0; i < 4; ++i) boxed.size[i] = static_cast<u64>(size[i]);
  for (i32 i = 0; i < 3; ++i)
    boxed.stride[i] = size[i + 1] > 1 ? static_cast<u64>(stride[i] * element_bytes) : least;
  boxed.box[0] = static_cast<u32>(128 / element_bytes);
  boxed.box[1] = static_cast<u32>(box[0]), boxed.box[2] = static_cast<u32>(box[1]);
  boxed.box[3] = 1;
  return boxed;
}

}  // namespace

/// Rows of 64 columns of one page or block and head are a box. Keys without pages lie in one.
BoxedTensor TensorMaps::box(const PoolView& pool, const TensorRef& tensor, const Level& level,
                            i32 dim, i32 box_rows) const {
  const bool in_blocks = level.storage != KvStorage::ragged;
  const i64 blocks = in_blocks ? whole_blocks(tensor, level) : 1;
  const i64 rows = in_blocks ? level.block_size : raddle::dim(tensor, 0);
  return boxed_tensor(pool.data, element_bytes_, {dim, rows, heads_, blocks},
                      {in_blocks ? pool.row_stride : pool.block_stride, pool.head_stride,
                       in_blocks ? pool.block_stride : 0},
                      {box_rows, 1});
}

TensorMap TensorMaps::map_of(const BoxedTensor& tensor) {
  const auto found = maps_.find(tensor);
  if (found != maps_.end()) return found->second;
  if (maps_.size() >= most) maps_.clear();
  return maps_.emplace(tensor, make_tensor_map(tensor)).first->second;
}

bool TensorMaps::provide(const Layout& layout, const RunArgs& args, i32 tile_keys,
                         wgmma::Launch& launch) {
  const std::lock_guard lock(mutex_);
  const std::vector<Level>& levels = layout.levels();
  bool all = true;
  for (std::size_t i = 0; i < levels.size(); ++i) {
    launch.in_boxes[i] = false;
    const KvRef& pair = args.kv[args.kv.size() == 1 ? 0 : i];
    if (raddle::dim(pair.k, 0) == 0) continue;  // no key is copied
    const i32 block_size = launch.levels[i].block_size;
    if (!lies_in_boxes(levels[i], block_size)) {
      all = false;
      continue;
    }
    const bool in_blocks = levels[i].storage != KvStorage::ragged;
    const i32 box_rows = wgmma::box_rows(in_blocks ? block_size : tile_keys, tile_keys);
    const BoxedTensor boxed[2] = {box(launch.kv[i].k, pair.k, levels[i], dims_[0], box_rows),
                                  box(launch.kv[i].v, pair.v, levels[i], dims_[1], box_rows)};
    launch.in_boxes[i] = can_be_boxed(boxed[0]) && can_be_boxed(boxed[1]);
    for (i32 which = 0; which < 2 && launch.in_boxes[i]; ++which)
      launch.map[i][which] = map_of(boxed[which]);
    all = all && launch.in_boxes[i];
  }
  return all;
}

std::pair<wgmma::RowBoxes, BoxedTensor> TensorMaps::box_of_rows(const RowsView& rows,
                                                                const TensorRef& tensor, i32 dim,
                                                                i32 box_rows) const {
  const bool apart = tensor.rank == 4;
  const i64 requests = apart ? tensor.shape[0] : 1, count = requests * tensor.shape[apart ? 1 : 0];
  if (rows.request_stride == 0 && box_rows % group_size_ == 0)
    return {wgmma::RowBoxes::of_groups,
            boxed_tensor(rows.data, element_bytes_, {dim, group_size_, count, heads_},
                         {rows.head_stride, rows.row_stride, group_size_ * rows.head_stride},
                         {group_size_, box_rows / group_size_})};
  if (rows.request_stride > 0 && group_size_ == 1)
    return {wgmma::RowBoxes::of_heads,
            boxed_tensor(rows.data, element_bytes_, {dim, count, heads_, requests},
                         {rows.row_stride, rows.head_stride, rows.request_stride}, {box_rows, 1})};
  return {wgmma::RowBoxes::none, {}};
}

void TensorMaps::provide_rows(const RunArgs& args, wgmma::Launch& launch) {
  launch.row_boxes = wgmma::RowBoxes::none;
  launch.out_in_boxes = false;
  const auto [kind, q] = box_of_rows(launch.q, args.q, dims_[0], wgmma::group_rows);
  if (kind == wgmma::RowBoxes::none || !can_be_boxed(q)) return;
  const auto [kind_of_out, out] = box_of_rows(launch.out, args.out, dims_[1], wgmma::long_rows);
  const std::lock_guard lock(mutex_);
  launch.query_map = map_of(q);
  launch.row_boxes = kind;
  if (launch.state_only || kind_of_out != kind || !can_be_boxed(out)) return;
  launch.out_map = map_of(out);
  launch.out_in_boxes = true;
}

}  // namespace raddle::cuda

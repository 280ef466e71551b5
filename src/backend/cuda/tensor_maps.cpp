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

void TensorMaps::provide_queries(const RunArgs& args, wgmma::Launch& launch) {
  launch.query_boxes = wgmma::QueryBoxes::none;
  const bool apart = args.q.rank == 4;
  const i64 requests = apart ? args.q.shape[0] : 1, rows = requests * args.q.shape[apart ? 1 : 0];
  const RowsView& q = launch.q;
  wgmma::QueryBoxes kind = wgmma::QueryBoxes::none;
  BoxedTensor boxed;
  if (q.request_stride == 0 && wgmma::long_rows % group_size_ == 0) {
    kind = wgmma::QueryBoxes::of_groups;
    boxed = boxed_tensor(q.data, element_bytes_, {dims_[0], group_size_, rows, heads_},
                         {q.head_stride, q.row_stride, group_size_ * q.head_stride},
                         {group_size_, wgmma::long_rows / group_size_});
  } else if (q.request_stride > 0 && group_size_ == 1) {
    kind = wgmma::QueryBoxes::of_heads;
    boxed = boxed_tensor(q.data, element_bytes_, {dims_[0], rows, heads_, requests},
                         {q.row_stride, q.head_stride, q.request_stride}, {wgmma::long_rows, 1});
  }
  if (kind == wgmma::QueryBoxes::none || !can_be_boxed(boxed)) return;
  const std::lock_guard lock(mutex_);
  launch.query_map = map_of(boxed);
  launch.query_boxes = kind;
}

}  // namespace raddle::cuda

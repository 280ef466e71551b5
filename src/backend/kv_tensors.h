// Checks K and V against a level and finds the strides by which kernels walk them.
#pragma once

#include <initializer_list>
#include <span>
#include <string>
#include <vector>

#include "raddle/attention.h"
#include "raddle/engine/kernel/cpu/launch.h"

namespace raddle {

inline i64 dim(const TensorRef& t, int i) { return t.shape[static_cast<std::size_t>(i)]; }
inline i64 step(const TensorRef& t, int i) { return t.stride[static_cast<std::size_t>(i)]; }

/// Which dimensions of a page pool are the slots of a page and the heads.
struct PoolAxes {
  int slot, head;
};
inline PoolAxes pool_axes(HeadOrder order) {
  return order == HeadOrder::nhd ? PoolAxes{1, 2} : PoolAxes{2, 1};
}

/// The slots of a tensor of slots or of pages, in which blocks of slots lie.
inline i64 slots_of(const TensorRef& t, HeadOrder order) {
  return t.rank == 3 ? dim(t, 0) : dim(t, 0) * dim(t, pool_axes(order).slot);
}

/// "float16"
const char* name_of(DType dtype);

/// "[4, 8, 128]"
std::string shape_text(const TensorRef& t);

/// "[4, 8, 128] bfloat16"
std::string describe(const TensorRef& t);

/// Extents that are named in a call, borrowed: a run checks its tensors without allocating.
struct ExpectedShape : std::span<const i64> {
  ExpectedShape(std::initializer_list<i64> extents) : span(extents.begin(), extents.size()) {}
  ExpectedShape(std::span<const i64> extents) : span(extents) {}
  ExpectedShape(const std::vector<i64>& extents) : span(extents) {}
};

/// Raises where `name` is not `[expected…]` in `dtype` with a contiguous last dimension; -1 stands
/// for any extent.
void check_tensor(const std::string& name, const TensorRef& t, DType dtype, ExpectedShape expected);

/// The same for a tensor that is written: its elements must not coincide.
void check_output(const std::string& name, const TensorRef& t, DType dtype, ExpectedShape expected);

/// The same without the last demand: LSE may lie in any order, as [heads, rows] transposed.
void check_strided(const std::string& name, const TensorRef& t, DType dtype,
                   ExpectedShape expected);

/// Slots of a page of a paged level.
inline i64 rows_of_page(const Level& level) {
  return level.page_size > 0 ? level.page_size : level.block_size;
}

/// [rows, heads · head_dim] as [rows, heads, head_dim]; what has another shape is as it was.
TensorRef with_heads(const TensorRef& t, i64 heads, i64 head_dim);

/// Pools [slots, heads, head_dim], and scales [slots, heads] beside them, as those whose pages have
/// one slot; what has another rank is as it was.
KvRef with_pages(const KvRef& pool, HeadOrder order);

/// What holds for tensors of every shape: no extent below 0, elements where there should be some,
/// and a contiguous last dimension.
void check_storage(const std::string& name, const TensorRef& t);

/// A tensor that is written: raises unless its strides keep its elements apart. Sorted by size,
/// each must be beyond what the smaller ones reach.
void check_distinct(const std::string& name, const TensorRef& t);

/// Where a tensor's elements lie; begin == end where it has none.
struct MemoryRange {
  const u8 *begin, *end;
  bool meets(const MemoryRange& other) const { return begin < other.end && other.begin < end; }
};
MemoryRange range_of(const TensorRef& t);

/// Whether two tensors have a byte in common. Slices of one tensor have none where their strides
/// show it; other strides that interleave count as common.
bool overlap(const TensorRef& a, const TensorRef& b);

/// The same elements at the same places, by the same indices.
bool is_same(const TensorRef& a, const TensorRef& b);

/// Raises where the tensor `name`, which is written, has bytes in common with `other`.
void check_apart(const std::string& name, const TensorRef& t, const std::string& other_name,
                 const TensorRef& other);

/// GPU kernels take rows 16 bytes at a time: refuses tensors that do not allow it. Called for every
/// tensor of a run, so no string is made before something is wrong. `level` at least 0 is part of
/// the name.
void check_gpu_rows(const TensorRef& t, const char* what, i64 level = -1);

/// A scale for each token and head, rather than one for all or one a head.
inline bool is_by_token(const ScaleRef& scale) {
  return scale.tensor.data && scale.tensor.rank > 1;
}

/// Raises where `name` is no scale of the pool, which has `heads` KV heads.
void check_scale(const std::string& name, const ScaleRef& scale, const std::string& pool_name,
                 const TensorRef& pool, i64 heads);

/// A scale that no token has for itself.
ScaleView constant_scale(const ScaleRef& scale);

/// Scales of tokens as a pool whose heads have one element.
TensorRef as_rows_of_one(const TensorRef& scales);

/// K and V of one level as the kernels see them. `name` is the argument ("kv" or "kv[1]").
KvView view_kv(const std::string& name, const KvRef& kv, const Level& level,
               const AttentionSpec& spec);

/// Their scales, which view_kv's K and V have; `suffix` follows their names ("[1]").
KvScales view_scales(const std::string& suffix, const std::string& name, const KvRef& kv,
                     const Level& level, const AttentionSpec& spec);

}  // namespace raddle

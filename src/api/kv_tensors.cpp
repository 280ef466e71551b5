#include "api/kv_tensors.h"

#include "raddle/error.h"

namespace raddle {
namespace {

const char* name_of(DType t) {
  return t == DType::float32 ? "float32" : t == DType::float16 ? "float16" : "bfloat16";
}

std::string shape_text(const std::vector<i64>& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i)
    text += (i ? ", " : "") + (shape[i] < 0 ? std::string("*") : std::to_string(shape[i]));
  return text + "]";
}

i64 dim(const TensorRef& t, int i) { return t.shape[static_cast<std::size_t>(i)]; }
i64 step(const TensorRef& t, int i) { return t.stride[static_cast<std::size_t>(i)]; }

/// The pool of one tensor, and how many blocks of the level it holds.
struct Pool {
  PoolView view;
  i64 blocks;
};

Pool ragged_pool(const TensorRef& t) {
  return {PoolView{t.data, step(t, 0), step(t, 0), step(t, 1)}, dim(t, 0)};
}

Pool paged_pool(const TensorRef& t, HeadOrder order) {
  const int row = order == HeadOrder::nhd ? 1 : 2;
  const int head = order == HeadOrder::nhd ? 2 : 1;
  return {PoolView{t.data, step(t, 0), step(t, row), step(t, head)}, dim(t, 0)};
}

/// Blocks of Bc rows in a tensor of slots, or in a page pool whose pages follow one another without
/// gaps.
Pool block_pool(const std::string& name, const TensorRef& t, const Level& level,
                const AttentionSpec& spec, i32 head_dim) {
  const i64 bc = level.block_size;
  const auto check_slots = [&](i64 slots) {
    if (level.max_slot >= slots)
      fail<ValueError>(name, " has ", slots, " slots; the layout uses slot ", level.max_slot);
  };
  if (t.rank == 3) {
    check_tensor(name, t, spec.dtype, {-1, spec.num_kv_heads, head_dim});
    check_slots(dim(t, 0));
    // A last block may be cut short: it counts.
    return {PoolView{t.data, bc * step(t, 0), step(t, 0), step(t, 1)}, (dim(t, 0) + bc - 1) / bc};
  }
  if (level.order == HeadOrder::hnd) {
    check_tensor(name, t, spec.dtype, {-1, spec.num_kv_heads, bc, head_dim});
    return paged_pool(t, HeadOrder::hnd);
  }
  check_tensor(name, t, spec.dtype, {-1, -1, spec.num_kv_heads, head_dim});
  if (dim(t, 1) == bc) return paged_pool(t, HeadOrder::nhd);
  if (step(t, 0) != dim(t, 1) * step(t, 1))
    fail<ValueError>(name, " has pages of ", dim(t, 1), " rows with gaps between them; blocks of ",
                     bc, " rows need pages of ", bc, " rows, or slots without gaps");
  check_slots(dim(t, 0) * dim(t, 1));
  return {PoolView{t.data, bc * step(t, 1), step(t, 1), step(t, 2)},
          (dim(t, 0) * dim(t, 1) + bc - 1) / bc};
}

Pool pool_of(const std::string& name, const TensorRef& t, const Level& level,
             const AttentionSpec& spec, i32 head_dim) {
  const i64 heads = spec.num_kv_heads;
  switch (level.storage) {
    case KvStorage::ragged:
      check_tensor(name, t, spec.dtype, {-1, heads, head_dim});
      return ragged_pool(t);
    case KvStorage::paged:
      if (level.order == HeadOrder::nhd)
        check_tensor(name, t, spec.dtype, {-1, level.block_size, heads, head_dim});
      else
        check_tensor(name, t, spec.dtype, {-1, heads, level.block_size, head_dim});
      return paged_pool(t, level.order);
    default:
      return block_pool(name, t, level, spec, head_dim);
  }
}

PoolView checked_pool(const std::string& name, const TensorRef& t, const Level& level,
                      const AttentionSpec& spec, i32 head_dim) {
  const Pool pool = pool_of(name, t, level, spec, head_dim);
  if (level.max_block >= pool.blocks) {
    const char* what = level.storage == KvStorage::ragged  ? "row"
                       : level.storage == KvStorage::paged ? "page"
                                                           : "block";
    fail<ValueError>(name, " has ", pool.blocks, " ", what, "s; the layout uses ", what, " ",
                     level.max_block);
  }
  return pool.view;
}

}  // namespace

std::string describe(const TensorRef& t) {
  return shape_text({t.shape.begin(), t.shape.begin() + t.rank}) + " " + name_of(t.dtype);
}

void check_tensor(const std::string& name, const TensorRef& t, DType dtype,
                  const std::vector<i64>& expected) {
  bool ok = t.rank == static_cast<int>(expected.size());
  for (std::size_t i = 0; ok && i < expected.size(); ++i)
    ok = expected[i] < 0 || t.shape[i] == expected[i];
  if (!ok)
    fail<ValueError>(name, " is ", describe(t), "; expected ", shape_text(expected), " ",
                     name_of(dtype));
  if (t.dtype != dtype)
    fail<TypeError>(name, " is ", name_of(t.dtype), "; expected ", name_of(dtype));
  bool any = true;
  for (int i = 0; i < t.rank; ++i) any = any && dim(t, i) > 0;
  if (any && !t.data) fail<ValueError>(name, " has no data");
  const auto last = static_cast<std::size_t>(t.rank - 1);
  if (t.rank > 0 && t.shape[last] > 1 && t.stride[last] != 1)
    fail<ValueError>(name, " has a last dimension of stride ", t.stride[last],
                     "; expected 1: make it contiguous");
}

void check_output(const std::string& name, const TensorRef& t, DType dtype,
                  const std::vector<i64>& expected) {
  check_tensor(name, t, dtype, expected);
  for (int i = 0; i < t.rank; ++i)
    if (dim(t, i) > 1 && step(t, i) == 0)
      fail<ValueError>(name, " has stride 0 in dimension ", i,
                       "; expected rows that do not overlap");
}

KvView view_kv(const std::string& name, const KvRef& kv, const Level& level,
               const AttentionSpec& spec) {
  return KvView{checked_pool(name + ": k", kv.k, level, spec, spec.head_dim_qk),
                checked_pool(name + ": v", kv.v, level, spec, spec.head_dim_vo)};
}

}  // namespace raddle

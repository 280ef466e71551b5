#include "backend/kv_tensors.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <tuple>
#include <utility>

#include "backend/backend.h"
#include "raddle/error.h"

namespace raddle {
namespace {

/// `below_0` stands for an extent below 0; null: the number itself.
std::string extents_text(const i64* extents, std::size_t count, const char* below_0) {
  std::string text = "[";
  for (std::size_t i = 0; i < count; ++i) {
    if (i > 0) text += ", ";
    text += below_0 && extents[i] < 0 ? below_0 : std::to_string(extents[i]);
  }
  return text + "]";
}

/// The pool of one tensor, and how many blocks of the level it holds.
struct Pool {
  PoolView view;
  i64 blocks;
};

Pool ragged_pool(const TensorRef& t) {
  return {PoolView{t.data, step(t, 0), step(t, 0), step(t, 1)}, dim(t, 0)};
}

Pool paged_pool(const TensorRef& t, HeadOrder order) {
  const PoolAxes axes = pool_axes(order);
  return {PoolView{t.data, step(t, 0), step(t, axes.slot), step(t, axes.head)}, dim(t, 0)};
}

/// What a pool's rows are.
struct RowKind {
  DType dtype;
  i64 heads;
  i64 head_dim;
};

/// Blocks of Bc rows in a tensor of slots, or in a page pool whose pages follow one another without
/// gaps.
Pool block_pool(const std::string& name, const TensorRef& t, const Level& level,
                const RowKind& kind) {
  const i64 bc = level.block_size;
  const auto check_slots = [&](i64 slots) {
    if (level.max_slot >= slots)
      fail<ValueError>(name, " has ", slots, " slots; the layout uses slot ", level.max_slot);
  };
  if (t.rank == 3) {
    check_tensor(name, t, kind.dtype, {-1, kind.heads, kind.head_dim});
    check_slots(dim(t, 0));
    // A last block may be cut short: it counts.
    return {PoolView{t.data, bc * step(t, 0), step(t, 0), step(t, 1)}, (dim(t, 0) + bc - 1) / bc};
  }
  if (level.order == HeadOrder::hnd) {
    check_tensor(name, t, kind.dtype, {-1, kind.heads, bc, kind.head_dim});
    return paged_pool(t, HeadOrder::hnd);
  }
  check_tensor(name, t, kind.dtype, {-1, -1, kind.heads, kind.head_dim});
  if (dim(t, 1) == bc) return paged_pool(t, HeadOrder::nhd);
  if (step(t, 0) != dim(t, 1) * step(t, 1))
    fail<ValueError>(name, " has pages of ", dim(t, 1), " rows with gaps between them; blocks of ",
                     bc, " rows need pages of ", bc, " rows, or slots without gaps");
  const i64 slots = slots_of(t, level.order);
  check_slots(slots);
  return {PoolView{t.data, bc * step(t, 1), step(t, 1), step(t, 2)}, (slots + bc - 1) / bc};
}

Pool pool_of(const std::string& name, const TensorRef& t, const Level& level, const RowKind& kind) {
  switch (level.storage) {
    case KvStorage::ragged:
      check_tensor(name, t, kind.dtype, {-1, kind.heads, kind.head_dim});
      return ragged_pool(t);
    case KvStorage::paged: {
      const i64 rows = rows_of_page(level);
      if (level.order == HeadOrder::nhd)
        check_tensor(name, t, kind.dtype, {-1, rows, kind.heads, kind.head_dim});
      else
        check_tensor(name, t, kind.dtype, {-1, kind.heads, rows, kind.head_dim});
      return paged_pool(t, level.order);
    }
    default:
      return block_pool(name, t, level, kind);
  }
}

PoolView checked_pool(const std::string& name, const TensorRef& t, const Level& level,
                      const RowKind& kind) {
  const Pool pool = pool_of(name, t, level, kind);
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

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::float32:
      return "float32";
    case DType::float16:
      return "float16";
    case DType::bfloat16:
      return "bfloat16";
    case DType::float8_e4m3fn:
      return "float8_e4m3fn";
    case DType::float8_e5m2:
      return "float8_e5m2";
    case DType::int8:
      return "int8";
  }
  return "?";
}

std::string shape_text(const TensorRef& t) {
  return extents_text(t.shape.data(), static_cast<std::size_t>(t.rank), nullptr);
}

std::string describe(const TensorRef& t) { return shape_text(t) + " " + name_of(t.dtype); }

void check_storage(const std::string& name, const TensorRef& t) {
  bool any = true;
  for (int i = 0; i < t.rank; ++i) {
    if (dim(t, i) < 0)
      fail<ValueError>(name, " has shape ", shape_text(t), "; expected none below 0");
    any = any && dim(t, i) > 0;
  }
  if (any && !t.data) fail<ValueError>(name, " has no data");
  const int last = t.rank - 1;
  if (t.rank > 0 && dim(t, last) > 1 && step(t, last) != 1)
    fail<ValueError>(name, " has a last dimension of stride ", step(t, last),
                     "; expected 1: make it contiguous");
}

namespace {

/// Bytes that a tensor reaches before and behind its first element, `high` exclusive.
struct Reach {
  i64 low, high;
};

/// Of the dimensions that `counts` takes, given their strides in bytes.
template <class Counts>
Reach reach_of(const TensorRef& t, const Counts& counts) {
  const i64 bytes = dtype_bytes(t.dtype);
  Reach reach{0, bytes};
  for (int i = 0; i < t.rank; ++i) {
    const i64 stride = step(t, i) * bytes;
    if (dim(t, i) > 1 && counts(stride))
      (stride < 0 ? reach.low : reach.high) += (dim(t, i) - 1) * stride;
  }
  return reach;
}

bool has_elements(const TensorRef& t) {
  for (int i = 0; i < t.rank; ++i)
    if (dim(t, i) <= 0) return false;
  return t.data != nullptr;
}

/// Whether bytes lie at different places of a period that both tensors walk in: pages, slots or
/// rows of one tensor.
bool apart_within(i64 period, const TensorRef& a, const TensorRef& b) {
  if (period <= 0) return false;
  const auto within = [period](i64 stride) { return stride % period != 0; };
  const Reach x = reach_of(a, within), y = reach_of(b, within);
  const i64 between =
      (static_cast<const u8*>(b.data) + y.low) - (static_cast<const u8*>(a.data) + x.low);
  const i64 offset = (between % period + period) % period;
  return x.high - x.low <= offset && offset + (y.high - y.low) <= period;
}

}  // namespace

void check_distinct(const std::string& name, const TensorRef& t) {
  std::array<std::pair<i64, i64>, std::tuple_size_v<decltype(t.shape)>> dims;  // stride, extent
  std::size_t count = 0;
  for (int i = 0; i < t.rank; ++i) {
    if (dim(t, i) <= 0) return;
    if (dim(t, i) == 1) continue;
    std::size_t at = count++;
    const std::pair<i64, i64> one{std::abs(step(t, i)), dim(t, i)};
    for (; at > 0 && one < dims[at - 1]; --at) dims[at] = dims[at - 1];
    dims[at] = one;
  }
  i64 reach = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const auto [stride, extent] = dims[i];
    if (stride <= reach) [[unlikely]]
      fail<ValueError>(name, " has stride ", stride, " in a dimension of ", extent,
                       "; expected rows that do not overlap");
    reach += stride * (extent - 1);
  }
}

MemoryRange range_of(const TensorRef& t) {
  if (!has_elements(t)) return {};
  const Reach reach = reach_of(t, [](i64) { return true; });
  const auto* data = static_cast<const u8*>(t.data);
  return {data + reach.low, data + reach.high};
}

bool overlap(const TensorRef& a, const TensorRef& b) {
  if (a.device != b.device || !range_of(a).meets(range_of(b))) return false;
  for (const TensorRef* t : {&a, &b})
    for (int i = 0; i < t->rank; ++i)
      if (dim(*t, i) > 1 && apart_within(std::abs(step(*t, i)) * dtype_bytes(t->dtype), a, b))
        return false;
  return true;
}

bool is_same(const TensorRef& a, const TensorRef& b) {
  if (a.data != b.data || a.dtype != b.dtype || a.rank != b.rank) return false;
  for (int i = 0; i < a.rank; ++i)
    if (dim(a, i) != dim(b, i) || (dim(a, i) > 1 && step(a, i) != step(b, i))) return false;
  return true;
}

void check_apart(const std::string& name, const TensorRef& t, const std::string& other_name,
                 const TensorRef& other) {
  if (overlap(t, other)) [[unlikely]]
    fail<ValueError>(name, " shares memory with ", other_name, "; expected memory of its own");
}

void check_tensor(const std::string& name, const TensorRef& t, DType dtype,
                  ExpectedShape expected) {
  bool ok = t.rank == static_cast<int>(expected.size());
  for (std::size_t i = 0; ok && i < expected.size(); ++i)
    ok = expected[i] < 0 || t.shape[i] == expected[i];
  if (!ok)
    fail<ValueError>(name, " is ", describe(t), "; expected ",
                     extents_text(expected.data(), expected.size(), "*"), " ", name_of(dtype));
  if (t.dtype != dtype)
    fail<TypeError>(name, " is ", name_of(t.dtype), "; expected ", name_of(dtype));
  check_storage(name, t);
}

void check_strided(const std::string& name, const TensorRef& t, DType dtype,
                   ExpectedShape expected) {
  TensorRef dense = t;
  if (t.rank > 0) dense.stride[static_cast<std::size_t>(t.rank - 1)] = 1;
  check_tensor(name, dense, dtype, expected);
}

TensorRef with_heads(const TensorRef& t, i64 heads, i64 head_dim) {
  if (t.rank != 2 || dim(t, 1) != heads * head_dim || (dim(t, 1) > 1 && step(t, 1) != 1)) return t;
  TensorRef apart = t;
  apart.rank = 3;
  apart.shape = {dim(t, 0), heads, head_dim};
  apart.stride = {step(t, 0), head_dim, 1};
  return apart;
}

namespace {

/// With a dimension of one element before dimension `at`.
TensorRef with_one(const TensorRef& t, std::size_t at) {
  TensorRef more = t;
  ++more.rank;
  for (std::size_t i = static_cast<std::size_t>(t.rank); i > at; --i) {
    more.shape[i] = more.shape[i - 1];
    more.stride[i] = more.stride[i - 1];
  }
  more.shape[at] = 1;
  more.stride[at] = t.stride[at - 1];
  return more;
}

}  // namespace

KvRef with_pages(const KvRef& pool, HeadOrder order) {
  const auto slot = static_cast<std::size_t>(pool_axes(order).slot);
  KvRef pages = pool;
  for (TensorRef* t : {&pages.k, &pages.v})
    if (t->rank == 3) *t = with_one(*t, slot);
  for (ScaleRef* scale : {&pages.k_scale, &pages.v_scale})
    if (scale->tensor.rank == 2) scale->tensor = with_one(scale->tensor, slot);
  return pages;
}

void check_output(const std::string& name, const TensorRef& t, DType dtype,
                  ExpectedShape expected) {
  check_tensor(name, t, dtype, expected);
  check_distinct(name, t);
}

KvView view_kv(const std::string& name, const KvRef& kv, const Level& level,
               const AttentionSpec& spec) {
  const DType dtype = spec.stored_dtype();
  const i64 heads = spec.num_kv_heads;
  return KvView{checked_pool(name + ": k", kv.k, level, {dtype, heads, spec.k_columns()}),
                checked_pool(name + ": v", kv.v, level, {dtype, heads, spec.head_dim_vo})};
}

// --- scales ----------------------------------------------------------------------------------

void check_gpu_rows(const TensorRef& t, const char* what, i64 level) {
  const auto name = [&] {
    return (level >= 0 ? "kv[" + std::to_string(level) + "]: " : std::string()) + what;
  };
  if (!t.data) return;
  if (reinterpret_cast<std::uintptr_t>(t.data) % 16 != 0) [[unlikely]]
    fail<ValueError>(name(),
                     " begins at an address that is no multiple of 16 bytes; expected one "
                     "on a GPU");
  const i64 unit = 16 / dtype_bytes(t.dtype);
  for (std::size_t i = 0; i + 1 < static_cast<std::size_t>(t.rank); ++i)
    if (t.shape[i] > 1 && t.stride[i] % unit != 0) [[unlikely]]
      fail<ValueError>(name(), " has stride ", t.stride[i], " in dimension ", i,
                       "; expected a multiple of ", unit,
                       " elements on a GPU: rows of 16-byte "
                       "units");
}

void check_scale(const std::string& name, const ScaleRef& scale, const std::string& pool_name,
                 const TensorRef& pool, i64 heads) {
  if (!scale.is_given()) return;
  if (!has_8_bits(pool.dtype))
    fail<ValueError>(name, " is given, and ", pool_name, " is ", name_of(pool.dtype),
                     "; expected no scale: only K and V of 8 bits have them");
  if (scale.value && !std::isfinite(*scale.value))
    fail<ValueError>(name, " is ", *scale.value, "; expected a finite number");
  const TensorRef& t = scale.tensor;
  if (!t.data) return;
  const bool of_all = t.rank == 0 || (t.rank == 1 && dim(t, 0) == 1);
  bool ok = of_all || (t.rank == 1 && dim(t, 0) == heads) || is_by_token(scale);
  for (int i = 0; is_by_token(scale) && i < std::max(t.rank, pool.rank - 1); ++i)
    ok = ok && t.rank == pool.rank - 1 && dim(t, i) == dim(pool, i);
  if (!ok)
    fail<ValueError>(
        name, " is ", describe(t), "; expected a number, [", heads, "] float32, or ",
        extents_text(pool.shape.data(), static_cast<std::size_t>(pool.rank - 1), nullptr),
        " float32, a scale for each token and head of ", pool_name);
  if (t.dtype != DType::float32)
    fail<TypeError>(name, " is ", name_of(t.dtype), "; expected float32");
  if (t.device != pool.device)
    fail<ValueError>(name, " lies on device '", name_of(t.device), "'; expected '",
                     name_of(pool.device), "', as ", pool_name, " does");
}

ScaleView constant_scale(const ScaleRef& scale) {
  ScaleView view{static_cast<float*>(scale.tensor.data), 0, 0, 0, scale.value.value_or(1.0f)};
  if (scale.tensor.rank == 1 && dim(scale.tensor, 0) > 1) view.head_stride = step(scale.tensor, 0);
  return view;
}

TensorRef as_rows_of_one(const TensorRef& scales) {
  TensorRef rows = scales;
  rows.shape[static_cast<std::size_t>(rows.rank)] = 1;
  rows.stride[static_cast<std::size_t>(rows.rank)] = 1;
  ++rows.rank;
  return rows;
}

namespace {

ScaleView view_scale(const std::string& name, const ScaleRef& scale, const std::string& pool_name,
                     const TensorRef& pool, const Level& level, i64 heads) {
  check_scale(name, scale, pool_name, pool, heads);
  if (!is_by_token(scale)) return constant_scale(scale);
  // Found as the pool's rows are: it has the pool's shape, but for heads of one element.
  const PoolView view =
      pool_of(name, as_rows_of_one(scale.tensor), level, {DType::float32, heads, 1}).view;
  return {static_cast<float*>(scale.tensor.data), view.block_stride, view.row_stride,
          view.head_stride, 1.0f};
}

}  // namespace

KvScales view_scales(const std::string& suffix, const std::string& name, const KvRef& kv,
                     const Level& level, const AttentionSpec& spec) {
  if (!kv.k_scale.is_given() && !kv.v_scale.is_given())
    return {constant_scale({}), constant_scale({})};
  const i64 heads = spec.num_kv_heads;
  return {view_scale("k_scale" + suffix, kv.k_scale, name + ": k", kv.k, level, heads),
          view_scale("v_scale" + suffix, kv.v_scale, name + ": v", kv.v, level, heads)};
}

}  // namespace raddle

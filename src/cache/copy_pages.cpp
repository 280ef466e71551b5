// Copying pages within a pool or from one to another.
#include <numeric>
#include <optional>

#include "cache/checks.h"
#include "cache/on_device.h"
#include "layout/normal_form.h"
#include "raddle/engine/kernel/cache/copy.h"
#include "raddle/error.h"
#include "raddle/kv.h"

namespace raddle {
namespace {

/// A tensor of pages of any rank as the copying kernel sees it: slots of heads.
TensorRef as_pool(const std::string& name, const TensorRef& t) {
  if (t.rank < 2 || t.rank > 4) {
    fail<ValueError>(name, " has ", t.rank, " dimensions; expected 2 to 4, pages first");
  }
  check_storage(name, t);
  TensorRef pool = t;
  pool.rank = 4;
  for (std::size_t i = 1; i < 4; ++i) {
    // [pages, D] and [pages, Hkv, D] are pages of one slot, the latter of several.
    const int from = static_cast<int>(i) - (4 - t.rank);
    pool.shape[i] = from >= 1 ? dim(t, from) : 1;
    pool.stride[i] = from >= 1 ? step(t, from) : 0;
  }
  return pool;
}

void check_alike(const std::string& letter, const TensorRef& from, const TensorRef& to) {
  const std::string name = "to." + letter, other = "from." + letter;
  if (to.dtype != from.dtype) {
    fail<TypeError>(name, " is ", name_of(to.dtype), "; expected ", name_of(from.dtype), ", as ",
                    other, " is");
  }
  bool alike = to.rank == from.rank;
  for (int i = 1; alike && i < to.rank; ++i) alike = dim(to, i) == dim(from, i);
  if (!alike) {
    fail<ValueError>(name, " has shape ", shape_text(to), "; expected pages as in ", other, ", ",
                     shape_text(from));
  }
  check_distinct(name, to);
}

/// Scales of tokens: both sides have them, or neither.
struct MovedScales {
  ScaleView from, to;
};

MovedScales scales_of(const std::string& letter, const ScaleRef& from, const TensorRef& from_pool,
                      const ScaleRef& to, const TensorRef& to_pool) {
  const std::string from_name = "from." + letter + "_scale", to_name = "to." + letter + "_scale";
  const auto view = [&](const std::string& name, const ScaleRef& scale, const TensorRef& pool) {
    return moved_scales(name, scale, name.substr(0, name.find('_')), pool, HeadOrder::nhd);
  };
  if (from.is_given() != to.is_given())
    fail<ValueError>(from.is_given() ? to_name : from_name, " is missing; expected one, as ",
                     from.is_given() ? from_name : to_name, " is given");
  return {view(from_name, from, from_pool), view(to_name, to, to_pool)};
}

std::vector<i32> read_pages(const char* name, const IndexRef& ref, i64 pages) {
  std::vector<i32> list = copy_index(name, ref);
  for (std::size_t i = 0; i < list.size(); ++i)
    if (list[i] < 0 || list[i] >= pages)
      fail<ValueError>(name, "[", i, "] is ", list[i], "; expected a page, 0 to ", pages - 1);
  return list;
}

/// The entries of a list of pages, sorted by page.
std::vector<std::size_t> by_page(const std::vector<i32>& pages) {
  std::vector<std::size_t> order(pages.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return pages[a] < pages[b]; });
  return order;
}

/// The number, among the pages of `from`, of the first page of `to`, where both tensors walk
/// through one piece of memory with equal strides.
std::optional<i64> common_pages(const TensorRef& from, const TensorRef& to) {
  const i64 page = step(from, 0) * dtype_bytes(from.dtype);
  const i64 apart = static_cast<const u8*>(to.data) - static_cast<const u8*>(from.data);
  if (step(to, 0) != step(from, 0) || page == 0 || apart % page != 0) return std::nullopt;
  return apart / page;
}

/// Where the bytes of a tensor's pages lie.
struct PageSpan {
  const u8* base;
  i64 step, low, high;  ///< from page to page; within a page, `high` exclusive

  explicit PageSpan(const TensorRef& t)
      : base(static_cast<const u8*>(t.data)),
        step(raddle::step(t, 0) * dtype_bytes(t.dtype)),
        low(0),
        high(dtype_bytes(t.dtype)) {
    for (i32 i = 1; i < t.rank; ++i) {
      const i64 most = (dim(t, i) - 1) * raddle::step(t, i) * dtype_bytes(t.dtype);
      (most < 0 ? low : high) += most;
    }
  }
  const u8* begin(i32 page) const { return base + page * step + low; }
  const u8* end(i32 page) const { return base + page * step + high; }
};

[[noreturn]] void refuse_overwritten(const std::vector<i32>& from_pages, std::size_t from,
                                     std::size_t to) {
  fail<ValueError>("from_pages[", from, "] is ", from_pages[from], ", which to_pages[", to,
                   "] overwrites; expected no page both read and written");
}

/// Pages of tensors that walk through memory in different steps, as views of one pool in reverse
/// do, must not overlap.
void check_apart(const TensorRef& from, const TensorRef& to, const std::vector<i32>& from_pages,
                 const std::vector<i32>& to_pages) {
  const PageSpan read(from), written(to);
  std::vector<std::size_t> order(from_pages.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto begin = [&](std::size_t i) { return read.begin(from_pages[i]); };
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return begin(a) < begin(b); });
  for (std::size_t t = 0; t < to_pages.size(); ++t) {
    // All pages of a tensor are alike, so the last one that begins before the end is the nearest.
    const auto after =
        std::lower_bound(order.begin(), order.end(), written.end(to_pages[t]),
                         [&](std::size_t i, const u8* address) { return begin(i) < address; });
    if (after == order.begin()) continue;
    if (const std::size_t f = *(after - 1); read.end(from_pages[f]) > written.begin(to_pages[t]))
      refuse_overwritten(from_pages, f, t);
  }
}

/// Copies happen at once, in no order: no page may be written twice, or both read and written.
class Disjoint {
 public:
  Disjoint(const std::vector<i32>& from_pages, const std::vector<i32>& to_pages)
      : from_pages_(from_pages),
        to_pages_(to_pages),
        from_(by_page(from_pages)),
        to_(by_page(to_pages)) {
    for (std::size_t i = 1; i < to_.size(); ++i)
      if (to_pages[to_[i]] == to_pages[to_[i - 1]])
        fail<ValueError>("to_pages[", to_[i], "] is ", to_pages[to_[i]], ", and so is to_pages[",
                         to_[i - 1], "]; expected each page once");
  }

  void check(const TensorRef& from, const TensorRef& to) const {
    if (step(from, 0) * dtype_bytes(from.dtype) != step(to, 0) * dtype_bytes(to.dtype))
      return check_apart(from, to, from_pages_, to_pages_);
    const std::optional<i64> common = common_pages(from, to);
    if (!common) return;
    std::size_t i = 0;
    for (const std::size_t t : to_) {
      const i64 written = to_pages_[t] + *common;
      while (i < from_.size() && from_pages_[from_[i]] < written) ++i;
      if (i < from_.size() && from_pages_[from_[i]] == written)
        refuse_overwritten(from_pages_, from_[i], t);
    }
  }

 private:
  const std::vector<i32>& from_pages_;
  const std::vector<i32>& to_pages_;
  std::vector<std::size_t> from_, to_;  ///< entries sorted by page
};

/// Whether V is columns of K in both pools, the same ones. Raises where K and V that are written
/// share memory otherwise.
bool moves_with_k(const KvRef& from, const KvRef& to) {
  if (!check_pair_apart("to", to)) return false;
  const auto offset = [](const KvRef& pair) {
    return static_cast<const u8*>(pair.v.data) - static_cast<const u8*>(pair.k.data);
  };
  if (!overlap(from.k, from.v) || offset(from) != offset(to) || !check_pair_apart("from", from))
    check_apart("to.k", to.k, "to.v", to.v);
  return true;
}

}  // namespace

void copy_pages(const KvRef& from, const KvRef& to, const IndexRef& from_pages,
                const IndexRef& to_pages, void* stream) {
  const KvRef a{as_pool("from.k", from.k), as_pool("from.v", from.v)};
  const KvRef b{as_pool("to.k", to.k), as_pool("to.v", to.v)};
  check_alike("k", from.k, to.k);
  check_alike("v", from.v, to.v);
  if (dim(a.v, 1) != dim(a.k, 1) || dim(a.v, 2) != dim(a.k, 2)) {
    fail<ValueError>("from.v has shape ", shape_text(from.v), "; expected rows as in from.k, ",
                     shape_text(from.k));
  }
  const auto read = read_pages("from_pages", from_pages, std::min(dim(from.k, 0), dim(from.v, 0)));
  const auto written = read_pages("to_pages", to_pages, std::min(dim(to.k, 0), dim(to.v, 0)));
  if (read.size() != written.size()) {
    fail<ValueError>("to_pages has ", written.size(), " entries; expected ", read.size(),
                     ", as from_pages has");
  }
  const Disjoint disjoint(read, written);
  for (const TensorRef* x : {&a.k, &a.v})
    for (const TensorRef* y : {&b.k, &b.v}) disjoint.check(*x, *y);
  const bool v_moves_with_k = moves_with_k(a, b);
  const MovedScales k_scales = scales_of("k", from.k_scale, from.k, to.k_scale, to.k);
  const MovedScales v_scales = scales_of("v", from.v_scale, from.v, to.v_scale, to.v);

  if (check_scales_apart("to", to) && !is_same(from.k_scale.tensor, from.v_scale.tensor))
    fail<ValueError>(
        "to_k_scale is to_v_scale, and those that are read are two; expected two, too");

  CopyView view{};
  view.k_from = pool_bytes(a.k, HeadOrder::nhd);
  view.k_to = pool_bytes(b.k, HeadOrder::nhd);
  view.v_from = pool_bytes(a.v, HeadOrder::nhd);
  view.v_to = pool_bytes(b.v, HeadOrder::nhd);
  if (v_moves_with_k) view.v_from.head_bytes = view.v_to.head_bytes = 0;
  view.k_scale_from = k_scales.from;
  view.k_scale_to = k_scales.to;
  view.v_scale_from = v_scales.from;
  view.v_scale_to = v_scales.to;
  view.from_pages = read.data();
  view.to_pages = written.data();
  view.num_copies = static_cast<i32>(read.size());
  view.page_size = static_cast<i32>(dim(a.k, 1));
  const DeviceId device =
      common_device({{"from.k", from.k}, {"from.v", from.v}, {"to.k", to.k}, {"to.v", to.v}});
  if (is_gpu(device)) return cuda::copy({device, stream}, view, from.k.dtype);
  const i64 slots = view.page_size;
  const i64 bytes =
      (view.k_from.head_bytes + view.v_from.head_bytes) * view.k_from.num_heads * slots;
  share_units(view.num_copies, bytes, [&](i64 begin, i64 end) {
    for (i64 i = begin; i < end; ++i) {
      kv::copy_page(view.k_from, view.k_to, view.from_pages[i], view.to_pages[i], slots);
      kv::copy_page(view.v_from, view.v_to, view.from_pages[i], view.to_pages[i], slots);
      const i64 heads = view.k_from.num_heads;
      if (view.k_scale_from.data)
        kv::copy_page_scales(view.k_scale_from, view.k_scale_to, view.from_pages[i],
                             view.to_pages[i], slots, heads);
      if (view.v_scale_from.data)
        kv::copy_page_scales(view.v_scale_from, view.v_scale_to, view.from_pages[i],
                             view.to_pages[i], slots, heads);
    }
  });
}

}  // namespace raddle

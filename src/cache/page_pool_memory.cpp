// What a page pool is for: the layout of its requests, and memory for its pages.
#include <cstring>
#include <new>

#include "raddle/error.h"
#include "raddle/page_pool.h"

namespace raddle {

LayoutPtr pool_layout(const PagePool& pool, std::span<const RequestId> requests,
                      std::span<const i32> qo_len, HeadOrder order, i32 min_prefix) {
  if (qo_len.size() != requests.size())
    fail<ValueError>("qo_len has ", qo_len.size(), " entries; expected ", requests.size(),
                     ", one a request");
  std::vector<i32> qo_indptr{0};
  qo_indptr.reserve(requests.size() + 1);
  i64 rows = 0;
  for (std::size_t i = 0; i < qo_len.size(); ++i) {
    if (qo_len[i] < 0) fail<ValueError>("qo_len[", i, "] is ", qo_len[i], "; expected at least 0");
    rows += qo_len[i];
    if (rows > 0x7fffffff) fail<ValueError>("qo_len sums to ", rows, "; expected less than 2^31");
    qo_indptr.push_back(static_cast<i32>(rows));
  }
  const PageTables tables = pool.tables(requests);
  if (const auto& lacks = tables.without_room; lacks && qo_len[lacks->first] > 0)
    fail<ValueError>("requests[", lacks->first, "] has no room for its query rows: its last append",
                     " reported ", lacks->second, " missing pages and changed nothing; expected ",
                     "an append that reports 0, after pages were given back, or qo_len 0");
  const auto whole = [](const std::vector<i32>& v) {
    static constexpr i32 none = 0;  // an empty list must still count as given
    return v.empty() ? IndexRef{&none, 0} : IndexRef{v.data(), static_cast<i64>(v.size())};
  };
  PagedArgs args;
  args.qo_indptr = whole(qo_indptr);
  args.page_indptr = whole(tables.page_indptr);
  args.page_indices = whole(tables.page_indices);
  args.kv_len = whole(tables.kv_len);
  args.page_size = pool.page_size();
  args.order = order;
  args.min_prefix = min_prefix;
  return paged_kv(args);
}

KvMemory::KvMemory(const PagePool& pool, i32 num_kv_heads, i32 head_dim_qk, i32 head_dim_vo,
                   DType dtype, HeadOrder order) {
  for (const auto& [name, value] : {std::pair{"num_kv_heads", num_kv_heads},
                                    {"head_dim_qk", head_dim_qk},
                                    {"head_dim_vo", head_dim_vo}})
    if (value < 1) fail<ValueError>(name, " is ", value, "; expected at least 1");
  const auto make = [&](std::unique_ptr<void, Free>& memory, i32 head_dim) {
    constexpr std::size_t line = 64;
    const i64 elements =
        static_cast<i64>(pool.num_pages()) * pool.page_size() * num_kv_heads * head_dim;
    const auto bytes = static_cast<std::size_t>(elements * dtype_bytes(dtype));
    memory.reset(std::aligned_alloc(line, (bytes + line - 1) / line * line));
    if (!memory) throw std::bad_alloc();
    std::memset(memory.get(), 0, bytes);
    return order == HeadOrder::nhd
               ? TensorRef::contiguous(memory.get(), dtype, pool.num_pages(), pool.page_size(),
                                       num_kv_heads, head_dim)
               : TensorRef::contiguous(memory.get(), dtype, pool.num_pages(), num_kv_heads,
                                       pool.page_size(), head_dim);
  };
  kv_.k = make(k_, head_dim_qk);
  kv_.v = make(v_, head_dim_vo);
}

}  // namespace raddle

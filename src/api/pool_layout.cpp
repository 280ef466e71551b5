// The requests of a page pool as a layout.
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

}  // namespace raddle

// Prefix discovery on the host as the planner kernel does it on a device, with equal groups
// (discover_prefixes=True): one level, found by comparing each request with a leader
// (engine/plan/prefixes.h). Cascade.from_page_tables finds the runs of pages that are shared at
// every depth, as a tree (shared_runs.h), which a block of threads could not grow. The two differ
// where lists agree in their first page and in the page at the least depth, but not between those.
#pragma once

#include <vector>

#include "raddle/engine/plan/prefixes.h"

namespace raddle {

/// A page table's requests, by their lengths and where their lists lie.
struct PageLists {
  const std::vector<i32>& qo_indptr;    ///< [requests + 1]
  const std::vector<i32>& kv_len;       ///< [requests]
  const std::vector<i32>& block_begin;  ///< [requests] first entry of a request's list
  const i32* pages;
  i32 page_size;

  i32 num_requests() const { return static_cast<i32>(kv_len.size()); }
  /// Query rows of request r.
  i32 rows(i32 r) const {
    const auto at = static_cast<std::size_t>(r);
    return qo_indptr[at + 1] - qo_indptr[at];
  }
  /// Leading pages that request r may share.
  i32 shareable(i32 r) const {
    return shareable_pages(rows(r), kv_len[static_cast<std::size_t>(r)], page_size);
  }
  /// The list of request r.
  const i32* list(i32 r) const { return pages + block_begin[static_cast<std::size_t>(r)]; }
};

/// The two levels of a cascade: groups of requests over their prefixes, then every request over the
/// rest of its keys.
struct PrefixCascade {
  // the prefixes: rows of several requests share the keys
  std::vector<i32> row_indptr{0}, rows, columns, block_begin;
  // the requests
  std::vector<i32> suffix, kv_begin, suffix_begin;
  std::vector<i32> row_request;  ///< [rows of the query tensor]
};

/// Prefixes of at least `min_tokens` tokens that at least two requests share, in the order of their
/// first requests.
PrefixCascade discover_prefixes(const PageLists& lists, i32 min_tokens);

}  // namespace raddle

// Prefix discovery on the host: what the planner kernel does on a device.
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

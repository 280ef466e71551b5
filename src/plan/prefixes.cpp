#include "plan/prefixes.h"

namespace raddle {
namespace {

std::size_t at(i32 i) { return static_cast<std::size_t>(i); }

std::vector<PrefixLink> link_requests(const PageLists& lists, i32 depth) {
  std::vector<i32> leaders;
  std::vector<PrefixLink> links;
  for (i32 r = 0; r < lists.num_requests(); ++r) {
    i32 leader = r;
    i32 common = lists.shareable(r);
    if (common >= depth) {
      for (const i32 other : leaders) {
        if (!may_share(lists.list(r), lists.list(other), depth)) continue;
        leader = other;
        const i32 most = min(common, lists.shareable(other));
        common = 0;
        while (common < most && shares_page(lists.list(r), lists.list(leader), common)) ++common;
        break;
      }
      if (leader == r) leaders.push_back(r);
    }
    links.push_back(link_to(r, leader, common, depth));
  }
  return links;
}

}  // namespace

PrefixCascade discover_prefixes(const PageLists& lists, i32 min_tokens) {
  const i32 requests = lists.num_requests();
  const std::vector<PrefixLink> links =
      link_requests(lists, least_prefix_pages(min_tokens, lists.page_size));
  std::vector<std::vector<i32>> members(links.size());
  std::vector<i32> common(links.size(), int_max);  // pages that all members share
  for (i32 r = 0; r < requests; ++r) {
    const PrefixLink& link = links[at(r)];
    if (link.pages == 0) continue;
    members[at(link.leader)].push_back(r);
    common[at(link.leader)] = min(common[at(link.leader)], link.pages);
  }
  PrefixCascade cascade;
  cascade.suffix = lists.kv_len;
  cascade.kv_begin.resize(links.size());
  cascade.suffix_begin = lists.block_begin;
  for (i32 r = 0; r < requests; ++r) {
    for (i32 row = lists.qo_indptr[at(r)]; row < lists.qo_indptr[at(r) + 1]; ++row)
      cascade.row_request.push_back(r);
    if (members[at(r)].size() < 2) continue;
    const i32 pages = common[at(r)];
    for (const i32 member : members[at(r)]) {
      for (i32 row = lists.qo_indptr[at(member)]; row < lists.qo_indptr[at(member) + 1]; ++row)
        cascade.rows.push_back(row);
      cascade.suffix[at(member)] -= pages * lists.page_size;
      cascade.kv_begin[at(member)] = pages * lists.page_size;
      cascade.suffix_begin[at(member)] += pages;
    }
    cascade.row_indptr.push_back(static_cast<i32>(cascade.rows.size()));
    cascade.columns.push_back(pages * lists.page_size);
    cascade.block_begin.push_back(lists.block_begin[at(r)]);
  }
  return cascade;
}

}  // namespace raddle

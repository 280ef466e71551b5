// Shared prefixes: requests whose page tables begin alike read those pages once, as a level of a
// cascade.
//
// A request's leader is the first request whose list has the same first page and the same page at
// the least depth worth a level. A request that has at least that many leading pages in common with
// its leader is linked to it; all that are linked to one leader make a group, whose prefix is what
// they all have in common with the leader. A page stands for its place in the text in every paged
// cache that shares prefixes, so two equal pages at the same depth nearly always mean equal lists
// up to there, and the comparison that settles it is made once a request.
#pragma once

#include "raddle/engine/core/row.h"

namespace raddle {

/// A request's share in a prefix.
struct PrefixLink {
  i32 leader;
  i32 pages;  ///< leading pages in common with the leader; 0: not linked
};

}  // namespace raddle

RADDLE_ENGINE_BEGIN

/// Pages that a prefix must have to become a level.
RADDLE_FN i32 least_prefix_pages(i32 min_tokens, i32 page_size) {
  return max(1, ceil_div(min_tokens, page_size));
}

/// Leading pages that a request may share: full ones, before the keys of its own query rows.
RADDLE_FN i32 shareable_pages(i32 rows, i32 keys, i32 page_size) {
  return rows > 0 && keys > rows ? (keys - rows) / page_size : 0;
}

/// Whether two lists may have `depth` ≥ 1 leading pages in common. All four entries are asked for
/// at once: on a GPU each is a trip to memory.
RADDLE_FN bool may_share(const i32* a, const i32* b, i32 depth) {
  const i32 first = a[0];
  const i32 last = a[depth - 1];
  return (first >= 0) & (first == b[0]) & (last == b[depth - 1]);
}

/// Whether entry i is the same page in both.
RADDLE_FN bool shares_page(const i32* a, const i32* b, i32 i) {
  return (a[i] >= 0) & (a[i] == b[i]);
}

/// What `common` leading pages make of a request and its leader.
RADDLE_FN PrefixLink link_to(i32 request, i32 leader, i32 common, i32 depth) {
  return common >= depth ? PrefixLink{leader, common} : PrefixLink{request, 0};
}

RADDLE_ENGINE_END

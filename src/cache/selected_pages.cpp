// The pages that select_pages chose, as a block-sparse layout.
#include "cache/checks.h"
#include "raddle/error.h"
#include "raddle/kv.h"

namespace raddle {
namespace {

/// One list of pages per request; each page has the position of its first key and a number of keys.
struct Selection {
  IndexRef pages, pos, count;
  i64 width() const { return pages.shape[1]; }
};

i64 element(const IndexRef& ref, i64 row, i64 column) {
  const i64 at = row * ref.stride[0] + column * ref.stride[1];
  return ref.is_64bit ? static_cast<const std::int64_t*>(ref.data)[at]
                      : i64{static_cast<const std::int32_t*>(ref.data)[at]};
}

void check_lists(const Selection& selection, i64 requests) {
  const auto check = [&](const char* name, const IndexRef& ref) {
    if (ref.empty()) fail<TypeError>(name, " is missing; expected a list a request");
    if (ref.rank != 2 || ref.shape[0] != requests || ref.shape[1] != selection.width()) {
      fail<ValueError>(name, " has shape [", ref.shape[0], ref.rank == 2 ? ", " : "",
                       ref.rank == 2 ? std::to_string(ref.shape[1]) : "", "]; expected [", requests,
                       ", ", selection.width(), "], a list a request");
    }
  };
  check("pages", selection.pages);
  check("pos", selection.pos);
  check("count", selection.count);
}

/// The entries of one row block.
struct Lists {
  std::vector<i32> indptr{0}, indices, pos, first, count;

  /// Appends the pages of `request`; returns their keys.
  i32 add(const Selection& selection, i32 request, i32 page_size) {
    i64 keys = 0;
    for (i64 i = 0; i < selection.width(); ++i) {
      const i64 page = element(selection.pages, request, i);
      const i64 at = element(selection.pos, request, i);
      const i64 n = element(selection.count, request, i);
      if (page == -1) continue;
      if (page < 0 || page > int_max)
        fail<ValueError>("pages[", request, ", ", i, "] is ", page, "; expected 0 to ", int_max,
                         ", or -1 for none");
      if (n < 0 || n > page_size)
        fail<ValueError>("count[", request, ", ", i, "] is ", n, "; expected 0 to ", page_size);
      if (at < 0 || at > int_max - page_size)
        fail<ValueError>("pos[", request, ", ", i, "] is ", at, "; expected 0 to ",
                         int_max - page_size);
      indices.push_back(static_cast<i32>(page));
      pos.push_back(static_cast<i32>(at));
      first.push_back(0);
      count.push_back(static_cast<i32>(n));
      keys += n;
    }
    indptr.push_back(static_cast<i32>(indices.size()));
    return static_cast<i32>(keys);
  }
};

/// Keys count in the order of the lists. So, where a request has several rows, a mask by index
/// (causal) is right only if the request's newest keys are the last of its list.
void check_newest(const Selection& selection, const LevelView& level, i32 request) {
  const i32 last = level.columns[request] - 1;
  const i32 base = level.kv_begin ? level.kv_begin[request] : 0;
  i64 i = selection.width() - 1;
  while (i >= 0 && element(selection.pages, request, i) < 0) --i;
  const i32 first = kv::first_new_column(level, request) / level.block_size;
  for (i32 nth = last / level.block_size; nth >= first; --nth, --i)
    if (i < 0 || element(selection.pos, request, i) != base + nth * level.block_size)
      fail<ValueError>("pages lacks page ", nth, " of request ", request,
                       ", which holds keys of its ", group_rows(level, request),
                       " rows; expected all pages of a request's rows where it has several");
}

IndexRef whole(const std::vector<i32>& list) {
  static constexpr i32 none = 0;  // an empty list must still count as given
  return {list.empty() ? &none : list.data(), static_cast<i64>(list.size())};
}

}  // namespace

LayoutPtr selected_layout(const Layout& layout, const IndexRef& pages, const IndexRef& pos,
                          const IndexRef& count) {
  const LevelView& level = check_page_table(layout, "whose pages were selected");
  const LayoutView& batch = layout.view();
  const Selection selection{pages, pos, count};
  check_lists(selection, batch.num_requests);
  Lists lists;
  std::vector<i32> kv_len, qo_pos;
  for (i32 i = 0; i < batch.num_requests; ++i) {
    const i32 begin = batch.qo_indptr[i], end = batch.qo_indptr[i + 1];
    if (end - begin > 1 && level.columns[i] > 0) check_newest(selection, level, i);
    i32 keys = 0;
    for (i32 row = begin; row < end; ++row) {
      keys = lists.add(selection, i, level.block_size);
      qo_pos.push_back(batch.qo_pos ? batch.qo_pos[row] : batch.kv_len[i] - (end - row));
    }
    kv_len.push_back(keys);
  }
  BlockSparseArgs args;
  args.block_cols = level.block_size;
  args.order = layout.levels()[0].order;
  args.indptr = whole(lists.indptr);
  args.indices = whole(lists.indices);
  args.qo_indptr = {batch.qo_indptr, i64{batch.num_requests} + 1};
  args.kv_len = whole(kv_len);
  args.block_pos = whole(lists.pos);
  args.block_first = whole(lists.first);
  args.block_count = whole(lists.count);
  args.qo_pos = whole(qo_pos);
  return block_sparse(args);
}

}  // namespace raddle

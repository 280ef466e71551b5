// Page summaries and the choice of pages by them (Quest, arXiv 2406.10774).
#include <numeric>
#include <utility>

#include "cache/checks.h"
#include "cache/on_device.h"
#include "device/cpu/isa.h"
#include "layout/normal_form.h"
#include "raddle/engine/kernel/cache/select.h"
#include "raddle/error.h"
#include "raddle/kv.h"

namespace raddle {
namespace {

constexpr const char* whose_pages = "whose pages have summaries";

SummaryBytes summary_bytes(const TensorRef& t) {
  const i64 bytes = dtype_bytes(t.dtype);
  return SummaryBytes{
      static_cast<u8*>(t.data),    step(t, 0) * bytes,
      step(t, 1) * bytes,          step(t, 2) * bytes,
      static_cast<i32>(dim(t, 3)), static_cast<i32>(std::min<i64>(dim(t, 0), int_max))};
}

/// One page that is summarised.
struct PageJob {
  i32 page, keys;
};

/// The pages to summarise, each once. Requests that share a page must mean the same keys.
std::vector<PageJob> pages_to_summarize(const SummarizeView& view, const LevelView& level,
                                        i64 pages) {
  std::vector<PageJob> jobs;
  std::vector<i32> known(static_cast<std::size_t>(pages), -1);  // keys of a page
  for (i32 i = 0; i < level.num_groups; ++i) {
    for (i32 nth = kv::first_summarized(view, level, i); nth < kv::pages_of_group(level, i);
         ++nth) {
      check_page(level, i, nth, pages, "is summarised");
      const PageJob job{level.blocks[level.block_begin[i] + nth], kv::keys_in_page(level, i, nth)};
      i32& keys = known[static_cast<std::size_t>(job.page)];
      if (keys >= 0 && keys != job.keys)
        fail<ValueError>("page_indices has page ", job.page, " with ", job.keys, " keys as page ",
                         nth, " of request ", i, "; expected ", keys,
                         ", as where another request shares it");
      if (keys < 0) jobs.push_back(job);
      keys = job.keys;
    }
  }
  return jobs;
}

/// The tensors of a choice suit one another and the layout; returns KV heads.
i64 check_select(const Layout& layout, const SelectArgs& args) {
  const TensorRef& q = args.q;
  const TensorRef& s = args.summary;
  check_tensor("summary", s, s.dtype, {-1, 2, -1, -1});
  if (has_8_bits(s.dtype))
    fail<TypeError>("summary is ", name_of(s.dtype), "; expected float32, float16 or bfloat16");
  check_tensor("q", q, s.dtype, {layout.num_rows(), -1, dim(s, 3)});
  check_head_dim("summary", dim(s, 3));
  const i64 kv_heads = dim(s, 2);
  if (kv_heads < 1 || dim(q, 1) % kv_heads != 0)
    fail<ValueError>("q has ", dim(q, 1), " heads; expected a multiple of ", kv_heads,
                     ", the heads of summary");
  if (args.num_selected < 1)
    fail<ValueError>("num_pages is ", args.num_selected, "; expected at least 1");
  return kv_heads;
}

/// The three results of `lists` lists lie apart, and from what is read.
void check_lists_apart(const SelectArgs& args, i64 lists) {
  const auto as_tensor = [&](i32* data) {
    TensorRef t;
    t.data = data;
    t.dtype = DType::float32;  // of as many bytes
    t.device = args.q.device;
    t.rank = 1;
    t.shape[0] = lists * args.num_selected;
    t.stride[0] = 1;
    return t;
  };
  const TensorRef pages = as_tensor(args.pages), pos = as_tensor(args.pos),
                  count = as_tensor(args.count);
  check_apart("pages", pages, "pos", pos);
  check_apart("pages", pages, "count", count);
  check_apart("pos", pos, "count", count);
  for (const auto& [name, t] : {std::pair{"pages", &pages}, {"pos", &pos}, {"count", &count}}) {
    check_apart(name, *t, "q", args.q);
    check_apart(name, *t, "summary", args.summary);
  }
}

/// Neighbouring pages of a list, which one thread scores.
struct ScorePart {
  i64 list;
  i32 begin, end;
};

/// The pages of a list's request.
i32 pages_of_list(const SelectView& view, const LevelView& level, i64 list) {
  return kv::pages_of_group(level, static_cast<i32>(list / kv::lists_of_request(view)));
}

/// A batch's rows as a scorer reads them.
struct ArrangedQueries {
  struct alignas(64) Line {
    u8 bytes[64];
  };
  i64 row_bytes;
  std::vector<Line> lines;

  ArrangedQueries(const PageScorer& scorer, const SelectView& view, i64 rows)
      : row_bytes(round_up<i64>(scorer.row_bytes(view), sizeof(Line))),
        lines(static_cast<std::size_t>(rows * row_bytes) / sizeof(Line)) {
    share_units(rows, row_bytes, [&](i64 begin, i64 end) {
      for (i64 row = begin; row < end; ++row)
        scorer.arrange(view, static_cast<i32>(row), lines.data()->bytes + row * row_bytes);
    });
  }
};

void score_part(const PageScorer& scorer, const SelectView& view, const ArrangedQueries& queries,
                const LayoutView& layout, const LevelView& level, const ScorePart& part) {
  const i32 lists = kv::lists_of_request(view);
  const i32 request = static_cast<i32>(part.list / lists);
  const i32 head = static_cast<i32>(part.list % lists);
  scorer.score(
      ScoreJob{&view, queries.lines.data()->bytes, queries.row_bytes, layout.qo_indptr[request],
               layout.qo_indptr[request + 1], head, head + kv::heads_of_list(view),
               level.blocks + level.block_begin[request] + part.begin, part.end - part.begin,
               view.scores + part.list * view.max_pages + part.begin});
}

/// Chooses among a list's scores. `order` is scratch.
void choose_pages(const SelectView& view, const LevelView& level, i64 list,
                  std::vector<u64>& order) {
  const i32 pages = pages_of_list(view, level, list);
  // Ascending: larger scores first, and earlier pages among equal ones.
  order.clear();
  for (i32 nth = 0; nth < pages; ++nth) {
    const bool kept = view.keep_last && nth == pages - 1;
    const u32 key = kept ? kv::kept_key : view.scores[list * view.max_pages + nth];
    order.push_back(u64{~key} << 32 | static_cast<u32>(nth));
  }
  const auto best = order.begin() + std::min(view.num_selected, pages);
  if (best != order.end()) std::nth_element(order.begin(), best, order.end());
  std::sort(order.begin(), best,
            [](u64 a, u64 b) { return static_cast<u32>(a) < static_cast<u32>(b); });
  const i32 request = static_cast<i32>(list / kv::lists_of_request(view));
  i32 rank = 0;
  for (auto it = order.begin(); it != best; ++it)
    kv::write_selected(view, level, request, list, rank++, static_cast<i32>(static_cast<u32>(*it)));
  while (rank < view.num_selected) kv::write_none(view, list, rank++);
}

/// Scores all pages of all lists, and chooses.
void select_on_host(SelectView view, const Layout& layout, DType dtype) {
  const LevelView& level = layout.view().levels[0];
  const i64 lists = i64{level.num_groups} * kv::lists_of_request(view);
  // Pages of a part are enough work to share, and few enough to share evenly.
  constexpr i32 pages_at_a_time = 64;
  std::vector<ScorePart> parts;
  for (i64 list = 0; list < lists; ++list)
    for (i32 begin = 0, pages = pages_of_list(view, level, list); begin < pages;
         begin += pages_at_a_time)
      parts.push_back(ScorePart{list, begin, std::min(pages, begin + pages_at_a_time)});
  std::vector<u32> scores(static_cast<std::size_t>(lists * view.max_pages));
  view.scores = scores.data();
  const PageScores& of = cpu::page_scores(cpu::selected_isa());
  const PageScorer& scorer = dtype == DType::float16    ? of.float16
                             : dtype == DType::bfloat16 ? of.bfloat16
                                                        : of.float32;
  const ArrangedQueries queries(scorer, view, layout.num_rows());
  const i64 page_bytes = 2 * i64{kv::heads_of_list(view)} * view.summary.dim * dtype_bytes(dtype);
  share_units(static_cast<i64>(parts.size()), pages_at_a_time * page_bytes,
              [&](i64 begin, i64 end) {
                for (i64 i = begin; i < end; ++i)
                  score_part(scorer, view, queries, layout.view(), level,
                             parts[static_cast<std::size_t>(i)]);
              });
  share_units(lists, view.max_pages * i64{sizeof(u64)}, [&](i64 begin, i64 end) {
    std::vector<u64> order;
    for (i64 list = begin; list < end; ++list) choose_pages(view, level, list, order);
  });
}

}  // namespace

void summarize_pages(const Layout& layout, const TensorRef& k_pool, const TensorRef& summary,
                     bool new_only, void* stream, const ScaleRef& k_scale) {
  const LevelView& level = check_page_table(layout, whose_pages);
  check_pool("pool.k", k_pool, layout);
  const HeadOrder order = layout.levels()[0].order;
  check_head_dim("pool.k", dim(k_pool, 3));
  const bool quantized = has_8_bits(k_pool.dtype);
  if (quantized && has_8_bits(summary.dtype))
    fail<TypeError>(
        "summary is ", name_of(summary.dtype),
        "; expected float32, float16 or bfloat16, the dtype of queries, where pool.k is "
        "quantised");
  check_output("summary", summary, quantized ? summary.dtype : k_pool.dtype,
               {-1, 2, dim(k_pool, pool_axes(order).head), dim(k_pool, 3)});
  check_apart("summary", summary, "pool.k", k_pool);
  const SummarizeView view{pool_bytes(k_pool, order), summary_bytes(summary),
                           pool_scale("k_scale", k_scale, "pool.k", k_pool, order), new_only};
  for (i32 i = 0; i < layout.num_requests(); ++i)
    if (new_only && kv::first_new_column(level, i) < 0)
      fail<ValueError>("kv_len[", i, "] is ", level.columns[i], "; expected at least ",
                       group_rows(level, i), ", the new rows of that request");
  const auto jobs = pages_to_summarize(view, level, std::min(dim(k_pool, 0), dim(summary, 0)));
  const DeviceId device = common_device({{"pool.k", k_pool}, {"summary", summary}});
  if (is_gpu(device))
    return cuda::summarize({device, stream}, layout, view, summary.dtype, k_pool.dtype);
  const i64 bytes = view.k.head_bytes * view.k.num_heads * level.block_size;
  share_units(static_cast<i64>(jobs.size()), bytes, [&](i64 begin, i64 end) {
    const auto summarize = [&](auto t, auto p) {
      for (i64 i = begin; i < end; ++i) {
        const PageJob& job = jobs[static_cast<std::size_t>(i)];
        for (i32 head = 0; head < view.k.num_heads; ++head)
          kv::summarize_page<decltype(t), decltype(p)>(kv::Alone{}, view, job.page, job.keys, head);
      }
    };
    dispatch_dtype(summary.dtype, [&](auto t) {
      dispatch_kv_dtype(k_pool.dtype, [&](auto p) {
        using P = decltype(p);
        // Keys that are not quantised have the summary's dtype.
        if constexpr (is_quantized<P>)
          summarize(t, p);
        else
          summarize(t, t);
      });
    });
  });
}

void select_pages(const Layout& layout, const SelectArgs& args) {
  const LevelView& level = check_page_table(layout, whose_pages);
  const i64 kv_heads = check_select(layout, args);
  i64 most = 0;
  for (i32 i = 0; i < level.num_groups; ++i) {
    const i32 pages = kv::pages_of_group(level, i);
    for (i32 nth = 0; nth < pages; ++nth)
      check_page(level, i, nth, dim(args.summary, 0), "may be selected");
    most = std::max<i64>(most, pages);
  }
  check_lists_apart(args, i64{level.num_groups} * (args.per_head ? kv_heads : 1));
  SelectView view{};
  view.summary = summary_bytes(args.summary);
  const i64 bytes = dtype_bytes(args.q.dtype);
  view.q = RowBytes{static_cast<const u8*>(args.q.data), step(args.q, 0) * bytes,
                    step(args.q, 1) * bytes};
  view.num_kv_heads = static_cast<i32>(kv_heads);
  view.group_size = static_cast<i32>(dim(args.q, 1) / kv_heads);
  view.per_head = args.per_head;
  view.keep_last = args.keep_last;
  view.num_selected = args.num_selected;
  view.max_pages = static_cast<i32>(most);
  view.pages = args.pages;
  view.pos = args.pos;
  view.count = args.count;
  const DeviceId device = common_device({{"q", args.q}, {"summary", args.summary}});
  if (is_gpu(device)) return cuda::select({device, args.stream}, layout, view, args.q.dtype);
  select_on_host(view, layout, args.q.dtype);
}

}  // namespace raddle

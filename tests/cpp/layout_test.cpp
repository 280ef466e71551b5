// Ragged tensors and page tables against brute force, and their errors.
#include <algorithm>
#include <numeric>

#include "layout_testing.h"
#include "raddle/variant.h"

namespace raddle {
namespace {

TEST_F(LayoutTest, RaggedKeysAreTheirRows) {
  const Ints qo = indptr(lengths(9, 0, 5)), kv = indptr(lengths(9, 0, 30));
  const LayoutPtr layout = ragged_kv({.qo_indptr = index_of(qo), .kv_indptr = index_of(kv)});
  const LevelView& level = layout->view().levels[0];
  EXPECT_EQ(level.blocks, nullptr);
  for (i32 g = 0; g < 9; ++g) {
    ASSERT_EQ(level.columns[g], kv[at(g + 1)] - kv[at(g)]);
    for (i32 c = 0; c < level.columns[g]; ++c) {
      expect_column(level, g, c, {kv[at(g)] + c, 0, c, c, true});
    }
  }
  expect_rows(*layout);
  EXPECT_EQ(layout->levels()[0].max_block, kv.back() - 1);
}

TEST_F(LayoutTest, PagesAreFoundByListAndByTable) {
  for (int repeat = 0; repeat < 20; ++repeat) {
    Table t = draw_table(draw(0, 12), [this](i32 a, i32 b) { return draw(a, b); });
    const LayoutPtr by_list = paged_kv(t.args());
    expect_pages(*by_list, t);
    expect_rows(*by_list);

    // The same as rows of a wider table, stale past each length.
    const i32 groups = static_cast<i32>(t.kv_len.size()), width = 102;
    Ints table(at(groups * width), -77);
    for (i32 g = 0; g < groups; ++g) {
      for (i32 j = 0; j < t.kv_len[at(g)]; ++j) {
        table[at(g * width + j / t.page_size)] = t.page(g, j);
      }
    }
    PagedArgs args = t.args();
    args.page_indptr = {};
    args.page_indices = IndexRef(static_cast<const i32*>(index_of(table).data), groups, 101, width);
    expect_pages(*paged_kv(args), t);
  }
}

TEST_F(LayoutTest, Int64AndStridedArraysAreNarrowed) {
  const Table t = draw_table(7, [this](i32 a, i32 b) { return draw(a, b); });
  const auto spread = [](const Ints& v) {
    std::vector<i64> wide;
    for (const i32 x : v) wide.insert(wide.end(), {x, i64{1} << 40});
    return wide;
  };
  const auto qo = spread(t.qo_indptr), kv = spread(t.kv_len), begin = spread(t.page_indptr),
             pages = spread(t.pages);
  const auto strided = [](const std::vector<i64>& v) {
    IndexRef r(v.data(), static_cast<i64>(v.size() / 2));
    r.stride[0] = 2;
    return r;
  };
  PagedArgs args = t.args();
  args.qo_indptr = strided(qo);
  args.kv_len = strided(kv);
  args.page_indptr = strided(begin);
  if (!t.pages.empty()) args.page_indices = strided(pages);
  expect_pages(*paged_kv(args), t);
}

TEST_F(LayoutTest, ExtremesOfUsedPagesAreKnown) {
  // 40 pages, of which the last 3 of request 1 are beyond its length.
  Table t{4, {0, 1, 2}, {100, 48}, {0, 25, 40}, Ints(40)};
  std::iota(t.pages.begin(), t.pages.end(), 10);
  t.pages[38] = 999;
  t.pages[7] = -1;
  const Level level = paged_kv(t.args())->levels()[0];
  EXPECT_EQ(level.min_block, -1);
  EXPECT_EQ(level.max_block, 46);
}

TEST_F(LayoutTest, KvBeginShiftsIndices) {
  const Table t = draw_table(5, [this](i32 a, i32 b) { return draw(a, b); });
  const Ints begin = lengths(5, 0, 50);
  PagedArgs args = t.args();
  args.kv_begin = index_of(begin);
  const LayoutPtr layout = paged_kv(args);
  expect_pages(*layout, t, begin);
  expect_rows(*layout);
  for (i32 g = 0; g < 5; ++g) {
    EXPECT_EQ(layout->view().kv_len[g], begin[at(g)] + t.kv_len[at(g)]);
  }
}

TEST_F(LayoutTest, PositionsOfRowsAreTheCallers) {
  const Table t = draw_table(5, [this](i32 a, i32 b) { return draw(a, b); });
  const Ints positions = lengths(t.qo_indptr.back(), -9, 500);
  PagedArgs args = t.args();
  args.qo_pos = index_of(positions);
  expect_rows(*paged_kv(args), positions);
}

TEST_F(LayoutTest, DiscoveredPrefixesHoldTheSameKeys) {
  i32 prefixes = 0;
  for (int repeat = 0; repeat < 40; ++repeat) {
    Table t = draw_table(draw(1, 9), [this](i32 a, i32 b) { return draw(a, b); });
    for (std::size_t g = 1; g < t.kv_len.size(); ++g)  // lists that begin as the one before
      for (i32 p = 0, n = draw(0, 9); p < n; ++p)
        if (t.page_indptr[g] + p < t.page_indptr[g + 1] &&
            t.page_indptr[g - 1] + p < t.page_indptr[g])
          t.pages[at(t.page_indptr[g] + p)] = t.pages[at(t.page_indptr[g - 1] + p)];
    PagedArgs args = t.args();
    args.min_prefix = draw(1, 40);
    const LayoutPtr layout = paged_kv(args);
    expect_rows(*layout);
    const LevelView &first = layout->view().levels[0], &last = layout->view().levels[1];
    ASSERT_TRUE(first.keys_are_shared && first.rows && last.kv_begin && last.groups_are_requests);
    std::vector<i32> shared(t.kv_len.size(), 0);
    for (i32 g = 0; g < first.num_groups; ++g, ++prefixes) {
      ASSERT_GE(first.columns[g], args.min_prefix);
      for (i32 i = 0; i < group_rows(first, g); ++i) {
        const i32 r = layout->view().row_request[query_row(first, g, i)];
        shared[at(r)] = first.columns[g];
        for (i32 c = 0; c < first.columns[g]; ++c)
          expect_column(first, g, c, {t.page(r, c), c % t.page_size, c, c, true});
      }
    }
    for (i32 r = 0; r < last.num_groups; ++r) {
      ASSERT_EQ(last.columns[r] + shared[at(r)], t.kv_len[at(r)]);
      for (i32 c = 0; c < last.columns[r]; ++c) {
        const i32 j = c + shared[at(r)];
        expect_column(last, r, c, {t.page(r, j), j % t.page_size, j, j, true});
      }
    }
  }
  EXPECT_GT(prefixes, 10);
}

TEST_F(LayoutTest, ErrorsNameWhatIsWrong) {
  const Table good{16, {0, 1, 2}, {100, 10}, {0, 7, 8}, Ints(8, 3)};
  const auto refused = [](const std::string& words, const Table& t) {
    expect_error(words, [&] { paged_kv(t.args()); });
  };
  EXPECT_NO_THROW(paged_kv(good.args()));
  Table t = good;
  t.page_indptr = {0, 5, 8};
  refused("page_indptr[0]..[1] lists 5 pages; kv_len[0] = 100 at page_size 16 needs 7", t);
  t = good;
  t.qo_indptr = {0, 2, 1};
  refused("qo_indptr[2] is 1 after 2", t);
  t = good;
  t.qo_indptr = {1, 1, 2};
  refused("qo_indptr[0] is 1; expected 0", t);
  t = good;
  t.kv_len = {100, -1};
  refused("kv_len[1] is -1", t);
  t = good;
  t.kv_len = {100};
  refused("kv_len has 1 entries; expected 2", t);
  t = good;
  t.page_size = 0;
  refused("page_size is 0", t);
  t = good;
  t.pages[3] = -2;
  refused("page_indices holds -2", t);
  t = good;
  t.pages.pop_back();
  refused("page_indices has 7 entries; expected at least 8", t);
  t = good;
  t.kv_len = {2147418111, 10};
  refused("needs 134213632", t);
  const Ints three{0, 1, 2}, two{0, 5};
  expect_error("kv_indptr has 2 entries; expected 3",
               [&] { ragged_kv({.qo_indptr = index_of(three), .kv_indptr = index_of(two)}); });
  expect_error("levels is empty", [] { cascade({}); });
  expect_error("levels[0] is missing", [] { cascade({nullptr}); });
  expect_error("layout is missing", [] { page_table_to_bsr(nullptr); });
}

TEST(Arrays, HaveTheirShapesElements) {
  EXPECT_EQ(Array<float>({1, 2, 3, 4, 5, 6}, {2, 3}).size(), 6u);
  expect_error("shape is [10000000, 4]; expected one of 2 elements", [] {
    Array<float>({1, 2}, {10000000, 4});
  });
  expect_error("shape is [-1, -2]; expected one of 2 elements", [] {
    Array<float>({1, 2}, {-1, -2});
  });
}

}  // namespace
}  // namespace raddle

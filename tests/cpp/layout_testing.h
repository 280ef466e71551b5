// What the layout tests share: drawn page tables, and what rows and columns must be.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "raddle/error.h"
#include "raddle/layout.h"
#include "test_seed.h"

namespace raddle {

using Ints = std::vector<i32>;

inline IndexRef index_of(const Ints& v) {
  static const i32 none = 0;
  return {v.empty() ? &none : v.data(), static_cast<i64>(v.size())};
}

inline std::size_t at(i64 i) { return static_cast<std::size_t>(i); }

class LayoutTest : public testing::Test {
 protected:
  void SetUp() override {
    const u32 seed = test_seed();
    trace_.emplace(__FILE__, __LINE__, seed_text(seed));
    random_.seed(seed);
  }

  i32 draw(i32 low, i32 high) { return std::uniform_int_distribution<i32>(low, high)(random_); }
  Ints lengths(i32 n, i32 low, i32 high) {
    Ints v(at(n));
    for (i32& x : v) x = draw(low, high);
    return v;
  }

  std::mt19937 random_;

 private:
  std::optional<testing::ScopedTrace> trace_;
};

inline Ints indptr(const Ints& lengths) {
  Ints v{0};
  for (const i32 n : lengths) v.push_back(v.back() + n);
  return v;
}

/// A page table of random lengths, with the arrays that it borrows.
struct Table {
  i32 page_size = 1;
  Ints qo_indptr, kv_len, page_indptr, pages;

  PagedArgs args() const {
    PagedArgs a;
    a.qo_indptr = index_of(qo_indptr);
    a.page_indptr = index_of(page_indptr);
    a.page_indices = index_of(pages);
    a.kv_len = index_of(kv_len);
    a.page_size = page_size;
    return a;
  }
  i32 page(i32 group, i32 key) const { return pages[at(page_indptr[at(group)] + key / page_size)]; }
};

template <class Draw>
Table draw_table(i32 groups, Draw draw) {
  Table t;
  t.page_size = draw(1, 20);
  Ints qo_len, counts;
  for (i32 g = 0; g < groups; ++g) {
    qo_len.push_back(draw(0, 4));
    t.kv_len.push_back(draw(0, 100));
    counts.push_back((t.kv_len.back() + t.page_size - 1) / t.page_size + draw(0, 2));
  }
  t.qo_indptr = indptr(qo_len);
  t.page_indptr = indptr(counts);
  for (i32 i = 0; i < t.page_indptr.back(); ++i) t.pages.push_back(draw(0, 1000));
  return t;
}

inline void expect_column(const LevelView& level, i32 group, i32 c, const Column& expected) {
  const Column found = column_at(level, group, c);
  ASSERT_EQ(found.block, expected.block) << "group " << group << ", column " << c;
  ASSERT_EQ(found.offset, expected.offset) << "group " << group << ", column " << c;
  ASSERT_EQ(found.kv_index, expected.kv_index) << "group " << group << ", column " << c;
  ASSERT_EQ(found.kv_pos, expected.kv_pos) << "group " << group << ", column " << c;
  ASSERT_EQ(found.valid, expected.valid) << "group " << group << ", column " << c;
}

inline void expect_pages(const Layout& layout, const Table& t, const Ints& begin = {}) {
  const LevelView& level = layout.view().levels[0];
  ASSERT_EQ(level.num_groups, static_cast<i32>(t.kv_len.size()));
  for (i32 g = 0; g < level.num_groups; ++g) {
    ASSERT_EQ(level.columns[g], t.kv_len[at(g)]);
    for (i32 j = 0; j < t.kv_len[at(g)]; ++j) {
      const i32 index = j + (begin.empty() ? 0 : begin[at(g)]);
      expect_column(level, g, j, {t.page(g, j), j % t.page_size, index, index, true});
    }
  }
}

/// What every row of the layout must be: its request, its index, its position.
inline void expect_rows(const Layout& layout, const Ints& qo_pos = {}) {
  const LayoutView& view = layout.view();
  const i32 group_size = 3, kv_head = 2;
  for (i32 l = 0; l < view.num_levels; ++l) {
    const LevelView& level = view.levels[l];
    for (i32 g = 0; g < level.num_groups; ++g) {
      for (i32 fused = 0; fused < group_rows(level, g) * group_size; ++fused) {
        const Row row = make_row(view, level, g, fused, kv_head, group_size);
        ASSERT_EQ(row.row, query_row(level, g, fused / group_size));
        ASSERT_LE(view.qo_indptr[row.request], row.row);
        ASSERT_LT(row.row, view.qo_indptr[row.request + 1]);
        ASSERT_EQ(row.qo_len, view.qo_indptr[row.request + 1] - view.qo_indptr[row.request]);
        ASSERT_EQ(row.kv_len, view.kv_len[row.request]);
        ASSERT_EQ(row.q_index, row.kv_len - row.qo_len + row.row - view.qo_indptr[row.request]);
        ASSERT_EQ(row.q_pos, qo_pos.empty() ? row.q_index : qo_pos[at(row.row)]);
        ASSERT_EQ(row.q_head, kv_head * group_size + fused % group_size);
      }
    }
  }
}

inline void expect_error(const std::string& words, const std::function<void()>& call) {
  try {
    call();
    FAIL() << "no error; expected " << words;
  } catch (const ValueError& e) {
    EXPECT_NE(std::string(e.what()).find(words), std::string::npos)
        << "error: " << e.what() << "\nexpected: " << words;
  }
}

}  // namespace raddle

// Block-sparse matrices, cascades and conversions against brute force.
#include <algorithm>
#include <numeric>

#include "layout_testing.h"

namespace raddle {
namespace {

TEST_F(LayoutTest, BlockColumnsAreKeys) {
  for (int repeat = 0; repeat < 20; ++repeat) {
    const i32 br = draw(1, 4), bc = draw(1, 9), rows = draw(0, 12), cols = draw(1, 60);
    const i32 row_blocks = (rows + br - 1) / br, col_blocks = (cols + bc - 1) / bc;
    Ints counts, indices;
    for (i32 b = 0; b < row_blocks; ++b) {
      Ints kept(at(col_blocks));
      std::iota(kept.begin(), kept.end(), 0);
      std::shuffle(kept.begin(), kept.end(), random_);
      counts.push_back(draw(0, col_blocks));
      indices.insert(indices.end(), kept.begin(), kept.begin() + counts.back());
    }
    const Ints begin = indptr(counts);
    BlockSparseArgs args;
    args.block_rows = br;
    args.block_cols = bc;
    args.indptr = index_of(begin);
    args.indices = index_of(indices);
    args.num_rows = rows;
    args.num_cols = cols;
    const LayoutPtr layout = block_sparse(args);
    const LevelView& level = layout->view().levels[0];
    expect_rows(*layout);
    for (i32 b = 0; b < row_blocks; ++b) {
      EXPECT_EQ(group_rows(level, b), std::min(br, rows - b * br));
      // Every key of the listed blocks once, in list order, and nothing past the last column.
      Ints expected, found;
      for (i32 e = begin[at(b)]; e < begin[at(b + 1)]; ++e) {
        for (i32 c = indices[at(e)] * bc; c < std::min(cols, (indices[at(e)] + 1) * bc); ++c) {
          expected.push_back(c);
        }
      }
      for (i32 c = 0; c < level.columns[b]; ++c) {
        const Column column = column_at(level, b, c);
        if (!column.valid) continue;
        EXPECT_EQ(column.kv_index, column.block * bc + column.offset);
        EXPECT_EQ(column.kv_pos, column.kv_index);
        found.push_back(column.kv_index);
      }
      EXPECT_EQ(found, expected);
    }
  }
}

TEST_F(LayoutTest, ExplicitBlocksCountInListOrder) {
  const Ints begin{0, 3, 4}, indices{5, -1, 7, 2}, pos{100, 0, 40, 9}, first{2, 0, 0, 1},
      count{2, 4, 1, 3};
  BlockSparseArgs args;
  args.block_cols = 4;
  args.indptr = index_of(begin);
  args.indices = index_of(indices);
  args.num_rows = 2;
  args.block_pos = index_of(pos);
  args.block_first = index_of(first);
  args.block_count = index_of(count);
  const LayoutPtr layout = block_sparse(args);
  const LevelView& level = layout->view().levels[0];
  EXPECT_EQ(layout->view().kv_len[0], 7);
  EXPECT_EQ(layout->levels()[0].min_block, -1);
  EXPECT_EQ(level.columns[0], 9);
  EXPECT_EQ(level.columns[1], 3);
  expect_column(level, 0, 0, {5, 2, 0, 100, true});
  expect_column(level, 0, 1, {5, 3, 1, 101, true});
  EXPECT_FALSE(column_at(level, 0, 2).valid);
  expect_column(level, 0, 4, {-1, 0, 2, 0, true});
  expect_column(level, 0, 8, {7, 0, 6, 40, true});
  expect_column(level, 1, 2, {2, 3, 2, 11, true});
}

TEST_F(LayoutTest, ACascadeCountsKeysOverLevels) {
  // Requests of 1, 2 and 1 rows; rows 0, 2 and 3 share 16 keys, row 1 has none of them and the
  // second request therefore cannot share. So rows 0 and 3 share.
  const Ints rows{3, 0}, prefix_qo{0, 2}, prefix_pages{0, 2}, prefix_list{8, 9}, prefix_len{16};
  PagedArgs prefix;
  prefix.qo_indptr = index_of(prefix_qo);
  prefix.page_indptr = index_of(prefix_pages);
  prefix.page_indices = index_of(prefix_list);
  prefix.kv_len = index_of(prefix_len);
  prefix.page_size = 8;
  prefix.qo_rows = index_of(rows);
  Table t{8, {0, 1, 3, 4}, {5, 20, 0}, {0, 1, 4, 4}, {1, 2, 3, 4}};
  const LayoutPtr layout = cascade({paged_kv(prefix), paged_kv(t.args())});
  const LayoutView& view = layout->view();
  EXPECT_EQ(Ints(view.kv_len, view.kv_len + 3), (Ints{21, 20, 16}));
  EXPECT_EQ(Ints(view.row_request, view.row_request + 4), (Ints{0, 1, 1, 2}));
  EXPECT_FALSE(view.levels[0].groups_are_requests);
  EXPECT_TRUE(view.levels[1].groups_are_requests);
  expect_rows(*layout);
  expect_column(view.levels[0], 0, 9, {9, 1, 9, 9, true});
  expect_column(view.levels[1], 0, 4, {1, 4, 20, 20, true});
  expect_column(view.levels[1], 1, 0, {2, 0, 0, 0, true});

  const Ints right{16, 0, 16}, wrong{16, 16, 16};
  PagedArgs args = t.args();
  args.kv_begin = index_of(right);
  expect_column(cascade({paged_kv(prefix), paged_kv(args)})->view().levels[1], 0, 4,
                {1, 4, 20, 20, true});
  args.kv_begin = index_of(wrong);
  expect_error("levels[1]: kv_begin[1] is 16; expected 0", [&] {
    cascade({paged_kv(prefix), paged_kv(args)});
  });
  // With gaps, the keys before kv_begin lie elsewhere, and count.
  const LayoutPtr gaps = cascade({paged_kv(prefix), paged_kv(args)}, true);
  EXPECT_EQ(gaps->view().levels[1].kv_begin[1], 16);
  EXPECT_EQ(gaps->view().kv_len[1], 16 + layout->view().kv_len[1]);
  const Ints early{0, 0, 16};
  args.kv_begin = index_of(early);
  expect_error("levels[1]: kv_begin[0] is 0; expected at least 16", [&] {
    cascade({paged_kv(prefix), paged_kv(args)}, true);
  });
}

TEST_F(LayoutTest, RowsOfARequestNeedEqualKeys) {
  const Ints qo{0, 2}, half{1}, half_qo{0, 1}, one{0, 1}, page{0}, len{4}, none{0}, no_pages{0, 0};
  PagedArgs prefix;
  prefix.qo_indptr = index_of(half_qo);
  prefix.page_indptr = index_of(one);
  prefix.page_indices = index_of(page);
  prefix.kv_len = index_of(len);
  prefix.qo_rows = index_of(half);
  PagedArgs last;
  last.qo_indptr = index_of(qo);
  last.page_indptr = index_of(no_pages);
  last.page_indices = index_of(page);
  last.kv_len = index_of(none);
  expect_error("group 0 holds rows 0 and 1", [&] { cascade({paged_kv(prefix), paged_kv(last)}); });
}

TEST_F(LayoutTest, APageTableAsBsrHasTheSameKeys) {
  const Table t = draw_table(6, [this](i32 a, i32 b) { return draw(a, b); });
  const LayoutPtr pages = paged_kv(t.args()), bsr = page_table_to_bsr(pages);
  const LevelView& level = bsr->view().levels[0];
  EXPECT_EQ(level.num_groups, t.qo_indptr.back());
  expect_rows(*bsr);
  for (i32 g = 0; g < level.num_groups; ++g) {
    const i32 request = bsr->view().row_request[g];
    ASSERT_EQ(level.columns[g], t.kv_len[at(request)]);
    for (i32 j = 0; j < level.columns[g]; ++j) {
      expect_column(level, g, j, {t.page(request, j), j % t.page_size, j, j, true});
    }
  }
  expect_error("not a plain page table", [&] { page_table_to_bsr(bsr); });
}

TEST_F(LayoutTest, DenseMasksAreBlocks) {
  for (int repeat = 0; repeat < 20; ++repeat) {
    const i32 rows = draw(0, 11), cols = draw(0, 23), br = draw(1, 4), bc = draw(1, 6);
    const i32 density = draw(0, 100);
    std::vector<u8> mask(at(rows * cols));
    for (u8& keep : mask) keep = draw(0, 99) < density ? static_cast<u8>(draw(1, 255)) : u8{0};
    const Bsr bsr = dense_mask_to_bsr(mask.data(), rows, cols, br, bc);
    std::vector<u8> found(mask.size(), 0);
    for (i32 b = 0; b + 1 < static_cast<i32>(bsr.indptr.size()); ++b) {
      for (i32 e = bsr.indptr[at(b)]; e < bsr.indptr[at(b + 1)]; ++e) {
        for (i32 i = 0; i < br * bc; ++i) {
          const i32 row = b * br + i / bc, col = bsr.indices[at(e)] * bc + i % bc;
          const i64 bit = i64{e} * br * bc + i;
          const bool keep = bsr.mask_bits.empty() || (bsr.mask_bits[at(bit / 8)] >> (bit % 8)) & 1;
          if (row < rows && col < cols) found[at(row * cols + col)] = keep;
        }
      }
    }
    for (std::size_t i = 0; i < mask.size(); ++i) ASSERT_EQ(found[i], mask[i] != 0) << i;
  }
}

TEST_F(LayoutTest, RowBlocksOfUnequalRequestsAreRefusedPastTheShorter) {
  const Ints begin{0, 1}, indices{1}, qo{0, 1, 2}, kv{6, 9};
  BlockSparseArgs args;
  args.block_rows = 2;
  args.block_cols = 4;
  args.indptr = index_of(begin);
  args.indices = index_of(indices);
  args.qo_indptr = index_of(qo);
  args.kv_len = index_of(kv);
  expect_error("row block 0 holds requests with kv_len 6 and 9", [&] { block_sparse(args); });
  const Ints early{0};
  args.indices = index_of(early);
  const LayoutPtr layout = block_sparse(args);
  EXPECT_EQ(layout->view().levels[0].columns[0], 4);
  expect_rows(*layout);
}

}  // namespace
}  // namespace raddle

// Other formats' contents as block-sparse matrices.
#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "raddle/error.h"
#include "raddle/layout.h"

namespace raddle {

LayoutPtr page_table_to_bsr(const LayoutPtr& layout) {
  if (!layout) fail<ValueError>("layout is missing");
  const std::vector<Level>& from = layout->levels();
  if (from.size() != 1 || from[0].storage != KvStorage::paged || !from[0].rows.empty()) {
    fail<ValueError>("layout is not a plain page table: expected one PagedKV without qo_rows");
  }
  const Level& pages = from[0];
  const LayoutView& view = layout->view();
  const auto rows = static_cast<std::size_t>(view.num_rows);
  std::vector<i32> row_request(rows);
  Level level;
  level.storage = KvStorage::blocks;
  level.order = pages.order;
  level.block_size = pages.block_size;
  level.groups_are_requests = false;
  level.row_indptr.resize(rows + 1);
  std::iota(level.row_indptr.begin(), level.row_indptr.end(), 0);
  level.columns.resize(rows);
  level.block_begin.resize(rows);
  if (!pages.kv_begin.empty()) level.kv_begin.resize(rows);
  // The row blocks of a request share one stored list of blocks.
  level.blocks = pages.blocks;
  level.min_block = pages.min_block;
  level.max_block = pages.max_block;
  for (i32 request = 0; request < view.num_requests; ++request) {
    const auto g = static_cast<std::size_t>(request);
    for (i32 row = view.qo_indptr[request]; row < view.qo_indptr[request + 1]; ++row) {
      const auto r = static_cast<std::size_t>(row);
      row_request[r] = request;
      level.columns[r] = pages.columns[g];
      level.block_begin[r] = pages.block_begin[g];
      if (!pages.kv_begin.empty()) level.kv_begin[r] = pages.kv_begin[g];
    }
  }
  std::vector<i32> qo_pos;
  if (view.qo_pos) qo_pos.assign(view.qo_pos, view.qo_pos + view.num_rows);
  return std::make_shared<const Layout>(
      std::vector<i32>(view.qo_indptr, view.qo_indptr + view.num_requests + 1),
      std::vector<i32>(view.kv_len, view.kv_len + view.num_requests), std::move(qo_pos),
      std::move(row_request), std::vector<Level>{std::move(level)});
}

namespace {

/// A block of a dense mask; it is cut short at the mask's edges.
struct MaskBlock {
  const u8* first;
  i64 row_stride;
  i64 rows, cols;

  bool at(i64 r, i64 c) const { return first[r * row_stride + c] != 0; }
  i64 kept() const {
    i64 sum = 0;
    for (i64 r = 0; r < rows; ++r) {
      for (i64 c = 0; c < cols; ++c) sum += at(r, c);
    }
    return sum;
  }
};

void append_bits(const MaskBlock& block, i64 entry, i32 block_rows, i32 block_cols,
                 std::vector<u8>& bits) {
  const i64 end = (entry + 1) * block_rows * block_cols;
  bits.resize(static_cast<std::size_t>((end + 7) / 8), u8{0});
  for (i64 r = 0; r < block.rows; ++r) {
    for (i64 c = 0; c < block.cols; ++c) {
      const i64 bit = (entry * block_rows + r) * block_cols + c;
      u8& byte = bits[static_cast<std::size_t>(bit / 8)];
      byte = static_cast<u8>(byte | static_cast<u8>(block.at(r, c) << (bit % 8)));
    }
  }
}

}  // namespace

Bsr dense_mask_to_bsr(const u8* mask, i64 rows, i64 cols, i32 block_rows, i32 block_cols) {
  if (block_rows < 1) fail<ValueError>("Br is ", block_rows, "; expected at least 1");
  if (block_cols < 1) fail<ValueError>("Bc is ", block_cols, "; expected at least 1");
  if (rows < 0 || cols < 0 || std::max(rows, cols) > std::numeric_limits<i32>::max()) {
    fail<ValueError>("mask has shape [", rows, ", ", cols, "]; expected at most 2^31 - 1 each");
  }
  Bsr bsr{{0}, {}, {}};
  std::vector<u8> bits;
  bool any_partial = false;
  for (i64 r = 0; r < rows; r += block_rows) {
    for (i64 c = 0; c < cols; c += block_cols) {
      const MaskBlock block{mask + r * cols + c, cols, std::min<i64>(block_rows, rows - r),
                            std::min<i64>(block_cols, cols - c)};
      const i64 kept = block.kept();
      if (kept == 0) continue;
      any_partial |= kept < block.rows * block.cols;
      append_bits(block, static_cast<i64>(bsr.indices.size()), block_rows, block_cols, bits);
      bsr.indices.push_back(static_cast<i32>(c / block_cols));
    }
    bsr.indptr.push_back(static_cast<i32>(bsr.indices.size()));
  }
  if (any_partial) bsr.mask_bits = std::move(bits);
  return bsr;
}

}  // namespace raddle

// Layouts: what attends to what. Each constructor checks its arguments, copies them, and brings
// them into the engine's normal form (engine/layout/layout.h); `Attention::plan` decides how the
// work is done.
//
// Common words: `qo_indptr` [requests + 1] are the requests' first rows in the ragged query tensor.
// All constructors raise ValueError naming the argument, what was found and what was expected.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "raddle/engine/layout/layout.h"
#include "raddle/tensor.h"

namespace raddle {

/// How a level's K and V rows are stored, and what `run` checks of the tensors.
enum class KvStorage : i32 {
  ragged,  ///< [rows, Hkv, D]
  paged,   ///< [pages, page_size, Hkv, D] (NHD) or [pages, Hkv, page_size, D] (HND)
  blocks   ///< rows [slots, Hkv, D] addressed in blocks of Bc, or [blocks, Bc, Hkv, D]
};

enum class HeadOrder : i32 { nhd, hnd };

/// Most keys of a request: the planner rounds them up to whole tiles and adds them to positions, in
/// 32 bits.
constexpr i32 longest_request = 0x7fffffff - (1 << 16);

/// One level with the arrays it owns. Immutable once a Layout holds it.
struct Level {
  KvStorage storage = KvStorage::ragged;
  HeadOrder order = HeadOrder::nhd;
  i32 block_size = 1;
  i32 block_rows = 1;
  i32 page_size = 0;  ///< of pages of which a block is one row, block_first's; 0: a page is a block
  bool groups_are_requests = true;
  bool keys_are_shared = false;  ///< of several requests; a Layout finds out where it is false
  std::vector<i32> row_indptr, rows, columns, kv_begin, block_begin, blocks;
  std::vector<i32> block_index, block_pos, block_first, block_count;
  std::vector<u8> mask_bits;
  i32 min_block = 0;  ///< smallest and largest used entry of `blocks` (of the KV rows when ragged)
  i32 max_block = -1;
  i64 max_slot = -1;  ///< largest KV slot that is read; known once a Layout holds the level

  LevelView view() const;
};

class LayoutCopies;

/// An immutable layout, shared by the plans made from it.
class Layout {
 public:
  Layout(std::vector<i32> qo_indptr, std::vector<i32> kv_len, std::vector<i32> qo_pos,
         std::vector<i32> row_request, std::vector<Level> levels);
  ~Layout();
  Layout(const Layout&) = delete;  // its view points into its own arrays
  Layout& operator=(const Layout&) = delete;

  const LayoutView& view() const { return view_; }
  const std::vector<Level>& levels() const { return levels_; }
  const std::vector<i32>& qo_indptr() const { return qo_indptr_; }
  const std::vector<i32>& kv_len() const { return kv_len_; }
  const std::vector<i32>& qo_pos() const { return qo_pos_; }
  const std::vector<i32>& row_request() const { return row_request_; }
  i32 num_requests() const { return view_.num_requests; }
  i32 num_rows() const { return view_.num_rows; }
  /// What GPUs that have met it keep of it.
  LayoutCopies& copies() const { return *copies_; }

 private:
  std::vector<i32> qo_indptr_, kv_len_, qo_pos_, row_request_;
  std::vector<Level> levels_;
  std::vector<LevelView> level_views_;
  LayoutView view_{};
  std::shared_ptr<LayoutCopies> copies_;
};

using LayoutPtr = std::shared_ptr<const Layout>;

struct RaggedArgs {
  IndexRef qo_indptr;      ///< [requests + 1]
  IndexRef kv_indptr;      ///< [requests + 1]; empty: kv_first and kv_len say where keys are
  IndexRef qo_pos = {};    ///< [rows] positions of the query rows; empty: their index
  IndexRef kv_first = {};  ///< [requests] row of the first key
  IndexRef kv_len = {};    ///< [requests] keys
  IndexRef kv_begin = {};  ///< [requests] kv_index of the first key; empty: 0
};

/// K and V as ragged tensors [tokens, Hkv, D]: request i's keys are rows kv_indptr[i] …
/// kv_indptr[i+1], or the kv_len[i] rows from kv_first[i] on, which requests may share.
LayoutPtr ragged_kv(const RaggedArgs& args);

struct PagedArgs {
  IndexRef qo_indptr;  ///< [groups + 1]
  IndexRef
      page_indptr;  ///< [groups + 1] into page_indices; empty when page_indices is a padded table
  IndexRef page_indices;  ///< [entries], or a padded block table [groups, max_pages]; entries past
                          ///< a row's length are never read
  IndexRef kv_len;        ///< [groups] keys (of this level, in a cascade)
  i32 page_size = 16;
  HeadOrder order = HeadOrder::nhd;
  IndexRef kv_begin;  ///< [groups] kv_index of the first key; empty: 0. For levels of a cascade
  IndexRef qo_rows;   ///< [qo_indptr[groups]] query rows of the groups, when they aren't adjacent;
                      ///< levels of a cascade only
  IndexRef qo_pos;    ///< [rows] positions of the query rows; empty: their index
  /// Above 0: leading pages that requests share, of at least so many tokens, become a level of
  /// their own, and the layout has two. Not with kv_begin or qo_rows.
  i32 min_prefix = 0;
  i32 num_rows = -1;  ///< at most so many query rows; -1: as many as qo_indptr has, which on a
                      ///< device are at most a reservation's
};

/// A page table: key j of request i is row j % page_size of page page_indices[page_indptr[i] + j /
/// page_size].
LayoutPtr paged_kv(const PagedArgs& args);

/// A good `min_prefix`: composing two states costs a row less than reading so many keys once more.
constexpr i32 default_min_prefix = 512;

/// A page table that only a GPU knows. The planner kernel reads it when a reservation is updated
/// with it, and again at every replay of a graph that captured the update. Its shapes are known.
struct DeviceLayout;
using DeviceLayoutPtr = std::shared_ptr<const DeviceLayout>;

/// As PagedArgs, in the memory of one GPU: int32, contiguous but for the rows of a block table.
/// Without kv_begin, qo_rows and qo_pos.
struct DevicePagedArgs : PagedArgs {
  IndexRef num_requests;  ///< [1] how many of the requests there are; empty: all
  i32 num_pages = 0;      ///< of the pools: entries are below it, and are checked. 0: they are not
  /// Kept as long as the layout: what keeps the arrays, which are borrowed, alive.
  std::shared_ptr<const void> owner;
};

/// The page table of paged_kv. Raises TypeError and ValueError as the other layouts; what the
/// arrays hold is checked on the device (Reservation::check).
DeviceLayoutPtr device_paged_kv(const DevicePagedArgs& args);

struct BlockSparseArgs {
  i32 block_rows = 1;  ///< Br
  i32 block_cols = 1;  ///< Bc
  IndexRef indptr;     ///< [ceil(rows / Br) + 1]
  IndexRef indices;    ///< [blocks] block columns: slots index * Bc … of K and V
  IndexRef qo_indptr;  ///< [requests + 1]; empty: one request of all rows (num_rows)
  IndexRef kv_len;     ///< [requests]; empty: num_cols for every request
  i64 num_rows = -1;   ///< rows of Q; may be -1 when qo_indptr is given
  i64 num_cols =
      -1;  ///< slots of K and V that count; -1: no bound. A last block may be cut short by it
  const u8* mask_bits =
      nullptr;  ///< [blocks, Br, Bc] bits, LSB first, packed without padding; null: all kept
  i64 mask_bytes = 0;
  /// Explicit blocks, all three or none: position of the first key, first row used, and count of
  /// keys. Their keys count in list order (kv_index). Without them key (column) c has index and
  /// position c.
  IndexRef block_pos, block_first, block_count;
  IndexRef kv_begin;  ///< [row blocks] see PagedArgs; levels of a cascade only
  IndexRef qo_pos;
  HeadOrder order = HeadOrder::nhd;  ///< of K and V given as [blocks, …]; hnd: [blocks, Hkv, Bc, D]
};

/// A block-sparse row matrix over the rows of Q and the slots of K and V.
LayoutPtr block_sparse(const BlockSparseArgs& args);

/// Composable formats: several levels over the same query rows, disjoint in keys, composed by ⊕.
/// The last level's groups are the requests, in order; a request's kv_len is the sum over the
/// levels that hold it. With `allow_gaps` a level may begin behind where the one before ends, by
/// its kv_begin: keys between the two lie elsewhere, such as on another machine, and count.
LayoutPtr cascade(const std::vector<LayoutPtr>& levels, bool allow_gaps = false);

/// Trees of drafted tokens, of each request the newest keys: node n of request i's is its row n,
/// and key kv_len - qo_len + n of its page table. A row sees the whole text before the tree, and of
/// the tree what `parents` or the mask say. Without kv_begin, qo_rows and min_prefix.
struct TokenTreeArgs : PagedArgs {
  /// [rows] each node's parent, an earlier node of its request, or -1: a row sees itself and its
  /// ancestors.
  IndexRef parents;
  /// Instead of parents: for request i a matrix [qo_len, qo_len] of bits from byte mask_indptr[i]
  /// on, row-major, LSB first, of ceil(qo_len² / 8) bytes.
  const u8* mask_bits = nullptr;
  i64 mask_bytes = 0;
  IndexRef mask_indptr;  ///< [requests + 1]
  /// Nodes of the largest tree that a reservation's layouts will have; 0: those of this one.
  i32 max_nodes = 0;
};

struct TokenTree {
  LayoutPtr layout;  ///< to plan: two levels, the text and the tree
  LayoutPtr pages;   ///< the page table with the nodes' positions, for append_kv and accept_tree
  std::vector<i32> parents;  ///< for accept_tree; empty where a mask is no tree
};

/// Positions, of rows and of nodes' keys alike, are qo_pos, by default the tokens before the tree
/// plus the depth in it: how many other nodes a row sees.
TokenTree token_tree(const TokenTreeArgs& args);

/// The same attention as `layout` (one level, plain page table) as a BSR matrix with Br = 1 row
/// blocks a request's row and Bc = page_size.
LayoutPtr page_table_to_bsr(const LayoutPtr& layout);

struct Bsr {
  std::vector<i32> indptr, indices;
  std::vector<u8> mask_bits;  ///< empty when every kept block is full
};

/// A dense boolean mask [rows, cols] (row-major bytes, nonzero = keep) as BSR; bits where a block
/// is partial.
Bsr dense_mask_to_bsr(const u8* mask, i64 rows, i64 cols, i32 block_rows, i32 block_cols);

}  // namespace raddle

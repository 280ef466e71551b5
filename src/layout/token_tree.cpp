// Trees of drafted tokens over page tables: the text before a tree as one level, its nodes as
// another.
//
// The first level is a page table that every row sees whole, so that no mask is evaluated there.
// The second has a block for each node, a single row of a page, with its own position and one bit
// for each row: q × q bits per request, whatever stands before the tree.
#include "layout/token_tree.h"

#include <algorithm>
#include <sstream>

#include "layout/normal_form.h"
#include "raddle/error.h"
#include "raddle/layout.h"

namespace raddle {
namespace {

std::size_t at(i64 i) { return static_cast<std::size_t>(i); }

/// The cycle that following parents from `node` ends in, as text; empty where a root ends it.
std::string cycle_of(const i32* parents, i32 nodes, i32 node) {
  for (i32 steps = 0; steps < nodes && node >= 0 && node < nodes; ++steps) node = parents[node];
  if (node < 0 || node >= nodes) return {};
  std::ostringstream text;
  text << node;
  for (i32 next = parents[node]; next != node; next = parents[next]) text << " -> " << next;
  text << " -> " << node;
  return text.str();
}

/// Which nodes each row of the requests' trees sees, by parents or by bits.
class Visibility {
 public:
  Visibility(const TokenTreeArgs& args, const Layout& pages);

  /// Calls body(node) for each node of its request that a row sees.
  template <class Body>
  void each_seen(i32 request, i32 row, const Body& body) const {
    if (by_parents_) {
      const i32* tree = parents_.data() + qo_indptr_[request];
      for (i32 node = row; node >= 0; node = tree[node]) body(node);
      return;
    }
    for (i32 node = 0; node < nodes(request); ++node)
      if (sees(request, row, node)) body(node);
  }
  /// Each node's parent; nothing where some request's bits are no tree.
  std::vector<i32> parents() const { return by_parents_ ? parents_ : parents_of_bits(); }

 private:
  i32 nodes(i32 request) const { return qo_indptr_[request + 1] - qo_indptr_[request]; }
  bool sees(i32 request, i32 row, i32 node) const {
    const i64 bit = first_bit_[at(request)] + i64{row} * nodes(request) + node;
    return (bits_[at(bit >> 3)] >> (bit & 7) & 1) != 0;
  }
  std::vector<i32> parents_of_bits() const;
  void take_bits(const TokenTreeArgs& args);

  const i32* qo_indptr_;
  i32 num_requests_;
  bool by_parents_;
  std::vector<i32> parents_;
  std::vector<u8> bits_;
  std::vector<i64> first_bit_;
};

Visibility::Visibility(const TokenTreeArgs& args, const Layout& pages)
    : qo_indptr_(pages.view().qo_indptr),
      num_requests_(pages.num_requests()),
      by_parents_(!args.mask_bits) {
  if (args.parents.empty() == by_parents_)
    fail<ValueError>(
        by_parents_ ? "parents is missing, and so is masks" : "parents and masks are both given",
        "; expected one of them");
  if (!by_parents_) {
    take_bits(args);
    return;
  }
  parents_ = copy_index("parents", args.parents, at(pages.num_rows()), "one a row of the batch");
  for (i32 i = 0; i < num_requests_; ++i)
    check_tree(parents_.data() + qo_indptr_[i], nodes(i), i, qo_indptr_[i]);
}

void Visibility::take_bits(const TokenTreeArgs& args) {
  const auto first =
      copy_index("masks[1]", args.mask_indptr, at(num_requests_) + 1, "one more than requests");
  if (first[0] != 0) fail<ValueError>("masks[1] begins with ", first[0], "; expected 0");
  for (i32 i = 0; i < num_requests_; ++i) {
    const i64 expected = ceil_div(i64{nodes(i)} * nodes(i), i64{8});
    const i64 given = i64{first[at(i) + 1]} - first[at(i)];
    if (given != expected)
      fail<ValueError>("masks give request ", i, " ", given, " bytes; expected ", expected,
                       ", for bits of ", nodes(i), " rows x ", nodes(i), " nodes");
    first_bit_.push_back(i64{first[at(i)]} * 8);
  }
  if (args.mask_bytes < first.back())
    fail<ValueError>("masks[0] has ", args.mask_bytes, " bytes; expected at least ", first.back(),
                     ", where masks[1] ends");
  bits_.assign(args.mask_bits, args.mask_bits + first.back());
}

std::vector<i32> Visibility::parents_of_bits() const {
  std::vector<i32> found;
  for (i32 i = 0; i < num_requests_; ++i) {
    for (i32 row = 0; row < nodes(i); ++row) {
      i32 parent = -1;
      for (i32 node = 0; node < row; ++node)
        if (sees(i, row, node)) parent = node;
      // A row sees itself and what its parent sees, and nothing else.
      for (i32 node = 0; node < nodes(i); ++node)
        if (sees(i, row, node) != (node == row || (parent >= 0 && sees(i, parent, node))))
          return {};
      found.push_back(parent);
    }
  }
  return found;
}

std::vector<i32> positions_of(const LayoutView& batch, const Visibility& visibility) {
  std::vector<i32> positions;
  for (i32 i = 0; i < batch.num_requests; ++i) {
    const i32 nodes = batch.qo_indptr[i + 1] - batch.qo_indptr[i];
    for (i32 row = 0; row < nodes; ++row) {
      i32 depth = 0;
      visibility.each_seen(i, row, [&](i32 node) { depth += node != row; });
      positions.push_back(batch.kv_len[i] - nodes + depth);
    }
  }
  return positions;
}

/// The nodes as single rows of their pages.
Level tree_level(const Level& table, const LayoutView& batch, const std::vector<i32>& positions,
                 const Visibility& visibility, i32 block_rows) {
  Level level;
  level.storage = KvStorage::paged;
  level.order = table.order;
  level.page_size = table.block_size;
  level.block_size = 1;
  level.block_rows = block_rows;
  level.row_indptr = table.row_indptr;
  level.mask_bits.assign(at(ceil_div(i64{batch.num_rows} * block_rows, i64{8})), 0);
  for (i32 i = 0; i < batch.num_requests; ++i) {
    const i32 nodes = batch.qo_indptr[i + 1] - batch.qo_indptr[i];
    const i32 context = batch.kv_len[i] - nodes;
    level.columns.push_back(nodes);
    level.kv_begin.push_back(context);
    level.block_begin.push_back(batch.qo_indptr[i]);
    for (i32 node = 0; node < nodes; ++node) {
      const i32 key = context + node, row = batch.qo_indptr[i] + node;
      level.blocks.push_back(table.blocks[at(table.block_begin[at(i)] + key / table.block_size)]);
      level.block_first.push_back(key % table.block_size);
      level.block_pos.push_back(positions[at(row)]);
    }
    for (i32 row = 0; row < nodes; ++row)
      visibility.each_seen(i, row, [&](i32 node) {
        const i64 bit = i64{batch.qo_indptr[i] + node} * block_rows + row;
        level.mask_bits[at(bit >> 3)] |= static_cast<u8>(1 << (bit & 7));
      });
  }
  const Extremes used = extremes(level.blocks);
  if (!level.blocks.empty()) level.min_block = used.min;
  level.max_block = std::max(used.max, -1);
  // A reservation fixes which arrays a layout has, so these do not depend on whether there are
  // nodes.
  for (std::vector<i32>* list : {&level.kv_begin, &level.block_first, &level.block_pos})
    if (list->empty()) list->push_back(0);
  if (level.mask_bits.empty()) level.mask_bits.push_back(0);
  return level;
}

}  // namespace

void check_tree(const i32* parents, i32 nodes, i32 request, i32 row) {
  for (i32 n = 0; n < nodes; ++n) {
    if (parents[n] >= -1 && parents[n] < n) continue;
    const std::string cycle = cycle_of(parents, nodes, n);
    fail<ValueError>("parents[", row + n, "] is ", parents[n], " for node ", n, " of request ",
                     request, "; expected an earlier node, or -1 for a root",
                     cycle.empty() ? "" : ": the parents form a cycle, " + cycle);
  }
}

TokenTree token_tree(const TokenTreeArgs& args) {
  for (const auto& [name, given] : {std::pair{"kv_begin", !args.kv_begin.empty()},
                                    {"qo_rows", !args.qo_rows.empty()},
                                    {"min_prefix", args.min_prefix != 0}})
    if (given)
      fail<ValueError>(name, " is given; expected a page table of requests, with all their keys");
  const LayoutPtr table = paged_kv(args);
  const LayoutView& batch = table->view();
  i32 most = 0;
  for (i32 i = 0; i < batch.num_requests; ++i) {
    const i32 nodes = batch.qo_indptr[i + 1] - batch.qo_indptr[i];
    if (batch.kv_len[i] < nodes)
      fail<ValueError>("kv_len[", i, "] is ", batch.kv_len[i], "; expected at least ", nodes,
                       ", the nodes of that request's tree");
    if (args.max_nodes > 0 && nodes > args.max_nodes)
      fail<ValueError>("qo_indptr gives request ", i, " ", nodes,
                       " nodes; expected at most max_nodes", " = ", args.max_nodes);
    most = std::max(most, nodes);
  }
  if (args.max_nodes < 0)
    fail<ValueError>("max_nodes is ", args.max_nodes,
                     "; expected at least 1, or 0 for the largest");
  const Visibility visibility(args, *table);
  std::vector<i32> positions = batch.qo_pos
                                   ? std::vector<i32>(batch.qo_pos, batch.qo_pos + batch.num_rows)
                                   : positions_of(batch, visibility);
  const std::vector<i32> qo_indptr(batch.qo_indptr, batch.qo_indptr + batch.num_requests + 1);
  const std::vector<i32> kv_len(batch.kv_len, batch.kv_len + batch.num_requests);

  std::vector<Level> levels(1, table->levels()[0]);
  for (i32 i = 0; i < batch.num_requests; ++i)
    levels[0].columns[at(i)] -= qo_indptr[at(i) + 1] - qo_indptr[at(i)];
  levels.push_back(tree_level(table->levels()[0], batch, positions, visibility,
                              args.max_nodes > 0 ? args.max_nodes : std::max(most, 1)));
  if (positions.empty()) positions.push_back(0);  // an empty array would count as absent

  TokenTree tree;
  tree.parents = visibility.parents();
  tree.pages = std::make_shared<const Layout>(qo_indptr, kv_len, positions, std::vector<i32>{},
                                              std::vector<Level>(table->levels()));
  tree.layout = std::make_shared<const Layout>(qo_indptr, kv_len, std::move(positions),
                                               std::vector<i32>{}, std::move(levels));
  return tree;
}

}  // namespace raddle

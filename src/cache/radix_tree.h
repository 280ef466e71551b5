// A radix tree over token ids whose edges are whole pages: which pages hold the keys of the longest
// known prefix of a sequence. It counts no references and takes no lock; RadixCache does both.
//
// - A node is the edge that leads to it: a run of tokens and the pages of their keys. Children of
//   one node differ in their first pages, so one hash of parent and first page finds a child.
// - An extra key has a root of its own, compared as text: sequences of different keys never meet,
//   whatever their hashes are.
// - Unlocked nodes stand in a list from the least to the most recently used. A use moves a node to
//   the end, and its ancestors behind it; a locked node and its ancestors are not in the list. So a
//   node's descendants stand before it, and the first in the list is always a leaf: eviction takes
//   it without a search.
// - A use ends at a node's end: where it ends within an edge the edge is split, so that all pages
//   of an edge were last used together. Which page is evicted next therefore does not depend on
//   where edges happen to begin.
#pragma once

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "raddle/engine/core/config.h"

namespace raddle {

template <class Token>
class RadixTree {
 public:
  static constexpr i32 none = -1;

  struct Node {
    std::vector<Token> tokens;
    std::vector<i32> pages;
    u64 hash = 0;  ///< of the parent and the first page, by which it is found
    i32 parent = none;
    i32 num_children = 0;
    i32 locks = 0;   ///< of this node and of its descendants
    i32 locked = 0;  ///< of these the node's own
    i32 older = none, newer = none;
    i32 generation = 0;  ///< how often the slot was used before
    bool is_used = false;
  };

  /// Where a walk along a sequence ended: after `inside` pages of a node's edge.
  struct Place {
    i32 node = none;  ///< none: not even the key is known
    i32 inside = 0;
    i64 pages = 0;  ///< from the root on
  };

  explicit RadixTree(i32 page_size) : page_size_(static_cast<std::size_t>(page_size)) {}

  /// The longest known prefix, in whole pages; appends its pages to `pages`. Changes nothing.
  Place find(std::span<const Token> tokens, std::string_view key, std::vector<i32>* pages) const {
    Place at;
    const auto root = roots_.find(key);
    if (root == roots_.end()) return at;
    at.node = root->second;
    std::span<const Token> left = tokens.first(tokens.size() / page_size_ * page_size_);
    while (!left.empty()) {
      const i32 child = child_of(at.node, left.first(page_size_));
      if (child == none) break;
      const Node& node = nodes_[index(child)];
      at.node = child;
      at.inside = common_pages(node.tokens, left);
      at.pages += at.inside;
      if (pages) pages->insert(pages->end(), node.pages.begin(), node.pages.begin() + at.inside);
      if (index(at.inside) < node.pages.size()) break;
      left = left.subspan(node.tokens.size());
    }
    return at;
  }

  /// The node that ends where `at` is: splits its edge where that goes on.
  i32 cut(const Place& at) {
    if (at.node == none || index(at.inside) == nodes_[index(at.node)].pages.size()) return at.node;
    return split(at.node, index(at.inside));
  }

  /// A new child of `parent`, a node or none: then of the key's root.
  i32 grow(i32 parent, std::string_view key, std::span<const Token> tokens,
           std::span<const i32> pages) {
    if (parent == none) parent = root_of(key);
    Node made;
    made.tokens.assign(tokens.begin(), tokens.end());
    made.pages.assign(pages.begin(), pages.end());
    made.parent = parent;
    made.hash = hash(parent, tokens.first(page_size_));
    const i32 id = place(std::move(made));
    ++nodes_[index(parent)].num_children;
    link(id, newest_);
    count(id, 1);
    return id;
  }

  /// The node and its ancestors become the most recently used ones.
  void use(i32 id) {
    for (; !is_root(id); id = nodes_[index(id)].parent) {
      if (nodes_[index(id)].locks > 0) continue;
      unlink(id);
      link(id, newest_);
    }
  }

  void lock(i32 id) {
    ++nodes_[index(id)].locked;
    for (; !is_root(id); id = nodes_[index(id)].parent) {
      Node& node = nodes_[index(id)];
      if (node.locks++ > 0) continue;
      unlink(id);
      locked_pages_ += static_cast<i64>(node.pages.size());
    }
  }

  /// The end of a use: nodes that are no longer locked become the most recently used ones.
  void unlock(i32 id) {
    --nodes_[index(id)].locked;
    for (; !is_root(id); id = nodes_[index(id)].parent) {
      Node& node = nodes_[index(id)];
      if (--node.locks > 0) continue;
      link(id, newest_);
      locked_pages_ -= static_cast<i64>(node.pages.size());
    }
  }

  /// The least recently used unlocked leaf, or none.
  i32 oldest() const { return oldest_; }

  /// Removes the last `count` pages of an unlocked leaf, and the leaf itself with its last page.
  void shorten(i32 id, i32 count_pages) {
    Node& node = nodes_[index(id)];
    const std::size_t left = node.pages.size() - index(count_pages);
    if (left == 0) return remove(id);
    num_pages_ -= count_pages;
    ++node.generation;  // its old number named more pages, and is refused from now on
    node.pages.resize(left);
    node.tokens.resize(left * page_size_);
    // Some spare capacity stays: otherwise evicting page by page would copy the edge each time.
    if (node.pages.capacity() > left + left / 8) {
      node.pages.shrink_to_fit();
      node.tokens.shrink_to_fit();
    }
  }

  const Node& node(i32 id) const { return nodes_[index(id)]; }
  bool is_root(i32 id) const { return nodes_[index(id)].parent == none; }
  /// Slots of nodes, used or not.
  i32 num_slots() const { return static_cast<i32>(nodes_.size()); }
  i64 num_nodes() const { return num_nodes_; }
  i64 num_pages() const { return num_pages_; }
  i64 locked_pages() const { return locked_pages_; }
  const std::map<std::string, i32, std::less<>>& roots() const { return roots_; }

  /// Bytes of everything held, without the allocator's overhead.
  i64 memory_bytes() const {
    std::size_t bytes = sizeof(*this) + nodes_.size() * sizeof(Node);
    for (const Node& node : nodes_)
      bytes += node.tokens.capacity() * sizeof(Token) + node.pages.capacity() * sizeof(i32);
    bytes += children_.bucket_count() * sizeof(void*);
    bytes += children_.size() * (sizeof(void*) + sizeof(typename decltype(children_)::value_type));
    bytes += free_nodes_.capacity() * sizeof(i32);
    for (const auto& [key, id] : roots_) bytes += key.capacity() + sizeof(key) + 5 * sizeof(void*);
    return static_cast<i64>(bytes);
  }

 private:
  static std::size_t index(i64 i) { return static_cast<std::size_t>(i); }

  // One multiplication and fold per token: the comparison costs more, and a bad hash costs time,
  // never a wrong match.
  u64 hash(i32 parent, std::span<const Token> page) const {
    u64 h = 0x9e3779b97f4a7c15ull ^ static_cast<u64>(parent);
    for (const Token token : page) {
      h = (h ^ static_cast<u64>(token)) * 0xd6e8feb86659fd93ull;
      h ^= h >> 32;
    }
    return h;
  }

  i32 child_of(i32 parent, std::span<const Token> page) const {
    const auto [first, last] = children_.equal_range(hash(parent, page));
    for (auto entry = first; entry != last; ++entry) {
      const Node& node = nodes_[index(entry->second)];
      if (node.parent == parent &&
          std::memcmp(node.tokens.data(), page.data(), page.size_bytes()) == 0)
        return entry->second;
    }
    return none;
  }

  /// How many leading whole pages are equal in both.
  i32 common_pages(std::span<const Token> a, std::span<const Token> b) const {
    const std::size_t length = std::min(a.size(), b.size());
    if (std::memcmp(a.data(), b.data(), length * sizeof(Token)) == 0)
      return static_cast<i32>(length / page_size_);
    const auto end = a.begin() + static_cast<std::ptrdiff_t>(length);
    const auto differ = std::mismatch(a.begin(), end, b.begin()).first;
    return static_cast<i32>(index(differ - a.begin()) / page_size_);
  }

  /// Splits an edge after `pages` pages and returns the new upper node. The lower one keeps its
  /// number and its locks.
  i32 split(i32 id, std::size_t pages) {
    const std::size_t tokens = pages * page_size_;
    Node& lower = nodes_[index(id)];
    Node made;
    made.tokens.assign(lower.tokens.begin(), lower.tokens.begin() + static_cast<i64>(tokens));
    made.pages.assign(lower.pages.begin(), lower.pages.begin() + static_cast<i64>(pages));
    std::vector<Token> tokens_left(lower.tokens.begin() + static_cast<i64>(tokens),
                                   lower.tokens.end());
    std::vector<i32> pages_left(lower.pages.begin() + static_cast<i64>(pages), lower.pages.end());
    made.parent = lower.parent;
    made.hash = lower.hash;
    made.locks = lower.locks;
    made.num_children = 1;
    const i32 upper = place(std::move(made));
    // The slots are a deque: `lower` is where it was.
    if (lower.locks == 0) link(upper, id);
    const u64 new_hash = hash(upper, std::span<const Token>(tokens_left).first(page_size_));
    children_.emplace(new_hash, id);
    forget(id, lower.hash);
    lower.hash = new_hash;
    lower.parent = upper;
    lower.tokens = std::move(tokens_left);
    lower.pages = std::move(pages_left);
    ++num_nodes_;
    return upper;
  }

  i32 root_of(std::string_view key) {
    if (const auto found = roots_.find(key); found != roots_.end()) return found->second;
    const i32 id = free_slot();
    key_of_root_.emplace(id, roots_.emplace(key, id).first);
    occupy(id, Node{});
    return id;
  }

  /// Puts a node into a slot and makes it known to `child_of`.
  i32 place(Node made) {
    const i32 id = free_slot();
    children_.emplace(made.hash, id);
    occupy(id, std::move(made));
    return id;
  }

  /// An unused slot. occupy() takes it later, so that what may fail can stand between the two.
  i32 free_slot() {
    if (free_nodes_.empty()) {
      // Room for every slot: freeing one must not fail for want of memory.
      if (free_nodes_.capacity() <= nodes_.size()) free_nodes_.reserve(2 * nodes_.size() + 16);
      nodes_.emplace_back();
      free_nodes_.push_back(static_cast<i32>(nodes_.size()) - 1);
    }
    return free_nodes_.back();
  }

  void occupy(i32 id, Node made) {
    free_nodes_.pop_back();
    made.generation = nodes_[index(id)].generation;
    made.is_used = true;
    nodes_[index(id)] = std::move(made);
  }

  void vacate(i32 id) {
    const i32 generation = nodes_[index(id)].generation + 1;
    nodes_[index(id)] = Node{};
    nodes_[index(id)].generation = generation;
    free_nodes_.push_back(id);
  }

  void remove(i32 id) {
    const i32 parent = nodes_[index(id)].parent;
    count(id, -1);
    unlink(id);
    forget(id, nodes_[index(id)].hash);
    vacate(id);
    if (--nodes_[index(parent)].num_children > 0 || !is_root(parent)) return;
    const auto key = key_of_root_.find(parent);
    roots_.erase(key->second);
    key_of_root_.erase(key);
    vacate(parent);
  }

  void forget(i32 id, u64 hash_of_child) {
    auto entry = children_.equal_range(hash_of_child).first;
    while (entry->second != id) ++entry;
    children_.erase(entry);
  }

  void count(i32 id, i64 sign) {
    num_nodes_ += sign;
    num_pages_ += sign * static_cast<i64>(nodes_[index(id)].pages.size());
  }

  // --- the order of use --------------------------------------------------------------------------

  /// Puts a node behind `older`; none: at the very beginning.
  void link(i32 id, i32 older) {
    Node& node = nodes_[index(id)];
    i32& next = older == none ? oldest_ : nodes_[index(older)].newer;
    node.older = older;
    node.newer = next;
    (next == none ? newest_ : nodes_[index(next)].older) = id;
    next = id;
  }

  void unlink(i32 id) {
    const Node& node = nodes_[index(id)];
    (node.older == none ? oldest_ : nodes_[index(node.older)].newer) = node.newer;
    (node.newer == none ? newest_ : nodes_[index(node.newer)].older) = node.older;
  }

  std::size_t page_size_;
  std::deque<Node> nodes_;  ///< roots too; a deque, for it keeps no room that it does not use
  std::vector<i32> free_nodes_;
  std::unordered_multimap<u64, i32> children_;
  std::map<std::string, i32, std::less<>> roots_;
  std::unordered_map<i32, typename decltype(roots_)::iterator> key_of_root_;
  i32 oldest_ = none, newest_ = none;
  i64 num_nodes_ = 0;  ///< without roots
  i64 num_pages_ = 0;
  i64 locked_pages_ = 0;
};

}  // namespace raddle

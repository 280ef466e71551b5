// A cache of prefixes over a page pool: which pages hold the keys of a sequence's longest known
// prefix (RadixAttention: Zheng et al. 2023, arXiv 2312.07104, section 3).
//
// A serving engine matches a new request with Use::lock, adds the matched pages to the pool as the
// request's first ones, computes the rest, inserts what it has computed, and unlocks at the end:
// what requests use stays, and unlocked pages are evicted when the pool runs out.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "raddle/page_pool.h"
#include "raddle/tensor.h"

namespace raddle {

/// Where a cached prefix ends; lock and unlock take it. It is not used again once evicted.
using CacheNode = i64;
constexpr CacheNode empty_prefix = -1;  ///< no tokens: locking it keeps nothing
constexpr CacheNode untouched = -2;     ///< of a match that did not touch; cannot be locked

struct CacheMatch {
  i64 num_tokens = 0;      ///< whole pages of them
  std::vector<i32> pages;  ///< num_tokens / page_size
  CacheNode node = empty_prefix;
};

struct CacheInsertion {
  i64 num_tokens = 0;      ///< in the cache now: the sequence's whole pages
  i64 num_cached = 0;      ///< of these there before
  std::vector<i32> pages;  ///< that hold them: up to num_cached those that were there
  CacheNode node = empty_prefix;
};

struct CacheCounts {
  i64 nodes = 0;         ///< edges of the tree
  i64 tokens = 0;        ///< of all edges
  i64 pages = 0;         ///< of all edges
  i64 locked_pages = 0;  ///< of those that cannot be evicted
  i64 memory_bytes = 0;  ///< of the tree
};

/// One edge of the tree.
struct CacheEntry {
  CacheNode node = empty_prefix, parent = empty_prefix;
  std::string key;
  std::vector<i64> tokens;
  std::vector<i32> pages;
  i32 locks = 0;  ///< of it and of what continues it
};

/// Any thread may call anything at any time; a call is seen as a whole or not at all. The cache's
/// lock is taken before the pool's. Between a match that does not lock and what the caller does
/// with its pages another thread may evict them: lock where there are several.
///
/// Tokens are [n] int32 or int64, from 0 to the largest of the cache's own width; what is wrong is
/// named by a ValueError before anything changes. Sequences of different extra keys (an adapter's,
/// a tenant's, of an image) share nothing.
class RadixCache {
 public:
  /// What a match does to the prefix that it finds.
  enum class Use {
    none,   ///< nothing: the caller only asks
    touch,  ///< it is the most recently used one
    lock    ///< that, and it is kept until unlock
  };

  /// token_bits: 32 or 64, in which tokens are kept. The cache shares the pool; it gives all its
  /// pages back at its end, locked or not.
  explicit RadixCache(std::shared_ptr<PagePool> pool, i32 token_bits = 32);
  ~RadixCache();
  RadixCache(const RadixCache&) = delete;
  RadixCache& operator=(const RadixCache&) = delete;

  const std::shared_ptr<PagePool>& pool() const;

  /// The longest cached prefix of the tokens. Where at least one token is to be computed, as for
  /// the logits of a prompt, pass all but the last.
  CacheMatch match(const IndexRef& tokens, std::string_view key = {}, Use use = Use::touch);

  /// Caches the tokens' whole pages, whose keys lie on `pages` (a request's, at least as many). Of
  /// those that are cached already the old pages stay; the others get a reference of the cache.
  CacheInsertion insert(const IndexRef& tokens, std::span<const i32> pages,
                        std::string_view key = {}, bool lock = false);

  /// Keeps a prefix until unlock; locks of one prefix add up.
  void lock(CacheNode node);
  void unlock(CacheNode node);

  /// Drops unlocked pages, the least recently used first and of a prefix the last first, until
  /// `num_pages` have become free, or none is left. Returns those: a page that a request still
  /// holds does not become free.
  std::vector<i32> evict(i32 num_pages);

  CacheCounts counts() const;
  /// All edges, in no particular order.
  std::vector<CacheNode> nodes() const;
  CacheEntry entry(CacheNode node) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace raddle

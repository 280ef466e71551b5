#include "raddle/radix_cache.h"

#include <gtest/gtest.h>

#include <atomic>
#include <numeric>
#include <random>
#include <thread>

#include "raddle/error.h"

namespace raddle {
namespace {

using Pages = std::vector<i32>;
using Tokens = std::vector<i32>;
using Use = RadixCache::Use;

IndexRef ids(const Tokens& tokens) { return {tokens.data(), static_cast<i64>(tokens.size())}; }
IndexRef ids(const std::vector<std::int64_t>& tokens) {
  return {tokens.data(), static_cast<i64>(tokens.size())};
}

/// A pool of pages of two tokens, and a cache.
struct Cached {
  std::shared_ptr<PagePool> pool;
  RadixCache cache;

  explicit Cached(i32 num_pages = 16, i32 token_bits = 32)
      : pool(std::make_shared<PagePool>(num_pages, 2)), cache(pool, token_bits) {}

  /// Caches the tokens on new pages, which only the cache holds then.
  CacheInsertion insert(const Tokens& tokens, std::string_view key = {}, bool lock = false) {
    const Pages pages = *pool->allocate(static_cast<i32>(tokens.size()) / 2);
    const CacheInsertion done = cache.insert(ids(tokens), pages, key, lock);
    pool->release(pages);
    return done;
  }
  i64 known(const Tokens& tokens, std::string_view key = {}) {
    return cache.match(ids(tokens), key, Use::none).num_tokens;
  }
};

TEST(RadixCache, MatchesWholePages) {
  Cached c;
  c.insert({1, 2, 3, 4, 5, 6});
  const CacheMatch found = c.cache.match(ids(Tokens{1, 2, 3, 4, 5, 7}));
  EXPECT_EQ(found.num_tokens, 4);
  EXPECT_EQ(found.pages, (Pages{0, 1}));
  EXPECT_EQ(c.cache.counts().nodes, 2) << "a use ends where an edge ends";
  EXPECT_EQ(c.known({1, 2, 3, 4, 5, 6, 7}), 6);
  EXPECT_EQ(c.known({1}), 0);
  EXPECT_EQ(c.known({1, 3, 3, 4}), 0);
  EXPECT_EQ(c.known({}), 0);
}

TEST(RadixCache, InsertSplitsEdgesAndKeepsPages) {
  Cached c;
  c.insert({1, 2, 3, 4});
  const CacheInsertion other = c.insert({1, 2, 5, 6, 7, 8, 9});
  EXPECT_EQ(other.num_tokens, 6);
  EXPECT_EQ(other.num_cached, 2);
  EXPECT_EQ(other.pages, (Pages{0, 3, 4})) << "the first page was there";
  EXPECT_EQ(c.cache.counts().nodes, 3);
  EXPECT_EQ(c.cache.counts().pages, 4);
  EXPECT_EQ(c.pool->counts().used, 4) << "the duplicate is free again";
  EXPECT_EQ(c.known({1, 2, 3, 4}), 4);
}

TEST(RadixCache, ExtraKeysShareNothing) {
  Cached c;
  c.insert({1, 2, 3, 4}, "a");
  EXPECT_EQ(c.known({1, 2, 3, 4}), 0);
  EXPECT_EQ(c.known({1, 2, 3, 4}, "b"), 0);
  EXPECT_EQ(c.known({1, 2, 3, 4}, "a"), 4);
  c.insert({1, 2}, std::string_view("a\0b", 3));
  EXPECT_EQ(c.cache.counts().pages, 3);
  EXPECT_EQ(c.cache.entry(c.cache.match(ids(Tokens{1, 2}), "a").node).key, "a");
}

TEST(RadixCache, EvictsTheLeastRecentlyUsed) {
  Cached c;
  c.insert({1, 2, 3, 4});
  c.insert({1, 2, 5, 6});
  c.insert({7, 8});
  c.cache.match(ids(Tokens{1, 2, 3, 4}));
  EXPECT_EQ(c.cache.evict(1).size(), 1u);
  EXPECT_EQ(c.known({1, 2, 5, 6}), 2);
  EXPECT_EQ(c.cache.evict(2), (Pages{2, 1}));
  EXPECT_EQ(c.known({7, 8}), 0);
  EXPECT_EQ(c.known({1, 2, 3, 4}), 2) << "the end of the longest one went before its beginning";
  EXPECT_EQ(c.cache.evict(5).size(), 1u);
  EXPECT_EQ(c.cache.counts().nodes, 0);
  EXPECT_EQ(c.pool->counts().used, 0);
}

TEST(RadixCache, LocksKeep) {
  Cached c;
  const CacheNode locked = c.insert({1, 2, 3, 4}, {}, true).node;
  c.insert({1, 2, 5, 6});
  EXPECT_EQ(c.cache.evict(16).size(), 1u);
  EXPECT_EQ(c.cache.counts().locked_pages, 2);
  c.cache.match(ids(Tokens{1, 2}));  // splits what is locked
  c.cache.lock(locked);
  c.cache.unlock(locked);
  EXPECT_EQ(c.cache.evict(16).size(), 0u);
  c.cache.unlock(locked);
  EXPECT_EQ(c.cache.evict(16).size(), 2u);
  EXPECT_THROW(c.cache.lock(locked), ValueError);
}

TEST(RadixCache, RefusesUnlocksWithoutLocks) {
  Cached c;
  const CacheNode longer = c.insert({1, 2, 3, 4}, {}, true).node;
  const CacheNode shorter = c.cache.match(ids(Tokens{1, 2})).node;
  EXPECT_THROW(c.cache.unlock(shorter), ValueError) << "only what continues it is locked";
  c.cache.unlock(longer);
  EXPECT_THROW(c.cache.unlock(longer), ValueError);
  EXPECT_THROW(c.cache.unlock(empty_prefix), ValueError);
  const CacheMatch nothing = c.cache.match(ids(Tokens{9, 9}), {}, Use::lock);
  EXPECT_EQ(nothing.node, empty_prefix);
  c.cache.unlock(nothing.node);
  EXPECT_THROW(c.cache.unlock(nothing.node), ValueError);
  EXPECT_THROW(c.cache.lock(c.cache.match(ids(Tokens{1, 2}), {}, Use::none).node), ValueError);
  EXPECT_EQ(c.cache.counts().locked_pages, 0);
}

TEST(RadixCache, ANumberDiesWithItsLastPage) {
  Cached c;
  const CacheNode node = c.insert({1, 2, 3, 4, 5, 6}).node;
  EXPECT_EQ(c.cache.evict(1).size(), 1u);
  EXPECT_THROW(c.cache.lock(node), ValueError) << "its third page is gone";
}

TEST(RadixCache, RefusesTokensOutOfRange) {
  Cached c;
  const std::vector<std::int64_t> large{1, std::int64_t{1} << 31}, negative{1, -1};
  const auto refused = [](auto&& call) -> std::string {
    try {
      call();
    } catch (const ValueError& error) {
      return error.what();
    }
    return "nothing was refused";
  };
  EXPECT_EQ(refused([&] { c.cache.match(ids(large)); }),
            "tokens[1] is 2147483648; expected 0 to 2147483647");
  EXPECT_EQ(refused([&] { c.cache.insert(ids(negative), Pages{0}); }),
            "tokens[1] is -1; expected 0 to 2147483647");
  EXPECT_EQ(refused([&] {
              c.cache.insert(ids(Tokens{1, 2, 3, 4}), Pages{0});
            }),
            "pages has 1 entries; expected at least 2 for 4 tokens on pages of 2");
  EXPECT_EQ(refused([&] {
              c.cache.insert(ids(Tokens{1, 2}), Pages{3});
            }),
            "pages[0] is 3, which is free; expected a page in use");
  EXPECT_EQ(c.cache.counts().nodes, 0);
  EXPECT_EQ(c.pool->counts().used, 0);

  Cached wide(16, 64);
  const Pages pages = *wide.pool->allocate(1);
  wide.cache.insert(ids(large), pages);
  EXPECT_EQ(wide.cache.match(ids(large)).num_tokens, 2);
  EXPECT_EQ(wide.known({1, 2}), 0);
  EXPECT_THROW(RadixCache(wide.pool, 16), ValueError);
  EXPECT_THROW(RadixCache(nullptr), ValueError);
}

TEST(RadixCache, GivesItsPagesBack) {
  auto pool = std::make_shared<PagePool>(4, 2);
  const Pages pages = *pool->allocate(2);
  {
    RadixCache cache(pool);
    cache.insert(ids(Tokens{1, 2, 3, 4}), pages, {}, true);
    EXPECT_EQ(pool->counts().shared, 2);
  }
  EXPECT_EQ(pool->counts().shared, 0);
  EXPECT_EQ(pool->release(pages), pages);
}

/// Threads serve requests over a pool that is too small: what a locked match promises about a page
/// is what its writer put there, however much is evicted meanwhile.
TEST(RadixCache, ManyThreads) {
  constexpr i32 num_pages = 48, page_size = 2;
  auto pool = std::make_shared<PagePool>(num_pages, page_size);
  RadixCache cache(pool);
  std::vector<std::atomic<i32>> memory(num_pages * page_size);
  std::atomic<int> wrong = 0, served = 0;
  const auto work = [&](unsigned seed) {
    std::mt19937 random(seed);
    for (int n = 0; n < 3000; ++n) {
      Tokens tokens(4 + random() % 12);
      for (i32& token : tokens) token = static_cast<i32>(random() % 2);
      const CacheMatch found = cache.match(ids(tokens), {}, Use::lock);
      for (i64 i = 0; i < found.num_tokens; ++i)
        wrong += memory[static_cast<std::size_t>(found.pages[static_cast<std::size_t>(i / 2)] * 2 +
                                                 i % 2)] != tokens[static_cast<std::size_t>(i)];
      const std::vector<RequestId> request{pool->add(found.pages)};
      const Pages rest{static_cast<i32>(static_cast<i64>(tokens.size()) - found.num_tokens)};
      for (i32 missing = 1; missing > 0;) {
        missing = pool->append(request, rest).missing;
        if (missing > 0 && cache.evict(missing).empty()) break;
      }
      if (pool->kv_len(request[0]) == static_cast<i32>(tokens.size())) {
        const Pages pages = pool->pages(request[0]);
        for (auto i = static_cast<std::size_t>(found.num_tokens); i < tokens.size(); ++i)
          memory[static_cast<std::size_t>(pages[i / 2] * 2) + i % 2] = tokens[i];
        cache.insert(ids(tokens), pages);
        ++served;
      }
      pool->finish(request);
      cache.unlock(found.node);
    }
  };
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 4; ++seed) threads.emplace_back(work, seed);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(served, 0);
  EXPECT_EQ(cache.counts().locked_pages, 0);
  EXPECT_EQ(pool->counts().used, cache.counts().pages);
  EXPECT_EQ(pool->counts().shared, 0);
  cache.evict(num_pages);
  EXPECT_EQ(pool->counts().used, 0);
  EXPECT_EQ(cache.counts().pages, 0);
}

}  // namespace
}  // namespace raddle

#include "raddle/radix_cache.h"

#include <algorithm>
#include <limits>
#include <mutex>
#include <utility>
#include <variant>

#include "cache/radix_tree.h"
#include "raddle/error.h"

namespace raddle {

namespace {

template <class Token, class From>
void check_range(const From* from, i64 step, i64 count) {
  constexpr i64 most = std::numeric_limits<Token>::max();
  for (i64 i = 0; i < count; ++i)
    if (from[i * step] < 0 || from[i * step] > most)
      fail<ValueError>("tokens[", i, "] is ", from[i * step], "; expected 0 to ", most);
}

/// The tokens in the cache's integer width: the caller's own array where it has that width.
template <class Token>
std::span<const Token> read_tokens(const IndexRef& ref, std::vector<Token>& copy) {
  if (ref.empty()) return {};  // an array of nothing may have no address
  if (ref.rank != 1) fail<ValueError>("tokens has ", ref.rank, " dimensions; expected 1");
  const i64 count = ref.shape[0], step = ref.stride[0];
  const auto taken = [&]<class From>(const From* from) -> std::span<const Token> {
    check_range<Token>(from, step, count);
    if constexpr (std::is_same_v<From, Token>)
      if (step == 1) return {from, static_cast<std::size_t>(count)};
    copy.reserve(static_cast<std::size_t>(count));
    for (i64 i = 0; i < count; ++i) copy.push_back(static_cast<Token>(from[i * step]));
    return copy;
  };
  return ref.is_64bit ? taken(static_cast<const std::int64_t*>(ref.data))
                      : taken(static_cast<const std::int32_t*>(ref.data));
}

}  // namespace

struct RadixCache::Impl {
  using Narrow = RadixTree<std::int32_t>;
  using Wide = RadixTree<std::int64_t>;

  std::shared_ptr<PagePool> pool;
  std::variant<Narrow, Wide> tree;
  i64 empty_locks = 0;
  mutable std::mutex mutex;

  Impl(std::shared_ptr<PagePool> of, i32 token_bits)
      : pool(std::move(of)), tree(std::in_place_type<Narrow>, pool->page_size()) {
    if (token_bits == 64) tree.emplace<Wide>(pool->page_size());
  }

  /// The tree's number of a node; the upper bits of `node` count the uses of its slot.
  template <class T>
  i32 find(const RadixTree<T>& nodes, CacheNode node) const {
    const i64 slot = node & 0xffffffff;
    if (node >= 0 && slot < nodes.num_slots()) {
      const auto id = static_cast<i32>(slot);
      if (nodes.node(id).is_used && nodes.node(id).generation == node >> 32 && !nodes.is_root(id))
        return id;
    }
    fail<ValueError>("node is ", node, node == untouched ? ", of a match that did not touch" : "",
                     "; expected one that this cache gave and has not evicted");
  }

  template <class T>
  CacheNode number(const RadixTree<T>& nodes, i32 id) const {
    if (id == RadixTree<T>::none || nodes.is_root(id)) return empty_prefix;
    return (static_cast<i64>(nodes.node(id).generation) << 32) | id;
  }

  template <class T>
  CacheNode used(RadixTree<T>& nodes, i32 id, bool lock) {
    const CacheNode node = number(nodes, id);
    if (node == empty_prefix) {
      empty_locks += lock ? 1 : 0;
      return node;
    }
    nodes.use(id);
    if (lock) nodes.lock(id);
    return node;
  }

  template <class T>
  CacheMatch match(RadixTree<T>& nodes, const IndexRef& ref, std::string_view key, Use use) {
    std::vector<T> copy;
    const std::span<const T> tokens = read_tokens<T>(ref, copy);
    const std::lock_guard guard(mutex);
    CacheMatch found;
    const auto place = nodes.find(tokens, key, &found.pages);
    found.num_tokens = place.pages * pool->page_size();
    if (use == Use::none)
      found.node = place.pages == 0 ? empty_prefix : untouched;
    else
      found.node = used(nodes, nodes.cut(place), use == Use::lock);
    return found;
  }

  template <class T>
  CacheInsertion insert(RadixTree<T>& nodes, const IndexRef& ref, std::span<const i32> pages,
                        std::string_view key, bool lock) {
    std::vector<T> copy;
    const std::span<const T> tokens = read_tokens<T>(ref, copy);
    const auto page_size = static_cast<std::size_t>(pool->page_size());
    const std::size_t full = tokens.size() / page_size;
    if (pages.size() < full)
      fail<ValueError>("pages has ", pages.size(), " entries; expected at least ", full, " for ",
                       tokens.size(), " tokens on pages of ", page_size);
    pages = pages.first(full);
    const std::lock_guard guard(mutex);
    CacheInsertion done;
    done.num_tokens = static_cast<i64>(full * page_size);
    const auto place = nodes.find(tokens, key, &done.pages);
    done.num_cached = place.pages * pool->page_size();
    const auto known = static_cast<std::size_t>(place.pages);
    done.pages.insert(done.pages.end(), pages.begin() + place.pages, pages.end());
    pool->share_cached(pages, place.pages);
    try {
      i32 end = nodes.cut(place);
      if (known < full)
        end = nodes.grow(end, key, tokens.subspan(known * page_size, (full - known) * page_size),
                         pages.subspan(known));
      done.node = used(nodes, end, lock);
    } catch (...) {  // out of memory: the tree is unchanged, except that an edge may be split
      pool->drop_cached(pages.subspan(known));
      throw;
    }
    return done;
  }

  template <class T>
  std::vector<i32> evict(RadixTree<T>& nodes, i32 num_pages) {
    const std::lock_guard guard(mutex);
    const auto enough = static_cast<std::size_t>(num_pages);
    std::vector<i32> freed;
    // Nothing fails between dropping a page and forgetting it.
    freed.reserve(std::min(enough, static_cast<std::size_t>(nodes.num_pages())));
    while (freed.size() < enough && nodes.oldest() != RadixTree<T>::none) {
      const i32 leaf = nodes.oldest();
      nodes.shorten(leaf, pool->drop_cached(nodes.node(leaf).pages, enough, freed));
    }
    return freed;
  }

  template <class T>
  void unlock(RadixTree<T>& nodes, CacheNode node) {
    if (node == empty_prefix) {
      if (empty_locks == 0)
        fail<ValueError>(
            "node is -1, the empty prefix, which is not locked; expected a lock first");
      --empty_locks;
      return;
    }
    const i32 id = find(nodes, node);
    if (nodes.node(id).locked == 0)
      fail<ValueError>("node is ", node, ", which is not locked; expected a lock first");
    nodes.unlock(id);
  }

  template <class T>
  CacheEntry entry(const RadixTree<T>& nodes, CacheNode node) const {
    const i32 id = find(nodes, node);
    const auto& found = nodes.node(id);
    CacheEntry entry{node, number(nodes, found.parent), {}, {}, found.pages, found.locks};
    entry.tokens.assign(found.tokens.begin(), found.tokens.end());
    i32 root = id;
    while (!nodes.is_root(root)) root = nodes.node(root).parent;
    for (const auto& [key, of] : nodes.roots())
      if (of == root) entry.key = key;
    return entry;
  }
};

RadixCache::RadixCache(std::shared_ptr<PagePool> pool, i32 token_bits) {
  if (!pool) fail<ValueError>("pool is null; expected a page pool");
  if (token_bits != 32 && token_bits != 64)
    fail<ValueError>("token_bits is ", token_bits, "; expected 32 or 64");
  impl_ = std::make_unique<Impl>(std::move(pool), token_bits);
}

RadixCache::~RadixCache() {
  const auto give_back = [this](const auto& nodes) {
    for (i32 id = 0; id < nodes.num_slots(); ++id) impl_->pool->drop_cached(nodes.node(id).pages);
  };
  std::visit(give_back, impl_->tree);
}

const std::shared_ptr<PagePool>& RadixCache::pool() const { return impl_->pool; }

CacheMatch RadixCache::match(const IndexRef& tokens, std::string_view key, Use use) {
  return std::visit([&](auto& nodes) { return impl_->match(nodes, tokens, key, use); },
                    impl_->tree);
}

CacheInsertion RadixCache::insert(const IndexRef& tokens, std::span<const i32> pages,
                                  std::string_view key, bool lock) {
  return std::visit([&](auto& nodes) { return impl_->insert(nodes, tokens, pages, key, lock); },
                    impl_->tree);
}

void RadixCache::lock(CacheNode node) {
  const std::lock_guard guard(impl_->mutex);
  if (node == empty_prefix) {
    ++impl_->empty_locks;
    return;
  }
  std::visit([&](auto& nodes) { nodes.lock(impl_->find(nodes, node)); }, impl_->tree);
}

void RadixCache::unlock(CacheNode node) {
  const std::lock_guard guard(impl_->mutex);
  std::visit([&](auto& nodes) { impl_->unlock(nodes, node); }, impl_->tree);
}

std::vector<i32> RadixCache::evict(i32 num_pages) {
  if (num_pages < 0) fail<ValueError>("num_pages is ", num_pages, "; expected at least 0");
  return std::visit([&](auto& nodes) { return impl_->evict(nodes, num_pages); }, impl_->tree);
}

CacheCounts RadixCache::counts() const {
  const std::lock_guard guard(impl_->mutex);
  const auto count = [this](const auto& nodes) {
    return CacheCounts{nodes.num_nodes(), nodes.num_pages() * impl_->pool->page_size(),
                       nodes.num_pages(), nodes.locked_pages(), nodes.memory_bytes()};
  };
  return std::visit(count, impl_->tree);
}

std::vector<CacheNode> RadixCache::nodes() const {
  const std::lock_guard guard(impl_->mutex);
  std::vector<CacheNode> found;
  const auto collect = [&](const auto& nodes) {
    for (i32 id = 0; id < nodes.num_slots(); ++id)
      if (nodes.node(id).is_used && !nodes.is_root(id)) found.push_back(impl_->number(nodes, id));
  };
  std::visit(collect, impl_->tree);
  return found;
}

CacheEntry RadixCache::entry(CacheNode node) const {
  const std::lock_guard guard(impl_->mutex);
  return std::visit([&](const auto& nodes) { return impl_->entry(nodes, node); }, impl_->tree);
}

}  // namespace raddle

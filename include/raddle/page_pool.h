// A pool of KV pages: which are free, what holds the others, and which keys of a request lie where.
//
// Pages are numbers. The memory that they number, K and V of every layer, is the caller's, or that
// of a KvMemory; the pool never touches it. What has to be copied there comes as pairs of pages
// for copy_pages.
//
// A page has a reference of every request that has keys on it, of the RadixCache that caches it,
// and as many as the caller holds (allocate, retain). It is free when it has none, and never
// before.
#pragma once

#include <cstdlib>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "raddle/attention.h"

namespace raddle {

/// A request's number in its pool; it is not used again when the request is finished.
using RequestId = i64;

/// used + free is the pool's number of pages; shared are those of at least two references.
struct PageCounts {
  i32 used = 0;
  i32 free = 0;
  i32 shared = 0;
};

/// What PagePool::append did. Where `missing` is above 0, so many free pages were too few and
/// nothing has changed. Else pages copy_from are to be copied to copy_to, in one call of
/// copy_pages, before the new keys are written.
struct Appended {
  i32 missing = 0;
  std::vector<i32> copy_from, copy_to;
};

/// The requests' pages as PagedKV takes them: entries page_indptr[i] … of page_indices are those of
/// the i-th request, as many as kv_len[i] keys need.
struct PageTables {
  std::vector<i32> page_indptr{0}, page_indices, kv_len;
  /// A request without room for the keys that were last to be appended, and the pages that were
  /// missing: its new query rows have no keys. Nothing where all have room.
  std::optional<std::pair<std::size_t, i32>> without_room{};
};

/// Any thread may call anything at any time: a call holds the pool's lock from its first check to
/// its last change, so that others see all of it or nothing. Arguments are checked first;
/// ValueError names the argument, and the pool is as it was. Taking and giving back a page is O(1).
class PagePool {
 public:
  /// Pages 0 … num_pages - 1, all free; the last one given back is the next one given out.
  PagePool(i32 num_pages, i32 page_size);
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  i32 num_pages() const { return static_cast<i32>(pages_.size()); }
  i32 page_size() const { return page_size_; }
  PageCounts counts() const;
  /// References of the pages, the caller's own included.
  std::vector<i32> references(std::span<const i32> pages) const;

  // --- pages in the caller's own hands --------------------------------------------------------

  /// `count` free pages, with one reference of the caller each; nothing where there are fewer.
  std::optional<std::vector<i32>> allocate(i32 count);
  /// One more reference of the caller to each of `pages`, which are not free.
  void retain(std::span<const i32> pages);
  /// Gives back one reference of the caller to each; refused where the caller has none,
  /// whatever else may hold the page. Returns the pages that are free now.
  std::vector<i32> release(std::span<const i32> pages);

  // --- requests ---------------------------------------------------------------------------------

  /// A new request whose first kv_len keys lie on `pages`, which are in use (a match of a
  /// RadixCache, for example), ceil(kv_len / page_size) of them. Without kv_len: as many keys
  /// as the pages hold.
  RequestId add(std::span<const i32> pages = {}, std::optional<i32> kv_len = {});
  /// `count` new requests with the keys of `request`, on the same pages, the last partial one
  /// included: a request that appends to it gets a copy first.
  std::vector<RequestId> fork(RequestId request, i32 count = 1);
  /// Makes room for counts[i] more keys of requests[i], each named once; all of them, or none. A
  /// partial last page that others hold, too, is replaced by a new one (copy-on-write); its last
  /// holder keeps it.
  Appended append(std::span<const RequestId> requests, std::span<const i32> counts);
  /// Drops the keys from kv_len[i] on, as after drafts that were not accepted. Returns the pages
  /// that are free now.
  std::vector<i32> truncate(std::span<const RequestId> requests, std::span<const i32> kv_len);
  /// Puts `pages`, which hold the same keys, in the place of the request's first ones: duplicates
  /// of what a RadixCache has already. Returns the pages that are free now.
  std::vector<i32> replace(RequestId request, std::span<const i32> pages);
  /// Ends requests. Returns the pages that are free now.
  std::vector<i32> finish(std::span<const RequestId> requests);

  i32 num_requests() const;
  i32 kv_len(RequestId request) const;
  std::vector<i32> pages(RequestId request) const;
  PageTables tables(std::span<const RequestId> requests) const;

 private:
  friend class RadixCache;

  struct Page {
    i32 references = 0;
    i32 held = 0;  ///< of these by the caller, who can give back no others
  };
  struct Request {
    std::vector<i32> pages;
    i32 kv_len = 0;
    i32 missing = 0;     ///< pages that its last append lacked; it has no room for new keys then
    i32 generation = 0;  ///< how often the slot was used before
    bool runs = false;
    bool named = false;  ///< by the call that is being checked
  };

  // All of these are called with the lock held.
  i32 take();
  void share(i32 page);
  bool drop(i32 page);
  void drop(i32 page, std::vector<i32>& freed);
  i32 pages_of(i64 tokens) const {
    return static_cast<i32>((tokens + page_size_ - 1) / page_size_);
  }
  bool appends_to_shared(const Request& request) const;
  void check_used(const char* name, std::span<const i32> pages) const;
  Request& find(const char* name, i64 at, RequestId request) const;
  std::vector<Request*> find_once(std::span<const RequestId> requests) const;
  void make_room_for(std::size_t requests);
  RequestId start(std::vector<i32> pages, i32 kv_len);

  // For the cache, which takes the lock through them.
  void share_cached(std::span<const i32> pages, i64 first);
  i32 drop_cached(std::span<const i32> pages, std::size_t enough, std::vector<i32>& freed);
  void drop_cached(std::span<const i32> pages);

  i32 page_size_;
  mutable std::mutex mutex_;
  std::vector<Page> pages_;
  std::vector<i32> free_;  ///< a stack
  i32 shared_ = 0;
  mutable std::vector<Request> requests_;
  std::vector<i32> free_slots_;
};

/// Host memory for the K and V of one layer on a pool's pages, for those who have none: zeroed,
/// aligned to cache lines, and theirs to read and write as long as it lives.
class KvMemory {
 public:
  KvMemory(const PagePool& pool, i32 num_kv_heads, i32 head_dim_qk, i32 head_dim_vo, DType dtype,
           HeadOrder order = HeadOrder::nhd);
  /// [pages, page_size, Hkv, D] (NHD) or [pages, Hkv, page_size, D] (HND), without scales.
  const KvRef& kv() const { return kv_; }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::unique_ptr<void, Free> k_, v_;
  KvRef kv_;
};

/// The layout of a step: requests[i] has qo_len[i] rows, whose keys are its last, appended already.
LayoutPtr pool_layout(const PagePool& pool, std::span<const RequestId> requests,
                      std::span<const i32> qo_len, HeadOrder order = HeadOrder::nhd,
                      i32 min_prefix = 0);

}  // namespace raddle

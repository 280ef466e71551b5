#include "raddle/page_pool.h"

#include <algorithm>
#include <numeric>

#include "raddle/error.h"
#include "raddle/layout.h"

namespace raddle {

namespace {

std::size_t at(i64 i) { return static_cast<std::size_t>(i); }

/// A request's number: its slot below, above how often that slot was used before.
RequestId number(i32 slot, i32 generation) { return (static_cast<i64>(generation) << 32) | slot; }

void check_sizes(std::span<const RequestId> requests, const char* name, std::size_t found) {
  if (found != requests.size())
    fail<ValueError>(name, " has ", found, " entries; expected ", requests.size(),
                     ", one a request");
}

/// Room for `size` entries that grows in proportion, so that appending one token at a time is O(1).
void make_room(std::vector<i32>& pages, std::size_t size) {
  if (size > pages.capacity()) pages.reserve(std::max(size, pages.capacity() * 3 / 2));
}

}  // namespace

PagePool::PagePool(i32 num_pages, i32 page_size) : page_size_(page_size) {
  // What is kept of a page takes some twenty bytes: beyond, a mistaken number would fill a machine.
  constexpr i32 most = 1 << 27;
  if (num_pages < 1 || num_pages > most)
    fail<ValueError>("num_pages is ", num_pages, "; expected at least 1, at most ", most);
  if (page_size < 1) fail<ValueError>("page_size is ", page_size, "; expected at least 1");
  pages_.resize(at(num_pages));
  free_.resize(at(num_pages));
  // A stack, so that page 0 is the first one given out.
  std::iota(free_.rbegin(), free_.rend(), 0);
}

PageCounts PagePool::counts() const {
  const std::lock_guard lock(mutex_);
  const auto free = static_cast<i32>(free_.size());
  return {num_pages() - free, free, shared_};
}

std::vector<i32> PagePool::references(std::span<const i32> pages) const {
  const std::lock_guard lock(mutex_);
  std::vector<i32> found;
  found.reserve(pages.size());
  for (std::size_t i = 0; i < pages.size(); ++i) {
    if (pages[i] < 0 || pages[i] >= num_pages())
      fail<ValueError>("pages[", i, "] is ", pages[i], "; expected 0 to ", num_pages() - 1);
    found.push_back(pages_[at(pages[i])].references);
  }
  return found;
}

// --- counting ---------------------------------------------------------------------------------

i32 PagePool::take() {
  const i32 page = free_.back();
  free_.pop_back();
  pages_[at(page)].references = 1;
  return page;
}

void PagePool::share(i32 page) {
  if (++pages_[at(page)].references == 2) ++shared_;
}

bool PagePool::drop(i32 page) {
  const i32 left = --pages_[at(page)].references;
  if (left == 1) --shared_;
  if (left > 0) return false;
  free_.push_back(page);  // never allocates: there was room for all pages from the start
  return true;
}

void PagePool::drop(i32 page, std::vector<i32>& freed) {
  if (drop(page)) freed.push_back(page);
}

void PagePool::check_used(const char* name, std::span<const i32> pages) const {
  for (std::size_t i = 0; i < pages.size(); ++i) {
    if (pages[i] < 0 || pages[i] >= num_pages())
      fail<ValueError>(name, "[", i, "] is ", pages[i], "; expected 0 to ", num_pages() - 1);
    if (pages_[at(pages[i])].references == 0)
      fail<ValueError>(name, "[", i, "] is ", pages[i], ", which is free; expected a page in use");
  }
}

// --- pages in the caller's own hands ------------------------------------------------------------

std::optional<std::vector<i32>> PagePool::allocate(i32 count) {
  if (count < 0) fail<ValueError>("count is ", count, "; expected at least 0");
  const std::lock_guard lock(mutex_);
  if (at(count) > free_.size()) return std::nullopt;
  std::vector<i32> pages(at(count));
  for (i32& page : pages) {
    page = take();
    pages_[at(page)].held = 1;
  }
  return pages;
}

void PagePool::retain(std::span<const i32> pages) {
  const std::lock_guard lock(mutex_);
  check_used("pages", pages);
  for (const i32 page : pages) {
    share(page);
    ++pages_[at(page)].held;
  }
}

std::vector<i32> PagePool::release(std::span<const i32> pages) {
  const std::lock_guard lock(mutex_);
  std::vector<i32> freed;
  freed.reserve(pages.size());
  // Counts down to see whether the list names a page too often, and up again where it does.
  for (std::size_t i = 0; i < pages.size(); ++i) {
    const i32 page = pages[i];
    const bool there = page >= 0 && page < num_pages();
    if (there && pages_[at(page)].held > 0) {
      --pages_[at(page)].held;
      continue;
    }
    for (std::size_t j = 0; j < i; ++j) ++pages_[at(pages[j])].held;
    if (!there) fail<ValueError>("pages[", i, "] is ", page, "; expected 0 to ", num_pages() - 1);
    fail<ValueError>("pages[", i, "] is ", page, ", which was released already",
                     "; expected a page that allocate or retain gave you");
  }
  for (const i32 page : pages) drop(page, freed);
  return freed;
}

// --- requests -----------------------------------------------------------------------------------

PagePool::Request& PagePool::find(const char* name, i64 entry, RequestId request) const {
  const i64 slot = request & 0xffffffff;
  const i64 generation = request >> 32;
  if (request >= 0 && slot < static_cast<i64>(requests_.size())) {
    Request& found = requests_[at(slot)];
    if (found.runs && found.generation == generation) return found;
  }
  std::string which = entry < 0 ? name : name + ("[" + std::to_string(entry) + "]");
  const bool ended = request >= 0 && slot < static_cast<i64>(requests_.size()) &&
                     generation <= requests_[at(slot)].generation;
  fail<ValueError>(which, " is ", request,
                   ended ? ", which is finished" : ", which was never added",
                   "; expected a request of this pool");
}

/// The requests of a call that names each once.
std::vector<PagePool::Request*> PagePool::find_once(std::span<const RequestId> requests) const {
  std::vector<Request*> found;
  found.reserve(requests.size());
  const auto forget = [&found] {
    for (Request* request : found) request->named = false;
  };
  try {
    for (std::size_t i = 0; i < requests.size(); ++i) {
      Request& request = find("requests", static_cast<i64>(i), requests[i]);
      if (request.named)
        fail<ValueError>("requests[", i, "] is ", requests[i], " again; expected each once");
      request.named = true;
      found.push_back(&request);
    }
  } catch (...) {
    forget();
    throw;
  }
  forget();
  return found;
}

/// Room for so many more requests: what follows cannot fail for want of memory.
void PagePool::make_room_for(std::size_t requests) {
  const std::size_t slots = requests_.size() - free_slots_.size() + requests;
  if (slots > requests_.capacity()) requests_.reserve(std::max(slots, 2 * requests_.size()));
  free_slots_.reserve(requests_.capacity());  // of every slot, so that finish cannot fail either
}

RequestId PagePool::start(std::vector<i32> pages, i32 kv_len) {
  if (free_slots_.empty()) {
    requests_.emplace_back();
    free_slots_.push_back(static_cast<i32>(requests_.size()) - 1);
  }
  const i32 slot = free_slots_.back();
  free_slots_.pop_back();
  for (const i32 page : pages) share(page);
  Request& request = requests_[at(slot)];
  request.pages = std::move(pages);
  request.kv_len = kv_len;
  request.runs = true;
  return number(slot, request.generation);
}

RequestId PagePool::add(std::span<const i32> pages, std::optional<i32> kv_len) {
  const i64 room = static_cast<i64>(pages.size()) * page_size_;
  const i64 tokens = kv_len ? *kv_len : room;
  if (tokens < 0 || tokens > room || tokens <= room - page_size_)
    fail<ValueError>("kv_len is ", tokens, " for ", pages.size(), " pages of ", page_size_,
                     "; expected as many pages as the keys need");
  if (tokens > longest_request)
    fail<ValueError>("kv_len is ", tokens, "; expected at most ", longest_request);
  const std::lock_guard lock(mutex_);
  check_used("pages", pages);
  make_room_for(1);
  return start({pages.begin(), pages.end()}, static_cast<i32>(tokens));
}

std::vector<RequestId> PagePool::fork(RequestId request, i32 count) {
  constexpr i32 most = 1 << 20;
  if (count < 0 || count > most)
    fail<ValueError>("count is ", count, "; expected at least 0, at most ", most);
  const std::lock_guard lock(mutex_);
  const Request& parent = find("request", -1, request);
  const i32 kv_len = parent.kv_len;
  std::vector<std::vector<i32>> pages(at(count), parent.pages);
  std::vector<RequestId> forks;
  forks.reserve(at(count));
  make_room_for(at(count));
  for (std::vector<i32>& each : pages) forks.push_back(start(std::move(each), kv_len));
  return forks;
}

bool PagePool::appends_to_shared(const Request& request) const {
  return request.kv_len % page_size_ != 0 && pages_[at(request.pages.back())].references > 1;
}

Appended PagePool::append(std::span<const RequestId> requests, std::span<const i32> counts) {
  check_sizes(requests, "counts", counts.size());
  const std::lock_guard lock(mutex_);
  const std::vector<Request*> grown = find_once(requests);
  std::vector<i32> new_pages(grown.size());
  i64 needed = 0;
  for (std::size_t i = 0; i < grown.size(); ++i) {
    const i64 kv_len = static_cast<i64>(grown[i]->kv_len) + counts[i];
    if (counts[i] < 0) fail<ValueError>("counts[", i, "] is ", counts[i], "; expected at least 0");
    if (kv_len > longest_request)
      fail<ValueError>("counts[", i, "] is ", counts[i], " after ", grown[i]->kv_len,
                       " keys; expected at most ", longest_request, " keys a request");
    new_pages[i] = pages_of(kv_len) - static_cast<i32>(grown[i]->pages.size());
    needed += new_pages[i];
  }
  // A request that gets a copy of a shared page leaves one reader fewer, so that the last reader
  // needs no copy. Counting down, and up again, finds which requests get copies.
  std::vector<std::size_t> copies;
  copies.reserve(grown.size());
  for (std::size_t i = 0; i < grown.size(); ++i) {
    if (counts[i] == 0 || !appends_to_shared(*grown[i])) continue;
    --pages_[at(grown[i]->pages.back())].references;
    copies.push_back(i);
  }
  for (const std::size_t i : copies) ++pages_[at(grown[i]->pages.back())].references;
  needed += static_cast<i64>(copies.size());

  Appended done;
  if (needed > static_cast<i64>(free_.size())) {
    done.missing = static_cast<i32>(needed - static_cast<i64>(free_.size()));
    for (std::size_t i = 0; i < grown.size(); ++i)
      if (counts[i] > 0) grown[i]->missing = done.missing;
    return done;
  }
  // All memory first: from here on nothing can fail.
  for (std::size_t i = 0; i < grown.size(); ++i)
    make_room(grown[i]->pages, grown[i]->pages.size() + at(new_pages[i]));
  done.copy_from.reserve(copies.size());
  done.copy_to.reserve(copies.size());
  for (const std::size_t i : copies) {
    i32& last = grown[i]->pages.back();
    done.copy_from.push_back(last);
    drop(last);
    last = take();
    done.copy_to.push_back(last);
  }
  for (std::size_t i = 0; i < grown.size(); ++i) {
    for (i32 n = 0; n < new_pages[i]; ++n) grown[i]->pages.push_back(take());
    grown[i]->kv_len += counts[i];
    grown[i]->missing = 0;
  }
  return done;
}

std::vector<i32> PagePool::truncate(std::span<const RequestId> requests,
                                    std::span<const i32> kv_len) {
  check_sizes(requests, "kv_len", kv_len.size());
  const std::lock_guard lock(mutex_);
  const std::vector<Request*> cut = find_once(requests);
  std::size_t given_back = 0;
  for (std::size_t i = 0; i < cut.size(); ++i) {
    if (kv_len[i] < 0 || kv_len[i] > cut[i]->kv_len)
      fail<ValueError>("kv_len[", i, "] is ", kv_len[i], "; expected 0 to ", cut[i]->kv_len);
    given_back += cut[i]->pages.size() - at(pages_of(kv_len[i]));
  }
  std::vector<i32> freed;
  freed.reserve(given_back);
  for (std::size_t i = 0; i < cut.size(); ++i) {
    std::vector<i32>& pages = cut[i]->pages;
    cut[i]->missing = 0;
    for (cut[i]->kv_len = kv_len[i]; pages.size() > at(pages_of(kv_len[i])); pages.pop_back())
      drop(pages.back(), freed);
  }
  return freed;
}

std::vector<i32> PagePool::replace(RequestId request, std::span<const i32> pages) {
  const std::lock_guard lock(mutex_);
  Request& found = find("request", -1, request);
  // A partial page is about to be written: one that others read must not take its place.
  const auto full = static_cast<std::size_t>(found.kv_len / page_size_);
  if (pages.size() > full)
    fail<ValueError>("pages has ", pages.size(), " entries; expected at most ", full,
                     ", the request's full pages");
  check_used("pages", pages);
  std::vector<i32> freed;
  freed.reserve(pages.size());
  for (const i32 page : pages) share(page);
  for (std::size_t i = 0; i < pages.size(); ++i) {
    drop(found.pages[i], freed);
    found.pages[i] = pages[i];
  }
  return freed;
}

std::vector<i32> PagePool::finish(std::span<const RequestId> requests) {
  const std::lock_guard lock(mutex_);
  const std::vector<Request*> ended = find_once(requests);
  std::size_t given_back = 0;
  for (const Request* request : ended) given_back += request->pages.size();
  std::vector<i32> freed;
  freed.reserve(given_back);
  for (Request* request : ended) {
    // The last page is given back first, so that the first is the next one given out.
    for (; !request->pages.empty(); request->pages.pop_back()) drop(request->pages.back(), freed);
    std::vector<i32>().swap(request->pages);
    request->kv_len = 0;
    request->runs = false;
    ++request->generation;
    request->missing = 0;
    free_slots_.push_back(static_cast<i32>(request - requests_.data()));
  }
  return freed;
}

i32 PagePool::num_requests() const {
  const std::lock_guard lock(mutex_);
  return static_cast<i32>(requests_.size() - free_slots_.size());
}

i32 PagePool::kv_len(RequestId request) const {
  const std::lock_guard lock(mutex_);
  return find("request", -1, request).kv_len;
}

std::vector<i32> PagePool::pages(RequestId request) const {
  const std::lock_guard lock(mutex_);
  return find("request", -1, request).pages;
}

PageTables PagePool::tables(std::span<const RequestId> requests) const {
  const std::lock_guard lock(mutex_);
  PageTables tables;
  tables.page_indptr.reserve(requests.size() + 1);
  tables.kv_len.reserve(requests.size());
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const Request& request = find("requests", static_cast<i64>(i), requests[i]);
    tables.page_indices.insert(tables.page_indices.end(), request.pages.begin(),
                               request.pages.end());
    tables.page_indptr.push_back(static_cast<i32>(tables.page_indices.size()));
    tables.kv_len.push_back(request.kv_len);
    if (request.missing > 0 && !tables.without_room) tables.without_room = {i, request.missing};
  }
  return tables;
}

// --- the cache's references ---------------------------------------------------------------------

/// Shares the pages from the `first` one on; all of them must be in use.
void PagePool::share_cached(std::span<const i32> pages, i64 first) {
  const std::lock_guard lock(mutex_);
  check_used("pages", pages);
  for (const i32 page : pages.subspan(at(first))) share(page);
}

/// Drops pages from the last one on until `freed` has `enough`; returns how many were dropped.
i32 PagePool::drop_cached(std::span<const i32> pages, std::size_t enough, std::vector<i32>& freed) {
  const std::lock_guard lock(mutex_);
  i32 dropped = 0;
  for (auto page = pages.rbegin(); page != pages.rend() && freed.size() < enough; ++page) {
    drop(*page, freed);
    ++dropped;
  }
  return dropped;
}

void PagePool::drop_cached(std::span<const i32> pages) {
  const std::lock_guard lock(mutex_);
  for (const i32 page : pages) drop(page);
}

}  // namespace raddle

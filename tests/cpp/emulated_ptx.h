// A GPU's thread block on the host: every thread a fiber, and the instructions of engine/ptx as
// functions that wait for one another where the hardware would. Lets a test run the GPU kernels
// where there is no GPU. A barrier or a warp's instruction that not all its threads reach ends the
// program, as it would hang the GPU.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#ifndef RADDLE_AMALGAMATED  // there the text before this one holds it
#include "raddle/engine/core/dtype.h"
#include "raddle/engine/core/tensor_map.h"
#endif
#include "emulated_hopper.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace raddle::emulated {

/// What a lane shows the others of its warp.
struct Exchange {
  float x;
  u32 a[4], b[2];
  u32 row;
  const void* pointer;
  bool flag;
};

/// `bytes` of what is copied, then zeros, to shared memory.
struct Copy {
  u32 to;
  const void* from;
  std::size_t bytes, size;
  std::shared_ptr<bool> done = std::make_shared<bool>(false);  // it may be waited for in two ways
};

class Block {
 public:
  /// `num_threads` are a team's.
  Block(i32 index, i32 num_threads, i32 shared_bytes, i32 num_blocks = 1, i32 teams = 1)
      : index_(index),
        num_blocks_(num_blocks),
        num_threads_(num_threads),
        fibers_(static_cast<std::size_t>(num_threads * teams)),
        slots_(fibers_.size()),
        warps_(fibers_.size() / 32),
        teams_(static_cast<std::size_t>(teams)),
        // Poisoned: all bits set are NaN in every dtype.
        shared_(static_cast<std::size_t>(shared_bytes) / sizeof(Unit) + 1, Unit{}),
        proxies_(static_cast<std::byte*>(shared()), shared_.size() * sizeof(Unit)),
        products_(fibers_.size() / Products::num_threads, Products(proxies_)),
        warpgroups_(products_.size()),
        random_(static_cast<u32>(index)) {}

  /// Runs body on every thread, one at a time, switching where one waits.
  void run(const std::function<void()>& body) { run_cluster({this}, body); }
  /// The same of the blocks of a cluster, in the order of their ranks.
  static void run_cluster(const std::vector<Block*>& blocks, const std::function<void()>& body) {
    Cluster cluster{blocks, {}};
    for (std::size_t rank = 0; rank < blocks.size(); ++rank) {
      blocks[rank]->cluster_ = &cluster;
      blocks[rank]->rank_ = static_cast<i32>(rank);
      blocks[rank]->begin(body);
    }
    const auto sum = [&](auto of) {
      i64 total = 0;
      for (Block* block : blocks) total += of(*block);
      return total;
    };
    const auto progress = [](const Block& block) { return block.progress_; };
    while (sum([](const Block& block) { return static_cast<i64>(block.left_); }) > 0) {
      const i64 before = sum(progress);
      for (Block* block : blocks) block->step();
      // Copies come as late as may be: when all threads wait for something, asking again or not.
      const bool asks = sum([](Block& block) { return std::exchange(block.asks_again_, 0); }) > 0;
      if (sum(progress) > before && !asks) continue;
      if (!finish_a_box(blocks) && !asks) broken("threads wait for others that never come");
    }
    for (Block* block : blocks) block->cluster_ = nullptr;
    current() = nullptr;
  }
  static Block*& current() {
    static thread_local Block* block = nullptr;
    return block;
  }
  i32 index() const { return index_; }
  i32 rank() const { return rank_; }
  Block& of_cluster(u32 rank) const {
    if (rank >= cluster_->blocks.size()) broken("no block of the cluster has that rank");
    Block& block = *cluster_->blocks[rank];
    if (block.left_ == 0) broken("a block reaches the shared memory of one that has ended");
    return block;
  }
  void arrive_cluster() { come(cluster_->barrier, cluster_threads()); }
  void wait_cluster() { wait(cluster_->barrier, cluster_threads()); }
  i32 num_blocks() const { return num_blocks_; }
  i32 num_threads() const { return num_threads_; }
  i32 num_teams() const { return static_cast<i32>(teams_.size()); }
  i32 team() const { return static_cast<i32>(running_) / num_threads_; }
  i32 thread() const { return static_cast<i32>(running_) % num_threads_; }
  void* shared() { return shared_.data(); }
  i64 time = 0;  // counts how often it is asked for
  /// A block that runs alone waits in vain. Beside others it waits for as long as they need: they
  /// compute more slowly than GPUs do.
  void pass_time(i32 ns) {
    if (cluster_->blocks.size() > 1)
      ++asks_again_;
    else
      time += ns;
  }
  u32 shared_bytes() const { return static_cast<u32>(shared_.size() * sizeof(Unit)); }

  void copy(const Copy& c) {
    if (std::exchange(*c.done, true)) return;
    auto* at = static_cast<std::byte*>(shared()) + c.to;
    std::memset(at, 0, c.size);
    if (c.bytes > 0) std::memcpy(at, c.from, c.bytes);
  }
  /// Copies happen only when they are waited for, so that a wait that is missing shows.
  void start_copy(const Copy& copy) { fibers_[running_].groups.back().push_back(copy); }
  void close_group() { fibers_[running_].groups.emplace_back(); }
  void finish_copies(std::size_t pending) {
    auto& groups = fibers_[running_].groups;  // the last one is still open
    while (groups.size() > pending + 1) {
      for (const Copy& each : groups.front()) copy(each);
      groups.pop_front();
    }
  }
  /// Barriers in shared memory, by address.
  void create_barrier(u32 at, i32 arrivals) {
    if (memory_barriers_.count(at)) broken("a barrier is created where one is");
    memory_barriers_[at] = {arrivals, arrivals, 0, 0, {}};
  }
  void destroy_barrier(u32 at) {
    if (memory_barriers_.erase(at) == 0) broken("no barrier is where one is destroyed");
  }
  void arrive(u32 at) {
    MemoryBarrier& barrier = barrier_at(at);
    if (--barrier.missing < 0) broken("more threads arrive at a barrier than it expects");
    end_phase(barrier);
  }
  void expect(u32 at, u32 bytes) { barrier_at(at).bytes += bytes; }
  void arrive_expecting(u32 at, u32 bytes) {
    expect(at, bytes);
    arrive(at);
  }
  /// Boxes are copied when nothing else is left to do, in any order.
  void start_box(const BoxCopy& box) {
    barrier_at(box.barrier);
    box.start(proxies_);
    boxes_.push_back(box);
  }
  /// Boxes are stored no sooner than their thread waits for that.
  void start_store(const BoxStore& box) {
    box.check();
    fibers_[running_].stores.push_back(box);
  }
  void finish_stores() {
    auto& stores = fibers_[running_].stores;
    for (const BoxStore& box : stores) box.finish(proxies_);
    stores.clear();
  }
  void fence_proxy() { proxies_.fence(); }
  /// All threads of a warpgroup begin and end products together.
  Products& products() { return products_[running_ / Products::num_threads]; }
  i32 thread_of_warpgroup() const { return static_cast<i32>(running_) % Products::num_threads; }
  void wait_warpgroup() { wait(warpgroups_[running_ / Products::num_threads], 128); }
  /// Barriers by number; a thread that does not wait comes all the same.
  void sync_threads(i32 id, i32 threads) { wait(named_[id], static_cast<std::size_t>(threads)); }
  bool sync_threads_any(i32 id, i32 threads, bool condition) {
    NamedBarrier& barrier = named_[id];
    barrier.some = barrier.some || condition;
    if (barrier.arrived + 1 == static_cast<std::size_t>(threads))
      barrier.told = std::exchange(barrier.some, false);
    wait(barrier, static_cast<std::size_t>(threads));
    return barrier.told;
  }
  void arrive_threads(i32 id, i32 threads) { come(named_[id], static_cast<std::size_t>(threads)); }
  /// The thread's copies are done when the phase ends, no sooner.
  void await_copies(u32 at) {
    auto& copies = barrier_at(at).copies;
    for (auto& group : fibers_[running_].groups) {
      group.erase(std::remove_if(group.begin(), group.end(), [](auto& c) { return *c.done; }),
                  group.end());
      copies.insert(copies.end(), group.begin(), group.end());
    }
  }
  void arrive_after_copies(u32 at) {
    await_copies(at);
    arrive(at);
  }
  bool has_ended(u32 at, i32 parity) { return barrier_at(at).phase % 2 != parity; }
  void wait_barrier(u32 at, i32 parity) {
    while (!has_ended(at, parity)) leave(false);
  }
  void wait_block() { wait(block_, fibers_.size()); }
  void wait_team() {
    wait(teams_[static_cast<std::size_t>(team())], static_cast<std::size_t>(num_threads_));
  }
  void wait_warp() { wait(warps_[running_ / 32], 32); }
  /// Some lanes of the warp, a bit each; others may be elsewhere.
  void wait_lanes(u32 lanes) {
    if (!(lanes >> running_ % 32 & 1u)) broken("a lane waits for others, not for itself");
    wait(lanes_[{running_ / 32, lanes}], static_cast<std::size_t>(__builtin_popcount(lanes)));
  }

  /// Shows `mine` to the warp; read(lane) is what a lane shows. Valid until the next exchange.
  template <class Read>
  void exchange(const Exchange& mine, Read&& read, u32 lanes = ~u32{0}) {
    slots_[running_] = mine;
    wait_lanes(lanes);
    const Exchange* warp = &slots_[running_ / 32 * 32];
    read([=](i32 lane) -> const Exchange& {
      if (!(lanes >> lane & 1u)) broken("a lane asks one that takes no part");
      return warp[lane];
    });
    wait_lanes(lanes);
  }

 private:
  static constexpr std::size_t stack_bytes = 256 * 1024;
  struct Fiber {
    ucontext_t context;
    std::unique_ptr<std::byte[]> stack;
    std::deque<std::vector<Copy>> groups{1};
    std::vector<BoxStore> stores;
    bool done = false;
  };
  struct Barrier {
    std::size_t arrived = 0;
    i64 generation = 0;
  };
  /// Its threads may say something: what one of them said, all are told.
  struct NamedBarrier : Barrier {
    bool some = false, told = false;
  };
  struct alignas(1024) Unit {
    Unit() { std::memset(x, 0xff, sizeof x); }
    u64 x[128];
  };

  /// Blocks that run together.
  struct Cluster {
    std::vector<Block*> blocks;
    Barrier barrier;
  };
  std::size_t cluster_threads() const { return cluster_->blocks.size() * fibers_.size(); }

  struct MemoryBarrier {
    i32 arrivals, missing;
    i64 phase, bytes;  ///< bytes of bulk copies that are announced and not there
    std::vector<Copy> copies;
  };

  void end_phase(MemoryBarrier& barrier) {
    if (barrier.missing > 0 || barrier.bytes != 0) return;
    for (const Copy& each : barrier.copies) copy(each);
    barrier.copies.clear();
    barrier.missing = barrier.arrivals;
    ++barrier.phase;
    ++progress_;
  }
  void begin(const std::function<void()>& body) {
    body_ = &body;
    for (Fiber& fiber : fibers_) {
      // Not filled: most of it is never touched.
      if (!fiber.stack) fiber.stack.reset(new std::byte[stack_bytes]);
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.get();
      fiber.context.uc_stack.ss_size = stack_bytes;
      fiber.context.uc_link = &scheduler_;
      makecontext(&fiber.context, &Block::start, 0);
    }
    left_ = fibers_.size();
  }
  /// Lets every thread run until it waits.
  void step() {
    current() = this;
    for (running_ = 0; running_ < fibers_.size(); ++running_) {
      if (fibers_[running_].done) continue;
      enter(fibers_[running_]);
      if (fibers_[running_].done) --left_, ++progress_;
    }
    if (left_ == 0 && !boxes_.empty()) broken("a block ends before what is copied to it is there");
  }
  /// Copies a box of some block.
  static bool finish_a_box(const std::vector<Block*>& blocks) {
    const std::size_t first = blocks.front()->random_();
    for (std::size_t i = 0; i < blocks.size(); ++i)
      if (blocks[(first + i) % blocks.size()]->finish_a_box()) return true;
    return false;
  }
  bool finish_a_box() {
    if (boxes_.empty()) return false;
    std::swap(boxes_[random_() % boxes_.size()], boxes_.back());
    const BoxCopy box = boxes_.back();
    boxes_.pop_back();
    box.finish(proxies_);
    MemoryBarrier& barrier = barrier_at(box.barrier);
    barrier.bytes -= box.bytes();
    end_phase(barrier);
    return true;
  }
  MemoryBarrier& barrier_at(u32 at) {
    const auto found = memory_barriers_.find(at);
    if (found == memory_barriers_.end()) broken("no barrier is where one is expected");
    return found->second;
  }

  static void start() {
    Block& block = *current();
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &block.host_stack_, &block.host_size_);
#endif
    (*block.body_)();
    if (!block.fibers_[block.running_].stores.empty())
      broken("a thread ends before boxes that it stores have been read");
    block.fibers_[block.running_].done = true;
    block.leave(true);
  }

  void enter(Fiber& fiber) {
#if defined(__SANITIZE_ADDRESS__)
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, fiber.stack.get(), stack_bytes);
#endif
    swapcontext(&scheduler_, &fiber.context);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
  }

  void leave([[maybe_unused]] bool for_good) {
    Fiber& fiber = fibers_[running_];
#if defined(__SANITIZE_ADDRESS__)
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(for_good ? nullptr : &fake, host_stack_, host_size_);
#endif
    swapcontext(&fiber.context, &scheduler_);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake, &host_stack_, &host_size_);
#endif
  }

  void come(Barrier& barrier, std::size_t threads) {
    if (++barrier.arrived < threads) return;
    barrier.arrived = 0;
    ++barrier.generation;
    ++progress_;
  }
  void wait(Barrier& barrier, std::size_t threads) {
    const i64 generation = barrier.generation;
    come(barrier, threads);
    while (barrier.generation == generation) leave(false);
  }

  i32 index_, num_blocks_, num_threads_, rank_ = 0;
  Cluster* cluster_ = nullptr;
  i64 asks_again_ = 0;  ///< sleeps since all blocks' last step
  std::vector<Fiber> fibers_;
  std::vector<Exchange> slots_;
  std::vector<Barrier> warps_, teams_;
  std::map<std::pair<std::size_t, u32>, Barrier> lanes_;
  std::vector<Unit> shared_;
  TwoProxies proxies_;
  std::vector<Products> products_;
  std::vector<Barrier> warpgroups_;
  std::map<i32, NamedBarrier> named_;
  std::vector<BoxCopy> boxes_;
  std::mt19937 random_;
  Barrier block_;
  std::map<u32, MemoryBarrier> memory_barriers_;
  const std::function<void()>* body_ = nullptr;
  ucontext_t scheduler_{};
  std::size_t running_ = 0, left_ = 0;  ///< left: threads that have not ended
  i64 progress_ = 0;
  const void* host_stack_ = nullptr;
  std::size_t host_size_ = 0;
};

/// Makes the `size` blocks of a launch's cluster number `index`, and runs them together.
inline void run_cluster(i32 index, i32 size, i32 num_threads, i32 shared_bytes, i32 num_blocks,
                        i32 teams, const std::function<void()>& body) {
  std::deque<Block> blocks;
  std::vector<Block*> cluster;
  for (i32 rank = 0; rank < size; ++rank)
    cluster.push_back(
        &blocks.emplace_back(size * index + rank, num_threads, shared_bytes, num_blocks, teams));
  Block::run_cluster(cluster, body);
}

}  // namespace raddle::emulated

RADDLE_ENGINE_BEGIN

namespace ptx {

using emulated::Block;
using emulated::Exchange;

inline i32 thread_index() { return Block::current()->thread(); }
inline i32 lane_index() { return thread_index() & 31; }
inline i32 warp_index() { return thread_index() >> 5; }
inline i32 block_index() { return Block::current()->index(); }
inline i32 team_index() { return Block::current()->team(); }
inline i32 team_count() { return Block::current()->num_teams(); }
inline void* shared_memory() { return Block::current()->shared(); }
inline void sync_block() { Block::current()->wait_block(); }
template <i32 num_threads>
inline void sync_team() {
  static_assert(num_threads % 32 == 0);
  Block::current()->wait_team();
}
inline void sync_warp() { Block::current()->wait_warp(); }
inline void sync_lanes(u32 lanes) { Block::current()->wait_lanes(lanes); }
inline void fence_device() {}
inline i64 global_time() { return ++Block::current()->time; }
inline void prefetch(const void*) {}
// The emulated driver begins a kernel when the one before has ended.
inline void wait_for_earlier_work() {}
inline void let_next_kernel_begin() {}
inline float settled(float x) { return x; }
inline void keep_order() {}
inline i32 renewed(i32 x) { return x; }
inline void sleep(i32 ns) { Block::current()->pass_time(ns); }
inline i32 load_now(const i32* word) { return *word; }
inline i32 load_relaxed(const i32* word) { return *word; }

inline float shuffle(float x, i32 lane, u32 lanes = ~u32{0}) {
  Exchange mine{};
  mine.x = x;
  float result = 0.0f;
  Block::current()->exchange(
      mine, [&](auto at) { result = at(lane).x; }, lanes);
  return result;
}
inline u32 uniform(u32 x) {
  Exchange mine{};
  mine.a[0] = x;
  Block::current()->exchange(mine, [&](auto at) {
    if (at(0).a[0] != x) emulated::broken("a number that differs between lanes is called uniform");
  });
  return x;
}
template <class T>
inline T* shuffle(T* x, i32 lane) {
  Exchange mine{};
  mine.pointer = x;
  T* result = nullptr;
  Block::current()->exchange(
      mine, [&](auto at) { result = static_cast<T*>(const_cast<void*>(at(lane).pointer)); });
  return result;
}
inline bool any(bool condition) {
  Exchange mine{};
  mine.flag = condition;
  bool result = false;
  Block::current()->exchange(mine, [&](auto at) {
    for (i32 lane = 0; lane < 32; ++lane) result = result || at(lane).flag;
  });
  return result;
}
inline float shuffle_xor(float x, i32 mask, u32 lanes = ~u32{0}) {
  return shuffle(x, (thread_index() % 32) ^ mask, lanes);
}

inline u32 shuffle_xor(u32 x, i32 mask) {
  Exchange mine{};
  mine.row = x;
  u32 result = 0;
  const i32 lane = (thread_index() % 32) ^ mask;
  Block::current()->exchange(mine, [&](auto at) { result = at(lane).row; });
  return result;
}
inline u32 ballot(bool yes) {
  Exchange mine{};
  mine.x = yes ? 1.0f : 0.0f;
  u32 votes = 0;
  Block::current()->exchange(mine, [&](auto at) {
    for (i32 lane = 0; lane < 32; ++lane) votes |= (at(lane).x != 0.0f ? 1u : 0u) << lane;
  });
  return votes;
}
inline u32 max_of_warp(u32 x) {
  Exchange mine{};
  mine.row = x;
  u32 most = 0;
  Block::current()->exchange(mine, [&](auto at) {
    for (i32 lane = 0; lane < 32; ++lane) most = std::max(most, at(lane).row);
  });
  return most;
}
inline i32 count_bits(u32 x) { return __builtin_popcount(x); }
inline i32 lowest_bit(u32 x) { return __builtin_ctz(x); }
inline u32 bit_mask(i32 first, i32 count) {
  return static_cast<u32>(((u64{1} << std::min(count, 32)) - 1) << std::min(first, 32));
}

inline i32 atomic_add(i32* counter, i32 x) {
  const i32 before = *counter;
  *counter += x;
  return before;
}

inline i32 atomic_add_acquire(i32* counter, i32 x) { return atomic_add(counter, x); }

inline i32 thread_count() { return Block::current()->num_threads(); }
inline i32 block_count() { return Block::current()->num_blocks(); }

inline i32 shuffle(i32 x, i32 lane) {
  Exchange mine{};
  mine.a[0] = static_cast<u32>(x);
  i32 result = 0;
  Block::current()->exchange(mine, [&](auto at) { result = static_cast<i32>(at(lane).a[0]); });
  return result;
}
inline i32 shuffle_up(i32 x, i32 delta) {
  const i32 lane = thread_index() % 32;
  return shuffle(x, lane >= delta ? lane - delta : lane);
}

inline void atomic_or(i32* word, i32 bits) { *word |= bits; }
inline void atomic_min(i32* number, i32 x) { *number = std::min(*number, x); }

inline u32 shared_address(const void* p) {
  return static_cast<u32>(static_cast<const std::byte*>(p) -
                          static_cast<const std::byte*>(shared_memory()));
}

/// Copies are done as late as they may be, and on sm_75 at once.
#if defined(RADDLE_EMULATED_PLAIN_COPIES)
constexpr bool plain_copies = true;
#else
constexpr bool plain_copies = false;
#endif

inline void start_copy(u32 to, const void* from, i32 bytes, u32 size) {
  if (to % size != 0 || to + size > Block::current()->shared_bytes() ||
      (bytes > 0 && reinterpret_cast<u64>(from) % size != 0)) {
    std::fprintf(stderr, "emulated GPU: a copy of %u bytes from %p to %u\n", size, from, to);
    std::abort();
  }
  const emulated::Copy copy{to, from, static_cast<std::size_t>(bytes), size};
  plain_copies ? Block::current()->copy(copy) : Block::current()->start_copy(copy);
}
inline void copy_async(u32 to, const void* from, i32 bytes) { start_copy(to, from, bytes, 16); }
inline void copy_word_async(u32 to, const void* from) { start_copy(to, from, 4, 4); }
inline void store_two(float* to, float x, float y) {
  to[0] = x;
  to[1] = y;
}
inline void copy_commit() { Block::current()->close_group(); }
template <i32 pending>
inline void copy_wait() {
  Block::current()->finish_copies(pending);
}

inline void barrier_create(u32 barrier, i32 arrivals) {
  Block::current()->create_barrier(barrier, arrivals);
}
inline void barrier_destroy(u32 barrier) { Block::current()->destroy_barrier(barrier); }
inline void barrier_arrive(u32 barrier) { Block::current()->arrive(barrier); }
inline void barrier_arrive_if(bool arrives, u32 barrier) {
  if (arrives) barrier_arrive(barrier);
}
inline void barrier_arrive_after_copies(u32 barrier) {
  Block::current()->arrive_after_copies(barrier);
}
inline void barrier_await_copies(u32 barrier) { Block::current()->await_copies(barrier); }
inline bool barrier_ended(u32 barrier, i32 parity) {
  return Block::current()->has_ended(barrier, parity);
}
inline void barrier_wait(u32 barrier, i32 parity) {
  Block::current()->wait_barrier(barrier, parity);
}

enum class Major : i32 { k = 0, other = 1 };
struct SharedMatrix {
  u64 bits;
};
inline SharedMatrix swizzled_matrix(u32 address, u32 next_columns = 16) {
  return {static_cast<u64>((address & 0x3ffff) >> 4) | static_cast<u64>(next_columns >> 4) << 16 |
          static_cast<u64>(1024 >> 4) << 32 | 1ull << 62};
}
inline SharedMatrix operator+(SharedMatrix matrix, u32 bytes) {
  return {matrix.bits + (bytes >> 4)};
}

inline void products_begin() {
  Block& block = *Block::current();
  block.wait_warpgroup();
  block.products().begin(block.thread_of_warpgroup());
}
inline void products_end() {
  Block& block = *Block::current();
  block.products().end(block.thread_of_warpgroup());
  block.wait_warpgroup();
}
template <i32 fragments>
inline void products_read(float (&)[fragments][4]) {}
template <i32 pending, i32 fragments>
inline void products_wait(float (&)[fragments][4]) {
  Block::current()->products().finish(pending);
}
template <class T>
inline float element(u16 bits) {
  return to_float(T{bits});
}
template <Major major_a, Major major_b, i32 fragments, class T>
inline void multiply(float (&c)[fragments][4], SharedMatrix a, SharedMatrix b, i32 keep, T) {
  Block& block = *Block::current();
  block.products().issue({&c[0][0],
                          4 * fragments,
                          block.thread_of_warpgroup(),
                          keep != 0,
                          {b.bits, major_b == Major::k},
                          {a.bits, major_a == Major::k},
                          nullptr,
                          {},
                          {},
                          &element<T>});
}
template <Major major_b, i32 fragments, class T>
inline void multiply(float (&c)[fragments][4], const u32 (&a)[4], SharedMatrix b, i32 keep, T) {
  Block& block = *Block::current();
  std::vector<float> rows(32);
  const Exchange mine{0.0f, {a[0], a[1], a[2], a[3]}, {}, 0, nullptr, false};
  const i32 g = block.thread() % 32 / 4;
  block.exchange(mine, [&](auto at) {
    for (i32 i = 0; i < 32; ++i) {
      const i32 half = i / 16, k = i % 16;
      const u32 pair = at(4 * g + k % 8 / 2).a[half + k / 8 * 2];
      rows[static_cast<std::size_t>(i)] = element<T>(static_cast<u16>(pair >> 16 * (k % 2)));
    }
  });
  block.products().issue({&c[0][0],
                          4 * fragments,
                          block.thread_of_warpgroup(),
                          keep != 0,
                          {b.bits, major_b == Major::k},
                          {},
                          a,
                          {a[0], a[1], a[2], a[3]},
                          rows,
                          &element<T>});
}

using raddle::TensorMap;
enum class Keep : u64 { usual, once, again };
inline void prefetch(const TensorMap*) {}
inline bool elected() { return lane_index() == 0; }
inline void fence_proxy() { Block::current()->fence_proxy(); }
inline void fence_created_barriers() {}
inline void barrier_arrive_expecting(u32 barrier, u32 bytes) {
  Block::current()->arrive_expecting(barrier, bytes);
}
inline void barrier_expect(u32 barrier, u32 bytes) { Block::current()->expect(barrier, bytes); }
inline void copy_box(u32 to, const TensorMap* map, u32 barrier, i32 column, i32 row, i32 head,
                     i32 page, Keep) {
  emulated::BoxCopy box{{{}, to, {column, row, head, page}}, barrier};
  std::memcpy(&box.map, map, sizeof box.map);
  Block::current()->start_box(box);
}
/// Addresses in the shared memory of any block of the cluster have the block's rank in front.
constexpr i32 rank_bits = 24;
inline i32 cluster_rank() { return Block::current()->rank(); }
inline u32 in_block_of_cluster(u32 address, i32 rank) {
  return address | static_cast<u32>(rank + 1) << rank_bits;
}
inline Block& block_of(u32& address) {
  const u32 rank = (address >> rank_bits) - 1;
  address &= (1u << rank_bits) - 1;
  return Block::current()->of_cluster(rank);
}
inline void arrive_cluster() { Block::current()->arrive_cluster(); }
inline void sync_cluster() { Block::current()->wait_cluster(); }
inline void barrier_arrive_in_cluster_if(bool arrives, u32 barrier) {
  if (arrives) block_of(barrier).arrive(barrier);
}
inline void tell_block_of_cluster(u32 word, i32 x, u32 barrier) {
  std::memcpy(static_cast<std::byte*>(block_of(word).shared()) + word, &x, sizeof x);
  block_of(barrier).arrive(barrier);
}
inline i32 told_in_cluster(u32 word, u32 barrier, i32 parity) {
  barrier_wait(barrier, parity);
  i32 x;
  std::memcpy(&x, static_cast<std::byte*>(shared_memory()) + word, sizeof x);
  return x;
}
inline void copy_box_to_both(u32 to, const TensorMap* map, u32 barrier, i32 column, i32 row,
                             i32 head, i32 page, Keep) {
  emulated::BoxCopy box{{{}, to, {column, row, head, page}}, barrier};
  std::memcpy(&box.map, map, sizeof box.map);
  for (u32 rank = 0; rank < 2; ++rank) Block::current()->of_cluster(rank).start_box(box);
}
inline void store_box(u32 from, const TensorMap* map, i32 column, i32 row, i32 head, i32 page) {
  emulated::BoxStore box{{{}, from, {column, row, head, page}}};
  std::memcpy(&box.map, map, sizeof box.map);
  Block::current()->start_store(box);
}
inline void wait_stored() { Block::current()->finish_stores(); }
template <i32>
inline void give_registers() {}
template <i32>
inline void take_registers() {}
inline void sync_threads(i32 id, i32 threads) { Block::current()->sync_threads(id, threads); }
inline bool sync_threads_any(i32 id, i32 threads, bool condition) {
  return Block::current()->sync_threads_any(id, threads, condition);
}
inline void arrive_threads(i32 id, i32 threads) { Block::current()->arrive_threads(id, threads); }

inline u32 element_of_row(u32 row, i32 i) {
  u16 x;
  std::memcpy(&x, static_cast<const std::byte*>(shared_memory()) + row + 2 * i, 2);
  return x;
}

inline void store_matrices_transposed(u32 row, const u32 (&x)[2]) {
  const i32 lane = thread_index() % 32;
  Exchange mine{};
  mine.row = row, mine.a[0] = x[0], mine.a[1] = x[1];
  Block::current()->exchange(mine, [&](auto at) {
    if (lane >= 16) return;
    if (row % 16 != 0) emulated::broken("a row of a matrix at an address that is no multiple");
    for (i32 g = 0; g < 8; ++g) {
      const u32 pair = at(4 * g + lane % 8 / 2).a[lane / 8];
      const auto element = static_cast<u16>(pair >> 16 * (lane % 2));
      std::memcpy(static_cast<std::byte*>(shared_memory()) + row + 2 * g, &element, 2);
    }
  });
}

inline void store_matrices(u32 row, const u32 (&x)[4]) {
  const i32 lane = thread_index() % 32;
  Exchange mine{};
  mine.row = row;
  for (i32 i = 0; i < 4; ++i) mine.a[i] = x[i];
  Block::current()->exchange(mine, [&](auto at) {
    if (row % 16 != 0) emulated::broken("a row of a matrix at an address that is no multiple");
    for (i32 t = 0; t < 4; ++t) {
      const u32 pair = at(lane % 8 * 4 + t).a[lane / 8];
      std::memcpy(static_cast<std::byte*>(shared_memory()) + row + 4 * t, &pair, 4);
    }
  });
}

inline void load_matrices(u32 (&x)[4], u32 row) {
  const i32 g = thread_index() % 32 / 4, t = thread_index() % 4;
  Exchange mine{};
  mine.row = row;
  Block::current()->exchange(mine, [&](auto at) {
    for (i32 i = 0; i < 4; ++i) {
      const u32 from = at(8 * i + g).row;
      x[i] = element_of_row(from, 2 * t) | element_of_row(from, 2 * t + 1) << 16;
    }
  });
}

inline void load_matrices_transposed(u32 (&x)[4], u32 row) {
  const i32 g = thread_index() % 32 / 4, t = thread_index() % 4;
  Exchange mine{};
  mine.row = row;
  Block::current()->exchange(mine, [&](auto at) {
    for (i32 i = 0; i < 4; ++i)
      x[i] = element_of_row(at(8 * i + 2 * t).row, g) | element_of_row(at(8 * i + 2 * t + 1).row, g)
                                                            << 16;
  });
}

template <class T>
inline float half_of(u32 packed, i32 which) {
  return to_float(T{static_cast<u16>(packed >> (16 * which))});
}

template <class T>
inline void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, T) {
  const i32 g = thread_index() % 32 / 4, t = thread_index() % 4;
  const Exchange mine{0.0f, {a[0], a[1], a[2], a[3]}, {b0, b1}, 0, nullptr, false};
  Block::current()->exchange(mine, [&](auto at) {
    for (i32 e = 0; e < 4; ++e) {
      const i32 column = 2 * t + e % 2;
      for (i32 k = 0; k < 16; ++k) {
        const u32 left = at(4 * g + k % 8 / 2).a[e / 2 + k / 8 * 2];
        const u32 right = at(4 * column + k % 8 / 2).b[k / 8];
        c[e] += half_of<T>(left, k % 2) * half_of<T>(right, k % 2);
      }
    }
  });
}

inline float exp2(float x) { return std::exp2(x); }
inline float log2(float x) { return std::log2(x); }
inline float reciprocal(float x) { return 1.0f / x; }
/// As far off as the hardware's may be; the errors of neighbours have nothing in common.
inline float off_by(float y, float x, float error) {
  const u32 hash = (float_to_bits(x) * 2654435761u) >> 8;
  return y + error * (static_cast<float>(hash) / 8388608.0f - 1.0f);
}
inline float sin(float x) { return off_by(std::sin(x), x, 6.7e-7f); }
inline float cos(float x) { return off_by(std::cos(x), x + 1.0f, 6.7e-7f); }
inline float max(float x, float y) { return std::fmax(x, y); }
inline float fma(float x, float y, float z) { return std::fma(x, y, z); }

template <class T>
inline void unpack(u32 packed, float& low, float& high, T) {
  low = half_of<T>(packed, 0);
  high = half_of<T>(packed, 1);
}
template <class T>
inline u32 pack(float low, float high, T) {
  return from_float<T>(low).bits | static_cast<u32>(from_float<T>(high).bits) << 16;
}
template <u32 which>
inline u32 select_bytes(u32 x) {
  const u64 bytes = x;
  u32 y = 0;
  for (u32 i = 0; i < 4; ++i)
    y |= static_cast<u32>(bytes >> (8 * (which >> (4 * i) & 7)) & 0xff) << (8 * i);
  return y;
}
constexpr bool converts_e4m3 = true;
inline void e4m3_to_f16(u32 (&y)[2], u32 x) {
  for (u32 i = 0; i < 2; ++i)
    y[i] = pack(to_float(e4m3{static_cast<u8>(x >> (16 * i))}),
                to_float(e4m3{static_cast<u8>(x >> (16 * i + 8))}), f16{});
}
inline u32 multiply_pair(u32 x, u32 y) {
  return pack(half_of<f16>(x, 0) * half_of<f16>(y, 0), half_of<f16>(x, 1) * half_of<f16>(y, 1),
              f16{});
}
inline u32 subtract_pair(u32 x, u32 y) {
  return pack(half_of<f16>(x, 0) - half_of<f16>(y, 0), half_of<f16>(x, 1) - half_of<f16>(y, 1),
              f16{});
}

}  // namespace ptx

RADDLE_ENGINE_END

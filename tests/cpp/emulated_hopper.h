// What Hopper adds to an emulated block: products of warpgroups and bulk copies, both as late as
// they may be, so that what uses a result too early, or a slot again too early, computes with NaN
// or stops.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "emulated_box_map.h"

namespace raddle::emulated {

[[noreturn]] inline void broken(const char* what) {
  std::fprintf(stderr, "emulated GPU: %s\n", what);
  std::abort();
}

/// Shared memory, and what bulk copies and products see of it: what threads wrote before one of
/// them fenced. One fence shows the writes of all threads, where the hardware's shows its thread's
/// alone.
class TwoProxies {
 public:
  TwoProxies(std::byte* memory, std::size_t size) : memory_(memory), seen_(memory, memory + size) {}
  void fence() { std::memcpy(seen_.data(), memory_, seen_.size()); }
  /// What a copy writes, both see.
  void write(u32 at, const void* from, std::size_t size) {
    check(at, size);
    std::memcpy(memory_ + at, from, size);
    std::memcpy(seen_.data() + at, from, size);
  }
  void poison(u32 at, std::size_t size) {
    check(at, size);
    std::memset(memory_ + at, 0xff, size);
    std::memset(seen_.data() + at, 0xff, size);
  }
  u16 read(u32 at) const {
    check(at, 2);
    u16 x, seen;
    std::memcpy(&x, memory_ + at, 2);
    std::memcpy(&seen, seen_.data() + at, 2);
    if (x != seen) broken("a product or a bulk copy reads what was written and not fenced");
    return x;
  }

 private:
  void check(u32 at, std::size_t size) const {
    if (at + size > seen_.size()) broken("an access behind the end of shared memory");
  }
  std::byte* memory_;
  std::vector<std::byte> seen_;
};

/// Bits 4 to 6 of an address are changed by bits 7 to 9.
inline u32 swizzle_128(u32 address) { return address ^ (address >> 3 & 0x70); }

/// A matrix that a descriptor names: rows of 128 bytes, swizzled. Element (row, k), where k is what
/// a product sums over.
struct MatrixInShared {
  u64 bits;
  bool k_major;
  u32 address(i32 row, i32 k) const {
    const auto field = [this](i32 at) { return static_cast<u32>(bits >> at & 0x3fff) << 4; };
    if ((bits >> 62) != 1) broken("a descriptor without a swizzle of 128 bytes");
    const u32 start = field(0), next_columns = field(16), next_rows = field(32);
    const u32 along = static_cast<u32>(k_major ? k : row),
              across = static_cast<u32>(k_major ? row : k);
    return swizzle_128(start + along / 64 * next_columns + across / 8 * next_rows +
                       across % 8 * 128 + along % 64 * 2);
  }
};

/// One thread's part of a product: rows g and g + 8 of its warp's 16 rows of A, and numbers of C.
struct Product {
  float* c;
  i32 size, thread;
  bool keep;
  MatrixInShared b, a;      ///< a: unless registers hold it
  const u32* registers;     ///< of this thread, or null
  u32 registers_then[4];    ///< what they held at the start
  std::vector<float> rows;  ///< 2 × 16 elements of A, of the registers of four threads
  float (*to_float)(u16);
};

/// The products of one warpgroup.
class Products {
 public:
  static constexpr i32 num_threads = 128;
  explicit Products(TwoProxies& memory) : memory_(memory), threads_(num_threads) {}

  void begin(i32 thread) { threads_[static_cast<std::size_t>(thread)].fenced = true; }
  /// Saves C and poisons it: it is the product's until that has been waited for.
  void issue(Product product) {
    Thread& thread = threads_[static_cast<std::size_t>(product.thread)];
    if (!thread.fenced) broken("a product without products_begin before it");
    Saved& saved = thread.saved[product.c];
    if (saved.products++ == 0) {
      saved.values.assign(product.c, product.c + product.size);
      std::memset(product.c, 0xff, 4 * saved.values.size());
    }
    thread.groups.back().push_back(std::move(product));
  }
  void end(i32 index) {
    Thread& thread = threads_[static_cast<std::size_t>(index)];
    thread.fenced = false;
    thread.groups.emplace_back();
  }
  /// Computes all threads' groups but the `pending` newest.
  void finish(std::size_t pending) {
    for (Thread& thread : threads_)
      while (thread.groups.size() > pending + 1) {  // the last one is still open
        for (const Product& each : thread.groups.front()) compute(thread, each);
        thread.groups.pop_front();
      }
  }

 private:
  struct Saved {
    i32 products = 0;
    std::vector<float> values;
  };
  struct Thread {
    bool fenced = false;
    std::deque<std::vector<Product>> groups{1};
    std::map<float*, Saved> saved;
  };

  void compute(Thread& thread, const Product& p) {
    if (p.registers && std::memcmp(p.registers, p.registers_then, sizeof p.registers_then) != 0)
      broken("registers that a product reads are written while it is under way");
    Saved& saved = thread.saved[p.c];
    const i32 g = p.thread % 32 / 4, t = p.thread % 4, first = p.thread / 32 * 16;
    for (i32 e = 0; e < p.size; ++e) {
      const i32 half = e / 2 % 2, column = e / 4 * 8 + 2 * t + e % 2;
      float sum = p.keep ? saved.values[static_cast<std::size_t>(e)] : 0.0f;
      for (i32 k = 0; k < 16; ++k) {
        const float a = p.registers
                            ? p.rows[static_cast<std::size_t>(16 * half + k)]
                            : p.to_float(memory_.read(p.a.address(first + g + 8 * half, k)));
        sum += a * p.to_float(memory_.read(p.b.address(column, k)));
      }
      saved.values[static_cast<std::size_t>(e)] = sum;
    }
    if (--saved.products > 0) return;
    for (i32 e = 0; e < p.size; ++e) {
      u32 bits;
      std::memcpy(&bits, p.c + e, 4);
      if (bits != ~0u) broken("accumulators are written while a product is under way");
    }
    std::copy(saved.values.begin(), saved.values.end(), p.c);
    thread.saved.erase(p.c);
  }

  TwoProxies& memory_;
  std::vector<Thread> threads_;
};

/// A box of a tensor in device memory, and where it lies in shared memory.
struct Box {
  BoxMap map;
  u32 shared;
  i32 at[4];
  u32 bytes() const {
    return static_cast<u32>(map.box[0] * map.box[1] * map.box[2] * map.box[3] * map.element_bytes);
  }
  void check() const {
    if (shared % (map.swizzled ? 1024 : 128) != 0)
      broken("a bulk copy at an address in shared memory that is no multiple");
    if (map.swizzled && map.box[0] * map.element_bytes > 128)
      broken("a box wider than its swizzle");
  }
  /// visit(where in shared memory, where in device memory or null): every element.
  template <class Visit>
  void every(Visit visit) const {
    u32 place = shared;
    const auto size = static_cast<u32>(map.element_bytes);
    for (i32 page = 0; page < map.box[3]; ++page)
      for (i32 head = 0; head < map.box[2]; ++head)
        for (i32 row = 0; row < map.box[1]; ++row)
          for (i32 column = 0; column < map.box[0]; ++column, place += size) {
            const i32 offset[4] = {column, row, head, page};
            std::byte* element = map.data;
            bool inside = true;
            for (i32 d = 0; d < 4; ++d) {
              const i64 x = at[d] + offset[d];
              inside = inside && x >= 0 && x < static_cast<i64>(map.size[d]);
              element += x * (d == 0 ? i64{size} : static_cast<i64>(map.stride[d - 1]));
            }
            visit(map.swizzled ? swizzle_128(place) : place, inside ? element : nullptr);
          }
  }
};

/// A bulk copy under way to shared memory.
struct BoxCopy : Box {
  u32 barrier;
  void start(TwoProxies& memory) const {
    check();
    memory.poison(shared, bytes());
  }
  void finish(TwoProxies& memory) const {
    const std::byte zeros[8] = {};
    every([&](u32 to, const std::byte* from) {
      memory.write(to, from ? from : zeros, static_cast<std::size_t>(map.element_bytes));
    });
  }
};

/// A bulk copy under way to device memory, of elements of 16 bits.
struct BoxStore : Box {
  void finish(const TwoProxies& memory) const {
    every([&](u32 from, std::byte* to) {
      const u16 x = memory.read(from);
      if (to) std::memcpy(to, &x, sizeof x);
    });
  }
};

}  // namespace raddle::emulated

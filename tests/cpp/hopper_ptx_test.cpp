// Hopper's bulk copies and matrix instructions as tests emulate them: they compute what they
// should, and stop at what the hardware would leave undefined.
#define RADDLE_EMULATED_PTX "emulated_ptx.h"
#include <gtest/gtest.h>

#include <functional>
#include <random>
#include <vector>

#include "raddle/engine/ptx/hopper.h"

namespace raddle {
namespace {

using emulated::Block;
using ptx::Major;

constexpr i32 rows = 64, dim = 128, half_columns = 64;
constexpr u32 half_bytes = rows * 128, tile_bytes = 2 * half_bytes;

/// A tile of 64 rows of `dim` numbers in device memory, and its map: boxes of 64 × 64.
struct Tile {
  std::vector<bf16> data;
  ptx::TensorMap map{};

  explicit Tile(std::mt19937& random, i32 existing_rows = rows)
      : data(static_cast<std::size_t>(rows * dim)) {
    std::normal_distribution<float> normal;
    for (bf16& x : data) x = from_float<bf16>(normal(random));
    const emulated::BoxMap box{reinterpret_cast<std::byte*>(data.data()),
                               2,
                               1,
                               {dim, static_cast<u64>(existing_rows), 1, 1},
                               {2 * dim, 0, 0},
                               {half_columns, rows, 1, 1}};
    std::memcpy(&map, &box, sizeof box);
    std::fill(data.begin() + existing_rows * dim, data.end(), bf16{});
  }
  float at(i32 row, i32 column) const {
    return to_float(data[static_cast<std::size_t>(row * dim + column)]);
  }
};

void copy_tile(u32 to, const Tile& tile, u32 barrier) {
  ptx::barrier_arrive_expecting(barrier, tile_bytes);
  for (i32 half = 0; half < 2; ++half)
    ptx::copy_box(to + static_cast<u32>(half) * half_bytes, &tile.map, barrier, 64 * half, 0, 0, 0,
                  ptx::Keep::once);
}

u32 step(i32 k) { return static_cast<u32>(k / 4) * half_bytes + static_cast<u32>(k % 4) * 32; }

/// Row and column of number e of C.
i32 row_of(i32 thread, i32 e) { return thread / 32 * 16 + thread % 32 / 4 + 8 * (e / 2 % 2); }
i32 column_of(i32 thread, i32 e) { return e / 4 * 8 + 2 * (thread % 4) + e % 2; }

constexpr u32 q_at = 1024, k_at = q_at + tile_bytes, v_at = k_at + tile_bytes;
constexpr i32 shared_bytes = static_cast<i32>(v_at + tile_bytes);

/// Q · Kᵀ, then its rounded numbers times V: what a warpgroup does with a KV tile.
struct Attention {
  std::mt19937 random{11};
  Tile q{random}, k{random}, v{random, 40};
  std::vector<float> s = std::vector<float>(64 * 64), o = std::vector<float>(64 * 128);

  void compute() {
    const i32 thread = ptx::thread_index();
    if (thread == 0) {
      ptx::barrier_create(0, 1);
      ptx::fence_created_barriers();
      ptx::barrier_arrive_expecting(0, 0);
    }
    ptx::sync_block();
    if (thread == 0) {
      ptx::barrier_create(8, 3);
      copy_tile(q_at, q, 8), copy_tile(k_at, k, 8), copy_tile(v_at, v, 8);
    }
    ptx::sync_block();
    ptx::barrier_wait(8, 0);
    float scores[8][4];
    ptx::products_begin();
    for (i32 i = 0; i < 8; ++i)
      ptx::multiply<Major::k, Major::k>(scores, ptx::swizzled_matrix(q_at) + step(i),
                                        ptx::swizzled_matrix(k_at) + step(i), i > 0, bf16{});
    ptx::products_end();
    ptx::products_wait<0>(scores);
    u32 p[4][4];
    for (i32 i = 0; i < 16; ++i)
      p[i / 4][i % 4] = ptx::pack(scores[i / 2][i % 2 * 2], scores[i / 2][i % 2 * 2 + 1], bf16{});
    float sums[16][4];
    ptx::products_begin();
    for (i32 i = 0; i < 4; ++i)
      ptx::multiply<Major::other>(
          sums, p[i], ptx::swizzled_matrix(v_at, half_bytes) + static_cast<u32>(2048 * i), i > 0,
          bf16{});
    ptx::products_end();
    ptx::products_wait<0>(sums);
    for (i32 e = 0; e < 32; ++e)
      s[static_cast<std::size_t>(row_of(thread, e) * 64 + column_of(thread, e))] =
          scores[e / 4][e % 4];
    for (i32 e = 0; e < 64; ++e)
      o[static_cast<std::size_t>(row_of(thread, e) * 128 + column_of(thread, e))] =
          sums[e / 4][e % 4];
  }
};

TEST(HopperPtx, ScoresAndValuesOfATile) {
  Attention x;
  Block block(0, 128, shared_bytes);
  block.run([&] { x.compute(); });
  for (i32 row = 0; row < 64; ++row) {
    for (i32 key = 0; key < 64; ++key) {
      double sum = 0;
      for (i32 d = 0; d < dim; ++d) sum += static_cast<double>(x.q.at(row, d)) * x.k.at(key, d);
      EXPECT_NEAR(x.s[static_cast<std::size_t>(row * 64 + key)], sum, 1e-4);
    }
    for (i32 d = 0; d < dim; ++d) {
      double sum = 0;
      for (i32 key = 0; key < 64; ++key) {
        const float p = x.s[static_cast<std::size_t>(row * 64 + key)];
        sum += static_cast<double>(to_float(from_float<bf16>(p))) * x.v.at(key, d);
      }
      EXPECT_NEAR(x.o[static_cast<std::size_t>(row * 128 + d)], sum, 1e-3);
    }
  }
}

/// Swapped products, of few queries: K · Qᵀ with keys as rows, then Vᵀ · Pᵀ.
TEST(HopperPtx, SwappedProducts) {
  std::mt19937 random{12};
  Tile k{random}, q{random, 8};
  std::vector<float> s(64 * 8), o(64 * 8);
  Block block(0, 128, shared_bytes);
  block.run([&] {
    const i32 thread = ptx::thread_index();
    if (thread == 0) {
      ptx::barrier_create(8, 2);
      copy_tile(q_at, q, 8), copy_tile(k_at, k, 8);
    }
    ptx::sync_block();
    ptx::barrier_wait(8, 0);
    float scores[1][4], columns[1][4];
    ptx::products_begin();
    for (i32 i = 0; i < 8; ++i)
      ptx::multiply<Major::k, Major::k>(scores, ptx::swizzled_matrix(k_at) + step(i),
                                        ptx::swizzled_matrix(q_at) + step(i), i > 0, bf16{});
    // The first 64 columns of K, transposed, times the first 64 columns of the 8 rows of Q.
    for (i32 i = 0; i < 4; ++i)
      ptx::multiply<Major::other, Major::k>(columns,
                                            ptx::swizzled_matrix(k_at) + static_cast<u32>(2048 * i),
                                            ptx::swizzled_matrix(q_at) + step(i), i > 0, bf16{});
    ptx::products_end();
    ptx::products_wait<0>(scores);
    for (i32 e = 0; e < 4; ++e) {
      const auto at = static_cast<std::size_t>(row_of(thread, e) * 8 + column_of(thread, e));
      s[at] = scores[0][e], o[at] = columns[0][e];
    }
  });
  for (i32 row = 0; row < 64; ++row)
    for (i32 query = 0; query < 8; ++query) {
      double sum = 0, across = 0;
      for (i32 d = 0; d < dim; ++d) sum += static_cast<double>(k.at(row, d)) * q.at(query, d);
      for (i32 key = 0; key < 64; ++key)
        across += static_cast<double>(k.at(key, row)) * q.at(query, key);
      EXPECT_NEAR(s[static_cast<std::size_t>(row * 8 + query)], sum, 1e-4);
      EXPECT_NEAR(o[static_cast<std::size_t>(row * 8 + query)], across, 1e-4);
    }
}

/// Scores as accumulators hold them, Sᵀ, become rows of queries in shared memory, which the swapped
/// product of values reads.
TEST(HopperPtx, WeightsOfSwappedProducts) {
  std::vector<u16> stored(8 * 64);
  std::vector<float> o(64 * 8);
  std::mt19937 random{14};
  Tile v{random};
  Block block(0, 128, shared_bytes);
  const auto weight = [](i32 query, i32 key) {
    return static_cast<float>(query - 3) + static_cast<float>(key) / 64.0f;
  };
  block.run([&] {
    const i32 thread = ptx::thread_index(), lane = thread % 32;
    if (thread == 0) ptx::barrier_create(8, 1), copy_tile(v_at, v, 8);
    ptx::sync_block();
    float s[4];
    for (i32 e = 0; e < 4; ++e) s[e] = weight(column_of(thread, e), row_of(thread, e));
    const u32 rounded[2] = {ptx::pack(s[0], s[1], bf16{}), ptx::pack(s[2], s[3], bf16{})};
    const i32 row = lane % 8, chunk = 2 * (thread / 32) + lane / 8 % 2;
    ptx::store_matrices_transposed(q_at + static_cast<u32>(128 * row + (chunk ^ row) * 16),
                                   rounded);
    ptx::fence_proxy();
    ptx::barrier_wait(8, 0);
    ptx::sync_threads(1, 128);
    float columns[1][4];
    ptx::products_begin();
    for (i32 i = 0; i < 4; ++i)
      ptx::multiply<Major::other, Major::k>(columns,
                                            ptx::swizzled_matrix(v_at) + static_cast<u32>(2048 * i),
                                            ptx::swizzled_matrix(q_at) + step(i), i > 0, bf16{});
    ptx::products_end();
    ptx::products_wait<0>(columns);
    for (i32 e = 0; e < 4; ++e)
      o[static_cast<std::size_t>(row_of(thread, e) * 8 + column_of(thread, e))] = columns[0][e];
    if (thread < 8)
      for (i32 key = 0; key < 64; ++key) {
        const i32 at = 128 * thread + ((key / 8) ^ thread) * 16 + key % 8 * 2;
        stored[static_cast<std::size_t>(64 * thread + key)] =
            static_cast<u16*>(ptx::shared_memory())[(static_cast<i32>(q_at) + at) / 2];
      }
  });
  for (i32 query = 0; query < 8; ++query) {
    for (i32 key = 0; key < 64; ++key)
      EXPECT_EQ(stored[static_cast<std::size_t>(64 * query + key)],
                from_float<bf16>(weight(query, key)).bits);
    for (i32 d = 0; d < 64; ++d) {
      double sum = 0;
      for (i32 key = 0; key < 64; ++key)
        sum += static_cast<double>(to_float(from_float<bf16>(weight(query, key)))) * v.at(key, d);
      EXPECT_NEAR(o[static_cast<std::size_t>(d * 8 + query)], sum, 1e-3);
    }
  }
}

/// What one of them says at a barrier all are told, and at the next one no more.
TEST(HopperPtx, ThreadsAgreeAtABarrier) {
  i32 told = 0, told_of_none = 0;
  Block block(0, 256, 1024);
  block.run([&] {
    const i32 thread = ptx::thread_index(), group = thread / 128;
    for (i32 i = 0; i < 3; ++i) {
      told += ptx::sync_threads_any(1 + group, 128, group == 1 && thread == 200) ? 1 : 0;
      told_of_none += ptx::sync_threads_any(1 + group, 128, false) ? 1 : 0;
    }
  });
  EXPECT_EQ(told, 3 * 128);
  EXPECT_EQ(told_of_none, 0);
}

/// Runs `body` on a warpgroup whose shared memory is full of ones that all proxies see.
void run(const std::function<void()>& body) {
  Block block(0, 128, shared_bytes);
  block.run([&] {
    auto* x = static_cast<u16*>(ptx::shared_memory());
    if (ptx::thread_index() == 0) {
      std::fill_n(x, shared_bytes / 2, u16{0x3f80});
      ptx::fence_proxy();
    }
    ptx::sync_block();
    body();
  });
}

void multiply_once(float (&c)[1][4]) {
  ptx::multiply<Major::k, Major::k>(c, ptx::swizzled_matrix(k_at), ptx::swizzled_matrix(q_at), 0,
                                    bf16{});
}

TEST(HopperPtxDeathTest, WhatTheHardwareLeavesUndefinedStops) {
  testing::GTEST_FLAG(death_test_style) = "threadsafe";
  EXPECT_DEATH(run([] {
                 float c[1][4];
                 multiply_once(c);
               }),
               "a product without products_begin before it");
  EXPECT_DEATH(run([] {
                 float c[1][4];
                 ptx::products_begin();
                 multiply_once(c);
                 ptx::products_end();
                 c[0][1] = 2.0f;
                 ptx::products_wait<0>(c);
               }),
               "accumulators are written while a product is under way");
  EXPECT_DEATH(run([] {
                 float c[1][4];
                 u32 a[4] = {};
                 ptx::products_begin();
                 ptx::multiply<Major::k>(c, a, ptx::swizzled_matrix(q_at), 0, bf16{});
                 ptx::products_end();
                 a[2] = 1;
                 ptx::products_wait<0>(c);
               }),
               "registers that a product reads are written while it is under way");
  EXPECT_DEATH(run([] {
                 float c[1][4];
                 static_cast<u16*>(ptx::shared_memory())[k_at / 2] = 0;
                 ptx::sync_block();
                 ptx::products_begin();
                 multiply_once(c);
                 ptx::products_end();
                 ptx::products_wait<0>(c);
               }),
               "a product or a bulk copy reads what was written and not fenced");
  EXPECT_DEATH(run([] {
                 if (ptx::thread_index() > 0) return;
                 std::mt19937 random{16};
                 const Tile tile(random);
                 static_cast<u16*>(ptx::shared_memory())[k_at / 2] = 0;
                 ptx::store_box(k_at, &tile.map, 0, 0, 0, 0);
                 ptx::wait_stored();
               }),
               "a product or a bulk copy reads what was written and not fenced");
  EXPECT_DEATH(run([] {
                 if (ptx::thread_index() > 0) return;
                 std::mt19937 random{17};
                 const Tile tile(random);
                 ptx::store_box(k_at, &tile.map, 0, 0, 0, 0);
               }),
               "a thread ends before boxes that it stores have been read");
  EXPECT_DEATH(run([] {
                 if (ptx::thread_index() > 0) return;
                 ptx::barrier_create(8, 1);
                 ptx::barrier_arrive_expecting(8, 16);
                 ptx::barrier_wait(8, 0);
               }),
               "threads wait for others that never come");
}

/// A slot that is filled again while products read it: they read what the copy leaves behind.
TEST(HopperPtx, ASlotThatIsReusedTooEarlyShows) {
  std::mt19937 random{13};
  const Tile tile(random);
  float first = 0.0f;
  run([&] {
    float c[1][4];
    if (ptx::thread_index() == 0) ptx::barrier_create(8, 1);
    ptx::sync_block();
    ptx::products_begin();
    multiply_once(c);
    ptx::products_end();
    if (ptx::thread_index() == 0) copy_tile(k_at, tile, 8);
    ptx::sync_warp();
    ptx::products_wait<0>(c);
    if (ptx::thread_index() == 0) first = c[0][0];
    ptx::barrier_wait(8, 0);
  });
  EXPECT_NE(first, 16.0f);
}

TEST(HopperPtx, NumbersBeforeTheWaitAreNotThere) {
  run([] {
    float c[1][4];
    ptx::products_begin();
    multiply_once(c);
    ptx::products_end();
    EXPECT_TRUE(std::isnan(c[0][3]));
    ptx::sync_block();  // the first that waits has the products of all computed
    ptx::products_wait<0>(c);
    EXPECT_EQ(c[0][3], 16.0f);
  });
}

/// Two warpgroups take turns: each waits for its own number, and comes to the other's.
TEST(HopperPtx, Turns) {
  std::vector<i32> order;
  Block block(0, 256, 1024);
  block.run([&] {
    const i32 mine = ptx::thread_index() / 128;
    if (mine == 1) ptx::arrive_threads(1, 256);
    for (i32 i = 0; i < 3; ++i) {
      ptx::sync_threads(1 + mine, 256);
      if (ptx::thread_index() % 128 == 0) order.push_back(mine);
      ptx::arrive_threads(1 + (mine ^ 1), 256);
    }
    if (mine == 0) ptx::sync_threads(1, 256);
  });
  EXPECT_EQ(order, (std::vector<i32>{0, 1, 0, 1, 0, 1}));
}

/// Two blocks on emulated threads; `body` sees its rank.
void run_cluster(const std::function<void(i32 rank)>& body) {
  Block first(0, 32, shared_bytes, 2), second(1, 32, shared_bytes, 2);
  Block::run_cluster({&first, &second}, [&] { body(ptx::cluster_rank()); });
}

/// Each block copies half of a tile to both, when the other has said that it has room, and hears a
/// number from the other.
TEST(HopperPtx, ClustersShareATile) {
  std::mt19937 random{18};
  const Tile tile(random);
  constexpr u32 full = 8, free = 16, told_full = 24, word = 32;
  i32 copied = 0;
  run_cluster([&](i32 rank) {
    const bool leads = ptx::lane_index() == 0;
    if (leads)
      for (const u32 barrier : {full, free, told_full}) ptx::barrier_create(barrier, 1);
    ptx::sync_cluster();
    const auto there = [rank](u32 at) { return ptx::in_block_of_cluster(at, rank ^ 1); };
    ptx::barrier_arrive_in_cluster_if(leads, there(free));
    if (leads) {
      ptx::tell_block_of_cluster(there(word), 7 + rank, there(told_full));
      ptx::barrier_arrive_expecting(full, tile_bytes);
      ptx::barrier_wait(free, 0);
      ptx::copy_box_to_both(k_at + static_cast<u32>(rank) * half_bytes, &tile.map, full, 64 * rank,
                            0, 0, 0, ptx::Keep::once);
    }
    ptx::barrier_wait(full, 0);
    EXPECT_EQ(ptx::told_in_cluster(word, told_full, 0), 7 + (rank ^ 1));
    const auto* shared = static_cast<const std::byte*>(ptx::shared_memory());
    for (i32 row = ptx::lane_index(); row < rows; row += 32)
      for (i32 column = 0; column < dim; ++column) {
        bf16 x;
        const u32 at = static_cast<u32>(128 * row + 2 * (column % 64));
        const u32 half = static_cast<u32>(column / 64) * half_bytes;
        std::memcpy(&x, shared + emulated::swizzle_128(k_at + half + at), sizeof x);
        EXPECT_EQ(to_float(x), tile.at(row, column)) << row << ", " << column;
        ++copied;
      }
    ptx::sync_cluster();
  });
  EXPECT_EQ(copied, 2 * rows * dim);
}

TEST(HopperPtxDeathTest, BlocksOfAClusterEndTogether) {
  testing::GTEST_FLAG(death_test_style) = "threadsafe";
  EXPECT_DEATH(run_cluster([](i32 rank) {
                 if (rank == 1) return;
                 ptx::barrier_arrive_in_cluster_if(true, ptx::in_block_of_cluster(8, 1));
               }),
               "no barrier is where one is expected");
  EXPECT_DEATH(run_cluster([](i32 rank) {
                 if (rank == 0) return;
                 ptx::barrier_arrive_in_cluster_if(true, ptx::in_block_of_cluster(8, 0));
               }),
               "a block reaches the shared memory of one that has ended");
  EXPECT_DEATH(run_cluster([](i32 rank) {
                 if (rank == 0) ptx::sync_cluster();
               }),
               "threads wait for others that never come");
}

/// What accumulators hold, rounded, leaves by way of shared memory as boxes of a tensor, of which
/// rows behind its end are not written.
TEST(HopperPtx, BoxesAreStored) {
  constexpr i32 existing = 40;
  std::mt19937 random{15};
  Tile out{random, existing};
  const std::vector<bf16> before = out.data;
  Block block(0, 128, shared_bytes);
  const auto value = [](i32 row, i32 column) { return static_cast<float>(row * 2 - column); };
  block.run([&] {
    const i32 thread = ptx::thread_index(), lane = thread % 32, first = thread / 32 * 16;
    for (i32 chunk = 0; chunk < dim / 8; chunk += 2) {
      u32 x[4];
      for (i32 i = 0; i < 4; ++i) {
        const i32 row = first + lane / 4 + 8 * (i % 2), column = 8 * (chunk + i / 2) + lane % 4 * 2;
        x[i] = ptx::pack(value(row, column), value(row, column + 1), bf16{});
      }
      const i32 row = first + lane % 16, mine = chunk + lane / 16;
      ptx::store_matrices(q_at + static_cast<u32>(mine / 8) * half_bytes +
                              static_cast<u32>(128 * row + ((mine % 8) ^ (row % 8)) * 16),
                          x);
    }
    ptx::fence_proxy();
    ptx::sync_threads(1, 128);
    if (thread == 0) {
      for (i32 half = 0; half < 2; ++half)
        ptx::store_box(q_at + static_cast<u32>(half) * half_bytes, &out.map, 64 * half, 0, 0, 0);
      ptx::wait_stored();
    }
  });
  for (i32 row = 0; row < rows; ++row)
    for (i32 column = 0; column < dim; ++column) {
      const bf16 left = before[static_cast<std::size_t>(row * dim + column)];
      EXPECT_EQ(out.at(row, column), row < existing ? value(row, column) : to_float(left))
          << row << ", " << column;
    }
}

}  // namespace
}  // namespace raddle

#include "raddle/page_pool.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <thread>

#include "raddle/error.h"

namespace raddle {
namespace {

using Pages = std::vector<i32>;
using Requests = std::vector<RequestId>;

void expect_counts(const PagePool& pool, i32 used, i32 shared) {
  EXPECT_EQ(pool.counts().used, used);
  EXPECT_EQ(pool.counts().free, pool.num_pages() - used);
  EXPECT_EQ(pool.counts().shared, shared);
}

/// The message of the ValueError that `call` raises.
template <class Call>
std::string refused(const Call& call) {
  try {
    call();
  } catch (const ValueError& error) {
    return error.what();
  }
  return "nothing was refused";
}

TEST(PagePool, PagesInTheCallersHands) {
  PagePool pool(4, 16);
  EXPECT_EQ(pool.allocate(2), (Pages{0, 1}));
  EXPECT_EQ(pool.allocate(3), std::nullopt);
  expect_counts(pool, 2, 0);
  pool.retain(Pages{1});
  expect_counts(pool, 2, 1);
  EXPECT_EQ(pool.release(Pages{1, 0}), Pages{0});
  EXPECT_EQ(pool.allocate(1), Pages{0}) << "the last one given back is the next one given out";
  EXPECT_EQ(pool.release(Pages{0, 1}), (Pages{0, 1}));
  expect_counts(pool, 0, 0);
}

TEST(PagePool, RefusesWhatIsNotTheCallers) {
  PagePool pool(4, 16);
  const Pages own = *pool.allocate(2);
  const RequestId request = pool.add();
  pool.append(Requests{request}, Pages{10});
  EXPECT_EQ(pool.pages(request), Pages{2});
  const std::string twice = refused([&] { pool.release(Pages{0, 1, 0}); });
  EXPECT_EQ(twice,
            "pages[2] is 0, which was released already; expected a page that allocate or retain "
            "gave you");
  EXPECT_NE(refused([&] { pool.release(Pages{2}); }), "nothing was refused");
  EXPECT_EQ(refused([&] { pool.release(Pages{4}); }), "pages[0] is 4; expected 0 to 3");
  EXPECT_EQ(refused([&] {
              pool.retain(Pages{0, 3});
            }),
            "pages[1] is 3, which is free; expected a page in use");
  EXPECT_EQ(refused([&] { pool.add(Pages{3}); }),
            "pages[0] is 3, which is free; expected a page in use");
  expect_counts(pool, 3, 0);
  EXPECT_EQ(pool.release(own), own);
}

TEST(PagePool, ForksShareUntilTheyWrite) {
  PagePool pool(8, 4);
  const RequestId parent = pool.add();
  pool.append(Requests{parent}, Pages{6});  // pages 0 and 1, the second half full
  const Requests forks = pool.fork(parent, 2);
  expect_counts(pool, 2, 2);
  EXPECT_EQ(pool.references(Pages{0, 1}), (Pages{3, 3}));

  const Requests all{forks[0], parent, forks[1]};
  const Appended grown = pool.append(all, Pages{1, 1, 1});
  EXPECT_EQ(grown.missing, 0);
  EXPECT_EQ(grown.copy_from, (Pages{1, 1}));
  EXPECT_EQ(grown.copy_to, (Pages{2, 3}));
  EXPECT_EQ(pool.pages(forks[1]), (Pages{0, 1})) << "the last one keeps the page";
  expect_counts(pool, 4, 1);

  EXPECT_TRUE(pool.append(all, Pages{1, 1, 1}).copy_from.empty());
  EXPECT_EQ(pool.finish(Requests{parent, forks[0]}).size(), 2u);
  EXPECT_EQ(pool.finish(Requests{forks[1]}), (Pages{1, 0}));
  expect_counts(pool, 0, 0);
}

TEST(PagePool, AFullPageIsNotCopied) {
  PagePool pool(4, 4);
  const RequestId parent = pool.add();
  pool.append(Requests{parent}, Pages{4});
  const RequestId fork = pool.fork(parent)[0];
  EXPECT_TRUE(pool.append(Requests{fork}, Pages{1}).copy_from.empty());
  EXPECT_EQ(pool.pages(fork), (Pages{0, 1}));
  // Cut back into the shared page, it is partial.
  EXPECT_EQ(pool.truncate(Requests{fork}, Pages{3}), Pages{1});
  EXPECT_EQ(pool.append(Requests{fork}, Pages{1}).copy_from, Pages{0});
}

TEST(PagePool, AppendsForAllOrNone) {
  PagePool pool(4, 4);
  const RequestId a = pool.add();
  pool.append(Requests{a}, Pages{6});
  const RequestId b = pool.fork(a)[0];
  const auto unchanged = [&] {
    expect_counts(pool, 2, 2);
    EXPECT_EQ(pool.kv_len(a), 6);
    EXPECT_EQ(pool.pages(a), (Pages{0, 1}));
    EXPECT_EQ(pool.pages(b), (Pages{0, 1}));
    EXPECT_EQ(pool.references(Pages{0, 1, 2, 3}), (Pages{2, 2, 0, 0}));
  };
  EXPECT_EQ(pool.append(Requests{a, b}, Pages{3, 3}).missing, 1);
  unchanged();
  EXPECT_EQ(refused([&] {
              pool.append(Requests{a, b}, Pages{1, -1});
            }),
            "counts[1] is -1; expected at least 0");
  EXPECT_EQ(refused([&] {
              pool.append(Requests{a, a}, Pages{1, 1});
            }),
            "requests[1] is 0 again; expected each once");
  EXPECT_EQ(refused([&] {
              pool.append(Requests{a, 7}, Pages{1, 1});
            }),
            "requests[1] is 7, which was never added; expected a request of this pool");
  EXPECT_EQ(refused([&] {
              pool.append(Requests{a}, Pages{1, 1});
            }),
            "counts has 2 entries; expected 1, one a request");
  EXPECT_NE(refused([&] { pool.append(Requests{a}, Pages{0x7fffffff}); }), "nothing was refused");
  EXPECT_NE(refused([&] { pool.truncate(Requests{a}, Pages{7}); }), "nothing was refused");
  unchanged();
  EXPECT_EQ(pool.append(Requests{a, b}, Pages{3, 2}).missing, 0);
}

TEST(PagePool, AFinishedRequestIsGone) {
  PagePool pool(4, 4);
  const RequestId first = pool.add();
  pool.finish(Requests{first});
  const std::string found = "request is 0, which is finished; expected a request of this pool";
  EXPECT_EQ(refused([&] { pool.fork(first); }), found);
  const RequestId second = pool.add();
  EXPECT_NE(second, first);
  EXPECT_EQ(refused([&] { pool.kv_len(first); }), found);
  EXPECT_NE(refused([&] { pool.finish(Requests{second, first}); }), "nothing was refused");
  EXPECT_EQ(pool.num_requests(), 1);
}

TEST(PagePool, ReplacesDuplicates) {
  PagePool pool(8, 4);
  const Requests twins{pool.add(), pool.add()};
  pool.append(twins, Pages{10, 10});  // pages 0 … 2 and 3 … 5
  EXPECT_EQ(pool.replace(twins[1], Pages{0, 1}), (Pages{3, 4}));
  EXPECT_EQ(pool.pages(twins[1]), (Pages{0, 1, 5}));
  EXPECT_TRUE(pool.replace(twins[1], Pages{0, 1}).empty()) << "once more changes nothing";
  EXPECT_NE(refused([&] {
              pool.replace(twins[1], Pages{0, 1, 2});
            }),
            "nothing was refused")
      << "a partial page is written";
  expect_counts(pool, 4, 2);
}

TEST(PagePool, RefusesBadSizes) {
  EXPECT_EQ(refused([] { PagePool(0, 16); }),
            "num_pages is 0; expected at least 1, at most 134217728");
  EXPECT_EQ(refused([] { PagePool(1, 0); }), "page_size is 0; expected at least 1");
  PagePool pool(4, 4);
  const Pages own = *pool.allocate(2);
  for (const i32 kv_len : {4, 9, -1, -2})
    EXPECT_NE(refused([&] { pool.add(own, kv_len); }), "nothing was refused") << kv_len;
  EXPECT_EQ(pool.num_requests(), 0);
  EXPECT_EQ(pool.kv_len(pool.add(own)), 8);
  EXPECT_EQ(pool.kv_len(pool.add(own, 5)), 5);
}

TEST(PagePool, LayoutOfAStep) {
  PagePool pool(8, 4);
  const Requests requests{pool.add(), pool.add()};
  pool.append(requests, Pages{6, 3});
  const LayoutPtr layout = pool_layout(pool, requests, Pages{2, 1});
  EXPECT_EQ(layout->num_rows(), 3);
  EXPECT_EQ(layout->view().kv_len[0], 6);
  EXPECT_EQ(layout->levels()[0].blocks, (Pages{0, 1, 2}));
  EXPECT_EQ(pool_layout(pool, {}, {})->num_requests(), 0);
  EXPECT_EQ(refused([&] { pool_layout(pool, requests, Pages{2}); }),
            "qo_len has 1 entries; expected 2, one a request");
}

TEST(PagePool, MemoryForThoseWhoHaveNone) {
  PagePool pool(3, 4);
  const KvMemory memory(pool, 2, 16, 8, DType::bfloat16, HeadOrder::hnd);
  const KvRef& kv = memory.kv();
  EXPECT_EQ(kv.k.shape, (decltype(kv.k.shape){3, 2, 4, 16}));
  EXPECT_EQ(kv.v.stride, (decltype(kv.v.stride){64, 32, 8, 1}));
  for (std::size_t i = 0; i < 3 * 2 * 4 * 8; ++i)
    EXPECT_EQ(static_cast<const std::uint16_t*>(kv.v.data)[i], 0);
  const KvMemory nhd(pool, 2, 16, 16, DType::float32);
  EXPECT_EQ(nhd.kv().k.shape, (decltype(kv.k.shape){3, 4, 2, 16}));
  EXPECT_EQ(refused([&] { KvMemory(pool, 2, 0, 8, DType::float32); }),
            "head_dim_qk is 0; expected at least 1");
}

TEST(PagePool, ManyThreads) {
  PagePool pool(64, 4);
  const auto work = [&pool](unsigned seed) {
    std::mt19937 random(seed);
    Requests mine;
    for (int step = 0; step < 4000; ++step) {
      const std::size_t any = mine.empty() ? 0 : random() % mine.size();
      switch (random() % 4) {
        case 0:
          mine.push_back(pool.add());
          break;
        case 1:
          if (!mine.empty()) mine.push_back(pool.fork(mine[any])[0]);
          break;
        case 2:
          pool.append(mine, Pages(mine.size(), static_cast<i32>(random() % 3)));
          break;
        default:
          if (mine.empty()) break;
          pool.finish(Requests{mine[any]});
          mine.erase(mine.begin() + static_cast<std::ptrdiff_t>(any));
      }
      const PageCounts counts = pool.counts();
      ASSERT_EQ(counts.used + counts.free, 64);
      ASSERT_LE(counts.shared, counts.used);
    }
    pool.finish(mine);
  };
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 4; ++seed) threads.emplace_back(work, seed);
  for (std::thread& thread : threads) thread.join();
  expect_counts(pool, 0, 0);
  EXPECT_EQ(pool.num_requests(), 0);
}

}  // namespace
}  // namespace raddle

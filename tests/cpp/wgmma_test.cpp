// Hopper's kernel for long queries on emulated threads, against the fp64 reference.
#define RADDLE_EMULATED_PTX "emulated_ptx.h"
#include "wgmma_testing.h"

namespace raddle {
namespace {

using namespace testing_wgmma;

/// Requests of a few hundred rows and keys: tiles that masks cut, tails, requests without keys. By
/// workers of one block, and by as many that are clusters of two.
template <class T, i32 dim_qk, i32 dim_vo, class V>
void check(const Ints& qo_len, const Ints& kv_len, i32 page_size, const V& variant,
           const reference::Parts& parts, i32 num_workers, const Logits& logits = {}) {
  testing_wgmma::check<T, dim_qk, dim_vo, 0>(
      Batch{qo_len, kv_len, page_size, num_workers, 4, logits}, variant, parts);
  testing_wgmma::check<T, dim_qk, dim_vo, 0, true>(
      Batch{qo_len, kv_len, page_size, 2 * num_workers, 4, logits}, variant, parts);
}

TEST(Wgmma, HeadsOfAnyWidthFitInSharedMemory) {
  each_width([](auto qk, auto vo) {
    const auto fits = [&]<class V>(V) {
      using wgmma::Kernel, wgmma::Memory, wgmma::Serves;
      using OfRows = Kernel<bf16, qk.value, vo.value, Serves{.rows = true}, V>;
      using OfClusters = Kernel<bf16, qk.value, vo.value, Serves{.clusters = true}, V>;
      EXPECT_LE(sizeof(Memory<OfRows>), wgmma::shared_bytes) << qk << ", " << vo;
      EXPECT_LE(sizeof(Memory<OfClusters>), wgmma::shared_bytes) << qk << ", " << vo;
    };
    fits(Composition<NoMask>{});
    fits(Composition<AllOf<Leaf<1>, Leaf<2>>, SoftCap, SlidingWindow, Causal>{});
  });
}

/// Logits that exceed those of the rows' first tiles by so much that weights overflow, and ones too
/// large for a single multiply-add.
TEST(Wgmma, LogitsThatGrow) {
  const Case plain = testing_attention::cases()[0], causal = testing_attention::cases()[1];
  const Ints few{9, 70}, many{140, 420};
  for (const float grows : {12.0f, 60.0f, 400.0f}) {
    const Logits logits{0.0, grows, 300};
    check<f16, 64, 64>(few, many, 0, Composition<NoMask>{}, plain.parts, 1, logits);
    check<bf16, 128, 64>(few, many, 0, Composition<Leaf<0>, Causal>{}, causal.parts, 3, logits);
  }
}
/// Where an item's queries may have given way to the next one's by the time that scores of its last
/// tile are multiplied again.
TEST(Wgmma, LogitsThatGrowInAnOnlySlotOfQueries) {
  const Case plain = testing_attention::cases()[0], causal = testing_attention::cases()[1];
  check<f16, 192, 128>({140, 70}, {420, 380}, 0, Composition<NoMask>{}, plain.parts, 1,
                       Logits{0.0, 60.0f, 300});
  check<f16, 256, 256>({130}, {360}, 0, Composition<Leaf<0>, Causal>{}, causal.parts, 1,
                       Logits{-0.3, 60.0f, 300});
}
TEST(Wgmma, ScalesThatAreNotPositive) {
  const Case causal = testing_attention::cases()[1];
  for (const double scale : {-0.3, -1e-30})
    check<bf16, 64, 64>({70}, {300}, 16, Composition<Leaf<0>, Causal>{}, causal.parts, 1,
                        Logits{scale});
}

const Ints rows{70, 130, 3}, keys{200, 130, 0};

TEST(Wgmma, CausalPages) {
  const Case causal = testing_attention::cases()[1];
  for (const i32 workers : {1, 3, 13})
    check<bf16, 64, 64>(rows, keys, 16, Composition<Leaf<0>, Causal>{}, causal.parts, workers);
}
TEST(Wgmma, LargeAndSmallPages) {
  const Case causal = testing_attention::cases()[1];
  for (const i32 page_size : {8, 64, 256})
    check<f16, 64, 64>(rows, keys, page_size, Composition<Leaf<0>, Causal>{}, causal.parts, 2);
}
/// Rows that no boxes hold are copied one by one.
TEST(Wgmma, PagesOfAnySize) {
  const Case causal = testing_attention::cases()[1];
  check<bf16, 64, 64>(rows, keys, 1, Composition<Leaf<0>, Causal>{}, causal.parts, 3);
  check<f16, 64, 64>(rows, keys, 24, Composition<Leaf<0>, Causal>{}, causal.parts, 1);
  check<f16, 96, 128>({40}, {300}, 1, Composition<Leaf<0>, Causal>{}, causal.parts, 1);
  check<bf16, 192, 128>({40}, {150}, 5, Composition<Leaf<0>, Causal>{}, causal.parts, 1);
}
TEST(Wgmma, KeysInOnePiece) {
  const Case plain = testing_attention::cases()[0];
  check<f16, 96, 64>({90, 1}, {140, 259}, 0, Composition<NoMask>{}, plain.parts, 1);
}
TEST(Wgmma, WideHeads) {
  const Case causal = testing_attention::cases()[1];
  check<bf16, 128, 128>({40}, {300}, 32, Composition<Leaf<0>, Causal>{}, causal.parts, 4);
}
/// Tiles of 64 keys; items that wait for the only slot of queries; weights that overflow, and are
/// multiplied again, of queries in it.
TEST(Wgmma, HeadsAbove128) {
  const Case plain = testing_attention::cases()[0], causal = testing_attention::cases()[1];
  check<bf16, 192, 128>({40}, {150}, 32, Composition<Leaf<0>, Causal>{}, causal.parts, 1);
  check<f16, 256, 256>({70, 130}, {200, 140}, 16, Composition<Leaf<0>, Causal>{}, causal.parts, 2);
  check<bf16, 256, 64>({9, 70}, {100, 200}, 0, Composition<NoMask>{}, plain.parts, 1,
                       Logits{0.0, 400.0, 100});
  check<bf16, 72, 192>({20}, {90}, 8, Composition<Leaf<0>, Causal>{}, causal.parts, 1);
  check<bf16, 192, 256>({20, 140}, {90, 150}, 8, Composition<Leaf<0>, Causal>{}, causal.parts, 1);
}
/// Tiles of 128 keys that leave room for facts about two items alone: several items a worker, one
/// without keys among them, states, scores, rows that no boxes hold, and an output part, whose
/// tiles have 64.
TEST(Wgmma, TightTiles) {
  using Causal_ = Composition<Leaf<0>, Causal>;
  const Case plain = testing_attention::cases()[0], causal = testing_attention::cases()[1],
             gemma_case = testing_attention::cases()[2];
  static_assert(wgmma::long_keys(192, 128, false) == 128 && wgmma::long_keys(192, 128, true) == 64);
  const Ints many_rows{70, 130, 3, 140}, many_keys{200, 400, 0, 300};
  check<bf16, 192, 128>(many_rows, many_keys, 16, Causal_{}, causal.parts, 1);
  check<f16, 192, 128>({9}, {1000}, 64, Causal_{}, causal.parts, 5);
  check<bf16, 136, 96>(many_rows, many_keys, 0, Causal_{}, causal.parts, 2);
  check<bf16, 192, 128>({140}, {300}, 24, Causal_{}, causal.parts, 1);
  check<bf16, 192, 128>({40}, {300}, 16, Composition<NoMask, Halved>{}, plain.parts, 1);
  Composition<AllOf<Leaf<1>, Leaf<2>>, SoftCap, SlidingWindow, Causal> gemma{};
  gemma.variants.first.cap = 2.0f;
  gemma.variants.rest.first = SlidingWindow{9, -1};
  check<bf16, 192, 128>(rows, {500, 130, 0}, 16, gemma, gemma_case.parts, 3);
}
TEST(Wgmma, ScoresAndWindows) {
  const Case gemma_case = testing_attention::cases()[2];
  Composition<AllOf<Leaf<1>, Leaf<2>>, SoftCap, SlidingWindow, Causal> gemma{};
  gemma.variants.first.cap = 2.0f;
  gemma.variants.rest.first = SlidingWindow{9, -1};
  check<bf16, 64, 64>(rows, {500, 130, 0}, 16, gemma, gemma_case.parts, 3);
}
TEST(Wgmma, SinksOfSplitTiles) {
  Case oss_case = testing_attention::cases()[3];
  const float logit[] = {0.5f, -1.0f, 2.0f, 0.0f};
  Composition<AllOf<Leaf<1>, Leaf<2>>, Sinks, SlidingWindow, Causal> oss{};
  oss.variants.first.logit = {logit, {4}};
  oss.variants.rest.first = SlidingWindow{9, -1};
  check<f16, 64, 64>({9}, {1000}, 16, oss, oss_case.parts, 8);
}
TEST(Wgmma, Sums) {
  const Case sigmoid_case = testing_attention::cases()[4];
  Composition<NoMask, Sigmoid> sigmoid_only{};
  sigmoid_only.variants.first.bias = -1.0f;
  for (const i32 workers : {1, 6})
    check<bf16, 64, 64>({70}, {600}, 16, sigmoid_only, sigmoid_case.parts, workers);
}
TEST(Wgmma, OutputParts) {
  const Case plain = testing_attention::cases()[0];
  check<f16, 64, 32>({70}, {300}, 16, Composition<NoMask, Halved>{}, plain.parts, 1);
}

}  // namespace
}  // namespace raddle

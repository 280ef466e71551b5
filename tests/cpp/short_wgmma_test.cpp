// Hopper's kernels for short queries on emulated threads, against the fp64 reference.
#define RADDLE_EMULATED_PTX "emulated_ptx.h"
#include "wgmma_testing.h"

namespace raddle {
namespace {

using namespace testing_wgmma;

const Case plain = testing_attention::cases()[0], causal = testing_attention::cases()[1];
using JustCausal = Composition<Leaf<0>, Causal>;

TEST(ShortWgmma, HeadsOfAnyWidthFitInSharedMemory) {
  each_width([](auto qk, auto vo) {
    const auto fits = [&](auto rows) {
      using wgmma::Serves, wgmma::ShortMemory;
      if constexpr (rows.value <= wgmma::most_short_rows(vo.value)) {
        using Kernel = wgmma::ShortKernel<bf16, qk.value, vo.value, rows.value,
                                          Serves{.levels = true, .rows = true}, JustCausal>;
        EXPECT_LE(sizeof(ShortMemory<Kernel>), wgmma::shared_bytes)
            << qk << ", " << vo << ", rows: " << rows;
      }
    };
    fits(std::integral_constant<i32, 8>{});
    fits(std::integral_constant<i32, 16>{});
    fits(std::integral_constant<i32, 32>{});
    fits(std::integral_constant<i32, 64>{});
  });
}

/// Items of many tiles, of one, and of none; tails of tiles; a split that many workers share.
TEST(ShortWgmma, DecodesInPages) {
  for (const i32 page_size : {8, 16, 128})
    for (const i32 workers : {1, 3, 16})
      check<bf16, 128, 128, 8>({{1, 1, 1, 1}, {300, 64, 0, 1}, page_size, workers, 8}, JustCausal{},
                               causal.parts);
}
/// Rows that no boxes hold are copied one by one.
TEST(ShortWgmma, PagesOfAnySize) {
  for (const auto& [page_size, workers] : {std::pair{1, 16}, {4, 1}, {24, 3}})
    check<bf16, 128, 128, 8>({{1, 1, 1, 1}, {700, 64, 0, 1}, page_size, workers, 8}, JustCausal{},
                             causal.parts);
  check<f16, 64, 64, 16>({{5, 8, 1}, {950, 90, 64}, 1, 3}, JustCausal{}, causal.parts);
  check<bf16, 40, 72, 8>({{2, 1}, {140, 70}, 1, 1}, JustCausal{}, causal.parts);
}
TEST(ShortWgmma, DecodesInOnePiece) {
  check<f16, 128, 128, 8>({{1, 2, 1}, {700, 90, 3}, 0, 2}, Composition<NoMask>{}, plain.parts);
}
TEST(ShortWgmma, GroupsOfOneToSixteen) {
  for (const i32 group : {1, 3, 5, 8})
    check<f16, 64, 64, 8>({{1, 1}, {150, 777}, 16, 2, 2 * group}, JustCausal{}, causal.parts);
  check<f16, 64, 64, 16>({{1, 1}, {150, 777}, 16, 2, 2 * 16}, JustCausal{}, causal.parts);
}
/// Trees of drafts, and tiles whose last rows are padding.
TEST(ShortWgmma, SeveralRows) {
  check<bf16, 64, 64, 16>({{5, 8, 1}, {150, 90, 64}, 16, 3}, JustCausal{}, causal.parts);
  check<bf16, 128, 128, 32>({{14, 2}, {130, 70}, 16, 2}, JustCausal{}, causal.parts);
  check<bf16, 128, 128, 64>({{32, 20, 1}, {200, 20, 30}, 16, 3}, JustCausal{}, causal.parts);
  check<f16, 64, 64, 8>({{9, 30}, {100, 60}, 16, 2}, JustCausal{}, causal.parts);  // cut into tiles
}
TEST(ShortWgmma, OtherHeads) {
  check<f16, 96, 96, 8>({{1, 1}, {200, 65}, 16, 1}, JustCausal{}, causal.parts);
  check<bf16, 256, 256, 32>({{3, 16}, {140, 200}, 32, 2}, JustCausal{}, causal.parts);
  check<bf16, 192, 128, 16>({{1, 8}, {140, 300}, 32, 1}, JustCausal{}, causal.parts);
  check<bf16, 192, 128, 64>({{20, 32}, {140, 200}, 32, 1}, JustCausal{}, causal.parts);
  check<bf16, 40, 72, 8>({{2, 1}, {140, 70}, 16, 1}, JustCausal{}, causal.parts);
}
/// References that rise at one tile, or at every one; weights that the dtype could not hold else.
TEST(ShortWgmma, LogitsThatGrow) {
  for (const float grows : {2.0f, 12.0f, 400.0f}) {
    const Logits logits{0.0, grows, 300};
    check<f16, 64, 64, 8>({{1, 2}, {70, 820}, 0, 1, 4, logits}, Composition<NoMask>{}, plain.parts);
    check<bf16, 128, 64, 32>({{3, 9}, {140, 420}, 0, 3, 4, logits}, JustCausal{}, causal.parts);
  }
}
TEST(ShortWgmma, ScalesThatAreNotPositive) {
  for (const double scale : {-0.3, -1e-30})
    check<bf16, 64, 64, 8>({{2}, {300}, 16, 1, 4, Logits{scale}}, JustCausal{}, causal.parts);
}
TEST(ShortWgmma, ScoresAndWindows) {
  const Case gemma_case = testing_attention::cases()[2];
  Composition<AllOf<Leaf<1>, Leaf<2>>, SoftCap, SlidingWindow, Causal> gemma{};
  gemma.variants.first.cap = 2.0f;
  gemma.variants.rest.first = SlidingWindow{9, -1};
  check<bf16, 64, 64, 8>({{1, 3, 1}, {500, 130, 0}, 16, 3}, gemma, gemma_case.parts);
  check<bf16, 64, 64, 64>({{30, 12, 1}, {500, 130, 0}, 16, 3}, gemma, gemma_case.parts);
}
TEST(ShortWgmma, SinksOfSplitTiles) {
  const Case oss_case = testing_attention::cases()[3];
  const float logit[] = {0.5f, -1.0f, 2.0f, 0.0f};
  Composition<AllOf<Leaf<1>, Leaf<2>>, Sinks, SlidingWindow, Causal> oss{};
  oss.variants.first.logit = {logit, {4}};
  oss.variants.rest.first = SlidingWindow{9, -1};
  for (const i32 workers : {1, 8})
    check<f16, 64, 64, 8>({{2}, {1000}, 16, workers}, oss, oss_case.parts);
}
TEST(ShortWgmma, Sums) {
  const Case sigmoid_case = testing_attention::cases()[4];
  Composition<NoMask, Sigmoid> sigmoid_only{};
  sigmoid_only.variants.first.bias = -1.0f;
  for (const i32 workers : {1, 6})
    check<bf16, 64, 64, 16>({{7, 1, 1}, {600, 0, 40}, 16, workers}, sigmoid_only,
                            sigmoid_case.parts);
}
TEST(ShortWgmma, OutputParts) {
  for (const i32 workers : {1, 4})
    check<f16, 64, 32, 8>({{3, 1}, {300, 70}, 16, workers}, Composition<NoMask, Halved>{},
                          plain.parts);
}

}  // namespace
}  // namespace raddle

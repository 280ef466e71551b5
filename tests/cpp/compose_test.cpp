// States of a row are composed to the same bits by all code that composes them: which worker does,
// and so which code runs, depends on who is first.
#define RADDLE_EMULATED_PTX "emulated_ptx.h"
#include <random>

#include "raddle/engine/kernel/mma/attention.h"
#include "test_seed.h"
#include "wgmma_testing.h"

namespace raddle {
namespace {

using namespace testing_wgmma;

constexpr i32 most_states = 70;

/// Partial states of one row: rows of random numbers, one after another.
template <i32 dim>
struct States {
  std::vector<float> o, lse;
  GpuLaunch launch{};

  explicit States(std::mt19937& random, float spread) : o(most_states * dim), lse(most_states) {
    std::normal_distribution<float> normal;
    for (float& x : o) x = normal(random);
    for (float& x : lse) x = spread * normal(random);
    lse[3] = -math::infinity;  // it has kept nothing
    std::fill_n(o.begin() + 3 * dim, dim, 0.0f);
    launch.partial_o = o.data(), launch.partial_lse = lse.data();
  }
};

template <i32 dim>
struct Result {
  std::vector<float> o = std::vector<float>(static_cast<std::size_t>(dim));
  float lse = 0.0f;
  bool operator==(const Result&) const = default;
};

/// What a warp leaves in `o` and returns as the LSE.
template <i32 dim, class Compose>
Result<dim> by_warp(const Compose& compose) {
  Result<dim> result;
  emulated::Block(0, 32, 32 * 1024).run([&] {
    const float lse = compose(result.o.data());
    if (ptx::lane_index() == 0) result.lse = lse;
  });
  return result;
}

template <i32 dim, Scan scan>
void check() {
  using Kernel =
      wgmma::ShortKernel<bf16, dim, dim, 8, wgmma::Serves{.levels = true}, Composition<NoMask>>;
  const u32 seed = test_seed();
  SCOPED_TRACE(seed_text(seed));
  std::mt19937 random(seed);
  for (const float spread : {0.1f, 3.0f, 200.0f}) {
    States<dim> states(random, spread);
    for (const i32 count : {1, 2, 3, 7, 8, 9, 16, 31, 32, 33, 70}) {
      const Result<dim> by_rows = by_warp<dim>([&](float* o) {
        gpu_kernel::ComposedRow<Kernel, scan> row;
        for (i32 done = 0; done < count; done += 32)
          row.compose(states.launch, done + ptx::lane_index(), min(32, count - done));
        const float lse = row.finish();
        gpu_kernel::LaneRow<dim>::each([&](i32 i, i32 d) { std::copy_n(row.o.of[i].x, 4, o + d); });
        return lse;
      });
      const Result<dim> in_steps = by_warp<dim>([&](float* o) {
        return wgmma::compose_states<Kernel, scan>(states.o.data(), states.lse.data(),
                                                   wgmma::StateRows{0, 1, count},
                                                   static_cast<float*>(ptx::shared_memory()), o);
      });
      EXPECT_EQ(by_rows, in_steps) << count << " states, spread " << spread;
      if (count != 2) continue;
      Result<dim> halves;
      mma::PairedHalves pair;
      halves.lse = pair.template weigh<scan>(states.lse[0], states.lse[1]);
      for (i32 d = 0; d < dim; d += 4) {
        gpu_kernel::Four of[2];
        for (i32 n = 0; n < 2; ++n) std::copy_n(&states.o[n * dim + d], 4, of[n].x);
        std::copy_n(pair.template compose<scan>(of[0], of[1]).x, 4, &halves.o[d]);
      }
      EXPECT_EQ(by_rows, halves) << "spread " << spread;
    }
  }
}

TEST(Compose, TheSameBitsByAllCode) {
  check<64, Scan::softmax>();
  check<128, Scan::softmax>();
  check<256, Scan::softmax>();
  check<128, Scan::sum>();
}

}  // namespace
}  // namespace raddle

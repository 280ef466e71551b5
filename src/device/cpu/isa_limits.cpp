// Compiled once an instruction set, with RADDLE_ISA naming the namespace of everything included
// here.
#include "device/cpu/compute_loops.h"
#include "raddle/engine/simd/vec.h"

#if defined(__AMX_BF16__)
#include "raddle/engine/simd/amx.h"
#elif defined(__AVX512BF16__)
#include "raddle/engine/simd/bf16.h"
#endif

RADDLE_ENGINE_BEGIN

namespace cpu {
namespace {

/// Registers that a loop keeps busy: two for its operands, two to spare. With a latency of four
/// cycles and two units, eight would do.
constexpr i32 chains = simd::registers - 4;

u64 sum_of(const simd::Vec& v) { return static_cast<u64>(static_cast<i64>(simd::reduce_sum(v))); }

/// Steps of all chains, which begin apart, or one would do for all.
template <class Step>
LoopResult run_chains(i64 repeat, double flops_of_step, const Step& step) {
  constexpr i32 steps = 1024;
  simd::Vec chain[chains];
#pragma GCC unroll 32
  for (i32 c = 0; c < chains; ++c) chain[c] = simd::broadcast(static_cast<float>(c));
  for (i64 i = 0; i < repeat * steps; ++i) {
#pragma GCC unroll 32
    for (i32 c = 0; c < chains; ++c) chain[c] = step(chain[c]);
  }
  simd::Vec sum = chain[0];
#pragma GCC unroll 32
  for (i32 c = 1; c < chains; ++c) sum = sum + chain[c];
  return LoopResult{flops_of_step * chains * steps * static_cast<double>(repeat), sum_of(sum)};
}

LoopResult fma_loop(i64 repeat) {
  const simd::Vec factor = simd::broadcast(0.999f), term = simd::broadcast(0.5f);
  return run_chains(repeat, 2.0 * simd::lanes,
                    [=](simd::Vec x) { return simd::fma(x, factor, term); });
}

LoopResult exp2_loop(i64 repeat) {
  constexpr i32 count = 4096;  // half of a small L1
  alignas(64) float x[count];
  for (i32 i = 0; i < count; ++i) x[i] = -static_cast<float>(i) * (20.0f / count);
  simd::Vec sum{};
  for (i64 r = 0; r < repeat; ++r) {
    for (i32 i = 0; i < count; i += 4 * simd::lanes) {
#pragma GCC unroll 4
      for (i32 j = 0; j < 4; ++j)
        sum = sum + simd::exp2_nonpositive(simd::load(x + i + j * simd::lanes));
    }
  }
  return LoopResult{static_cast<double>(count) * static_cast<double>(repeat), sum_of(sum)};
}

#if defined(__AVX512BF16__)

/// Random numbers of either sign around 1: on zeros a unit would draw less power, and run faster
/// than it can.
u16 next_operand(u32& state) {
  state = state * 1664525u + 1013904223u;
  return static_cast<u16>(0x3f80u ^ (state >> 16 & 0x80ffu));
}

#endif

#if defined(__AMX_BF16__)

/// Four accumulators, since a product takes three times as long as the next one has to wait.
LoopResult bf16_loop(i64 repeat) {
  constexpr i32 steps = 256;
  simd::configure_tiles();
  constexpr i32 row_bytes = simd::tile_bytes / simd::tile_rows;
  constexpr i32 halves = simd::tile_bytes / 2;
  alignas(64) u16 operand[4][halves];
  u32 state = 1;
  for (auto& tile : operand)
    for (u16& half : tile) half = next_operand(state);
  simd::tile_load<4>(operand[0], row_bytes);
  simd::tile_load<5>(operand[1], row_bytes);
  simd::tile_load<6>(operand[2], row_bytes);
  simd::tile_load<7>(operand[3], row_bytes);
  simd::tile_zero<0>();
  simd::tile_zero<1>();
  simd::tile_zero<2>();
  simd::tile_zero<3>();
  for (i64 i = 0; i < repeat * steps; ++i) {
    simd::tile_dot<0, 4, 6>();
    simd::tile_dot<1, 4, 7>();
    simd::tile_dot<2, 5, 6>();
    simd::tile_dot<3, 5, 7>();
  }
  alignas(64) u32 found[halves / 2];
  u64 sum = 0;
  simd::tile_store<0>(found, row_bytes);
  for (const u32 bits : found) sum += bits;
  simd::tile_store<3>(found, row_bytes);
  for (const u32 bits : found) sum += bits;
  simd::release_tiles();
  const double flops = 2.0 * 16 * 16 * 32 * 4 * steps;
  return LoopResult{flops * static_cast<double>(repeat), sum};
}

#elif defined(__AVX512BF16__)

LoopResult bf16_loop(i64 repeat) {
  alignas(64) bf16 operand[2 * simd::lanes];
  u32 state = 1;
  for (bf16& x : operand) x.bits = next_operand(state);
  const simd::VecW right = simd::load_words(operand);
  const u32 left = u32{next_operand(state)} << 16 | next_operand(state);
  return run_chains(repeat, 4.0 * simd::lanes,
                    [=](simd::Vec x) { return simd::dot_pairs(x, left, right); });
}

#endif

#if defined(__AVX512BF16__)
constexpr ComputeLoop products_of_bf16 = bf16_loop;
#else
constexpr ComputeLoop products_of_bf16 = nullptr;
#endif

constexpr ComputeLoops loops{fma_loop, exp2_loop, products_of_bf16};

}  // namespace
}  // namespace cpu

const ComputeLoops& compute_loops();
const ComputeLoops& compute_loops() { return cpu::loops; }

RADDLE_ENGINE_END

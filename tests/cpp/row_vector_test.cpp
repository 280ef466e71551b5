// Head vectors in registers, on emulated threads, against the CPU's: the same bits where a part's
// own arithmetic is the same.
#define RADDLE_EMULATED_PTX "emulated_ptx.h"
#include "raddle/engine/tile/row_vector.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "raddle/engine/kernel/mma/rows.h"
#include "raddle/engine/variant/rope.h"

namespace raddle {
namespace {

constexpr i32 warp_keys = 32;
constexpr i32 tile_keys = warp_keys * mma::num_warps;

struct Facts {
  i32 request = 3, kv_head = 1;
};

/// A part that shows every pair and element which one it is. Lanes of different rows part ways.
template <Pairs pairs>
struct Numbered {
  i32 n;

  template <class Vec>
  void key(Vec& x, const Key& c) const {
    const auto shift = [&](float& a, float& b, i32 i) {
      const float from = a + static_cast<float>(i);
      a = b - 0.5f * static_cast<float>(c.kv_pos % 64), b = from;
    };
    if (c.kv_index % 3 == 0) {
      const float size = x.sum([](float y) { return y > 0.0f ? 1.0f : 0.0f; });
      x.map([=](float y, i32 i) { return y * size + static_cast<float>(i); });
      if constexpr (pairs == Pairs::half)
        x.half_pairs(n, shift);
      else
        x.interleaved_pairs(n, shift);
      return;
    }
    if constexpr (pairs == Pairs::half)
      x.half_pairs(n, shift);
    else
      x.interleaved_pairs(n, shift);
    x.map([&](float y, i32) { return y + static_cast<float>(x.size() + c.request + c.kv_head); });
  }
};

/// A tile's rows in a block's shared memory, some without a key; compared with what the CPU's
/// vector makes of them.
template <class T, i32 dim>
class Tile {
  using Rows = SharedRows<dim>;

 public:
  explicit Tile(std::mt19937& random) : elements(tile_keys * dim), keys{} {
    std::normal_distribution<float> normal;
    for (T& x : elements) x = from_float<T>(normal(random));
    for (i32 j = 0; j < tile_keys; ++j) {
      keys.kv_index[j] = static_cast<i32>(random() % 1000);
      keys.kv_pos[j] = static_cast<i32>(random() % 2000000) - 1000000;
      // The third warp has no keys at all.
      keys.column[j] = random() % 4 == 0 || j / warp_keys == 2 ? -1 : j;
    }
  }

  template <class V>
  void check(const V& variant, float tolerance) {
    emulated::Block block(0, mma::num_threads, tile_keys * Rows::pitch);
    auto* memory = static_cast<u8*>(block.shared());
    const auto element = [&](i32 j, i32 d) -> T& {
      return reinterpret_cast<T*>(memory + Rows::at(j, d / 8))[d % 8];
    };
    for (i32 j = 0; j < tile_keys; ++j)
      for (i32 d = 0; d < dim; ++d) element(j, d) = elements[at(j, d)];
    block.run([&] {
      u8* own = memory + ptx::warp_index() * warp_keys * Rows::pitch;
      mma::transform_keys<T, dim>(own, 0, keys, Facts{}, [&](auto& x, const Key& key) {
        EXPECT_TRUE(exists(key)) << key.kv_index;
        variant.key(x, key);
      });
    });
    for (i32 j = 0; j < tile_keys; ++j) {
      std::vector<float> row(dim);
      for (i32 d = 0; d < dim; ++d) row[static_cast<std::size_t>(d)] = to_float(elements[at(j, d)]);
      HeadVector x(row.data(), dim);
      if (keys.column[j] >= 0)
        variant.key(x, Key{Facts{}.request, keys.kv_index[j], keys.kv_pos[j], Facts{}.kv_head});
      for (i32 d = 0; d < dim; ++d) {
        const float expected = to_float(from_float<T>(row[static_cast<std::size_t>(d)]));
        ASSERT_NEAR(to_float(element(j, d)), expected, tolerance * (1.0f + std::abs(expected)))
            << "key " << j << ", element " << d << " of " << dim;
      }
    }
  }

 private:
  static std::size_t at(i32 j, i32 d) { return static_cast<std::size_t>(j * dim + d); }
  bool exists(const Key& key) const {
    for (i32 j = 0; j < tile_keys; ++j)
      if (keys.column[j] >= 0 && keys.kv_index[j] == key.kv_index && keys.kv_pos[j] == key.kv_pos)
        return true;
    return false;
  }

  std::vector<T> elements;
  gpu_kernel::TileKeys<tile_keys, false, mma::num_warps> keys;
};

template <class T>
class RowVectorTest : public testing::Test {
 protected:
  /// f(Int<dim>{}) for dims of every kind: halves of whole chunks or not, lanes left over or not.
  template <class F>
  static void for_each_dim(F f) {
    f(Int<8>{}), f(Int<16>{}), f(Int<24>{}), f(Int<64>{}), f(Int<72>{}), f(Int<80>{}), f(Int<96>{});
    f(Int<128>{}), f(Int<192>{}), f(Int<256>{});
  }
  /// Numbers of elements that form pairs: all; powers of two, which lanes swap; others.
  static std::vector<i32> rotary_dims(i32 dim) {
    std::vector<i32> dims;
    for (const i32 n : {dim, dim - 2, dim / 2, dim / 4, 64, 32, 48, 20, 16, 2, 0})
      if (n <= dim && n % 2 == 0) dims.push_back(n);
    return dims;
  }
  std::mt19937 random{11};
};

using Halves = testing::Types<f16, bf16>;
TYPED_TEST_SUITE(RowVectorTest, Halves);

TYPED_TEST(RowVectorTest, HasTheBitsOfTheCpus) {
  this->for_each_dim([&](auto dim) {
    Tile<TypeParam, decltype(dim)::value> tile(this->random);
    for (const i32 n : this->rotary_dims(dim.value)) {
      SCOPED_TRACE(n);
      tile.check(Numbered<Pairs::half>{n}, 0.0f);
      tile.check(Numbered<Pairs::interleaved>{n}, 0.0f);
    }
  });
}

/// Beyond the rounding of the row, which an approximate sine may tip over.
TYPED_TEST(RowVectorTest, Rotates) {
  const float ulp = std::is_same_v<TypeParam, f16> ? 0x1p-10f : 0x1p-7f;
  this->for_each_dim([&](auto dim) {
    Tile<TypeParam, decltype(dim)::value> tile(this->random);
    for (const i32 n : this->rotary_dims(dim.value)) {
      SCOPED_TRACE(n);
      std::vector<u32> hi(static_cast<std::size_t>(n / 2)), lo(hi.size());
      std::generate(hi.begin(), hi.end(), std::ref(this->random));
      std::generate(lo.begin(), lo.end(), std::ref(this->random));
      const i32 offset = -12345;
      RopeOf<Pairs::half> half{{hi.data(), {n / 2}}, {lo.data(), {n / 2}}, {&offset, {1}}, 1.25f};
      tile.check(half, ulp);
      const RopeOf<Pairs::interleaved> interleaved{half.freq_hi, half.freq_lo, half.offset, 1.25f};
      tile.check(interleaved, ulp);
    }
  });
}

/// Against the product with all its bits, of which a turn's fraction is left.
TEST(Turns, AreExact) {
  std::mt19937 random(5);
  for (i32 i = 0; i < 10000; ++i) {
    const u32 hi = static_cast<u32>(random()), lo = static_cast<u32>(random());
    const i32 pos = static_cast<i32>(static_cast<u32>(random())) >> (i % 31);
    const u64 frequency = u64{hi} << 32 | lo;
    EXPECT_EQ(math::turns(pos, hi, lo),
              static_cast<u32>((static_cast<u64>(i64{pos}) * frequency) >> 32));
  }
}

}  // namespace
}  // namespace raddle

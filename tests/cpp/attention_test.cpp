// The public C++ API end to end against the fp64 reference: layouts, dtypes, variants, splits,
// states.
#include "raddle/attention.h"

#include <gtest/gtest.h>

#include <random>

#include "attention_testing.h"
#include "device/cpu/topology.h"

namespace raddle {
namespace {

using namespace testing_attention;

/// Of Q and O, and of K and V.
struct DTypes {
  DType dtype;
  DType kv_dtype;
};

class AttentionTest : public testing::TestWithParam<DTypes> {};

/// Runs a layout with every variant on 1, 3 and 40 workers.
void check(const LayoutPtr& layout, DTypes dtypes, std::mt19937& random) {
  const DType dtype = dtypes.dtype;
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    AttentionSpec spec;
    spec.num_qo_heads = qo_heads;
    spec.num_kv_heads = kv_heads;
    spec.head_dim_qk = dim_qk;
    spec.head_dim_vo = dim_vo;
    spec.dtype = dtype;
    spec.kv_dtype = dtypes.kv_dtype;
    spec.variant = c.variant;
    const Attention attention(spec);
    const bool has_lse = c.parts.scan == Scan::softmax;
    Tensors t(random, dtype, dtypes.kv_dtype, layout->num_rows());
    const auto problem = problem_of(*layout, t, dtype, c);
    const cpu::Isa isa = cpu::selected_isa();
    const bool rounded_weights = multiplies_in_bf16(isa, dtype, dtypes.kv_dtype) ||
                                 multiplies_short_in_tiles(isa, dtype, dtypes.kv_dtype);
    for (const i32 workers : {1, 3, 40}) {
      SCOPED_TRACE(workers);
      PlanOptions options;
      options.num_workers = workers;
      RunArgs args;
      args.q = t.q.ref;
      args.kv = {{t.k.ref, t.v.ref}};
      if (has_8_bits(dtypes.kv_dtype)) args.kv = {{t.k.ref, t.v.ref, t.k_scale.ref, t.v_scale.ref}};
      args.out = t.out.ref;
      if (has_lse) args.lse = t.lse.ref;
      attention.run(*attention.plan(layout, options), args);
      expect_within(problem, t, dtype, has_lse, rounded_weights);
    }
  }
}

TEST_P(AttentionTest, Pages) {
  std::mt19937 random(1);
  check(pages(), GetParam(), random);
}

TEST_P(AttentionTest, BlocksWithMaskBits) {
  std::mt19937 random(2);
  check(blocks(random), GetParam(), random);
}

TEST_P(AttentionTest, TwoLevels) {
  std::mt19937 random(3);
  check(two_levels(), GetParam(), random);
}

INSTANTIATE_TEST_SUITE_P(DTypes, AttentionTest,
                         testing::Values(DTypes{DType::float32, DType::float32},
                                         DTypes{DType::float16, DType::float16},
                                         DTypes{DType::bfloat16, DType::bfloat16},
                                         DTypes{DType::bfloat16, DType::float8_e4m3fn},
                                         DTypes{DType::float16, DType::float8_e5m2},
                                         DTypes{DType::bfloat16, DType::int8}));

}  // namespace
}  // namespace raddle

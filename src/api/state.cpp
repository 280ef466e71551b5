// Composition of states that the caller holds.
#include "raddle/engine/core/state.h"

#include <algorithm>

#include "api/bound_variant.h"
#include "api/kv_tensors.h"
#include "device/cpu/isa.h"
#include "device/cpu/pool.h"
#include "raddle/attention.h"
#include "raddle/error.h"

namespace raddle {
namespace {

/// One state of the list that is composed: O [rows, heads, D] and LSE [rows, heads].
struct StateRows {
  const float* o;
  const float* lse;
  i64 o_row, o_head, lse_row, lse_head;
};

void check_state(const std::string& o_name, const TensorRef& o, const std::string& lse_name,
                 const TensorRef& lse, const std::vector<i64>& shape) {
  check_tensor(o_name, o, DType::float32, shape);
  check_tensor(lse_name, lse, DType::float32, {shape.begin(), shape.end() - 1});
}

void check_outputs(const std::string& lse_name, const TensorRef& out, const TensorRef& lse,
                   const std::vector<i64>& shape) {
  check_output("out", out, DType::float32, shape);
  check_output(lse_name, lse, DType::float32, {shape.begin(), shape.end() - 1});
}

StateRows rows_of(const TensorRef& o, const TensorRef& lse) {
  return StateRows{static_cast<const float*>(o.data),
                   static_cast<const float*>(lse.data),
                   step(o, 0),
                   step(o, 1),
                   step(lse, 0),
                   step(lse, 1)};
}

/// out[row, head] = states[0] ⊕ states[1] ⊕ … ; then the sink and output parts of `finish`, if
/// given.
void compose_rows(const std::vector<StateRows>& states, const TensorRef& out,
                  const TensorRef& lse_out, const Stages* finish, const AttentionSpec* spec) {
  const i64 rows = dim(out, 0), heads = dim(out, 1), d_vo = dim(out, 2);
  const CpuKernels& kernels = cpu::kernels(cpu::selected_isa());
  // One row is a few hundred nanoseconds of memory traffic: below that many, threads do not pay.
  constexpr i64 rows_a_thread = 256;
  const i32 wanted =
      static_cast<i32>(std::clamp<i64>(rows * heads / rows_a_thread, 1, cpu::default_threads()));
  cpu::WorkerPool::instance().run(wanted, [&](i32 thread, i32 threads) {
    for (i64 r = rows * thread / threads; r < rows * (thread + 1) / threads; ++r)
      for (i64 h = 0; h < heads; ++h) {
        float* o = static_cast<float*>(out.data) + r * step(out, 0) + h * step(out, 1);
        float total = -math::infinity;
        // The outputs may be one of the inputs: each state's row is read before the result is
        // stored.
        float sum[256] = {};
        for (const StateRows& s : states) {
          const float* from = s.o + r * s.o_row + h * s.o_head;
          const float lse = s.lse[r * s.lse_row + h * s.lse_head];
          if (lse == -math::infinity) continue;  // whatever its O holds
          const Mix mix = compose(total, lse);
          for (i64 d = 0; d < d_vo; ++d) sum[d] = sum[d] * mix.first + from[d] * mix.second;
          total = mix.lse;
        }
        if (finish) {
          const i32 head = static_cast<i32>(h), row = static_cast<i32>(r),
                    n = static_cast<i32>(rows);
          kernels.finish_state(*finish,
                               Row{0, row, row, row, head, head / spec->group_size(), n, n},
                               static_cast<i32>(d_vo), sum, total);
        }
        std::copy_n(sum, d_vo, o);
        static_cast<float*>(lse_out.data)[r * step(lse_out, 0) + h * step(lse_out, 1)] = total;
      }
  });
}

}  // namespace

void merge_state(const TensorRef& o_a, const TensorRef& lse_a, const TensorRef& o_b,
                 const TensorRef& lse_b, const TensorRef& out, const TensorRef& lse) {
  check_state("o_a", o_a, "lse_a", lse_a, {-1, -1, -1});
  const std::vector<i64> shape{dim(o_a, 0), dim(o_a, 1), dim(o_a, 2)};
  if (shape[2] > 256)
    fail<ValueError>("o_a is ", describe(o_a), "; expected a last dimension of at most 256");
  check_state("o_a", o_a, "lse_a", lse_a, shape);
  check_state("o_b", o_b, "lse_b", lse_b, shape);
  check_outputs("lse", out, lse, shape);
  compose_rows({rows_of(o_a, lse_a), rows_of(o_b, lse_b)}, out, lse, nullptr, nullptr);
}

void merge_states(const TensorRef& o, const TensorRef& lse, const TensorRef& out,
                  const TensorRef& lse_out, const AttentionSpec* finish) {
  check_tensor("o", o, DType::float32, {-1, -1, -1, -1});
  const std::vector<i64> shape{dim(o, 1), dim(o, 2), dim(o, 3)};
  if (shape[2] > 256)
    fail<ValueError>("o is ", describe(o), "; expected a last dimension of at most 256");
  check_tensor("lse", lse, DType::float32, {dim(o, 0), shape[0], shape[1]});
  check_outputs("lse_out", out, lse_out, shape);
  std::optional<BoundVariant> variant;
  if (finish) {
    check_spec(*finish);
    if (finish->num_qo_heads != shape[1])
      fail<ValueError>("finish has ", finish->num_qo_heads, " query heads; o has ", shape[1]);
    variant.emplace(*finish);
    if (variant->stages().scan == Scan::sum)
      fail<ValueError>("finish is a Scan::sum variant; its states are summed, not composed");
  }
  std::vector<StateRows> states;
  states.reserve(static_cast<std::size_t>(dim(o, 0)));
  for (i64 i = 0; i < dim(o, 0); ++i)
    states.push_back(StateRows{static_cast<const float*>(o.data) + i * step(o, 0),
                               static_cast<const float*>(lse.data) + i * step(lse, 0), step(o, 1),
                               step(o, 2), step(lse, 1), step(lse, 2)});
  compose_rows(states, out, lse_out, variant ? &variant->stages() : nullptr, finish);
}

}  // namespace raddle

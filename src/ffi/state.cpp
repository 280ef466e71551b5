// Composition of states.

#include "ffi/border.h"

namespace raddle::border {

namespace {

void merge_two(Arguments& in) {
  const TensorRef o_a = in.tensor("o_a", Where::anywhere);
  const TensorRef lse_a = in.tensor("lse_a", Where::anywhere);
  const TensorRef o_b = in.tensor("o_b", Where::anywhere);
  const TensorRef lse_b = in.tensor("lse_b", Where::anywhere);
  const TensorRef out = in.tensor("out", Where::anywhere);
  const TensorRef merged_lse = in.tensor("lse", Where::anywhere);
  merge_state(o_a, lse_a, o_b, lse_b, out, merged_lse, current_stream(o_a.device));
}

void merge_many(Arguments& in) {
  const TensorRef o = in.tensor("o", Where::anywhere);
  const TensorRef lse = in.tensor("lse", Where::anywhere);
  const TensorRef out = in.tensor("out", Where::anywhere);
  const TensorRef lse_out = in.tensor("lse_out", Where::anywhere);
  const auto finish = in.map("finish");
  void* stream = current_stream(o.device);
  if (finish.empty()) return merge_states(o, lse, out, lse_out, nullptr, stream);
  const AttentionSpec spec = to_spec(finish);
  merge_states(o, lse, out, lse_out, &spec, stream);
}

/// Of as many states as each row has.
void merge_uneven(Arguments& in) {
  const TensorRef o = in.tensor("o", Where::anywhere);
  const TensorRef lse = in.tensor("lse", Where::anywhere);
  const IndexRef indptr = in.index("indptr", Where::anywhere);
  const TensorRef out = in.tensor("out", Where::anywhere);
  const TensorRef lse_out = in.tensor("lse_out", Where::anywhere);
  const auto finish = in.map("finish");
  void* stream = current_stream(o.device);
  if (finish.empty()) return merge_states(o, lse, indptr, out, lse_out, nullptr, stream);
  const AttentionSpec spec = to_spec(finish);
  merge_states(o, lse, indptr, out, lse_out, &spec, stream);
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  Exports()
      .def("raddle.merge_state", merge_two, "o_a lse_a o_b lse_b out lse")
      .def("raddle.merge_states", merge_many, "o lse out lse_out finish")
      .def("raddle.merge_uneven_states", merge_uneven, "o lse indptr out lse_out finish");
}

}  // namespace raddle::border

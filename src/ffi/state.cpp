// Composition of states.
#include <tvm/ffi/reflection/registry.h>

#include "ffi/border.h"

namespace raddle::border {

namespace {

void merge_two(Arguments& in) {
  const TensorRef o_a = in.tensor("o_a");
  const TensorRef lse_a = in.tensor("lse_a");
  const TensorRef o_b = in.tensor("o_b");
  const TensorRef lse_b = in.tensor("lse_b");
  const TensorRef out = in.tensor("out");
  merge_state(o_a, lse_a, o_b, lse_b, out, in.tensor("lse"));
}

void merge_many(Arguments& in) {
  const TensorRef o = in.tensor("o");
  const TensorRef lse = in.tensor("lse");
  const TensorRef out = in.tensor("out");
  const TensorRef lse_out = in.tensor("lse_out");
  const auto finish = in.map("finish");
  if (finish.empty()) return merge_states(o, lse, out, lse_out);
  const AttentionSpec spec = to_spec(finish);
  merge_states(o, lse, out, lse_out, &spec);
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  ffi::reflection::GlobalDef()
      .def_packed("raddle.merge_state", exported(merge_two))
      .def_packed("raddle.merge_states", exported(merge_many));
}

}  // namespace raddle::border

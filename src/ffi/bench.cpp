// What `raddle bench` measures against: the C++ call without the border.
#include <tvm/ffi/reflection/registry.h>

#include <chrono>

#include "ffi/border.h"

namespace raddle::border {
namespace {

/// Microseconds of one Attention::run, the mean over `repeat` calls in a row.
double run_cpp(Arguments& in) {
  const Attention& attention = *in.object<AttentionObj>("attention").value;
  const Plan& plan = *in.object<PlanObj>("plan").value;
  RunArgs args;
  args.q = in.tensor("q");
  args.out = in.tensor("out");
  const TensorRef k = in.tensor("kv: k");
  args.kv.push_back(KvRef{k, in.tensor("kv: v")});
  const i32 repeat = in.integer32("repeat", 1);
  if (repeat < 1) fail<ValueError>("repeat is ", repeat, "; expected at least 1");
  const auto start = std::chrono::steady_clock::now();
  for (i32 i = 0; i < repeat; ++i) attention.run(plan, args);
  const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - start;
  return time.count() / repeat;
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  tvm::ffi::reflection::GlobalDef().def_packed("raddle.bench_run_cpp", exported(run_cpp));
}

}  // namespace raddle::border

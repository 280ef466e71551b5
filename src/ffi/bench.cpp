// What `raddle bench` measures against: the C++ call without the border, and the machine's limits.

#include <chrono>

#include "ffi/border.h"
#include "raddle/limits.h"

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

template <double (*measure)(std::size_t bytes, i32 threads)>
double read_gbps(Arguments& in) {
  const i64 bytes = in.integer("nbytes", i64{1} << 30);
  const i32 threads = in.integer32("num_threads", 0);
  if (bytes < 1) fail<ValueError>("nbytes is ", bytes, "; expected at least 1");
  return measure(static_cast<std::size_t>(bytes), threads);
}

double rate_of(Arguments& in) {
  const std::string name = in.string("limit");
  const i32 threads = in.integer32("num_threads", 0);
  if (name == "fma") return compute_rate(ComputeLimit::fma, threads);
  if (name == "exp2") return compute_rate(ComputeLimit::exp2, threads);
  if (name == "bf16") return compute_rate(ComputeLimit::bf16, threads);
  fail<ValueError>("limit is '", name, "'; expected fma, exp2 or bf16");
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  Exports()
      .def("raddle.bench_run_cpp", run_cpp, "attention plan q out kv_k kv_v repeat")
      .def("raddle.read_bandwidth_gbps", read_gbps<read_bandwidth_gbps>, "nbytes num_threads")
      .def("raddle.read_pages_gbps", read_gbps<read_pages_gbps>, "nbytes num_threads")
      .def("raddle.compute_rate", rate_of, "limit num_threads");
}

}  // namespace raddle::border

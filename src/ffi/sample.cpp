// Sampling of tokens.
#include "raddle/sample.h"

#include "backend/cuda/sample.h"
#include "ffi/border.h"

namespace raddle::border {

namespace {

/// None, an integer or an array of them.
RowInteger take_integers(Arguments& in, const char* name) {
  const ffi::AnyView value = in.take(name);
  if (const auto integer = value.try_cast<std::int64_t>()) return *integer;
  return to_index(name, value, Where::anywhere);
}

void sample_tokens(Arguments& in) {
  SampleArgs args;
  args.logits = in.tensor("logits", Where::anywhere);
  for (const auto& [name, number] : {std::pair{"temperature", &args.temperature},
                                     {"top_p", &args.top_p},
                                     {"min_p", &args.min_p},
                                     {"repetition_penalty", &args.repetition_penalty},
                                     {"presence_penalty", &args.presence_penalty},
                                     {"frequency_penalty", &args.frequency_penalty}})
    *number = to_scale(name, in.take(name));
  args.top_k = take_integers(in, "top_k");
  args.seed = take_integers(in, "seed");
  args.offset = take_integers(in, "offset");
  args.counts = in.index("counts", Where::anywhere);
  args.count_drawn = in.boolean("count_drawn");
  args.tokens = in.index("out", Where::anywhere);
  args.stream = current_stream(args.logits.device);
  sample(args);
}

/// The GPU kernel for a dtype of logits, and what the assembler says of it.
ffi::Map<ffi::String, ffi::Any> compile(Arguments& in) {
  const DType dtype = dtype_field("dtype", in.take("dtype"));
  const jit::Cubin cubin = cuda::compile_sample(dtype, in.string("arch"));
  return {{"log", ffi::String(cubin.log)}, {"cubin", ffi::Bytes(cubin.bytes)}};
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  Exports()
      .def("raddle.sample", sample_tokens,
           "logits temperature top_p min_p repetition_penalty presence_penalty frequency_penalty "
           "top_k seed offset counts count_drawn out")
      .def("raddle.cuda.compile_sample", compile, "dtype arch");
}

}  // namespace raddle::border

// Attention on a GPU over tensors in host memory.
#include <tvm/ffi/reflection/registry.h>

#include "api/cuda_attention.h"
#include "ffi/border.h"
#include "jit/nvrtc.h"

namespace raddle::border {

namespace {

using Fields = ffi::Map<ffi::String, ffi::Any>;

Fields compile(Arguments& in) {
  const AttentionSpec spec = to_spec(in.map("spec"));
  const cuda::KernelReport report = cuda::compile(spec, in.string("arch"));
  Fields fields;
  fields.Set("registers", report.registers);
  fields.Set("spill_bytes", report.spill_bytes);
  fields.Set("shared_bytes", report.shared_bytes);
  fields.Set("seconds", report.seconds);
  fields.Set("log", report.log);
  return fields;
}

void warm(Arguments& in) {
  const AttentionSpec spec = to_spec(in.map("spec"));
  cuda::warm(spec, in.string("arch"));
}

void run(Arguments& in) {
  const AttentionSpec spec = to_spec(in.map("spec"));
  const LayoutPtr layout = in.object<LayoutObj>("layout").value;
  PlanOptions options;
  options.num_workers = in.integer32("num_workers", 0);
  options.schedule = parse_schedule(in.string("schedule"));
  RunArgs args;
  args.q = in.tensor("q");
  args.out = in.tensor("out");
  args.lse = in.optional_tensor("lse");
  args.return_state = in.boolean("return_state");
  args.scale = in.number("scale");
  options.params = to_params(in.map("plan_params"));
  const Params params = to_params(in.map("params"));
  args.params = &params;
  while (in.more()) args.kv.push_back(take_pair(in, "kv[" + std::to_string(args.kv.size()) + "]"));
  cuda::attend(spec, layout, options, args);
}

Fields machine(Arguments&) {
  const cuda::Machine machine = cuda::machine();
  Fields fields;
  fields.Set("gpu", machine.gpu);
  fields.Set("arch", machine.arch);
  fields.Set("driver", machine.driver);
  fields.Set("nvrtc", machine.nvrtc);
  fields.Set("nvrtc_path", machine.nvrtc_path);
  return fields;
}

void add_search_folder(Arguments& in) { jit::Nvrtc::add_search_folder(in.string("folder")); }

ffi::String nvrtc_version(Arguments&) { return jit::Nvrtc::instance().version(); }

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = ffi::reflection;
  refl::GlobalDef()
      .def_packed("raddle.cuda.compile", exported(compile))
      .def_packed("raddle.cuda.warm", exported(warm))
      .def_packed("raddle.cuda.run", exported(run))
      .def_packed("raddle.cuda.machine", exported(machine))
      .def_packed("raddle.cuda.add_search_folder", exported(add_search_folder))
      .def_packed("raddle.cuda.nvrtc_version", exported(nvrtc_version));
}

}  // namespace raddle::border

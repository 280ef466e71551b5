// Kernels for GPUs, and what there is to compile and run them with.

#include "backend/cuda/compile.h"
#include "device/cuda/device.h"
#include "ffi/border.h"
#include "jit/background.h"
#include "jit/cubin.h"
#include "jit/nvrtc.h"

namespace raddle::border {

namespace {

using Fields = ffi::Map<ffi::String, ffi::Any>;

Fields fields_of(const cuda::KernelReport& report) {
  Fields fields;
  fields.Set("registers", report.registers);
  fields.Set("spill_bytes", report.spill_bytes);
  fields.Set("shared_bytes", report.shared_bytes);
  fields.Set("seconds", report.seconds);
  fields.Set("log", report.log);
  fields.Set("cubin", ffi::Bytes(report.cubin));
  return fields;
}

KernelFamily family_of(const std::string& name) {
  for (const KernelFamily family : {KernelFamily::mma, KernelFamily::wgmma})
    if (name == name_of(family)) return family;
  fail<ValueError>("family is '", name, "'; expected 'mma' or 'wgmma'");
}

Fields compile(Arguments& in) {
  const AttentionSpec spec = to_spec(in.map("spec"));
  const std::string arch = in.string("arch");
  const std::string family = in.string("family");
  const bool short_only = in.boolean("short_only");
  const i32 short_rows = in.integer32("short_rows");
  const wgmma::Serves serves{in.boolean("levels"), in.boolean("rows"), in.boolean("clusters")};
  const bool scales_output = in.boolean("scales_output");
  return fields_of(
      cuda::compile(spec, arch, family_of(family), short_only, short_rows, serves, scales_output));
}

Fields compile_planner(Arguments& in) {
  const AttentionSpec spec = to_spec(in.map("spec"));
  const std::string arch = in.string("arch");
  const bool prefixes = in.boolean("prefixes");
  return fields_of(cuda::compile_planner(spec, arch, prefixes, in.boolean("in_shared")));
}

/// Labels of a spec's kernels, in the order of cuda::kernels_of.
ffi::Array<ffi::String> kernels(Arguments& in) {
  const AttentionSpec spec = to_spec(in.map("spec"));
  const std::string arch = in.string("arch");
  ffi::Array<ffi::String> labels;
  for (const cuda::KernelText& each : cuda::kernels_of(spec, arch, in.boolean("all")))
    labels.push_back(each.label);
  return labels;
}

/// Whether the kernel of that label was compiled now, rather than found.
bool warm(Arguments& in) {
  const AttentionSpec spec = to_spec(in.map("spec"));
  const std::string arch = in.string("arch"), label = in.string("label");
  for (const cuda::KernelText& each : cuda::kernels_of(spec, arch, true))
    if (each.label == label) return jit::warm_cubin(label, each.source, arch);
  fail<ValueError>("label is '", label, "'; expected one of the spec's kernels");
}

/// What runs: the first GPU, the driver, NVRTC.
Fields machine(Arguments&) {
  const cuda::DeviceInfo& gpu = cuda::Device::get(0).info();
  const jit::Nvrtc& nvrtc = jit::Nvrtc::instance();
  Fields fields;
  fields.Set("gpu", gpu.name);
  fields.Set("arch", gpu.arch);
  fields.Set("driver", cuda::driver_version());
  fields.Set("nvrtc", nvrtc.version());
  fields.Set("nvrtc_path", nvrtc.path());
  return fields;
}

/// Version of the driver, its GPUs, and what is wrong with RADDLE_CUDA_ARCH. Raises where there is
/// no driver or it does not start.
Fields driver(Arguments&) {
  Fields fields;
  fields.Set("version", cuda::driver_version());
  ffi::Array<Fields> gpus;
  std::string problem;
  for (const cuda::DeviceInfo& info : cuda::devices()) {
    Fields gpu;
    gpu.Set("name", info.name);
    gpu.Set("arch", info.arch);
    gpu.Set("target", info.arch);
    gpu.Set("supported", info.compute >= cuda::oldest_compute);
    try {
      gpu.Set("target", cuda::target_of(info));
    } catch (const ValueError& error) {
      problem = error.what();
    }
    gpus.push_back(gpu);
  }
  fields.Set("problem", problem);
  fields.Set("gpus", gpus);
  return fields;
}

/// Where NVRTC is, looked for anew. Raises where it is not.
Fields nvrtc(Arguments&) {
  const jit::Nvrtc::Found found = jit::Nvrtc::find();
  Fields fields;
  fields.Set("path", found.path);
  fields.Set("origin", found.origin);
  fields.Set("version", found.version);
  return fields;
}

void stop_compiling(Arguments&) { jit::stop_background(); }

void add_search_folder(Arguments& in) { jit::Nvrtc::add_search_folder(in.string("folder")); }

ffi::String nvrtc_version(Arguments&) { return jit::Nvrtc::instance().version(); }

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  jit::promise_to_stop();  // python/raddle/_cuda.py does
  Exports()
      .def("raddle.cuda.compile", compile,
           "spec arch family short_only short_rows levels rows clusters scales_output")
      .def("raddle.cuda.compile_planner", compile_planner, "spec arch prefixes in_shared")
      .def("raddle.cuda.kernels", kernels, "spec arch all")
      .def("raddle.cuda.warm", warm, "spec arch label")
      .def("raddle.cuda.machine", machine)
      .def("raddle.cuda.nvrtc", nvrtc)
      .def("raddle.cuda.driver", driver)
      .def("raddle.cuda.stop_compiling", stop_compiling)
      .def("raddle.cuda.add_search_folder", add_search_folder, "folder")
      .def("raddle.cuda.nvrtc_version", nvrtc_version);
}

}  // namespace raddle::border

#include "jit/kv_kernels.h"

#include <sstream>

#include "jit/cubin.h"

namespace raddle::jit {
namespace {

/// What an entry point takes and calls.
struct Entry {
  const char* name;
  const char* launch;
  const char* call;  ///< {} stands for the element type, [] for that of pools
  const char* threads;
  bool variant;
};

constexpr Entry entries[] = {
    {append_entry, "AppendLaunch", "append<{}, []>(launch, variant)", "num_threads", true},
    {copy_entry, "CopyLaunch", "copy(launch)", "num_threads", false},
    {accept_entry, "AcceptLaunch", "accept(launch)", "num_threads", false},
    {summarize_entry, "SummarizeLaunch", "summarize<{}, []>(launch)", "num_threads", false},
    {score_entry, "SelectLaunch", "score<{}>(launch)", "num_threads", false},
    {select_entry, "SelectLaunch", "select(launch)", "num_select_threads", false},
    {merge_entry, "MergeLaunch", "merge(launch, variant)", "num_threads", true},
};

void write(std::ostream& text, const Entry& entry, const KvKernels& kernels) {
  std::string call = entry.call;
  const auto fill = [&call](const char* hole, DType dtype) {
    if (const auto at = call.find(hole); at != std::string::npos)
      call.replace(at, 2, qualified_type_of(dtype));
  };
  fill("{}", kernels.dtype);
  fill("[]", kernels.kv_dtype);
  text << "extern \"C\" __global__ void __launch_bounds__(raddle::kv::" << entry.threads << ", 1)\n"
       << entry.name << "(const __grid_constant__ raddle::" << entry.launch << " launch";
  if (entry.variant) text << ",\n    const __grid_constant__ raddle::Variant variant";
  text << ") {\n  raddle::kv::" << call << ";\n}\n";
}

std::string name_of(const KvKernels& kernels) {
  std::string name = std::string("kv ") + type_of(kernels.dtype);
  if (kernels.kv_dtype != kernels.dtype) name += std::string(" ") + type_of(kernels.kv_dtype);
  for (const Functor& part : kernels.composition.parts) name += " " + part.type;
  return name;
}

}  // namespace

std::string source_of(const KvKernels& kernels) {
  std::ostringstream text;
  text << "#define RADDLE_ISA gpu\n#include \"raddle/engine/kernel/cache/gpu.h\"\n"
       << "#include \"raddle/engine/kernel/cache/gpu_select.h\"\n"
       << declare_variant(kernels.composition, kernels.variant_bytes);
  for (const Entry& entry : entries) write(text, entry, kernels);
  return amalgamate(text.str());
}

Cubin compile(const KvKernels& kernels, const std::string& arch) {
  return Nvrtc::instance().compile(source_of(kernels), arch);
}

std::string cubin_of(const KvKernels& kernels, const std::string& arch) {
  return find_or_compile_cubin(name_of(kernels), source_of(kernels), arch);
}

}  // namespace raddle::jit

#include "jit/kv_kernels.h"

#include <sstream>

#include "jit/cubin.h"

namespace raddle::jit {
namespace {

const char* type_of(DType dtype) {
  return dtype == DType::float16    ? "raddle::f16"
         : dtype == DType::bfloat16 ? "raddle::bf16"
                                    : "float";
}

/// What an entry point takes and calls.
struct Entry {
  const char* name;
  const char* launch;
  const char* call;  ///< {} stands for the element type
  const char* threads;
  bool variant;
};

constexpr Entry entries[] = {
    {append_entry, "AppendLaunch", "append<{}>(launch, variant)", "num_threads", true},
    {copy_entry, "CopyLaunch", "copy(launch)", "num_threads", false},
    {accept_entry, "AcceptLaunch", "accept(launch)", "num_threads", false},
    {summarize_entry, "SummarizeLaunch", "summarize<{}>(launch)", "num_threads", false},
    {score_entry, "SelectLaunch", "score<{}>(launch)", "num_threads", false},
    {select_entry, "SelectLaunch", "select(launch)", "num_select_threads", false},
    {merge_entry, "MergeLaunch", "merge(launch, variant)", "num_threads", true},
};

void write(std::ostream& text, const Entry& entry, const char* type) {
  std::string call = entry.call;
  if (const auto at = call.find("{}"); at != std::string::npos) call.replace(at, 2, type);
  text << "extern \"C\" __global__ void __launch_bounds__(raddle::kv::" << entry.threads << ", 1)\n"
       << entry.name << "(const __grid_constant__ raddle::" << entry.launch << " launch";
  if (entry.variant) text << ",\n    const __grid_constant__ raddle::Variant variant";
  text << ") {\n  raddle::kv::" << call << ";\n}\n";
}

std::string name_of(const KvKernels& kernels) {
  std::string name = std::string("kv ") + type_of(kernels.dtype);
  for (const Functor& part : kernels.composition.parts) name += " " + part.type;
  return name;
}

}  // namespace

std::string source_of(const KvKernels& kernels) {
  std::ostringstream text;
  text << "#define RADDLE_ISA gpu\n#include \"raddle/engine/kernel/kv/gpu.h\"\n"
       << "#include \"raddle/engine/kernel/kv/gpu_select.h\"\n"
       << declare_variant(kernels.composition, kernels.variant_bytes);
  for (const Entry& entry : entries) write(text, entry, type_of(kernels.dtype));
  return amalgamate(text.str());
}

Cubin compile(const KvKernels& kernels, const std::string& arch) {
  return Nvrtc::instance().compile(source_of(kernels), arch);
}

std::string cubin_of(const KvKernels& kernels, const std::string& arch) {
  return find_or_compile_cubin(name_of(kernels), source_of(kernels), arch);
}

}  // namespace raddle::jit

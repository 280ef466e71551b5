#include "jit/gpu_kernel.h"

#include <cstdlib>
#include <sstream>

#include "jit/cubin.h"

namespace raddle::jit {

namespace {

/// What a kernel's source includes and names.
struct FamilyText {
  const char *header, *launch;
  std::string kernel;  ///< with its template arguments
  const char* bounds;  ///< threads of a block, blocks of a multiprocessor
  const char* attend;
};

FamilyText text_of(const GpuKernel& kernel, const std::string& arch) {
  std::ostringstream type;
  const std::string element = std::string("raddle::") + type_of(kernel.dtype);
  if (kernel.family == KernelFamily::wgmma) {
    const bool is_short = kernel.short_rows > 0;
    type << "raddle::wgmma::" << (is_short ? "ShortKernel<" : "Kernel<") << element << ", "
         << kernel.dim_qk << ", " << kernel.dim_vo << ", ";
    if (is_short) type << kernel.short_rows << ", ";
    type << std::boolalpha << "raddle::wgmma::Serves{" << kernel.serves.levels << ", "
         << kernel.serves.rows << ", " << kernel.serves.clusters << "}, raddle::Variant>";
    return {"raddle/engine/kernel/wgmma/attention.h", "raddle::wgmma::Launch", type.str(),
            "raddle::wgmma::num_threads, 1",
            is_short ? "raddle::wgmma::attend_short" : "raddle::wgmma::attend_long"};
  }
  std::string stored = std::string("raddle::") + type_of(kernel.kv_dtype);
  if (kernel.k_extends_v) stored = "raddle::mma::KExtendsV<" + stored + ">";
  type << "raddle::mma::Kernel<" << element << ", " << stored << ", " << kernel.dim_qk << ", "
       << kernel.dim_vo << ", " << arch_number(arch) << ", raddle::Variant, "
       << (kernel.short_only ? "true" : "false") << ">";
  return {"raddle/engine/kernel/mma/attention.h", "raddle::GpuLaunch", type.str(),
          "Attention::block_threads, Attention::blocks",
          kernel.short_only ? "raddle::mma::attend_short" : "raddle::mma::attend"};
}

}  // namespace

std::string label_of(const GpuKernel& kernel) {
  std::string name = type_of(kernel.dtype);
  if (kernel.kv_dtype != kernel.dtype) name += std::string(" ") + type_of(kernel.kv_dtype);
  name += " " + std::to_string(kernel.dim_qk) + "/" + std::to_string(kernel.dim_vo);
  if (kernel.k_extends_v) name += " (K extends V)";
  for (const Functor& part : kernel.composition.parts) name += " " + part.type;
  if (kernel.family == KernelFamily::wgmma) {
    name += " (wgmma";
    if (kernel.short_rows > 0)
      name += ", short queries of " + std::to_string(kernel.short_rows) + " rows";
    name += kernel.serves.levels ? ", several levels" : "";
    name += kernel.serves.clusters ? ", clusters of two blocks" : "";
    name += kernel.serves.rows ? ", keys row by row)" : ")";
  }
  if (kernel.short_only) name += " (short queries)";
  if (kernel.scales_output) name += " (scaled V)";
  return name;
}

i32 arch_number(const std::string& arch) {
  const std::size_t at = arch.find_first_of("0123456789");
  return at == std::string::npos ? 0 : std::atoi(arch.c_str() + at);
}

std::string source_of(const GpuKernel& kernel, const std::string& arch) {
  std::ostringstream text;
  const FamilyText family = text_of(kernel, arch);
  if (kernel.scales_output) text << "#define RADDLE_SCALES_OUTPUT\n";
  text << "#define RADDLE_ISA gpu\n#include \"" << family.header << "\"\n"
       << declare_variant(kernel.composition, kernel.variant_bytes)
       << "using Attention = " << family.kernel << ";\n"
       << "extern \"C\" __global__ void "
       << "__launch_bounds__(" << family.bounds << ")\n"
       << gpu_entry_point << "(const __grid_constant__ " << family.launch << " launch,\n"
       << "    const __grid_constant__ raddle::Variant variant) {\n"
       << "  " << family.attend << "<Attention>(launch, variant);\n}\n";
  return amalgamate(text.str());
}

Cubin compile(const GpuKernel& kernel, const std::string& arch) {
  return Nvrtc::instance().compile(source_of(kernel, arch), arch);
}

std::string cubin_of(const GpuKernel& kernel, const std::string& arch, Watch* watch) {
  return find_or_compile_cubin(label_of(kernel), source_of(kernel, arch), arch, watch);
}

}  // namespace raddle::jit

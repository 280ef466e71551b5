#include "jit/gpu_kernel.h"

#include <cstdlib>
#include <sstream>

#include "jit/cubin.h"

namespace raddle::jit {

namespace {

/// What a kernel's source includes and names.
struct FamilyText {
  const char *header, *kernel;
  const char *attend, *attend_short;  ///< entries for any plan, and for plans of short queries
};

FamilyText text_of(KernelFamily family) {
  switch (family) {
    case KernelFamily::mma:
      return {"raddle/engine/kernel/mma/attention.h", "raddle::mma::Kernel", "raddle::mma::attend",
              "raddle::mma::attend_short"};
  }
  return {};
}

}  // namespace

std::string label_of(const GpuKernel& kernel) {
  std::string name = type_of(kernel.dtype);
  if (kernel.kv_dtype != kernel.dtype) name += std::string(" ") + type_of(kernel.kv_dtype);
  name += " " + std::to_string(kernel.dim_qk) + "/" + std::to_string(kernel.dim_vo);
  for (const Functor& part : kernel.composition.parts) name += " " + part.type;
  if (kernel.short_only) name += " (short queries)";
  return name;
}

i32 arch_number(const std::string& arch) {
  const std::size_t at = arch.find_first_of("0123456789");
  return at == std::string::npos ? 0 : std::atoi(arch.c_str() + at);
}

std::string source_of(const GpuKernel& kernel, const std::string& arch) {
  std::ostringstream text;
  const FamilyText family = text_of(kernel.family);
  text << "#define RADDLE_ISA gpu\n#include \"" << family.header << "\"\n"
       << declare_variant(kernel.composition, kernel.variant_bytes)
       << "using Attention = " << family.kernel << "<raddle::" << type_of(kernel.dtype)
       << ", raddle::" << type_of(kernel.kv_dtype) << ", " << kernel.dim_qk << ", " << kernel.dim_vo
       << ", " << arch_number(arch) << ", raddle::Variant, "
       << (kernel.short_only ? "true" : "false") << ">;\n"
       << "extern \"C\" __global__ void "
       << "__launch_bounds__(Attention::block_threads, Attention::blocks)\n"
       << gpu_entry_point << "(const __grid_constant__ raddle::GpuLaunch launch,\n"
       << "    const __grid_constant__ raddle::Variant variant) {\n"
       << "  " << (kernel.short_only ? family.attend_short : family.attend)
       << "<Attention>(launch, variant);\n}\n";
  return amalgamate(text.str());
}

Cubin compile(const GpuKernel& kernel, const std::string& arch) {
  return Nvrtc::instance().compile(source_of(kernel, arch), arch);
}

std::string cubin_of(const GpuKernel& kernel, const std::string& arch, Watch* watch) {
  return find_or_compile_cubin(label_of(kernel), source_of(kernel, arch), arch, watch);
}

}  // namespace raddle::jit

#include "jit/planner_kernel.h"

#include <sstream>

#include "jit/cache.h"

namespace raddle::jit {

std::string source_of(const PlannerKernel& kernel) {
  std::ostringstream text;
  text << "#define RADDLE_ISA gpu\n#include \"raddle/engine/variant/composition.h\"\n"
       << "#include \"raddle/engine/kernel/plan/kernel.h\"\n"
       << declare(kernel.composition, "Variant");
  if (kernel.variant_bytes > 0)
    text << "static_assert(sizeof(raddle::Variant) == " << kernel.variant_bytes << ");\n";
  text << "extern \"C\" __global__ void __launch_bounds__(raddle::planner::num_threads, 1)\n"
       << planner_entry_point << "(const __grid_constant__ raddle::PlanLaunch launch,\n"
       << "    const __grid_constant__ raddle::Variant variant) {\n"
       << "  raddle::planner::plan_batch<" << (kernel.prefixes ? "true" : "false")
       << ">(launch, variant);\n}\n";
  return amalgamate(text.str());
}

Cubin compile(const PlannerKernel& kernel, const std::string& arch) {
  return Nvrtc::instance().compile(source_of(kernel), arch);
}

std::string cubin_of(const PlannerKernel& kernel, const std::string& arch) {
  Request request;
  request.compiler = "nvrtc " + Nvrtc::instance().version();
  for (const std::string& option : Nvrtc::options(arch)) request.key += option + " ";
  request.source = source_of(kernel);
  request.key += "\n" + request.source;
  request.name = kernel.prefixes ? "planner with prefixes" : "planner";
  for (const Functor& part : kernel.composition.parts) request.name += " " + part.type;
  request.target = arch;
  request.compile = [&] { return Nvrtc::instance().compile(request.source, arch).bytes; };
  return find_or_compile(request).bytes;
}

}  // namespace raddle::jit

#include "jit/planner_kernel.h"

#include <sstream>

#include "jit/cubin.h"

namespace raddle::jit {

std::string label_of(const PlannerKernel& kernel) {
  std::string label = kernel.prefixes       ? "planner with prefixes"
                      : kernel.fixed_chunks ? "planner of fixed chunks"
                                            : "planner";
  for (const Functor& part : kernel.composition.parts) label += " " + part.type;
  if (!kernel.in_shared) label += " (arrays in device memory)";
  return label;
}

std::string source_of(const PlannerKernel& kernel) {
  std::ostringstream text;
  const auto name = [](bool yes) { return yes ? "true" : "false"; };
  text << "#define RADDLE_ISA gpu\n#include \"raddle/engine/variant/composition.h\"\n"
       << "#include \"raddle/engine/kernel/gpu_planner/kernel.h\"\n"
       << declare_variant(kernel.composition, kernel.variant_bytes)
       << "extern \"C\" __global__ void __launch_bounds__(raddle::planner::num_threads, 1)\n"
       << planner_entry_point << "(const __grid_constant__ raddle::PlanLaunch launch,\n"
       << "    const __grid_constant__ raddle::Variant variant) {\n"
       << "  raddle::planner::plan_batch<raddle::planner::PlannerKind{.prefixes = "
       << name(kernel.prefixes) << ", .in_shared = " << name(kernel.in_shared)
       << ", .fixed_chunks = " << name(kernel.fixed_chunks) << "}>(launch, variant);\n}\n";
  return amalgamate(text.str());
}

Cubin compile(const PlannerKernel& kernel, const std::string& arch) {
  return Nvrtc::instance().compile(source_of(kernel), arch);
}

std::string cubin_of(const PlannerKernel& kernel, const std::string& arch, Watch* watch) {
  return find_or_compile_cubin(label_of(kernel), source_of(kernel), arch, watch);
}

}  // namespace raddle::jit

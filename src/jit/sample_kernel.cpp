#include "jit/sample_kernel.h"

#include <sstream>

#include "jit/cubin.h"
#include "jit/source.h"

namespace raddle::jit {

std::string sample_source(DType dtype) {
  std::ostringstream text;
  text << "#define RADDLE_ISA gpu\n#include \"raddle/engine/kernel/sampling/block.h\"\n"
       << "extern \"C\" __global__ void __launch_bounds__(raddle::sampling::num_threads, 1)\n"
       << sample_entry_point << "(const __grid_constant__ raddle::SampleView view) {\n"
       << "  raddle::sampling::sample_row<" << qualified_type_of(dtype) << ">(view);\n}\n";
  return amalgamate(text.str());
}

Cubin compile_sample(DType dtype, const std::string& arch) {
  return Nvrtc::instance().compile(sample_source(dtype), arch);
}

std::string sample_cubin(DType dtype, const std::string& arch) {
  return find_or_compile_cubin(std::string("sample ") + type_of(dtype), sample_source(dtype), arch);
}

}  // namespace raddle::jit

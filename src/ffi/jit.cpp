// The cache of what was compiled, and what compiles.

#include <tvm/ffi/extra/c_env_api.h>

#include "ffi/border.h"
#include "jit/cache.h"
#include "jit/cpu_stages.h"
#include "jit/host_compiler.h"
#include "jit/process.h"

namespace raddle::border {

namespace {

using Row = ffi::Map<ffi::String, ffi::Any>;

ffi::String folder(Arguments&) { return jit::cache_folder(); }

ffi::Array<Row> list(Arguments&) {
  ffi::Array<Row> rows;
  for (const jit::CacheEntry& entry : jit::list_cache())
    rows.push_back({{"name", ffi::String(entry.name)},
                    {"target", ffi::String(entry.target)},
                    {"path", ffi::String(entry.path)},
                    {"bytes", static_cast<i64>(entry.bytes)}});
  return rows;
}

i64 clear(Arguments&) { return jit::clear_cache(); }
i64 num_compiled(Arguments&) { return jit::num_compiled(); }

Row compiler(Arguments&) {
  const jit::HostCompiler found = jit::find_compiler();
  return {{"path", ffi::String(found.path)},
          {"identity", ffi::String(found.identity)},
          {"origin", ffi::String(found.origin)}};
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  jit::set_interrupt_check([] {  // Python's own handlers run where it waits for a compiler
    if (TVMFFIEnvCheckSignals() != 0) throw ffi::EnvErrorAlreadySet();
  });
  Exports()
      .def("raddle.cache.folder", folder)
      .def("raddle.cache.list", list)
      .def("raddle.cache.clear", clear)
      .def("raddle.jit.num_compiled", num_compiled)
      .def("raddle.jit.compiler", compiler);
}

}  // namespace raddle::border

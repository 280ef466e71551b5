#include "raddle/version.h"

#include "ffi/border.h"

namespace raddle::border {

TVM_FFI_STATIC_INIT_BLOCK() {
  Exports().def("raddle.version", [](Arguments&) { return ffi::String(version()); });
}

}  // namespace raddle::border

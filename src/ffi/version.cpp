#include "raddle/version.h"

#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

TVM_FFI_STATIC_INIT_BLOCK() {
  tvm::ffi::reflection::GlobalDef().def("raddle.version",
                                        [] { return tvm::ffi::String(raddle::version()); });
}

// What this machine offers, and the one conversion that numpy's DLPack lacks.

#include "device/cpu/topology.h"
#include "ffi/border.h"
#include "raddle/support.h"

namespace raddle::border {

namespace {

/// ml_dtypes' arrays come as views of unsigned integers, because numpy cannot export them. The
/// tensor is the wrapper's own and has no other reader yet, so its dtype is changed in place.
ffi::Tensor as_dtype(Arguments& in) {
  const auto tensor = in.take("tensor").as<ffi::Tensor>();
  const DType dtype = dtype_field("dtype", in.take("dtype"));
  const std::uint8_t code = dtype == DType::bfloat16        ? kDLBfloat
                            : dtype == DType::float8_e4m3fn ? kDLFloat8_e4m3fn
                                                            : kDLFloat8_e5m2;
  const auto bits = static_cast<std::uint8_t>(8 * dtype_bytes(dtype));
  if (!tensor || tensor->dtype().bits != bits)
    fail<TypeError>("expected a tensor of ", int{bits}, "-bit elements");
  const_cast<DLTensor*>(tensor->GetDLTensorPtr())->dtype = DLDataType{code, bits, 1};
  return *tensor;
}

ffi::String isa(Arguments&) { return cpu_isa(); }
i64 threads(Arguments&) { return cpu_threads(); }
ffi::Map<ffi::String, ffi::Any> report(Arguments&) {
  const cpu::Report found = cpu::report();
  ffi::Array<ffi::String> supported;
  for (const std::string& name : found.supported_isas) supported.push_back(name);
  return {{"isa", ffi::String(found.isa)},
          {"isa_reason", ffi::String(found.isa_reason)},
          {"supported_isas", supported},
          {"threads", found.threads},
          {"threads_reason", ffi::String(found.threads_reason)},
          {"affinity_cpus", found.affinity_cpus},
          {"online_cpus", found.online_cpus},
          {"quota_cpus", found.quota.cpus},
          {"quota_source", ffi::String(found.quota.source)},
          {"pinned", found.pinned}};
}

ffi::Array<ffi::Map<ffi::String, ffi::Any>> support(Arguments& in) {
  ffi::Array<ffi::Map<ffi::String, ffi::Any>> rows;
  for (const Support& row : support_matrix(parse_device(in.string("device")))) {
    rows.push_back({{"feature", ffi::String(row.feature)},
                    {"backend", ffi::String(row.backend)},
                    {"works", row.works},
                    {"reason", ffi::String(row.reason)}});
  }
  return rows;
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  Exports()
      .def("raddle.as_dtype", as_dtype, "tensor dtype")
      .def("raddle.cpu_isa", isa)
      .def("raddle.cpu_threads", threads)
      .def("raddle.cpu_report", report)
      .def("raddle.support_matrix", support, "device");
}

}  // namespace raddle::border

#include "ffi/border.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "backend/kv_tensors.h"

namespace raddle::border {

std::string dtype_text(DLDataType t) {
  if (t.code == kDLFloat8_e4m3fn) return "float8_e4m3fn";
  if (t.code == kDLFloat8_e5m2) return "float8_e5m2";
  const char* code = t.code == kDLInt       ? "int"
                     : t.code == kDLUInt    ? "uint"
                     : t.code == kDLFloat   ? "float"
                     : t.code == kDLBfloat  ? "bfloat"
                     : t.code == kDLComplex ? "complex"
                     : t.code == kDLBool    ? "bool"
                                            : "another kind of ";
  return t.code == kDLBool ? code : code + std::to_string(t.bits);
}

bool is(DLDataType t, int code, int bits) {
  return t.code == code && t.bits == bits && t.lanes == 1;
}

namespace {

const DLTensor* as_tensor(const ffi::AnyView& value) {
  switch (value.type_index()) {
    case ffi::TypeIndex::kTVMFFITensor:
      return value.cast<const ffi::TensorObj*>();
    case ffi::TypeIndex::kTVMFFIDLTensorPtr:
      return value.cast<DLTensor*>();
    default:
      return nullptr;
  }
}

const DLTensor& any_tensor(const std::string& name, const ffi::AnyView& value) {
  const DLTensor* t = as_tensor(value);
  if (!t) fail<TypeError>(name, " is ", kind_of(value), "; expected an array or a tensor");
  return *t;
}

}  // namespace

DeviceId device_of(const std::string& name, const DLTensor& t) {
  switch (t.device.device_type) {
    case kDLCPU:
    case kDLCUDAHost:
      return {};
    case kDLCUDA:
    case kDLCUDAManaged:
      return DeviceId::cuda(t.device.device_id);
    default:
      fail<ValueError>(name, " lies on device ", t.device.device_type, ":", t.device.device_id,
                       " (DLPack); expected 'cpu' or 'cuda'");
  }
}

namespace {

/// The tensor that an argument is; it must lie on the host.
const DLTensor& host_tensor(const std::string& name, const ffi::AnyView& value) {
  const DLTensor& t = any_tensor(name, value);
  if (const DeviceId device = device_of(name, t); device.kind != DeviceId::Kind::cpu)
    fail<ValueError>(name, " lies on device 'cuda:", device.ordinal,
                     "'; expected host memory: pass a copy on 'cpu'");
  return t;
}

i64 count_elements(const DLTensor& t) {
  i64 elements = 1;
  for (int i = 0; i < t.ndim; ++i) elements *= t.shape[i];
  return elements;
}

}  // namespace

void* first_element(const std::string& name, const DLTensor& t) {
  // An empty tensor may have no address, which would read as "not given".
  alignas(16) static char nothing[16] = {};
  if (!t.data) {
    if (count_elements(t) > 0)
      fail<ValueError>(name, " has no data; expected a tensor with storage");
    return nothing;
  }
  char* address = static_cast<char*>(t.data) + t.byte_offset;
  const auto bytes = static_cast<std::uintptr_t>(t.dtype.bits / 8);
  if (bytes > 1 && reinterpret_cast<std::uintptr_t>(address) % bytes != 0) {
    fail<ValueError>(name, " is not aligned to its elements of ", bytes, " bytes");
  }
  return address;
}

namespace {

void copy_shape(const DLTensor& t, i64* shape, i64* stride) {
  // Strides of an empty tensor mean nothing, and numpy makes them 0.
  const bool given = t.strides && count_elements(t) > 0;
  i64 contiguous = 1;
  for (int i = t.ndim - 1; i >= 0; --i) {
    shape[i] = t.shape[i];
    stride[i] = given ? t.strides[i] : contiguous;
    contiguous *= t.shape[i];
  }
}

/// How to make the dtype that is wanted of another one.
std::string cast_advice(const std::string& name, DLDataType t, DType wanted) {
  const std::string argument = name.substr(name.find_last_of(' ') + 1);
  const std::string dtype = name_of(wanted);
  if (is(t, kDLUInt, 16) && wanted == DType::bfloat16)
    return ": where these are bfloat16's bits, pass " + argument + ".view(ml_dtypes.bfloat16)";
  if (has_8_bits(wanted)) return "";
  const std::string numpy = wanted == DType::bfloat16 ? "ml_dtypes." : "numpy.";
  return ": pass " + argument + ".astype(" + numpy + dtype + "), or " + argument + ".to(torch." +
         dtype + ")";
}

DType to_dtype(const std::string& name, DLDataType t, std::optional<DType> wanted) {
  if (is(t, kDLBfloat, 16)) return DType::bfloat16;
  if (is(t, kDLFloat, 16)) return DType::float16;
  if (is(t, kDLFloat, 32)) return DType::float32;
  if (is(t, kDLFloat8_e4m3fn, 8)) return DType::float8_e4m3fn;
  if (is(t, kDLFloat8_e5m2, 8)) return DType::float8_e5m2;
  if (is(t, kDLInt, 8)) return DType::int8;
  if (wanted)
    fail<TypeError>(name, " has dtype ", dtype_text(t), "; expected ", name_of(*wanted),
                    ", as the spec says", cast_advice(name, t, *wanted));
  fail<TypeError>(name, " has dtype ", dtype_text(t),
                  "; expected float32, float16, bfloat16, float8_e4m3fn, float8_e5m2 or int8");
}

}  // namespace

std::string kind_of(const ffi::AnyView& value) {
  switch (value.type_index()) {
    case ffi::TypeIndex::kTVMFFINone:
      return "None";
    case ffi::TypeIndex::kTVMFFIBool:
      return "a bool";
    case ffi::TypeIndex::kTVMFFIInt:
      return "an int";
    case ffi::TypeIndex::kTVMFFIFloat:
      return "a float";
    case ffi::TypeIndex::kTVMFFISmallStr:
    case ffi::TypeIndex::kTVMFFIStr:
      return "a string";
    case ffi::TypeIndex::kTVMFFIArray:
      return "a list or tuple";
    case ffi::TypeIndex::kTVMFFIMap:
      return "a dict";
    case ffi::TypeIndex::kTVMFFITensor:
    case ffi::TypeIndex::kTVMFFIDLTensorPtr:
      return "a tensor";
    case ffi::TypeIndex::kTVMFFIOpaquePyObject:
      return "an object of another kind";
    default:
      if (value.GetTypeKey() == "ffi.BigInt") return "an int of more than 64 bits";
      return "a " + value.GetTypeKey();
  }
}

ArgumentNames::ArgumentNames(std::string_view text) {
  while (!text.empty()) {
    const std::size_t end = std::min(text.find(' '), text.size());
    names_.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  any_number_ = !names_.empty() && names_.back().front() == '*';
}

bool ArgumentNames::is(int n, std::string_view name) const {
  if (any_number_ && n >= count() - 1) return true;
  if (n >= count()) return false;
  const std::string_view known = names_[static_cast<std::size_t>(n)];
  if (known == name) return true;
  std::size_t at = 0;
  const auto separates = [](char c) { return c == '_' || c == ' ' || c == ':' || c == '.'; };
  for (std::size_t i = 0; i < name.size(); ++i) {
    if (separates(name[i]) && i > 0 && separates(name[i - 1])) continue;
    const char wanted = separates(name[i]) ? '_' : name[i];
    if (at == known.size() || known[at++] != wanted) return false;
  }
  return at == known.size();
}

ffi::AnyView Arguments::take(std::string_view name) {
  if (!more()) fail<TypeError>("a call lacks its argument ", name);
  if (names_ && !names_->is(next_, name))
    fail<TypeError>("argument ", next_, " is read as ", name, ", which the export's list has not");
  return args_[next_++];
}

void Arguments::check_all_read() const {
  if (more()) fail<TypeError>("a call has ", args_.size(), " arguments; expected ", next_);
}

i64 Arguments::integer(const char* name, i64 if_none) {
  const ffi::AnyView value = take(name);
  if (value == nullptr) return if_none;
  const auto number =
      value.type_index() == ffi::TypeIndex::kTVMFFIInt ? value.as<std::int64_t>() : std::nullopt;
  if (!number) fail<TypeError>(name, " is ", kind_of(value), "; expected an int");
  return *number;
}

i32 Arguments::integer32(const char* name, i32 if_none) {
  const i64 value = integer(name, if_none);
  if (value < std::numeric_limits<i32>::min() || value > std::numeric_limits<i32>::max()) {
    fail<ValueError>(name, " is ", value, "; expected a 32-bit integer");
  }
  return static_cast<i32>(value);
}

std::optional<i32> Arguments::optional_integer32(const char* name) {
  const bool none = more() && args_[next_] == nullptr;
  const i32 value = integer32(name, 0);
  return none ? std::nullopt : std::optional(value);
}
i32 Arguments::integer32(const char* name) {
  const std::optional<i32> value = optional_integer32(name);
  if (!value) fail<TypeError>(name, " is None; expected an int");
  return *value;
}

bool Arguments::boolean(const char* name) {
  const ffi::AnyView value = take(name);
  const auto flag = value.as<bool>();
  if (!flag) fail<TypeError>(name, " is ", kind_of(value), "; expected a bool");
  return *flag;
}

double to_number(const std::string& name, const ffi::AnyView& value) {
  // A bool would convert, and is never what a number was meant to be.
  const bool flag = value.type_index() == ffi::TypeIndex::kTVMFFIBool;
  const auto number = flag ? std::nullopt : value.try_cast<double>();
  if (!number) fail<TypeError>(name, " is ", kind_of(value), "; expected a number");
  return *number;
}

std::optional<float> Arguments::number(const char* name) {
  const ffi::AnyView value = take(name);
  if (value == nullptr) return std::nullopt;
  return static_cast<float>(to_number(name, value));
}

double Arguments::real(const char* name) { return to_number(name, take(name)); }

std::string Arguments::string(const char* name) {
  const ffi::AnyView value = take(name);
  const auto text = value.as<ffi::String>();
  if (!text) fail<TypeError>(name, " is ", kind_of(value), "; expected a string");
  return *text;
}

TensorRef to_tensor(const std::string& name, const ffi::AnyView& value, Where where,
                    std::optional<DType> bytes, std::optional<DType> wanted) {
  const DLTensor& t = where == Where::host ? host_tensor(name, value) : any_tensor(name, value);
  TensorRef tensor;
  tensor.device = device_of(name, t);
  tensor.dtype = bytes && is(t.dtype, kDLUInt, 8) ? *bytes : to_dtype(name, t.dtype, wanted);
  if (t.ndim > static_cast<int>(tensor.shape.size())) {
    fail<ValueError>(name, " has ", t.ndim, " dimensions; expected at most ", tensor.shape.size());
  }
  tensor.data = first_element(name, t);
  tensor.rank = t.ndim;
  copy_shape(t, tensor.shape.data(), tensor.stride.data());
  return tensor;
}

TensorRef Arguments::tensor(const std::string& name, Where where, std::optional<DType> bytes,
                            std::optional<DType> wanted) {
  return to_tensor(name, take(name), where, bytes, wanted);
}

TensorRef Arguments::optional_tensor(const std::string& name, Where where,
                                     std::optional<DType> bytes, std::optional<DType> wanted) {
  const ffi::AnyView value = take(name);
  return value == nullptr ? TensorRef{} : to_tensor(name, value, where, bytes, wanted);
}

ScaleRef to_scale(const std::string& name, const ffi::AnyView& value) {
  if (value == nullptr) return {};
  if (const DLTensor* t = as_tensor(value); t && !is(t->dtype, kDLFloat, 32))
    fail<TypeError>(name, " is ", dtype_text(t->dtype), "; expected float32");
  if (as_tensor(value)) return to_tensor(name, value, Where::anywhere);
  return static_cast<float>(to_number(name, value));
}

IndexRef Arguments::index(const char* name, Where where) {
  return to_index(name, take(name), where);
}

IndexRef to_index(const char* name, const ffi::AnyView& value, Where where) {
  if (value == nullptr) return {};
  const DLTensor& t = where == Where::host ? host_tensor(name, value) : any_tensor(name, value);
  IndexRef index;
  index.device = device_of(name, t);
  index.is_64bit = is(t.dtype, kDLInt, 64);
  if (!index.is_64bit && !is(t.dtype, kDLInt, 32)) {
    fail<TypeError>(name, " has dtype ", dtype_text(t.dtype), "; expected int32 or int64");
  }
  if (t.ndim != 1 && t.ndim != 2) {
    fail<ValueError>(name, " has ", t.ndim, " dimensions; expected 1");
  }
  index.data = first_element(name, t);
  index.rank = t.ndim;
  copy_shape(t, index.shape.data(), index.stride.data());
  return index;
}

std::vector<RequestId> Arguments::requests(const char* name) {
  const IndexRef index = this->index(name);
  if (index.empty()) fail<TypeError>(name, " is None; expected the numbers of requests");
  if (index.rank != 1) fail<ValueError>(name, " has ", index.rank, " dimensions; expected 1");
  std::vector<RequestId> numbers;
  numbers.reserve(static_cast<std::size_t>(index.shape[0]));
  for (i64 i = 0; i < index.shape[0]; ++i) numbers.push_back(index.at(i));
  return numbers;
}

const LayoutObj& Arguments::any_layout(const char* name) {
  const ffi::AnyView value = take(name);
  const auto* layout = value.as<LayoutObj>();
  if (!layout) fail<TypeError>(name, " is ", kind_of(value), "; expected a ", LayoutObj::_type_key);
  if (!layout->value && !layout->on_device)
    fail<ValueError>(name, " is empty; expected one that was made");
  return *layout;
}

const DLTensor* Arguments::bytes(const char* name) {
  const ffi::AnyView value = take(name);
  if (value == nullptr) return nullptr;
  const DLTensor& t = host_tensor(name, value);
  if (!is(t.dtype, kDLUInt, 8) && !is(t.dtype, kDLBool, 8)) {
    fail<TypeError>(name, " has dtype ", dtype_text(t.dtype), "; expected bool or uint8");
  }
  if (!ffi::IsContiguous(t)) fail<ValueError>(name, " is not contiguous");
  return &t;
}

ffi::Map<ffi::String, ffi::Any> Arguments::map(const char* name) {
  const ffi::AnyView value = take(name);
  if (value == nullptr) return {};
  const auto map = value.as<ffi::Map<ffi::String, ffi::Any>>();
  if (!map) fail<TypeError>(name, " is ", kind_of(value), "; expected a dict with names as keys");
  return *map;
}

}  // namespace raddle::border

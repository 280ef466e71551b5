// Values that cross by name: members of variants, specs, maxima.
#include <limits>
#include <vector>

#include "device/name.h"
#include "ffi/border.h"

namespace raddle::border {

namespace {

using Fields = ffi::Map<ffi::String, ffi::Any>;

/// Larger arrays of a run are not copied. What a GPU keeps from run to run is smaller, and owned.
constexpr i64 least_borrowed_bytes = 64 * 1024 + 1;

bool is_contiguous(const DLTensor& t) {
  i64 step = 1;
  for (i32 d = t.ndim; t.strides && d-- > 0; step *= t.shape[d])
    if (t.shape[d] != 1 && t.strides[d] != step) return false;
  return true;
}

template <class T>
const T* data_of(const DLTensor& t) {
  return reinterpret_cast<const T*>(static_cast<const char*>(t.data) + t.byte_offset);
}

/// The elements of a GPU, which its kernels read where they lie; `owner` keeps them there.
MemberValue gpu_member(const std::string& name, const DLTensor& t, DeviceId device,
                       const std::shared_ptr<const void>& owner) {
  const std::string where = " on device '" + name_of(device) + "'";
  const auto borrow = [&]<class T>(T) -> MemberValue {
    return Array<T>::borrowed(owner, static_cast<const T*>(first_element(name, t)),
                              {t.shape, t.shape + t.ndim}, device);
  };
  if (!owner)
    fail<ValueError>(name, " lies", where, "; expected host memory: pass a copy on 'cpu'");
  if (t.ndim == 0)
    fail<ValueError>(name, " is a single element", where,
                     "; expected a number, which kernels take by value: pass float(x)");
  if (!is_contiguous(t))
    fail<ValueError>(name, " is not contiguous", where,
                     "; expected what kernels read where it lies: pass x.contiguous()");
  if (is(t.dtype, kDLFloat, 32)) return borrow(float{});
  if (is(t.dtype, kDLInt, 32)) return borrow(std::int32_t{});
  if (is(t.dtype, kDLUInt, 32)) return borrow(std::uint32_t{});
  if (is(t.dtype, kDLUInt, 8) || is(t.dtype, kDLBool, 8)) return borrow(std::uint8_t{});
  fail<TypeError>(name, " has dtype ", dtype_text(t.dtype), where,
                  "; expected float32, int32, uint32, uint8 or bool, which kernels read where they "
                  "lie: pass x.float() or x.int()");
}

/// The elements as they are: copied, or where they lie if `owner` keeps a large array of them
/// there.
template <class T>
MemberValue plain_member(const DLTensor& t, const std::shared_ptr<const void>& owner) {
  i64 count = 1;
  for (i32 d = 0; d < t.ndim; ++d) count *= t.shape[d];
  const T* data = data_of<T>(t);
  std::vector<std::int64_t> shape(t.shape, t.shape + t.ndim);
  if (owner && count * i64{sizeof(T)} >= least_borrowed_bytes)
    return Array<T>::borrowed(owner, data, std::move(shape));
  return Array<T>(std::vector<T>(data, data + count), std::move(shape));
}

/// The elements in row-major order, whatever the strides; `to` converts one.
template <class From, class Convert>
auto copy_strided(const DLTensor& t, const Convert& to) {
  const auto* data = data_of<From>(t);
  std::vector<std::int64_t> shape(t.shape, t.shape + t.ndim), at(shape.size(), 0);
  i64 total = 1, step = 1;
  for (const i64 extent : shape) total *= extent;
  std::vector<std::int64_t> stride(shape.size());
  for (std::size_t d = shape.size(); d-- > 0; step *= shape[d])
    stride[d] = t.strides ? t.strides[d] : step;
  std::vector<decltype(to(From{}))> values;
  values.reserve(static_cast<std::size_t>(total));
  i64 offset = 0;
  for (i64 i = 0; i < total; ++i) {
    values.push_back(to(data[offset]));
    for (std::size_t d = shape.size(); d-- > 0;) {  // the next index, last dimension first
      offset += stride[d];
      if (++at[d] < shape[d]) break;
      offset -= stride[d] * shape[d];
      at[d] = 0;
    }
  }
  return Array(std::move(values), std::move(shape));
}

MemberValue tensor_member(const std::string& name, const DLTensor& t,
                          const std::shared_ptr<const void>& owner) {
  if (t.ndim > max_tensor_rank)
    fail<ValueError>(name, " has ", t.ndim, " dimensions; expected at most ", max_tensor_rank);
  if (const DeviceId device = device_of(name, t); is_gpu(device))
    return gpu_member(name, t, device, owner);
  const auto holds = [&t](int code, int bits) { return is(t.dtype, code, bits); };
  const auto same = [](auto x) { return x; };
  const auto narrow = [](auto x) { return static_cast<float>(x); };
  const auto widen = [](auto x) { return to_float(x); };
  const auto narrow_integer = [&name](std::int64_t x) {
    if (x < std::numeric_limits<i32>::min() || x > std::numeric_limits<i32>::max())
      fail<ValueError>(name, " holds ", x, "; expected 32-bit integers");
    return static_cast<std::int32_t>(x);
  };
  if (is_contiguous(t)) {
    if (holds(kDLFloat, 32)) return plain_member<float>(t, owner);
    if (holds(kDLInt, 32)) return plain_member<std::int32_t>(t, owner);
    if (holds(kDLUInt, 32)) return plain_member<std::uint32_t>(t, owner);
    if (holds(kDLUInt, 8) || holds(kDLBool, 8)) return plain_member<std::uint8_t>(t, owner);
  }
  if (holds(kDLFloat, 32)) return copy_strided<float>(t, same);
  if (holds(kDLFloat, 64)) return copy_strided<double>(t, narrow);
  if (holds(kDLFloat, 16)) return copy_strided<f16>(t, widen);
  if (holds(kDLBfloat, 16)) return copy_strided<bf16>(t, widen);
  if (holds(kDLInt, 32)) return copy_strided<std::int32_t>(t, same);
  if (holds(kDLInt, 64)) return copy_strided<std::int64_t>(t, narrow_integer);
  if (holds(kDLUInt, 32)) return copy_strided<std::uint32_t>(t, same);
  if (holds(kDLUInt, 8) || holds(kDLBool, 8)) return copy_strided<std::uint8_t>(t, same);
  fail<TypeError>(name, " has dtype ", dtype_text(t.dtype),
                  "; expected floats, bools, or integers of 8 (unsigned), 32 or 64 bits");
}

/// A member of rank 0 in the caller's hands is a number.
MemberValue scalar_if_rank_0(MemberValue value, int rank) {
  if (rank != 0) return value;
  return std::visit(
      [](const auto& x) -> MemberValue {
        if constexpr (std::is_same_v<std::decay_t<decltype(x)>, double>)
          return x;
        else
          return static_cast<double>(x.front());
      },
      value);
}

MemberValue list_member(const std::string& name, const ffi::Array<ffi::Any>& list) {
  std::vector<std::int64_t> integers;
  std::vector<float> floats;
  for (const ffi::Any& value : list) {
    const auto number = value.try_cast<double>();
    if (!number) fail<TypeError>(name, " holds ", kind_of(value), "; expected numbers");
    floats.push_back(static_cast<float>(*number));
    if (value.type_index() == ffi::TypeIndex::kTVMFFIInt)
      integers.push_back(value.cast<std::int64_t>());
  }
  if (integers.size() < floats.size() || floats.empty()) return Array(std::move(floats));
  std::vector<std::int32_t> narrow;
  for (const std::int64_t v : integers) {
    if (v < std::numeric_limits<i32>::min() || v > std::numeric_limits<i32>::max())
      fail<ValueError>(name, " holds ", v, "; expected 32-bit integers");
    narrow.push_back(static_cast<std::int32_t>(v));
  }
  return Array(std::move(narrow));
}

[[noreturn]] void wrong_type(const std::string& name, const ffi::AnyView& value,
                             const char* expected) {
  fail<TypeError>(name, " is ", kind_of(value), "; expected ", expected);
}

i64 integer_field(const std::string& name, const ffi::AnyView& value) {
  if (value.type_index() != ffi::TypeIndex::kTVMFFIInt) wrong_type(name, value, "an int");
  return value.cast<std::int64_t>();
}

i32 integer32_field(const std::string& name, const ffi::AnyView& value) {
  const i64 n = integer_field(name, value);
  if (n < std::numeric_limits<i32>::min() || n > std::numeric_limits<i32>::max()) {
    fail<ValueError>(name, " is ", n, "; expected a 32-bit integer");
  }
  return static_cast<i32>(n);
}

bool boolean_field(const std::string& name, const ffi::AnyView& value) {
  const auto flag = value.as<bool>();
  if (!flag) wrong_type(name, value, "a bool");
  return *flag;
}

}  // namespace

DType dtype_field(const std::string& name, const ffi::AnyView& value) {
  const auto text = value.as<ffi::String>();
  if (!text) wrong_type(name, value, "a string");
  if (*text == "bfloat16") return DType::bfloat16;
  if (*text == "float16") return DType::float16;
  if (*text == "float32") return DType::float32;
  if (*text == "float8_e4m3fn") return DType::float8_e4m3fn;
  if (*text == "float8_e5m2") return DType::float8_e5m2;
  if (*text == "int8") return DType::int8;
  fail<ValueError>(name, " is '", std::string(*text), "'; expected ",
                   name == "kv_dtype" ? "'float8_e4m3fn', 'float8_e5m2', 'int8' or None"
                                      : "'float32', 'float16' or 'bfloat16'");
}

namespace {

std::vector<Variant> variants_field(const std::string& name, const ffi::AnyView& value) {
  const auto list = value.as<ffi::Array<ffi::Any>>();
  if (!list) wrong_type(name, value, "a variant or a list of variants");
  std::vector<Variant> variants;
  for (const ffi::Any& each : *list) {
    const VariantObj* variant = each.as<VariantObj>();
    if (!variant) wrong_type(name + "[" + std::to_string(variants.size()) + "]", each, "a variant");
    variants.push_back(variant->value);
  }
  return variants;
}

}  // namespace

MemberValue to_member(const std::string& name, const ffi::AnyView& value, Members members) {
  if (const auto number = value.try_cast<double>()) return *number;
  if (const auto tensor = value.as<ffi::Tensor>()) {
    std::shared_ptr<const void> owner;
    if (members == Members::borrowed) owner = std::make_shared<const ffi::Tensor>(*tensor);
    return scalar_if_rank_0(tensor_member(name, *tensor->GetDLTensorPtr(), owner), tensor->ndim());
  }
  if (const auto view = value.as<ffi::TensorView>()) {
    return scalar_if_rank_0(tensor_member(name, *value.cast<DLTensor*>(), nullptr), view->ndim());
  }
  if (const auto list = value.as<ffi::Array<ffi::Any>>()) return list_member(name, *list);
  wrong_type(name, value, "a number, a list of numbers or an array");
}

Params to_params(const Fields& params, Members members) {
  Params values;
  for (const auto& [name, value] : params) {
    const std::string key = name;
    values.emplace(key, to_member("params['" + key + "']", value, members));
  }
  return values;
}

AttentionSpec to_spec(const Fields& fields) {
  AttentionSpec spec;
  for (const auto& [key, value] : fields) {
    const std::string name = key;
    if (name == "num_qo_heads") {
      spec.num_qo_heads = integer32_field(name, value);
    } else if (name == "num_kv_heads") {
      spec.num_kv_heads = integer32_field(name, value);
    } else if (name == "head_dim") {
      spec.head_dim_qk = integer32_field(name, value);
    } else if (name == "head_dim_vo") {
      spec.head_dim_vo = integer32_field(name, value);
    } else if (name == "dtype") {
      spec.dtype = dtype_field(name, value);
    } else if (name == "kv_dtype") {
      if (value == nullptr) continue;
      spec.kv_dtype = dtype_field(name, value);
    } else if (name == "variant") {
      spec.variant = variants_field(name, value);
    } else if (name == "scale") {
      if (value == nullptr) continue;
      spec.scale = static_cast<float>(to_number(name, value));
    } else if (name == "batch_invariant") {
      spec.batch_invariant = boolean_field(name, value);
    } else if (name == "k_extends_v") {
      spec.k_extends_v = boolean_field(name, value);
    } else if (name == "fuse") {
      spec.fuse = boolean_field(name, value);
    } else {
      fail<TypeError>("AttentionSpec has no field '", name, "'");
    }
  }
  return spec;
}

Maxima to_maxima(const Fields& fields) {
  Maxima maxima{1, 1, 1, 1, 0};
  for (const auto& [key, value] : fields) {
    const std::string name = key;
    if (integer_field(name, value) < 0) {
      fail<ValueError>(name, " is ", integer_field(name, value), "; expected at least 0");
    }
    if (name == "max_requests") {
      maxima.max_requests = integer32_field(name, value);
    } else if (name == "max_qo_tokens") {
      maxima.max_qo_tokens = integer32_field(name, value);
    } else if (name == "max_kv_tokens") {
      maxima.max_kv_tokens = integer_field(name, value);
    } else if (name == "max_levels") {
      maxima.max_levels = integer32_field(name, value);
    } else if (name == "max_runs") {
      maxima.max_runs = integer32_field(name, value);
    } else if (name == "max_qo_len") {
      maxima.max_qo_len = integer32_field(name, value);
    } else if (name == "max_mask_bytes") {
      maxima.max_mask_bytes = integer32_field(name, value);
    } else if (name == "page_size") {
      maxima.page_size = integer32_field(name, value);
    } else {
      fail<TypeError>("'", name, "' is no maximum");
    }
  }
  return maxima;
}

}  // namespace raddle::border

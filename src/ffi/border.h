// What the exports share: objects that Python holds, and arguments taken by name.
//
// Beside each export stand the names of its arguments, in the order in which it reads them. Python
// calls it with these names, which it asks for once, when it is imported
// (python/raddle/_library.py), and the readers below check in its first call that each is at the
// argument that it names. Errors speak of arguments by the names that users write.
#pragma once

#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

#include <atomic>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "raddle/attention.h"
#include "raddle/error.h"
#include "raddle/radix_cache.h"

namespace raddle::border {

namespace ffi = tvm::ffi;

struct LayoutObj : ffi::Object {
  LayoutPtr value;
  DeviceLayoutPtr on_device;  ///< one of the two
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("raddle.Layout", LayoutObj, ffi::Object);
};

struct VariantObj : ffi::Object {
  Variant value;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("raddle.Variant", VariantObj, ffi::Object);
};

struct PlanObj : ffi::Object {
  PlanPtr value;
  i32 head_dim_vo = 0;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("raddle.Plan", PlanObj, ffi::Object);
};

struct AttentionObj : ffi::Object {
  std::unique_ptr<Attention> value;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("raddle.Attention", AttentionObj, ffi::Object);
};

struct ReservationObj : ffi::Object {
  ReservationPtr value;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("raddle.Reservation", ReservationObj, ffi::Object);
};

struct PagePoolObj : ffi::Object {
  std::shared_ptr<PagePool> value;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("raddle.PagePool", PagePoolObj, ffi::Object);
};

struct RadixCacheObj : ffi::Object {
  std::unique_ptr<RadixCache> value;
  ffi::ObjectRef pool;  ///< as Python has it
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("raddle.RadixCache", RadixCacheObj, ffi::Object);
};

/// A new object that holds `value`.
template <class Obj, class T>
ffi::ObjectRef wrap(T value) {
  auto object = ffi::make_object<Obj>();
  object->value = std::move(value);
  return ffi::ObjectRef(std::move(object));
}

/// "list", "torch tensor" …: what an argument is, for errors.
std::string kind_of(const ffi::AnyView& value);
/// "float32"; of any dtype, known to tvm-ffi or not.
std::string dtype_text(DLDataType dtype);
/// Whether elements are scalars of that kind and size.
bool is(DLDataType dtype, int code, int bits);

/// Which tensors an argument may be; the callee checks the device of those from anywhere.
enum class Where { host, anywhere };

/// Names of an export's arguments in their order, of a literal "spec device". A last one with a
/// star ("*kv") stands for any number.
class ArgumentNames {
 public:
  explicit ArgumentNames(std::string_view text);

  int count() const { return static_cast<int>(names_.size()); }
  bool any_number() const { return any_number_; }
  /// Whether argument `n` is the one that a reader calls `name`: "k_pool", or "kv_pool: k" of
  /// kv_pool_k, as what separates words counts as one underscore.
  bool is(int n, std::string_view name) const;

 private:
  std::vector<std::string_view> names_;
  bool any_number_ = false;
};

/// The arguments of one call, taken in order. Each reader names what it takes.
class Arguments {
 public:
  /// `names`: what readers are checked against; null once a call has been read to its end.
  Arguments(ffi::PackedArgs args, const ArgumentNames* names) : args_(args), names_(names) {}

  int left() const { return args_.size() - next_; }
  bool more() const { return left() > 0; }
  ffi::AnyView take(std::string_view name);
  /// Fails where an argument has not been read: the export's list of names is not what it reads.
  void check_all_read() const;

  /// `called`: what errors call it, where that is not its name.
  template <class Obj>
  const Obj& object(const char* argument, const char* called = nullptr) {
    const ffi::AnyView value = take(argument);
    const char* name = called ? called : argument;
    const Obj* object = value.as<Obj>();
    if (!object) fail<TypeError>(name, " is ", kind_of(value), "; expected a ", Obj::_type_key);
    // Python can make a handle of nothing by skipping the constructor.
    if constexpr (requires { object->value == nullptr; }) {
      if constexpr (requires { object->on_device; })
        if (object->on_device)
          fail<ValueError>(name,
                           " has its lengths on a GPU; expected host arrays, or the update of a "
                           "reservation made with device_lengths=True");
      if (object->value == nullptr) fail<ValueError>(name, " is empty; expected one that was made");
    }
    return *object;
  }
  /// A layout of either kind.
  const LayoutObj& any_layout(const char* name);
  i64 integer(const char* name, i64 if_none);
  i32 integer32(const char* name, i32 if_none);
  i32 integer32(const char* name);  ///< None is refused
  std::optional<i32> optional_integer32(const char* name);
  bool boolean(const char* name);
  /// Nothing where None is given.
  std::optional<float> number(const char* name);
  double real(const char* name);
  std::string string(const char* name);
  /// `bytes`: what the elements of a uint8 tensor are, where it may be one. `wanted`: the dtype of
  /// the spec, which an error about any other kind of element names.
  TensorRef tensor(const std::string& name, Where where = Where::host,
                   std::optional<DType> bytes = {}, std::optional<DType> wanted = {});
  /// Without data where None is given.
  TensorRef optional_tensor(const std::string& name, Where where = Where::host,
                            std::optional<DType> bytes = {}, std::optional<DType> wanted = {});
  IndexRef index(const char* name, Where where = Where::host);
  /// Numbers of a page pool's requests.
  std::vector<RequestId> requests(const char* name);
  /// Bytes or booleans, contiguous; null where None is given.
  const DLTensor* bytes(const char* name);
  ffi::Map<ffi::String, ffi::Any> map(const char* name);

 private:
  ffi::PackedArgs args_;
  const ArgumentNames* names_;
  int next_ = 0;
};

/// A host tensor of the numbers, which it keeps; without a shape of one dimension.
template <class T>
ffi::Tensor array_of(std::vector<T> values, std::vector<std::int64_t> shape = {}) {
  struct Kept {
    std::vector<T> values;
    void AllocData(DLTensor* tensor) { tensor->data = values.data(); }
    void FreeData(DLTensor*) {}
  };
  if (shape.empty()) shape.push_back(static_cast<std::int64_t>(values.size()));
  constexpr auto code = std::is_floating_point_v<T> ? kDLFloat
                        : std::is_unsigned_v<T>     ? kDLUInt
                                                    : kDLInt;
  return ffi::Tensor::FromNDAlloc(Kept{std::move(values)}, ffi::Shape(shape.begin(), shape.end()),
                                  DLDataType{code, 8 * sizeof(T), 1}, DLDevice{kDLCPU, 0});
}

/// Types of members as they cross: "float", "int", or {"dtype": "float32", "extents": ["any", …]}.
VariantParam to_param(const std::string& name, const ffi::AnyView& value);
ffi::Any from_param(const VariantParam& param);
/// One operation of a traced function: {"op": "load", "dtype": "int", "args": [0, 2], …}.
TracedNode to_node(const ffi::Map<ffi::String, ffi::Any>& fields);
/// Where a tensor lies; pinned memory is the host's.
DeviceId device_of(const std::string& name, const DLTensor& t);
/// Its address; raises where there is none, or it is not aligned to the elements.
void* first_element(const std::string& name, const DLTensor& t);
TensorRef to_tensor(const std::string& name, const ffi::AnyView& value, Where where,
                    std::optional<DType> bytes = {}, std::optional<DType> wanted = {});
double to_number(const std::string& name, const ffi::AnyView& value);
/// Whether arrays are copied, which lie on the host; or large ones left where they are, for a call
/// that reads them at once, and those on a GPU, which its kernels read in stream order.
enum class Members { copied, borrowed };
/// A number, a list of numbers, or a tensor of rank 0 to 4.
MemberValue to_member(const std::string& name, const ffi::AnyView& value,
                      Members members = Members::copied);
Params to_params(const ffi::Map<ffi::String, ffi::Any>& params, Members members = Members::copied);
AttentionSpec to_spec(const ffi::Map<ffi::String, ffi::Any>& fields);
Maxima to_maxima(const ffi::Map<ffi::String, ffi::Any>& fields);
Schedule parse_schedule(const std::string& text);
/// "float8_e4m3fn"; of a field that has none by itself.
DType dtype_field(const std::string& name, const ffi::AnyView& value);
/// One level's K and V: two tensors, or one and None. `bytes`: as Arguments::tensor has it.
KvRef take_pair(Arguments& in, const std::string& name, Where where = Where::host,
                std::optional<DType> bytes = {}, std::optional<DType> wanted = {});
/// An array of integers; without data where None is given.
IndexRef to_index(const char* name, const ffi::AnyView& value, Where where);
/// A scale of K or V: None, a number or a tensor.
ScaleRef to_scale(const std::string& name, const ffi::AnyView& value);
/// "cpu", "cuda" (the GPU that is current, else the first) or "cuda:1".
DeviceId parse_device(const std::string& text);
/// "NHD" or "HND".
HeadOrder parse_order(const std::string& text);
/// The caller's current stream on a GPU: tvm-ffi takes it from the framework of a call's tensors.
void* current_stream(DeviceId device);

/// Runs `body` and turns Raddle's errors into Python's, without a C++ backtrace: to find its
/// symbols reads the debug data of every library of the process, seconds where torch is one of
/// them.
template <class Body>
auto guarded(Body&& body) {
  const auto raise = [](const char* kind, const char* text) { throw ffi::Error(kind, text, ""); };
  try {
    return body();
  } catch (const ValueError& e) {
    raise("ValueError", e.what());
  } catch (const TypeError& e) {
    raise("TypeError", e.what());
  } catch (const CompileError& e) {
    raise("CompileError", e.what());
  } catch (const DeviceError& e) {
    raise("RuntimeError", e.what());
  } catch (const std::bad_alloc&) {
    raise("MemoryError", "out of memory");
  }
  throw;  // not reached; the compiler does not know that raise throws
}

/// Registers exports.
class Exports {
 public:
  /// `arguments`: their names, in the order in which the body reads them. The body returns nothing,
  /// or a value that a ffi::Any can hold.
  template <class Body>
  Exports& def(const char* name, Body body, const char* arguments = "") {
    const auto call = [body, names = ArgumentNames(arguments),
                       checked = std::make_shared<std::atomic<bool>>(false)](ffi::PackedArgs args,
                                                                             ffi::Any* result) {
      guarded([&] {
        const bool known = checked->load(std::memory_order_relaxed);
        Arguments in(args, known ? nullptr : &names);
        if constexpr (std::is_void_v<decltype(body(in))>) {
          body(in);
          *result = nullptr;
        } else {
          *result = body(in);
        }
        if (known) return;
        in.check_all_read();
        checked->store(true, std::memory_order_relaxed);
      });
    };
    registry_.def_packed(name, call,
                         ffi::reflection::Metadata{{"arguments", ffi::String(arguments)}});
    return *this;
  }

 private:
  ffi::reflection::GlobalDef registry_;
};

}  // namespace raddle::border

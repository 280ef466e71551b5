// Memory of a GPU where no framework has any: what `raddle replay` and timelines need of one.
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>

#include <cstring>

#include "device/cuda/memory.h"
#include "ffi/border.h"

namespace raddle::border {

struct DeviceMemoryObj : ffi::Object {
  const cuda::Device* device = nullptr;
  cuda::Block block;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("raddle.DeviceMemory", DeviceMemoryObj, ffi::Object);
};

namespace {

const DeviceMemoryObj& take_memory(Arguments& in) {
  const auto* memory = in.take("memory").as<DeviceMemoryObj>();
  if (!memory || !memory->device) fail<TypeError>("memory is none; expected memory of a GPU");
  return *memory;
}

/// The stream that Python names by number, else the current one.
void* take_stream(Arguments& in, const cuda::Device& device) {
  const i64 stream = in.integer("stream", 0);
  return stream ? reinterpret_cast<void*>(stream)
                : current_stream(DeviceId::cuda(device.ordinal()));
}

std::size_t take_size(Arguments& in, const char* name) {
  const i64 size = in.integer(name, 0);
  if (size < 0) fail<ValueError>(name, " is ", size, "; expected at least 0");
  return static_cast<std::size_t>(size);
}

void check_within(const DeviceMemoryObj& memory, std::size_t at, std::size_t bytes) {
  if (at > memory.block.bytes() || bytes > memory.block.bytes() - at)
    fail<ValueError>("bytes ", at, " to ", at + bytes, " of memory; it has ", memory.block.bytes());
}

ffi::ObjectRef allocate(Arguments& in) {
  const std::size_t bytes = take_size(in, "nbytes");
  const DeviceId device = parse_device(in.string("device"));
  if (device.kind == DeviceId::Kind::cpu)
    fail<ValueError>("device is 'cpu'; expected 'cuda' or 'cuda:<number>'");
  auto memory = ffi::make_object<DeviceMemoryObj>();
  memory->device = &cuda::Device::get(device.ordinal);
  const cuda::ContextScope context(*memory->device);
  memory->block = cuda::DevicePool::of(*memory->device)
                      .take(bytes, take_stream(in, *memory->device), "a tensor");
  return ffi::ObjectRef(std::move(memory));
}

/// A tensor's memory is that of an object, which lives as long.
struct Borrowed {
  ffi::ObjectRef owner;
  void AllocData(DLTensor* tensor) { tensor->data = owner.as<DeviceMemoryObj>()->block.data(); }
  void FreeData(DLTensor*) {}
};

/// A contiguous tensor at the start of the memory.
ffi::Tensor tensor_of(Arguments& in) {
  const ffi::AnyView given = in.take("memory");
  const auto* memory = given.as<DeviceMemoryObj>();
  if (!memory) fail<TypeError>("memory is none; expected memory of a GPU");
  const auto shape = in.take("shape").cast<ffi::Array<i64>>();
  const DLDataType dtype = ffi::StringToDLDataType(in.string("dtype"));
  std::size_t bytes = static_cast<std::size_t>(dtype.bits) / 8;
  for (const i64 n : shape) bytes *= static_cast<std::size_t>(n);
  check_within(*memory, 0, bytes);
  return ffi::Tensor::FromNDAlloc(Borrowed{given.cast<ffi::ObjectRef>()},
                                  ffi::Shape(shape.begin(), shape.end()), dtype,
                                  DLDevice{kDLCUDA, memory->device->ordinal()});
}

/// Copies a host's bytes to the start of the memory, in stream order.
void upload(Arguments& in) {
  const DeviceMemoryObj& memory = take_memory(in);
  const DLTensor* from = in.bytes("array");
  const auto bytes = static_cast<std::size_t>(from ? ffi::GetDataSize(*from) : 0);
  check_within(memory, 0, bytes);
  if (bytes == 0) return;
  const cuda::ContextScope context(*memory.device);
  cuda::Upload pinned(*memory.device, bytes);
  std::memcpy(pinned.data(), static_cast<const u8*>(from->data) + from->byte_offset, bytes);
  pinned.send(memory.block, {{0, bytes}}, take_stream(in, *memory.device));
}

/// Copies from the start of the memory, and waits until it is there.
void download(Arguments& in) {
  const DeviceMemoryObj& memory = take_memory(in);
  const DLTensor* to = in.bytes("array");
  const auto bytes = static_cast<std::size_t>(to ? ffi::GetDataSize(*to) : 0);
  check_within(memory, 0, bytes);
  if (bytes == 0) return;
  const cuda::ContextScope context(*memory.device);
  cuda::download(static_cast<u8*>(to->data) + to->byte_offset, memory.block, 0, bytes,
                 take_stream(in, *memory.device));
}

/// Gives bytes of the memory a value, in stream order.
void set_bytes(Arguments& in) {
  const DeviceMemoryObj& memory = take_memory(in);
  const std::size_t at = take_size(in, "at"), bytes = take_size(in, "nbytes");
  const auto value = static_cast<u8>(in.integer("value", 0));
  check_within(memory, at, bytes);
  const cuda::ContextScope context(*memory.device);
  cuda::set_bytes(memory.block, at, bytes, value, take_stream(in, *memory.device));
}

/// Waits for a stream.
void synchronize(Arguments& in) {
  const DeviceId device = parse_device(in.string("device"));
  const cuda::Device& gpu = cuda::Device::get(device.ordinal);
  const cuda::ContextScope context(gpu);
  const cuda::Event event;
  event.record(take_stream(in, gpu));
  event.synchronize();
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = ffi::reflection;
  refl::ObjectDef<DeviceMemoryObj>();
  Exports()
      .def("raddle.cuda.allocate", allocate, "nbytes device stream")
      .def("raddle.cuda.tensor_of", tensor_of, "memory shape dtype")
      .def("raddle.cuda.upload", upload, "memory array stream")
      .def("raddle.cuda.download", download, "memory array stream")
      .def("raddle.cuda.set_bytes", set_bytes, "memory at nbytes value stream")
      .def("raddle.cuda.synchronize", synchronize, "device stream");
}

}  // namespace raddle::border

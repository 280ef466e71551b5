// The KV cache: appending, copying pages, choosing pages, accepting drafts.
#include "raddle/kv.h"

#include "cache/checks.h"
#include "cache/on_device.h"
#include "ffi/border.h"

namespace raddle::border {

namespace {

const Layout& take_layout(Arguments& in) { return *in.object<LayoutObj>("layout").value; }

/// A contiguous int32 array for a result, on the device where the result is made.
i32* take_result(Arguments& in, const char* name, DeviceId device, i64 entries) {
  const ffi::AnyView value = in.take(name);
  const DLTensor* t = value.type_index() == ffi::TypeIndex::kTVMFFITensor
                          ? static_cast<const DLTensor*>(value.cast<const ffi::TensorObj*>())
                      : value.type_index() == ffi::TypeIndex::kTVMFFIDLTensorPtr
                          ? value.cast<DLTensor*>()
                          : nullptr;
  if (!t) fail<TypeError>(name, " is ", kind_of(value), "; expected an int32 tensor");
  if (t->dtype.code != kDLInt || t->dtype.bits != 32 || t->dtype.lanes != 1)
    fail<TypeError>(name, " has dtype ", dtype_text(t->dtype), "; expected int32");
  const bool gpu = t->device.device_type != kDLCPU && t->device.device_type != kDLCUDAHost;
  const bool wants_gpu = device.kind == DeviceId::Kind::cuda;
  if (gpu != wants_gpu || (gpu && t->device.device_id != device.ordinal))
    fail<ValueError>(name, " lies on another device; expected the one of the other tensors");
  i64 have = 1;
  for (int i = 0; i < t->ndim; ++i) have *= t->shape[i];
  if (have != entries) fail<ValueError>(name, " has ", have, " elements; expected ", entries);
  if (!ffi::IsContiguous(*t)) fail<ValueError>(name, " is not contiguous");
  return reinterpret_cast<i32*>(static_cast<char*>(t->data) + t->byte_offset);
}

/// What pools of uint8 hold; nothing where None is given.
std::optional<DType> take_kv_dtype(Arguments& in) {
  const ffi::AnyView value = in.take("kv_dtype");
  if (value == nullptr) return std::nullopt;
  const DType dtype = dtype_field("kv_dtype", value);
  if (has_8_bits(dtype)) return dtype;
  return std::nullopt;
}

/// Where keys only move, one kind of bytes is as good as another.
constexpr DType moved_bytes = DType::float8_e4m3fn;

void take_scales(Arguments& in, KvRef& pool, const std::string& of = "") {
  for (const auto& [scale, name] :
       {std::pair{&pool.k_scale, of + "k_scale"}, std::pair{&pool.v_scale, of + "v_scale"}})
    *scale = to_scale(name, in.take(name));
}

void append(Arguments& in) {
  const Layout& layout = take_layout(in);
  const auto kv_dtype = take_kv_dtype(in);
  const TensorRef k_new = in.tensor("k_new", Where::anywhere, kv_dtype);
  const TensorRef v_new = in.tensor("v_new", Where::anywhere, kv_dtype);
  KvRef pool = take_pair(in, "kv_pool", Where::anywhere, kv_dtype);
  take_scales(in, pool);
  const ffi::AnyView rope = in.take("rope");
  void* stream = current_stream(k_new.device);
  if (rope == nullptr) return append_kv(layout, k_new, v_new, pool, nullptr, stream);
  const VariantObj* variant = rope.as<VariantObj>();
  if (!variant) fail<TypeError>("rope is ", kind_of(rope), "; expected a raddle.Variant");
  append_kv(layout, k_new, v_new, pool, &variant->value, stream);
}

/// The same to slots of the pool.
void append_slots(Arguments& in) {
  const IndexRef slots = in.index("slots", Where::anywhere);
  const HeadOrder order = parse_order(in.string("kv_layout"));
  const auto kv_dtype = take_kv_dtype(in);
  const TensorRef k_new = in.tensor("k_new", Where::anywhere, kv_dtype);
  const TensorRef v_new = in.tensor("v_new", Where::anywhere, kv_dtype);
  KvRef pool = take_pair(in, "kv_pool", Where::anywhere, kv_dtype);
  take_scales(in, pool);
  append_kv(slots, order, k_new, v_new, pool, current_stream(k_new.device));
}

void copy(Arguments& in) {
  KvRef from = take_pair(in, "kv_pool", Where::anywhere, moved_bytes);
  take_scales(in, from, "from.");
  KvRef to = take_pair(in, "to", Where::anywhere, moved_bytes);
  take_scales(in, to, "to.");
  const IndexRef from_pages = in.index("from_pages");
  copy_pages(from, to, from_pages, in.index("to_pages"), current_stream(from.k.device));
}

void summarize(Arguments& in) {
  const Layout& layout = take_layout(in);
  const auto kv_dtype = take_kv_dtype(in);
  const KvRef pool = take_pair(in, "kv_pool", Where::anywhere, kv_dtype);
  const ScaleRef k_scale = to_scale("k_scale", in.take("k_scale"));
  const TensorRef summary = in.tensor("summary", Where::anywhere);
  summarize_pages(layout, pool.k, summary, in.boolean("new_only"), current_stream(pool.k.device),
                  k_scale);
}

/// KV heads of a pool in the layout's order.
i64 heads_of_pool(Arguments& in) {
  const Layout& layout = take_layout(in);
  const KvRef pool = take_pair(in, "kv_pool", Where::anywhere);
  check_pool("kv_pool: k", pool.k, layout);
  return pool.k.shape[layout.levels()[0].order == HeadOrder::nhd ? 2 : 1];
}

void select(Arguments& in) {
  const Layout& layout = take_layout(in);
  SelectArgs args;
  args.q = in.tensor("q", Where::anywhere);
  args.summary = in.tensor("summary", Where::anywhere);
  args.num_selected = in.integer32("num_pages", 0);
  args.per_head = in.boolean("per_head");
  args.keep_last = in.boolean("keep_last");
  args.stream = current_stream(args.q.device);
  // Lists of requests; check_select names what is wrong with the sizes that they are made of.
  const i64 heads = args.per_head && args.summary.rank == 4 ? args.summary.shape[2] : 1;
  const i64 entries = layout.num_requests() * heads * std::max(args.num_selected, 0);
  args.pages = take_result(in, "pages", args.q.device, entries);
  args.pos = take_result(in, "pos", args.q.device, entries);
  args.count = take_result(in, "count", args.q.device, entries);
  select_pages(layout, args);
}

ffi::ObjectRef selected(Arguments& in) {
  const Layout& layout = take_layout(in);
  const IndexRef pages = in.index("pages");
  const IndexRef pos = in.index("pos");
  return wrap<LayoutObj>(selected_layout(layout, pages, pos, in.index("count")));
}

void accept(Arguments& in) {
  const Layout& layout = take_layout(in);
  KvRef pool = take_pair(in, "kv_pool", Where::anywhere, moved_bytes);
  take_scales(in, pool);
  const IndexRef parents = in.index("parents");
  const IndexRef accepted = in.index("accepted");
  i32* kv_len = take_result(in, "kv_len", {}, layout.num_requests());
  accept_tree(layout, pool, parents, accepted, kv_len, current_stream(pool.k.device));
}

/// The GPU kernels for a spec's dtype and variant, and what the assembler says of them.
ffi::Map<ffi::String, ffi::Any> compile(Arguments& in) {
  const AttentionSpec spec = to_spec(in.map("spec"));
  const jit::Cubin cubin = cuda::compile_kv(spec, in.string("arch"));
  return {{"log", ffi::String(cubin.log)}, {"cubin", ffi::Bytes(cubin.bytes)}};
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  Exports()
      .def("raddle.append_kv", append,
           "layout kv_dtype k_new v_new kv_pool_k kv_pool_v k_scale v_scale rope")
      .def("raddle.append_slots", append_slots,
           "slots kv_layout kv_dtype k_new v_new kv_pool_k kv_pool_v k_scale v_scale")
      .def("raddle.copy_pages", copy,
           "kv_pool_k kv_pool_v from_k_scale from_v_scale to_k to_v to_k_scale to_v_scale "
           "from_pages to_pages")
      .def("raddle.summarize_pages", summarize,
           "layout kv_dtype kv_pool_k kv_pool_v k_scale summary new_only")
      .def("raddle.heads_of_pool", heads_of_pool, "layout kv_pool_k kv_pool_v")
      .def("raddle.select_pages", select,
           "layout q summary num_pages per_head keep_last pages pos count")
      .def("raddle.selected_layout", selected, "layout pages pos count")
      .def("raddle.accept_tree", accept,
           "layout kv_pool_k kv_pool_v k_scale v_scale parents accepted kv_len")
      .def("raddle.cuda.compile_kv", compile, "spec arch");
}

}  // namespace raddle::border

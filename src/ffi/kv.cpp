// The KV cache: appending, copying pages, choosing pages, accepting drafts.
#include "raddle/kv.h"

#include <tvm/ffi/reflection/registry.h>

#include "api/kv_checks.h"
#include "api/kv_device.h"
#include "ffi/border.h"

namespace raddle::border {

namespace {

const Layout& take_layout(Arguments& in) { return *in.object<LayoutObj>("layout").value; }

/// An int32 array that the Python package made for a result.
i32* take_result(Arguments& in, const char* name) {
  const IndexRef array = in.index(name);
  if (array.is_64bit) fail<TypeError>(name, " is int64; expected int32");
  return static_cast<i32*>(const_cast<void*>(array.data));
}

void append(Arguments& in) {
  const Layout& layout = take_layout(in);
  const TensorRef k_new = in.tensor("k_new");
  const TensorRef v_new = in.tensor("v_new");
  const KvRef pool = take_pair(in, "kv_pool");
  const ffi::AnyView rope = in.take();
  if (rope == nullptr) return append_kv(layout, k_new, v_new, pool);
  const VariantObj* variant = rope.as<VariantObj>();
  if (!variant) fail<TypeError>("rope is ", kind_of(rope), "; expected a raddle.Variant");
  append_kv(layout, k_new, v_new, pool, &variant->value);
}

void copy(Arguments& in) {
  const KvRef from = take_pair(in, "kv_pool");
  const KvRef to = take_pair(in, "to");
  const IndexRef from_pages = in.index("from_pages");
  copy_pages(from, to, from_pages, in.index("to_pages"));
}

void summarize(Arguments& in) {
  const Layout& layout = take_layout(in);
  const KvRef pool = take_pair(in, "kv_pool");
  const TensorRef summary = in.tensor("summary");
  summarize_pages(layout, pool.k, summary, in.boolean("new_only"));
}

/// KV heads of a pool in the layout's order.
i64 heads_of_pool(Arguments& in) {
  const Layout& layout = take_layout(in);
  const KvRef pool = take_pair(in, "kv_pool");
  check_pool("kv_pool: k", pool.k, layout);
  return pool.k.shape[layout.levels()[0].order == HeadOrder::nhd ? 2 : 1];
}

void select(Arguments& in) {
  const Layout& layout = take_layout(in);
  SelectArgs args;
  args.q = in.tensor("q");
  args.summary = in.tensor("summary");
  args.num_selected = in.integer32("num_pages", 0);
  args.per_head = in.boolean("per_head");
  args.keep_last = in.boolean("keep_last");
  args.pages = take_result(in, "pages");
  args.pos = take_result(in, "pos");
  args.count = take_result(in, "count");
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
  const KvRef pool = take_pair(in, "kv_pool");
  const IndexRef parents = in.index("parents");
  const IndexRef accepted = in.index("accepted");
  accept_tree(layout, pool, parents, accepted, take_result(in, "kv_len"));
}

/// What the assembler says of the GPU kernels for a spec's dtype and variant.
ffi::String compile(Arguments& in) {
  const AttentionSpec spec = to_spec(in.map("spec"));
  return cuda::compile_kv(spec, in.string("arch"));
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  ffi::reflection::GlobalDef()
      .def_packed("raddle.append_kv", exported(append))
      .def_packed("raddle.copy_pages", exported(copy))
      .def_packed("raddle.summarize_pages", exported(summarize))
      .def_packed("raddle.heads_of_pool", exported(heads_of_pool))
      .def_packed("raddle.select_pages", exported(select))
      .def_packed("raddle.selected_layout", exported(selected))
      .def_packed("raddle.accept_tree", exported(accept))
      .def_packed("raddle.cuda.compile_kv", exported(compile));
}

}  // namespace raddle::border

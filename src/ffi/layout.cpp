// Layouts.
#include "raddle/layout.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "ffi/border.h"
#include "layout/normal_form.h"
#include "layout/on_device.h"

namespace raddle::border {

HeadOrder parse_order(const std::string& text) {
  if (text == "NHD") return HeadOrder::nhd;
  if (text == "HND") return HeadOrder::hnd;
  fail<ValueError>("kv_layout is '", text, "'; expected 'NHD' or 'HND'");
}

namespace {

ffi::ObjectRef ragged(Arguments& in) {
  RaggedArgs args;
  args.qo_indptr = in.index("qo_indptr");
  args.kv_indptr = in.index("kv_indptr");
  args.qo_pos = in.index("qo_pos");
  args.kv_first = in.index("kv_first");
  args.kv_len = in.index("kv_len");
  args.kv_begin = in.index("kv_begin");
  return wrap<LayoutObj>(ragged_kv(args));
}

/// True: the default; else the least number of tokens that makes a level.
i32 take_min_prefix(Arguments& in) {
  const ffi::AnyView value = in.take("discover_prefixes");
  if (value.type_index() == ffi::TypeIndex::kTVMFFIBool)
    return value.cast<bool>() ? default_min_prefix : 0;
  const auto tokens =
      value.type_index() == ffi::TypeIndex::kTVMFFIInt ? value.as<std::int64_t>() : std::nullopt;
  if (!tokens)
    fail<TypeError>("discover_prefixes is ", kind_of(value), "; expected a bool or an int");
  return static_cast<i32>(std::clamp<i64>(*tokens, -1, 1 << 30));
}

/// The page table may lie on a GPU, if all of it does; `owner` keeps it alive.
ffi::ObjectRef paged(Arguments& in) {
  DevicePagedArgs args;
  args.qo_indptr = in.index("qo_indptr", Where::anywhere);
  args.page_indptr = in.index("page_indptr", Where::anywhere);
  args.page_indices = in.index("page_indices", Where::anywhere);
  args.kv_len = in.index("kv_len", Where::anywhere);
  args.page_size = in.integer32("page_size", 16);
  args.order = parse_order(in.string("kv_layout"));
  args.kv_begin = in.index("kv_begin");
  args.qo_rows = in.index("qo_rows");
  args.qo_pos = in.index("qo_pos");
  args.min_prefix = take_min_prefix(in);
  args.num_pages = in.integer32("num_pages", 0);
  args.num_requests = in.index("num_requests", Where::anywhere);
  args.num_rows = in.optional_integer32("num_rows").value_or(-1);
  const ffi::AnyView owner = in.take("owner");
  if (args.kv_len.device.kind == DeviceId::Kind::cuda) {
    args.owner = std::make_shared<const ffi::Any>(owner);
    auto layout = ffi::make_object<LayoutObj>();
    layout->on_device = device_paged_kv(args);
    return ffi::ObjectRef(std::move(layout));
  }
  for (const auto& [name, ref] : {std::pair{"qo_indptr", args.qo_indptr},
                                  {"page_indptr", args.page_indptr},
                                  {"page_indices", args.page_indices}})
    if (ref.device != args.kv_len.device)
      fail<ValueError>(name, " lies on 'cuda:", ref.device.ordinal,
                       "'; expected host memory, where kv_len lies");
  if (!args.num_requests.empty())
    fail<ValueError>("num_requests is given; expected None where lengths lie on the host");
  return wrap<LayoutObj>(paged_kv(args));
}

/// The arguments that every page table on the host has.
void take_table(Arguments& in, PagedArgs& args) {
  args.qo_indptr = in.index("qo_indptr");
  args.page_indptr = in.index("page_indptr");
  args.page_indices = in.index("page_indices");
  args.kv_len = in.index("kv_len");
  args.page_size = in.integer32("page_size", 16);
  args.order = parse_order(in.string("kv_layout"));
  args.qo_pos = in.index("qo_pos");
}

/// {"layout": …, "reason": …} of a page table and an attention that will run it.
ffi::Map<ffi::String, ffi::Any> share(Arguments& in) {
  const Attention& attention = *in.object<AttentionObj>("attention").value;
  PagedArgs args;
  take_table(in, args);
  PlanOptions options;
  options.num_workers = in.integer32("num_workers", 0);
  options.schedule = parse_schedule(in.string("schedule"));
  options.params = to_params(in.map("params"));
  const SharedPrefixes chosen = attention.share_prefixes(args, options);
  ffi::Map<ffi::String, ffi::Any> result;
  result.Set("layout", wrap<LayoutObj>(chosen.layout));
  result.Set("reason", ffi::String(chosen.reason));
  return result;
}

/// Bytes of any shape; null where None is given.
const u8* take_bits(Arguments& in, const char* name, i64& count) {
  const DLTensor* bits = in.bytes(name);
  if (!bits) return nullptr;
  count = 1;
  for (int i = 0; i < bits->ndim; ++i) count *= bits->shape[i];
  static const u8 none = 0;  // an empty array may have no address, yet it is given
  return count == 0 ? &none : static_cast<const u8*>(bits->data) + bits->byte_offset;
}

/// {"layout": …, "pages": …, "parents": …}
ffi::Map<ffi::String, ffi::Any> tree(Arguments& in) {
  TokenTreeArgs args;
  take_table(in, args);
  args.parents = in.index("parents");
  args.mask_bits = take_bits(in, "mask_bits", args.mask_bytes);
  args.mask_indptr = in.index("mask_indptr");
  args.max_nodes = in.integer32("max_nodes", 0);
  const TokenTree made = token_tree(args);
  ffi::Map<ffi::String, ffi::Any> result;
  result.Set("layout", wrap<LayoutObj>(made.layout));
  result.Set("pages", wrap<LayoutObj>(made.pages));
  ffi::Array<i64> parents;
  for (const i32 parent : made.parents) parents.push_back(parent);
  result.Set("parents", parents);
  return result;
}

/// The requests of a page pool.
ffi::ObjectRef of_pool(Arguments& in) {
  const PagePool& pool = *in.object<PagePoolObj>("pool").value;
  const std::vector<RequestId> requests = in.requests("requests");
  const std::vector<i32> qo_len = copy_index("qo_len", in.index("qo_len"));
  const HeadOrder order = parse_order(in.string("kv_layout"));
  return wrap<LayoutObj>(pool_layout(pool, requests, qo_len, order, take_min_prefix(in)));
}

ffi::ObjectRef sparse(Arguments& in) {
  BlockSparseArgs args;
  args.block_rows = in.integer32("Br", 1);
  args.block_cols = in.integer32("Bc", 1);
  args.indptr = in.index("indptr");
  args.indices = in.index("indices");
  args.qo_indptr = in.index("qo_indptr");
  args.kv_len = in.index("kv_len");
  args.num_rows = in.integer("num_rows", -1);
  args.num_cols = in.integer("num_cols", -1);
  args.mask_bits = take_bits(in, "mask_bits", args.mask_bytes);
  args.block_pos = in.index("block_pos");
  args.block_first = in.index("block_first");
  args.block_count = in.index("block_count");
  args.kv_begin = in.index("kv_begin");
  args.qo_pos = in.index("qo_pos");
  return wrap<LayoutObj>(block_sparse(args));
}

IndexRef whole(const std::vector<i32>& v) { return {v.data(), static_cast<i64>(v.size())}; }

ffi::ObjectRef sparse_from_mask(Arguments& in) {
  const DLTensor* mask = in.bytes("mask");
  if (!mask) fail<TypeError>("mask is None; expected a boolean array [rows, cols]");
  if (mask->ndim != 2) {
    fail<ValueError>("mask has ", mask->ndim, " dimensions; expected 2 [rows, cols]");
  }
  BlockSparseArgs args;
  args.block_rows = in.integer32("Br", 1);
  args.block_cols = in.integer32("Bc", 1);
  args.qo_indptr = in.index("qo_indptr");
  args.num_rows = mask->shape[0];
  args.num_cols = mask->shape[1];
  const auto* bytes = static_cast<const u8*>(mask->data) + mask->byte_offset;
  const Bsr bsr =
      dense_mask_to_bsr(bytes, args.num_rows, args.num_cols, args.block_rows, args.block_cols);
  // An empty list must still count as given.
  static constexpr i32 none = 0;
  args.indptr = whole(bsr.indptr);
  args.indices = bsr.indices.empty() ? IndexRef{&none, 0} : whole(bsr.indices);
  if (!bsr.mask_bits.empty()) {
    args.mask_bits = bsr.mask_bits.data();
    args.mask_bytes = static_cast<i64>(bsr.mask_bits.size());
  }
  return wrap<LayoutObj>(block_sparse(args));
}

ffi::ObjectRef joined(Arguments& in) {
  const bool allow_gaps = in.boolean("allow_gaps");
  std::vector<LayoutPtr> levels;
  while (in.more()) {
    const std::string name = "levels[" + std::to_string(levels.size()) + "]";
    levels.push_back(in.object<LayoutObj>(name.c_str()).value);
  }
  return wrap<LayoutObj>(cascade(levels, allow_gaps));
}

ffi::ObjectRef to_block_sparse(Arguments& in) {
  return wrap<LayoutObj>(page_table_to_bsr(in.object<LayoutObj>("layout").value));
}

ffi::Map<ffi::String, ffi::Any> info(Arguments& in) {
  const LayoutObj& object = in.any_layout("layout");
  ffi::Map<ffi::String, ffi::Any> fields;
  if (object.on_device) {
    fields.Set("num_requests", object.on_device->batch.num_requests);
    fields.Set("num_levels", object.on_device->num_levels());
    if (const i32 rows = object.on_device->num_rows; rows >= 0) fields.Set("num_rows", rows);
    fields.Set("device", name_of(object.on_device->device));
    return fields;
  }
  const Layout& layout = *object.value;
  fields.Set("num_requests", layout.num_requests());
  fields.Set("num_rows", layout.num_rows());
  fields.Set("num_levels", layout.view().num_levels);
  return fields;
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = ffi::reflection;
  refl::ObjectDef<LayoutObj>();
  Exports()
      .def("raddle.ragged_kv", ragged, "qo_indptr kv_indptr qo_pos kv_first kv_len kv_begin")
      .def("raddle.paged_kv", paged,
           "qo_indptr page_indptr page_indices kv_len page_size kv_layout kv_begin qo_rows qo_pos "
           "discover_prefixes num_pages num_requests num_rows owner")
      .def("raddle.share_prefixes", share,
           "attention qo_indptr page_indptr page_indices kv_len page_size kv_layout qo_pos "
           "num_workers schedule params")
      .def("raddle.token_tree", tree,
           "qo_indptr page_indptr page_indices kv_len page_size kv_layout qo_pos parents mask_bits "
           "mask_indptr max_nodes")
      .def("raddle.pool_layout", of_pool, "pool requests qo_len kv_layout discover_prefixes")
      .def("raddle.block_sparse", sparse,
           "Br Bc indptr indices qo_indptr kv_len num_rows num_cols mask_bits block_pos "
           "block_first block_count kv_begin qo_pos")
      .def("raddle.block_sparse_from_mask", sparse_from_mask, "mask Br Bc qo_indptr")
      .def("raddle.cascade", joined, "allow_gaps *levels")
      .def("raddle.page_table_to_bsr", to_block_sparse, "layout")
      .def("raddle.layout_info", info, "layout");
}

}  // namespace raddle::border

// Variants and layouts as plain data and back: what Python pickles.

#include <tuple>

#include "ffi/border.h"

namespace raddle::border {

namespace {

using Fields = ffi::Map<ffi::String, ffi::Any>;

// --- variants --------------------------------------------------------------------------------

ffi::Any from_member(const MemberValue& value) {
  return std::visit(
      [](const auto& x) -> ffi::Any {
        if constexpr (std::is_same_v<std::decay_t<decltype(x)>, double>)
          return x;
        else
          return array_of(std::vector(x.data(), x.data() + x.size()), x.shape());
      },
      value);
}

Fields from_node(const TracedNode& node) {
  ffi::Array<ffi::Any> args;
  for (const i32 arg : node.args) args.push_back(arg);
  return {{"op", ffi::String(node.op)},
          {"dtype", ffi::String(node.dtype)},
          {"args", args},
          {"member", ffi::String(node.member)},
          {"value", node.value}};
}

Fields from_source(const VariantSource& source) {
  Fields params;
  for (const VariantParam& param : source.params) params.Set(param.name, from_param(param));
  ffi::Array<ffi::Any> expr;
  for (const TracedNode& node : source.expr) expr.push_back(from_node(node));
  return {{"name", ffi::String(source.name)},
          {"text", ffi::String(source.text)},
          {"params", params},
          {"expr", expr}};
}

Fields from_variant(const Variant& variant) {
  Fields members;
  for (const auto& [name, value] : variant.members) members.Set(name, from_member(value));
  ffi::Array<ffi::Any> masks;
  for (const Variant& mask : variant.masks) masks.push_back(from_variant(mask));
  Fields fields{{"kind", static_cast<i32>(variant.kind)},
                {"name", ffi::String(variant.name)},
                {"members", members},
                {"masks", masks}};
  if (variant.source) fields.Set("source", from_source(*variant.source));
  return fields;
}

VariantSource to_source(const Fields& fields) {
  VariantSource source;
  source.name = fields.at("name").cast<ffi::String>();
  source.text = fields.at("text").cast<ffi::String>();
  for (const auto& [name, type] : fields.at("params").cast<Fields>())
    source.params.push_back(to_param(name, type));
  for (const ffi::Any& node : fields.at("expr").cast<ffi::Array<ffi::Any>>())
    source.expr.push_back(to_node(node.cast<Fields>()));
  return source;
}

Variant to_variant(const Fields& fields) {
  Variant variant;
  variant.kind = static_cast<Variant::Kind>(fields.at("kind").cast<i32>());
  variant.name = fields.at("name").cast<ffi::String>();
  for (const auto& [name, value] : fields.at("members").cast<Fields>())
    variant.members.emplace(name, to_member(name, value));
  for (const ffi::Any& mask : fields.at("masks").cast<ffi::Array<ffi::Any>>())
    variant.masks.push_back(to_variant(mask.cast<Fields>()));
  if (fields.count("source"))
    variant.source = variant_from_source(to_source(fields.at("source").cast<Fields>())).source;
  return variant;
}

// --- layouts ---------------------------------------------------------------------------------

/// Calls `visit(name, field)` for everything that a level holds and a Layout does not compute.
template <class AnyLevel, class Visit>
void visit_level(AnyLevel& level, const Visit& visit) {
  visit("storage", level.storage);
  visit("order", level.order);
  visit("block_size", level.block_size);
  visit("block_rows", level.block_rows);
  visit("page_size", level.page_size);
  visit("groups_are_requests", level.groups_are_requests);
  visit("keys_are_shared", level.keys_are_shared);
  visit("row_indptr", level.row_indptr);
  visit("rows", level.rows);
  visit("columns", level.columns);
  visit("kv_begin", level.kv_begin);
  visit("block_begin", level.block_begin);
  visit("blocks", level.blocks);
  visit("block_index", level.block_index);
  visit("block_pos", level.block_pos);
  visit("block_first", level.block_first);
  visit("block_count", level.block_count);
  visit("mask_bits", level.mask_bits);
  visit("min_block", level.min_block);
  visit("max_block", level.max_block);
}

template <class T>
constexpr bool is_list = false;
template <class T>
constexpr bool is_list<std::vector<T>> = true;

template <class T>
void read(const Fields& fields, const char* name, T& field) {
  const ffi::Any value = fields.at(name);
  if constexpr (is_list<T>) {
    const auto tensor = value.cast<ffi::Tensor>();
    const auto* first = static_cast<const typename T::value_type*>(tensor.data_ptr());
    field.assign(first, first + tensor.numel());
  } else {
    field = static_cast<T>(value.cast<i64>());
  }
}

Fields from_layout(const Layout& layout) {
  ffi::Array<ffi::Any> levels;
  for (const Level& level : layout.levels()) {
    Fields fields;
    visit_level(level, [&fields](const char* name, const auto& field) {
      if constexpr (is_list<std::decay_t<decltype(field)>>)
        fields.Set(name, array_of(field));
      else
        fields.Set(name, static_cast<i64>(field));
    });
    levels.push_back(fields);
  }
  return {{"qo_indptr", array_of(layout.qo_indptr())},
          {"kv_len", array_of(layout.kv_len())},
          {"qo_pos", array_of(layout.qo_pos())},
          {"row_request", array_of(layout.row_request())},
          {"levels", levels}};
}

LayoutPtr to_layout(const Fields& fields) {
  std::vector<i32> qo_indptr, kv_len, qo_pos, row_request;
  read(fields, "qo_indptr", qo_indptr);
  read(fields, "kv_len", kv_len);
  read(fields, "qo_pos", qo_pos);
  read(fields, "row_request", row_request);
  std::vector<Level> levels;
  for (const ffi::Any& each : fields.at("levels").cast<ffi::Array<ffi::Any>>()) {
    const auto from = each.cast<Fields>();
    visit_level(levels.emplace_back(),
                [&from](const char* name, auto& field) { read(from, name, field); });
  }
  return std::make_shared<const Layout>(std::move(qo_indptr), std::move(kv_len), std::move(qo_pos),
                                        std::move(row_request), std::move(levels));
}

Fields layout_state(Arguments& in) {
  const LayoutObj& layout = in.any_layout("layout");
  if (layout.on_device)
    fail<TypeError>(
        "layout has its page table on a GPU and cannot be pickled; expected one of "
        "host arrays: make it again from its arrays there");
  return from_layout(*layout.value);
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  Exports()
      .def(
          "raddle.variant.state",
          [](Arguments& in) { return from_variant(in.object<VariantObj>("variant").value); },
          "variant")
      .def(
          "raddle.variant.restore",
          [](Arguments& in) { return wrap<VariantObj>(to_variant(in.map("state"))); }, "state")
      .def("raddle.layout.state", layout_state, "layout")
      .def(
          "raddle.layout.restore",
          [](Arguments& in) { return wrap<LayoutObj>(to_layout(in.map("state"))); }, "state");
}

}  // namespace raddle::border

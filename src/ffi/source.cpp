// What a variant of one's own consists of, as it crosses: types of members, traced operations.
#include <array>

#include "ffi/border.h"

namespace raddle::border {

namespace {

using Fields = ffi::Map<ffi::String, ffi::Any>;

constexpr std::array dtypes = {"float32", "int32", "uint32", "uint8"};
constexpr std::array extents = {"any", "qo_heads", "kv_heads", "half_head_dim", "one_or_requests"};
constexpr i32 first_tensor = static_cast<i32>(MemberKind::float_tensor);

template <class Names>
i32 find(const std::string& wanted, const Names& names) {
  for (std::size_t i = 0; i < names.size(); ++i)
    if (wanted == names[i]) return static_cast<i32>(i);
  fail<ValueError>("'", wanted, "' is no dtype or extent of a tensor parameter");
}

}  // namespace

VariantParam to_param(const std::string& name, const ffi::AnyView& value) {
  VariantParam param;
  param.name = name;
  if (const auto text = value.as<ffi::String>()) {
    param.type.kind = *text == "int" ? MemberKind::int_scalar : MemberKind::float_scalar;
    return param;
  }
  const auto fields = value.cast<Fields>();
  param.type.kind =
      static_cast<MemberKind>(first_tensor + find(fields.at("dtype").cast<ffi::String>(), dtypes));
  for (const ffi::Any& each : fields.at("extents").cast<ffi::Array<ffi::Any>>())
    param.extents.of[param.type.rank++] =
        static_cast<Extent>(find(each.cast<ffi::String>(), extents));
  return param;
}

ffi::Any from_param(const VariantParam& param) {
  if (param.type.kind == MemberKind::int_scalar) return ffi::String("int");
  if (param.type.kind == MemberKind::float_scalar) return ffi::String("float");
  ffi::Array<ffi::Any> names;
  for (i32 d = 0; d < param.type.rank; ++d)
    names.push_back(ffi::String(extents[static_cast<std::size_t>(param.extents.of[d])]));
  const auto dtype = static_cast<std::size_t>(static_cast<i32>(param.type.kind) - first_tensor);
  return Fields{{"dtype", ffi::String(dtypes[dtype])}, {"extents", names}};
}

TracedNode to_node(const Fields& fields) {
  TracedNode node;
  node.op = fields.at("op").cast<ffi::String>();
  node.dtype = fields.at("dtype").cast<ffi::String>();
  for (const ffi::Any& arg : fields.at("args").cast<ffi::Array<ffi::Any>>())
    node.args.push_back(arg.cast<i32>());
  if (fields.count("member")) node.member = fields.at("member").cast<ffi::String>();
  if (fields.count("value")) node.value = fields.at("value").cast<double>();
  return node;
}

}  // namespace raddle::border

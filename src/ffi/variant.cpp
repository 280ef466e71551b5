// Variants as values.
#include "raddle/variant.h"

#include <array>
#include <limits>
#include <sstream>
#include <type_traits>
#include <vector>

#include "ffi/border.h"
#include "variant/index_checks.h"
#include "variant/member.h"

namespace raddle::border {

namespace {

void check_rank(const char* name, const MemberValue& value) {
  if (const std::size_t rank = shape_of(value).size(); rank > 1)
    fail<ValueError>(name, " has ", rank, " dimensions; expected 1");
}

std::vector<float> float_list(const char* name, const ffi::AnyView& value) {
  const MemberValue member = to_member(name, value);
  check_rank(name, member);
  if (const auto* floats = std::get_if<Array<float>>(&member))
    return {floats->data(), floats->data() + floats->size()};
  if (const auto* integers = std::get_if<Array<std::int32_t>>(&member))
    return {integers->data(), integers->data() + integers->size()};
  fail<TypeError>(name, " is ", kind_of(value), "; expected an array of floats");
}

std::vector<std::int32_t> integer_list(const char* name, const ffi::AnyView& value) {
  if (value.type_index() == ffi::TypeIndex::kTVMFFIInt) {
    const i64 n = value.cast<std::int64_t>();
    if (n < std::numeric_limits<i32>::min() || n > std::numeric_limits<i32>::max())
      fail<ValueError>(name, " is ", n, "; expected a 32-bit integer");
    return {static_cast<std::int32_t>(n)};
  }
  const MemberValue member = to_member(name, value);
  check_rank(name, member);
  if (const auto* integers = std::get_if<Array<std::int32_t>>(&member))
    return {integers->data(), integers->data() + integers->size()};
  fail<TypeError>(name, " is ", kind_of(value), "; expected an int or an array of ints");
}

ffi::ObjectRef make_causal(Arguments&) { return wrap<VariantObj>(causal()); }

ffi::ObjectRef make_window(Arguments& in) {
  const i32 left = in.integer32("left", -1);
  return wrap<VariantObj>(sliding_window(left, in.integer32("right", -1)));
}

ffi::ObjectRef make_soft_cap(Arguments& in) {
  return wrap<VariantObj>(soft_cap(static_cast<float>(in.real("cap"))));
}

ffi::ObjectRef make_sinks(Arguments& in) {
  return wrap<VariantObj>(sinks(float_list("logits", in.take("logits"))));
}

ffi::ObjectRef make_sigmoid(Arguments& in) {
  return wrap<VariantObj>(sigmoid(static_cast<float>(in.real("bias"))));
}

ffi::ObjectRef make_alibi(Arguments& in) {
  return wrap<VariantObj>(alibi(float_list("slopes", in.take("slopes"))));
}

ffi::Array<double> slopes_for(Arguments& in) {
  ffi::Array<double> slopes;
  for (const float slope : alibi_slopes(in.integer32("num_heads", 0)))
    slopes.push_back(static_cast<double>(slope));
  return slopes;
}

ffi::ObjectRef make_packed_mask(Arguments& in) {
  const MemberValue bits = to_member("bits", in.take("bits"));
  const auto* bytes = std::get_if<Array<std::uint8_t>>(&bits);
  if (!bytes || bytes->shape().size() != 1)
    fail<TypeError>("bits has the wrong kind; expected a uint8 array of rank 1");
  return wrap<VariantObj>(packed_mask({bytes->data(), bytes->data() + bytes->size()},
                                      integer_list("indptr", in.take("indptr"))));
}

Array<float> float_table(const char* name, const ffi::AnyView& value) {
  const MemberValue table = to_member(name, value);
  if (const auto* floats = std::get_if<Array<float>>(&table)) return *floats;
  fail<TypeError>(name, " has the wrong kind; expected an array of floats of rank 2");
}

ffi::ObjectRef make_rope_tables(Arguments& in) {
  RopeTablesArgs args;
  args.cos = float_table("cos", in.take("cos"));
  args.sin = float_table("sin", in.take("sin"));
  args.offset = integer_list("offset", in.take("offset"));
  args.interleaved = in.boolean("interleaved");
  return wrap<VariantObj>(rope_tables(args));
}

/// Sets the fields that `map` names, or says which it does not know.
template <class Fields>
void read_numbers(const ffi::Map<ffi::String, ffi::Any>& map, const Fields& fields) {
  for (const auto& [key, value] : map) {
    const std::string name = key;
    // The one switch among them; a bool is no number elsewhere.
    const auto flag = name == "truncate" ? value.template as<bool>() : std::nullopt;
    if (!fields(name, flag ? static_cast<double>(*flag) : to_number("scaling." + name, value)))
      fail<TypeError>("scaling has no field '", name, "'");
  }
}

LinearScaling linear_scaling(const ffi::Map<ffi::String, ffi::Any>& map) {
  LinearScaling s;
  read_numbers(map, [&s](const std::string& name, double value) {
    if (name == "factor") return s.factor = value, true;
    return false;
  });
  return s;
}

RopeScaling llama31_scaling(const ffi::Map<ffi::String, ffi::Any>& map) {
  RopeScaling s;
  read_numbers(map, [&s](const std::string& name, double value) {
    if (name == "factor") return s.factor = value, true;
    if (name == "low_freq_factor") return s.low_freq_factor = value, true;
    if (name == "high_freq_factor") return s.high_freq_factor = value, true;
    if (name == "original_max_position") return s.original_max_position = value, true;
    return false;
  });
  return s;
}

YarnScaling yarn_scaling(const ffi::Map<ffi::String, ffi::Any>& map) {
  YarnScaling s;
  read_numbers(map, [&s](const std::string& name, double value) {
    if (name == "factor") return s.factor = value, true;
    if (name == "original_max_position") return s.original_max_position = value, true;
    if (name == "beta_fast") return s.beta_fast = value, true;
    if (name == "beta_slow") return s.beta_slow = value, true;
    if (name == "attention_factor") return s.attention_factor = value, true;
    if (name == "mscale") return s.mscale = value, true;
    if (name == "mscale_all_dim") return s.mscale_all_dim = value, true;
    if (name == "truncate") return s.truncate = value != 0.0, true;
    return false;
  });
  return s;
}

ffi::ObjectRef make_rope(Arguments& in) {
  RopeArgs args;
  args.rotary_dim = in.integer32("rotary_dim", 0);
  args.theta = in.real("theta");
  args.offset = integer_list("offset", in.take("offset"));
  args.interleaved = in.boolean("interleaved");
  const std::string scheme = in.string("scheme");
  const auto fields = in.map("scaling");
  if (scheme == "Llama31Scaling") {
    args.scaling = llama31_scaling(fields);
  } else if (scheme == "LinearScaling") {
    args.scaling = linear_scaling(fields);
  } else if (scheme == "YarnScaling") {
    args.scaling = yarn_scaling(fields);
  } else if (scheme != "NoneType") {
    fail<TypeError>("scaling is a ", scheme,
                    "; expected LinearScaling, Llama31Scaling, YarnScaling or None");
  }
  return wrap<VariantObj>(rope(args));
}

ffi::ObjectRef make_source(Arguments& in) {
  VariantSource source;
  source.name = in.string("name");
  source.text = in.string("source");
  for (const auto& [name, type] : in.map("params")) source.params.push_back(to_param(name, type));
  if (const ffi::AnyView expr = in.take("expr"); expr != nullptr)
    for (const ffi::Any& node : expr.cast<ffi::Array<ffi::Any>>())
      source.expr.push_back(to_node(node.cast<ffi::Map<ffi::String, ffi::Any>>()));
  return wrap<VariantObj>(variant_from_source(std::move(source)));
}

/// The variant with values for some of its members.
ffi::ObjectRef bind(Arguments& in) {
  Variant variant = in.object<VariantObj>("variant").value;
  for (const auto& [name, value] : in.map("values"))
    variant.members.insert_or_assign(name,
                                     to_member(variant.name + "." + std::string(name), value));
  return wrap<VariantObj>(std::move(variant));
}

/// Raises where a captured array of a traced mask is too short for sequences of these lengths.
void check_indices(Arguments& in) {
  const Variant& variant = in.object<VariantObj>("variant").value;
  Tile pairs{};
  for (const auto& [name, side] : {std::pair{"B", &Tile::request},
                                   {"H", &Tile::q_head},
                                   {"Q_LEN", &Tile::q_pos},
                                   {"KV_LEN", &Tile::kv_pos}})
    pairs.*side = Range{0, in.integer32(name) - 1};
  if (!variant.source) return;
  const TracedFunction function(*variant.source);
  std::array<TracedMember, max_traced_members> members;
  for (std::size_t n = 0; function.has_indices() && n < function.members().size(); ++n)
    members[n].value = &variant.members.at(function.members()[n]);
  if (!function.has_indices()) return;
  if (const auto error = find_short_array(variant.name, function, members.data(), pairs))
    fail<ValueError>(*error);
}

/// The variant's C++: a user's own text, or the engine header of a shipped one.
ffi::String source_of(Arguments& in) {
  const Variant& variant = in.object<VariantObj>("variant").value;
  return variant.source ? variant.source->text : "";
}

ffi::ObjectRef make_all_of(Arguments& in) {
  const Variant& a = in.object<VariantObj>("left", "the left side of &").value;
  return wrap<VariantObj>(a & in.object<VariantObj>("right", "the right side of &").value);
}

ffi::ObjectRef make_any_of(Arguments& in) {
  const Variant& a = in.object<VariantObj>("left", "the left side of |").value;
  return wrap<VariantObj>(a | in.object<VariantObj>("right", "the right side of |").value);
}

void write(std::ostream& text, const MemberValue& value) {
  std::visit(
      [&text](const auto& x) {
        if constexpr (std::is_same_v<std::decay_t<decltype(x)>, double>) {
          text << x;
        } else if (x.size() == 1) {
          text << x.front();
        } else {
          text << '[' << x.size() << " values]";
        }
      },
      value);
}

void write(std::ostream& text, const Variant& variant) {
  if (variant.kind == Variant::Kind::leaf) {
    text << variant.name << '(';
    const char* separator = "";
    for (const auto& [name, value] : variant.members) {
      text << separator << name << '=';
      write(text, value);
      separator = ", ";
    }
    text << ')';
    return;
  }
  text << '(';
  for (std::size_t i = 0; i < variant.masks.size(); ++i) {
    if (i > 0) text << (variant.kind == Variant::Kind::all_of ? " & " : " | ");
    write(text, variant.masks[i]);
  }
  text << ')';
}

ffi::String describe(Arguments& in) {
  std::ostringstream text;
  write(text, in.object<VariantObj>("variant").value);
  return text.str();
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = ffi::reflection;
  refl::ObjectDef<VariantObj>();
  Exports()
      .def("raddle.variant.causal", make_causal)
      .def("raddle.variant.window", make_window, "left right")
      .def("raddle.variant.softcap", make_soft_cap, "cap")
      .def("raddle.variant.sinks", make_sinks, "logits")
      .def("raddle.variant.sigmoid", make_sigmoid, "bias")
      .def("raddle.variant.packed_mask", make_packed_mask, "bits indptr")
      .def("raddle.variant.rope_tables", make_rope_tables, "cos sin offset interleaved")
      .def("raddle.variant.alibi", make_alibi, "slopes")
      .def("raddle.alibi_slopes", slopes_for, "num_heads")
      .def("raddle.variant.rope", make_rope, "rotary_dim theta offset interleaved scheme scaling")
      .def("raddle.variant.source", make_source, "name source params expr")
      .def("raddle.variant.bind", bind, "variant values")
      .def("raddle.variant.check_indices", check_indices, "variant B H Q_LEN KV_LEN")
      .def("raddle.variant.source_of", source_of, "variant")
      .def("raddle.variant.all_of", make_all_of, "left right")
      .def("raddle.variant.any_of", make_any_of, "left right")
      .def("raddle.variant.describe", describe, "variant");
}

}  // namespace raddle::border

// Constructors of the shipped variants.
#include <algorithm>
#include <cctype>
#include <cmath>

#include "raddle/error.h"
#include "raddle/variant.h"
#include "variant/member.h"

namespace raddle {
namespace {

Variant leaf(std::string name, std::map<std::string, MemberValue> members = {}) {
  Variant v;
  v.name = std::move(name);
  v.members = std::move(members);
  return v;
}

Variant join(Variant::Kind kind, const Variant& a, const Variant& b) {
  Variant v;
  v.kind = kind;
  v.masks = {a, b};
  return v;
}

}  // namespace

void check_shape(std::size_t size, const std::vector<std::int64_t>& shape) {
  std::size_t elements = 1;
  bool fits = true;
  for (const std::int64_t extent : shape) {
    fits = fits && extent >= 0 &&
           !__builtin_mul_overflow(elements, static_cast<std::size_t>(extent), &elements);
  }
  if (fits && elements == size) return;
  std::string text;
  for (const std::int64_t extent : shape)
    text += (text.empty() ? "" : ", ") + std::to_string(extent);
  fail<ValueError>("shape is [", text, "]; expected one of ", size, " elements, as many as values");
}

Variant variant_from_source(VariantSource source, std::map<std::string, MemberValue> members) {
  const auto is_identifier = [](const std::string& s) {
    return !s.empty() && !std::isdigit(static_cast<unsigned char>(s[0])) &&
           std::all_of(s.begin(), s.end(),
                       [](unsigned char c) { return std::isalnum(c) || c == '_'; });
  };
  // Macros of the engine would replace it.
  if (!is_identifier(source.name) || source.name.starts_with("RADDLE_"))
    fail<ValueError>("name is '", source.name, "'; expected the name of the struct in source");
  if (source.text.find("struct " + source.name) == std::string::npos)
    fail<ValueError>("source defines no struct ", source.name, "; expected one, as name says");
  for (const VariantParam& param : source.params)
    if (!is_identifier(param.name))
      fail<ValueError>("params: '", param.name, "' is no name of a member");
  Variant v = leaf(source.name, std::move(members));
  v.source = std::make_shared<const VariantSource>(std::move(source));
  return v;
}

Variant operator&(const Variant& a, const Variant& b) { return join(Variant::Kind::all_of, a, b); }
Variant operator|(const Variant& a, const Variant& b) { return join(Variant::Kind::any_of, a, b); }

Variant causal() { return leaf("causal"); }

Variant sliding_window(i32 left, i32 right) {
  for (const auto& [name, bound] : {std::pair{"left", left}, {"right", right}})
    if (bound < -1)
      fail<ValueError>(name, " is ", bound, "; expected a number of tokens, or -1: no bound");
  return leaf("window",
              {{"left", static_cast<double>(left)}, {"right", static_cast<double>(right)}});
}

Variant soft_cap(float cap) {
  check_value(Check::positive, static_cast<double>(cap), "cap");
  return leaf("softcap", {{"cap", static_cast<double>(cap)}});
}

Variant sinks(std::vector<float> logit) {
  Array<float> logits(std::move(logit));
  check_value(Check::logit, logits, "logits");
  return leaf("sinks", {{"logit", std::move(logits)}});
}

Variant sigmoid(float bias) {
  check_value(Check::finite, static_cast<double>(bias), "bias");
  return leaf("sigmoid", {{"bias", static_cast<double>(bias)}});
}

Variant packed_mask(std::vector<std::uint8_t> bits, std::vector<std::int32_t> indptr) {
  return leaf("packed_mask",
              {{"bits", Array(std::move(bits))}, {"indptr", Array(std::move(indptr))}});
}

Variant alibi(std::vector<float> slopes) {
  Array<float> values(std::move(slopes));
  check_value(Check::finite, values, "slopes");
  return leaf("alibi", {{"slopes", std::move(values)}});
}

std::vector<float> alibi_slopes(i32 num_heads) {
  constexpr i32 most = 1 << 20;
  if (num_heads <= 0 || num_heads > most)
    fail<ValueError>("num_heads is ", num_heads, "; expected at least 1, at most ", most);
  i32 whole = 1;  // the largest power of two that is not above num_heads
  while (2 * whole <= num_heads) whole *= 2;
  std::vector<float> slopes;
  for (i32 h = 1; h <= whole; ++h)
    slopes.push_back(static_cast<float>(std::exp2(-8.0 * h / whole)));
  // The other heads take every second slope of twice as many, which lie between these.
  for (i32 h = 0; h < num_heads - whole; ++h)
    slopes.push_back(static_cast<float>(std::exp2(-4.0 * (2 * h + 1) / whole)));
  return slopes;
}

}  // namespace raddle

// Constructors of the shipped variants.
#include "raddle/variant.h"

#include <algorithm>
#include <cctype>
#include <cmath>

#include "raddle/error.h"

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

constexpr double pi = 3.14159265358979323846;

/// Llama 3.1: frequencies whose wavelength exceeds the original context are divided by `factor`,
/// short ones stay, those between are interpolated (Llama 3.1's reference code, apply_scaling).
double scaled(double freq, const RopeScaling& s) {
  const double wavelength = 2.0 * pi / freq;
  if (wavelength > s.original_max_position / s.low_freq_factor) return freq / s.factor;
  if (wavelength < s.original_max_position / s.high_freq_factor) return freq;
  const double smooth = (s.original_max_position / wavelength - s.low_freq_factor) /
                        (s.high_freq_factor - s.low_freq_factor);
  return (1.0 - smooth) * freq / s.factor + smooth * freq;
}

}  // namespace

Variant variant_from_source(VariantSource source, std::map<std::string, MemberValue> members) {
  const auto is_identifier = [](const std::string& s) {
    return !s.empty() && !std::isdigit(static_cast<unsigned char>(s[0])) &&
           std::all_of(s.begin(), s.end(),
                       [](unsigned char c) { return std::isalnum(c) || c == '_'; });
  };
  if (!is_identifier(source.name))
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
  return leaf("window",
              {{"left", static_cast<double>(left)}, {"right", static_cast<double>(right)}});
}

Variant soft_cap(float cap) {
  if (!(cap > 0.0f) || !std::isfinite(cap))
    fail<ValueError>("cap is ", cap, "; expected a finite number above 0");
  return leaf("softcap", {{"cap", static_cast<double>(cap)}});
}

Variant sinks(std::vector<float> logit) { return leaf("sinks", {{"logit", std::move(logit)}}); }

Variant sigmoid(float bias) { return leaf("sigmoid", {{"bias", static_cast<double>(bias)}}); }

Variant rope(const RopeArgs& args) {
  if (args.rotary_dim <= 0 || args.rotary_dim % 2 != 0)
    fail<ValueError>("rotary_dim is ", args.rotary_dim, "; expected an even number above 0");
  if (!(args.theta > 1.0)) fail<ValueError>("theta is ", args.theta, "; expected a number above 1");
  if (args.offset.empty())
    fail<ValueError>("offset is empty; expected one integer, or one a request");
  std::vector<std::uint32_t> hi, lo;
  for (i32 i = 0; i < args.rotary_dim / 2; ++i) {
    double freq = std::pow(args.theta, -2.0 * i / args.rotary_dim);
    if (args.scaled) freq = scaled(freq, args.scaling);
    // Turns a position as a 64-bit fixed-point fraction; a double holds its 53 leading bits.
    const double turns = freq / (2.0 * pi);
    const double scaled_hi = std::floor(std::ldexp(turns, 32));
    hi.push_back(static_cast<std::uint32_t>(scaled_hi));
    lo.push_back(static_cast<std::uint32_t>(std::ldexp(std::ldexp(turns, 32) - scaled_hi, 32)));
  }
  return leaf("rope",
              {{"freq_hi", std::move(hi)}, {"freq_lo", std::move(lo)}, {"offset", args.offset}});
}

}  // namespace raddle

// Rotary embeddings: frequencies of the schemes that models use, as fixed-point fractions of a
// turn.
#include <algorithm>
#include <cmath>

#include "raddle/attention.h"
#include "raddle/error.h"
#include "raddle/variant.h"

namespace raddle {
namespace {

constexpr double pi = 3.14159265358979323846;

void check_positive(const char* name, double value) {
  if (!(value > 0.0) || !std::isfinite(value))
    fail<ValueError>(name, " is ", value, "; expected a finite number above 0");
}

double unscaled(const RopeArgs& args, i32 i) {
  return std::pow(args.theta, -2.0 * i / args.rotary_dim);
}

std::vector<double> frequencies(const RopeArgs& args, std::monostate) {
  std::vector<double> freq;
  for (i32 i = 0; i < args.rotary_dim / 2; ++i) freq.push_back(unscaled(args, i));
  return freq;
}

std::vector<double> frequencies(const RopeArgs& args, const LinearScaling& s) {
  check_positive("scaling.factor", s.factor);
  std::vector<double> freq;
  for (i32 i = 0; i < args.rotary_dim / 2; ++i) freq.push_back(unscaled(args, i) / s.factor);
  return freq;
}

/// Llama 3.1: frequencies whose wavelength exceeds the original context are divided by `factor`,
/// short ones stay, those between are interpolated (Llama 3.1's reference code, apply_scaling).
double slowed(double freq, const RopeScaling& s) {
  const double wavelength = 2.0 * pi / freq;
  if (wavelength > s.original_max_position / s.low_freq_factor) return freq / s.factor;
  if (wavelength < s.original_max_position / s.high_freq_factor) return freq;
  const double smooth = (s.original_max_position / wavelength - s.low_freq_factor) /
                        (s.high_freq_factor - s.low_freq_factor);
  return (1.0 - smooth) * freq / s.factor + smooth * freq;
}

std::vector<double> frequencies(const RopeArgs& args, const RopeScaling& s) {
  check_positive("scaling.factor", s.factor);
  check_positive("scaling.low_freq_factor", s.low_freq_factor);
  check_positive("scaling.original_max_position", s.original_max_position);
  if (!(s.high_freq_factor > s.low_freq_factor) || !std::isfinite(s.high_freq_factor))
    fail<ValueError>("scaling.high_freq_factor is ", s.high_freq_factor,
                     "; expected a finite number above low_freq_factor = ", s.low_freq_factor);
  std::vector<double> freq;
  for (i32 i = 0; i < args.rotary_dim / 2; ++i) freq.push_back(slowed(unscaled(args, i), s));
  return freq;
}

/// The pair, not a whole number, that makes `turns` turns over the original context.
double pair_of(const RopeArgs& args, const YarnScaling& s, double turns) {
  return args.rotary_dim * std::log(s.original_max_position / (turns * 2.0 * pi)) /
         (2.0 * std::log(args.theta));
}

/// YaRN, section 3.2, with the ramp as its authors' code and transformers have it: linear in the
/// number of the pair, not in the turns that it makes.
std::vector<double> frequencies(const RopeArgs& args, const YarnScaling& s) {
  if (!(s.factor >= 1.0) || !std::isfinite(s.factor))
    fail<ValueError>("scaling.factor is ", s.factor, "; expected a finite number, at least 1");
  check_positive("scaling.original_max_position", s.original_max_position);
  check_positive("scaling.beta_slow", s.beta_slow);
  if (!(s.beta_fast > s.beta_slow) || !std::isfinite(s.beta_fast))
    fail<ValueError>("scaling.beta_fast is ", s.beta_fast,
                     "; expected a finite number above beta_slow = ", s.beta_slow);
  double first = pair_of(args, s, s.beta_fast), last = pair_of(args, s, s.beta_slow);
  if (s.truncate) {
    first = std::floor(first);
    last = std::ceil(last);
  }
  first = std::max(first, 0.0);
  last = std::max(first, std::min(last, args.rotary_dim - 1.0));
  // A ramp of no length is a step.
  const double length = first == last ? 0.001 : last - first;
  std::vector<double> freq;
  for (i32 i = 0; i < args.rotary_dim / 2; ++i) {
    const double slow = std::min(std::max((i - first) / length, 0.0), 1.0);
    freq.push_back(unscaled(args, i) * (slow / s.factor + (1.0 - slow)));
  }
  return freq;
}

template <class NoTemperature>
double magnitude(const NoTemperature&) {
  return 1.0;
}

/// YaRN, section 3.3: √(1/t) = 0.1·ln(factor) + 1 on Q and K alike; DeepSeek weighs the logarithm.
double magnitude(const YarnScaling& s) {
  const auto grown = [&s](double weight) { return 0.1 * weight * std::log(s.factor) + 1.0; };
  if (s.mscale.has_value() != s.mscale_all_dim.has_value())
    fail<ValueError>(s.mscale ? "scaling.mscale_all_dim" : "scaling.mscale",
                     " is missing; expected both mscale and mscale_all_dim, or neither");
  if (s.mscale) check_positive("scaling.mscale", *s.mscale);
  if (s.mscale_all_dim) check_positive("scaling.mscale_all_dim", *s.mscale_all_dim);
  if (s.attention_factor) {
    check_positive("scaling.attention_factor", *s.attention_factor);
    return *s.attention_factor;
  }
  return s.mscale ? grown(*s.mscale) / grown(*s.mscale_all_dim) : grown(1.0);
}

}  // namespace

Variant rope(const RopeArgs& args) {
  if (args.rotary_dim <= 0 || args.rotary_dim % 2 != 0 || args.rotary_dim > max_head_dim_qk)
    fail<ValueError>("rotary_dim is ", args.rotary_dim,
                     "; expected an even number above 0, at most ", max_head_dim_qk);
  if (!(args.theta > 1.0) || !std::isfinite(args.theta))
    fail<ValueError>("theta is ", args.theta, "; expected a finite number above 1");
  if (args.offset.empty())
    fail<ValueError>("offset is empty; expected one integer, or one a request");
  std::vector<std::uint32_t> hi, lo;
  for (const double freq :
       std::visit([&](const auto& s) { return frequencies(args, s); }, args.scaling)) {
    // Turns a position as a 64-bit fixed-point fraction; a double holds its 53 leading bits.
    const double turns = std::ldexp(freq / (2.0 * pi), 32);
    hi.push_back(static_cast<std::uint32_t>(std::floor(turns)));
    lo.push_back(static_cast<std::uint32_t>(std::ldexp(turns - std::floor(turns), 32)));
  }
  Variant v;
  v.name = args.interleaved ? "rope_interleaved" : "rope";
  v.members = {{"freq_hi", std::move(hi)},
               {"freq_lo", std::move(lo)},
               {"offset", args.offset},
               {"magnitude", std::visit([](const auto& s) { return magnitude(s); }, args.scaling)}};
  return v;
}

Variant rope_tables(const RopeTablesArgs& args) {
  const auto check_table = [](const char* name, const Array<float>& table) {
    if (table.shape().size() != 2)
      fail<ValueError>(name, " has ", table.shape().size(),
                       " dimensions; expected 2, [positions, rotary_dim / 2]");
    if (table.size() == 0) fail<ValueError>(name, " is empty; expected at least one row");
  };
  check_table("cos", args.cos);
  check_table("sin", args.sin);
  if (args.cos.shape() != args.sin.shape())
    fail<ValueError>("sin is [", args.sin.shape()[0], ", ", args.sin.shape()[1],
                     "]; expected the shape of cos, [", args.cos.shape()[0], ", ",
                     args.cos.shape()[1], "]");
  if (args.offset.empty())
    fail<ValueError>("offset is empty; expected one integer, or one a request");
  Variant v;
  v.name = args.interleaved ? "rope_tables_interleaved" : "rope_tables";
  v.members = {{"cos", args.cos}, {"sin", args.sin}, {"offset", args.offset}};
  return v;
}

}  // namespace raddle

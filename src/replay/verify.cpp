// How far a right output may lie from the fp64 one, element by element. Write e for fp32's unit
// roundoff and u for the dtype's. Q, K and V are exact in the dtype. With weights p_j = exp(s_j -
// LSE), o = Σ p_j v_j:
//
//   sums      n roundings, each at most e of a partial sum, and a partial sum of independent terms
//   is about
//             as large as the total and the root of the terms' squares: √n·e·(|Σ t| + √Σ t²) in the
//             mean square, in any order (Higham and Mary, "A new approach to probabilistic rounding
//             error analysis", 2019).
//   logits    s_j is a sum of D products. Scaling, soft cap, the distance to the running maximum,
//   and the
//             fp32 LSE by which ⊕ weights chunks each add some e of their own size.
//   RoPE      Q and K are rounded to the dtype once more, 2·D roundings: u·scale·√(2/3·Σ(q_d
//   k_d)²). weights   an error δ_j of the logit moves o by p_j·(v_j - o)·δ_j: only the distance to
//   o counts. V is
//             random, so these add by squares. A sink is a key with v = 0.
//   P·V, Σp   sums of n terms.
//   p rounded where matrix units take the weights in the dtype, each is off by u·p_j:
//   independently,
//             √Σ(u·p_j·v_j)² in the mean square; equal weights alike, u·|o|. Weights of float16
//             that are small beside the row's largest, which is held as 1, lose bits: half the
//             spacing of its smallest numbers a key, √n keys.
//   output    rounding to the dtype, u·|o|.
//
// All but roundings of what is alike are standard deviations, taken λ-fold. One key too many or too
// few moves o by p_j·(v_j - o): at 1,000 keys and bf16 several times the budget in a row that is
// flat.
#include "replay/verify.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numbers>

#include "replay/parallel.h"

namespace raddle::replay {
namespace {

constexpr double fp32_roundoff = 0x1p-24;
constexpr double lambda = 4.0;
/// exp, tanh and the operations before them err by so many e of what they work on.
constexpr double function_error = 2.0;
/// On the whole, so that a tie in the output's rounding, which is right, reads 0.67 and not 1.
constexpr double slack = 1.5;

double sum_error(std::size_t n, double total, double square) {
  return std::sqrt(static_cast<double>(n)) * fp32_roundoff * (std::abs(total) + std::sqrt(square));
}

double roundoff(DType dtype) {
  switch (dtype) {
    case DType::bfloat16:
      return 0x1p-8;
    case DType::float16:
      return 0x1p-11;
    default:
      return fp32_roundoff;
  }
}

/// The spacing of the dtype's smallest numbers: what rounding costs where u·|o| says nothing.
double smallest(DType dtype) { return dtype == DType::float16 ? 0x1p-24 : 0x1p-126; }

std::vector<double> frequencies(const RopeArgs& rope) {
  std::vector<double> result;
  for (i32 i = 0; i < rope.rotary_dim / 2; ++i) {
    double f = std::pow(rope.theta, -2.0 * i / rope.rotary_dim);
    if (const auto* scaling = std::get_if<RopeScaling>(&rope.scaling)) {
      // Llama 3.1: slow frequencies are divided, fast ones kept, those between interpolated.
      const RopeScaling& s = *scaling;
      const double turns = s.original_max_position * f / (2 * std::numbers::pi);
      const double fast = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor);
      const double keep = std::clamp(fast, 0.0, 1.0);
      f *= keep + (1.0 - keep) / s.factor;
    }
    result.push_back(f);
  }
  return result;
}

template <class T>
using Elements = std::array<T, 256>;  ///< of a head vector; the first head_dim count

/// One sample's keys, their logits and what these may be off by.
class Row {
 public:
  Row(const LayerSpec& spec, const std::vector<double>& freq, const Sample& sample)
      : spec_(spec), freq_(freq), sample_(sample), dim_(static_cast<std::size_t>(spec.head_dim)) {
    const i32 first = spec.window_left < 0 ? 0 : std::max(0, sample.position - spec.window_left);
    attend(first);
    normalise();
  }

  Verdict judge() const {
    const Elements<double> expected = output();
    const Elements<double> allowed = budget(expected);
    Verdict worst;
    worst.ratio = -1.0;
    for (std::size_t d = 0; d < dim_; ++d) {
      const double found = static_cast<double>(sample_.found[d]);
      const double off = std::abs(found - expected[d]) / allowed[d];
      const double ratio = std::isnan(off) ? std::numeric_limits<double>::infinity() : off;
      if (ratio > worst.ratio) {
        worst = {ratio, static_cast<i32>(d), found, expected[d], allowed[d]};
      }
    }
    return worst;
  }

 private:
  void load(Stream stream, i32 position, i32 head, double* out) const {
    const i64 owner = spec_.prompts.owner(stream, sample_.request, position);
    const RowId id{spec_.seed, stream, spec_.layer, owner, position, head};
    dispatch_dtype(spec_.dtype, [&](auto zero) {
      using T = decltype(zero);
      Elements<T> row;
      fill_row(id, spec_.head_dim, row.data());
      for (std::size_t d = 0; d < dim_; ++d) out[d] = static_cast<double>(to_float(row[d]));
    });
  }

  void rotate(i32 position, double* x) const {
    for (std::size_t i = 0; i < freq_.size(); ++i) {
      const double angle = static_cast<double>(position) * freq_[i];
      const double a = x[i], b = x[i + freq_.size()];
      x[i] = a * std::cos(angle) - b * std::sin(angle);
      x[i + freq_.size()] = b * std::cos(angle) + a * std::sin(angle);
    }
  }

  void attend(i32 first) {
    const i32 kv_head = sample_.head / (spec_.num_qo_heads / spec_.num_kv_heads);
    const std::size_t n = static_cast<std::size_t>(sample_.position - first + 1);
    Elements<double> q, k;
    load(Stream::query, sample_.position, sample_.head, q.data());
    rotate(sample_.position, q.data());
    value_.resize(n * dim_);
    for (std::size_t j = 0; j < n; ++j) {
      const i32 position = first + static_cast<i32>(j);
      load(Stream::key, position, kv_head, k.data());
      load(Stream::value, position, kv_head, &value_[j * dim_]);
      rotate(position, k.data());
      push_logit(q.data(), k.data());
    }
  }

  void push_logit(const double* q, const double* k) {
    double dot = 0.0, square = 0.0;
    for (std::size_t d = 0; d < dim_; ++d) {
      const double product = q[d] * k[d];
      dot += product;
      square += product * product;
    }
    double s = spec_.scale * dot;
    double off = spec_.scale * sum_error(dim_, dot, square);
    if (!freq_.empty()) {
      const double sines = function_error * fp32_roundoff;
      off += (roundoff(spec_.dtype) + sines) * spec_.scale * std::sqrt(2.0 / 3.0 * square);
    }
    if (spec_.soft_cap > 0.0) s = spec_.soft_cap * std::tanh(s / spec_.soft_cap);
    logit_.push_back(s);
    error_.push_back(off + function_error * fp32_roundoff * std::abs(s));
  }

  void normalise() {
    const double sink = spec_.sinks
                            ? static_cast<double>(sink_logit(spec_.seed, spec_.layer, sample_.head))
                            : -std::numeric_limits<double>::infinity();
    const double top = std::max(sink, *std::max_element(logit_.begin(), logit_.end()));
    double total = std::exp(sink - top);
    for (const double s : logit_) total += std::exp(s - top);
    const double lse = top + std::log(total);
    for (std::size_t j = 0; j < logit_.size(); ++j) {
      weight_.push_back(std::exp(logit_[j] - lse));
      error_[j] += weight_error(logit_[j], top, lse);
    }
    sink_error_ = std::exp(sink - lse) * weight_error(spec_.sinks ? sink : top, top, lse);
  }

  static double weight_error(double s, double top, double lse) {
    return function_error * fp32_roundoff * (1.0 + std::abs(top - s) + std::abs(lse));
  }

  Elements<double> output() const {
    Elements<double> o{};
    for (std::size_t j = 0; j < weight_.size(); ++j) {
      for (std::size_t d = 0; d < dim_; ++d) o[d] += weight_[j] * value_[j * dim_ + d];
    }
    return o;
  }

  Elements<double> budget(const Elements<double>& o) const {
    Elements<double> weights{}, square{}, result{};
    double total_square = 0.0;
    for (std::size_t j = 0; j < weight_.size(); ++j) {
      const double p = weight_[j];
      total_square += p * p;
      for (std::size_t d = 0; d < dim_; ++d) {
        const double v = value_[j * dim_ + d];
        const double off = p * (v - o[d]) * error_[j];
        weights[d] += off * off;
        square[d] += p * p * v * v;
      }
    }
    const double u = roundoff(spec_.dtype);
    const double total = sum_error(weight_.size(), 1.0, total_square) + sink_error_;
    const double lost = spec_.rounds_weights ? lost_weight() : 0.0;
    for (std::size_t d = 0; d < dim_; ++d) {
      const double sums = sum_error(weight_.size(), o[d], square[d]) + total * std::abs(o[d]);
      const double spread = std::sqrt(weights[d]) + sums;
      const double rounded = spec_.rounds_weights
                                 ? lambda * u * std::sqrt(square[d]) + u * std::abs(o[d]) + lost
                                 : 0.0;
      const double off = lambda * spread + u * std::abs(o[d]) + smallest(spec_.dtype);
      result[d] = slack * (off + rounded);
    }
    return result;
  }

  /// What weights that underflow in the dtype may move an element by.
  double lost_weight() const {
    if (spec_.dtype != DType::float16) return 0.0;
    const double largest = *std::max_element(weight_.begin(), weight_.end());
    double reach = 0.0;
    for (const double v : value_) reach = std::max(reach, std::abs(v));
    const double keys = std::sqrt(static_cast<double>(weight_.size()));
    return lambda * smallest(spec_.dtype) / 2.0 * largest * keys * reach;
  }

  const LayerSpec& spec_;
  const std::vector<double>& freq_;
  const Sample& sample_;
  const std::size_t dim_;
  std::vector<double> logit_, error_, weight_;  ///< [keys]
  std::vector<double> value_;                   ///< [keys, D]
  double sink_error_ = 0.0;
};

}  // namespace

std::vector<Verdict> verify(const LayerSpec& spec, const std::vector<Sample>& samples) {
  const std::vector<double> freq = frequencies(spec.rope);
  std::vector<Verdict> verdicts(samples.size());
  parallel_for(static_cast<i64>(samples.size()), [&](i64 i) {
    const auto index = static_cast<std::size_t>(i);
    verdicts[index] = Row(spec, freq, samples[index]).judge();
  });
  return verdicts;
}

}  // namespace raddle::replay

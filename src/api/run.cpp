// Running a plan: checks the tensors of one layer, and hands them to the device.
#include <algorithm>
#include <cmath>

#include "backend/backend.h"
#include "backend/kv_tensors.h"
#include "raddle/error.h"
#include "variant/bound_variant.h"

namespace raddle {
namespace {

void check_device(const char* name, const TensorRef& t, DeviceId expected) {
  if (t.data && t.device != expected) [[unlikely]]
    fail<ValueError>(name, " lies on device '", name_of(t.device), "'; expected '",
                     name_of(expected), "', this attention's device");
}

/// What a run writes is none of what it reads; O may take the place of Q, element by element. Names
/// are made where something is wrong.
void check_no_overlap(const RunArgs& args) {
  struct Named {
    const char* name;
    const TensorRef& tensor;
    MemoryRange range;
  };
  const auto named = [](const char* name, const TensorRef& t) {
    return Named{name, t, range_of(t)};
  };
  const auto check = [](const Named& written, const Named& other) {
    if (written.range.meets(other.range)) [[unlikely]]
      check_apart(written.name, written.tensor, other.name, other.tensor);
  };
  const Named q = named("q", args.q), out = named("out", args.out), lse = named("lse", args.lse);
  if (out.range.meets(q.range) && !is_same(args.out, args.q) && overlap(args.out, args.q))
      [[unlikely]]
    fail<ValueError>("out shares memory with q; expected memory of its own, or exactly q's");
  for (const KvRef& pair : args.kv) {
    const Named k = named("kv: k", pair.k), v = named("kv: v", pair.v);
    check(out, k);
    check(out, v);
    check(lse, k);
    check(lse, v);
  }
  check(lse, q);
  check(lse, out);
}

/// The tensors with their heads, and pools with their pages, in dimensions of their own; nothing
/// where they are so.
std::optional<RunArgs> unfolded(const AttentionSpec& spec, const Plan& plan, const RunArgs& given) {
  const std::vector<Level>& levels = plan.layout().levels();
  const std::size_t num_levels = std::min(given.kv.size(), levels.size());
  bool folded = given.q.rank < 3 || given.out.rank < 3;
  for (std::size_t i = 0; i < num_levels; ++i) {
    const int rank = levels[i].storage == KvStorage::paged ? 4 : 3;
    folded = folded || given.kv[i].k.rank < rank || given.kv[i].v.rank < rank;
  }
  if (!folded) return std::nullopt;
  RunArgs args = given;
  args.q = with_heads(given.q, spec.num_qo_heads, spec.head_dim_qk);
  args.out = with_heads(given.out, spec.num_qo_heads, spec.head_dim_vo);
  for (std::size_t i = 0; i < num_levels; ++i) {
    KvRef& pair = args.kv[i];
    const Level& level = levels[i];
    if (level.storage == KvStorage::ragged) {
      pair.k = with_heads(pair.k, spec.num_kv_heads, spec.k_columns());
      pair.v = with_heads(pair.v, spec.num_kv_heads, spec.head_dim_vo);
    } else if (level.storage == KvStorage::paged && rows_of_page(level) == 1) {
      pair = with_pages(pair, level.order);
    }
  }
  return args;
}

/// A reservation's tensors have room for larger batches than the present one.
i64 rows_of_run(const Plan& plan, const TensorRef& q) {
  const i64 rows = plan.layout().num_rows();
  return plan.is_reserved() && q.rank > 0 ? std::max<i64>(rows, q.shape[0]) : rows;
}

/// Raises unless requests can be a dimension of q: they have equally many rows, and the host knows
/// how many. Returns how many.
i64 check_requests_apart(const Plan& plan, const RunArgs& args) {
  const LayoutView& layout = plan.layout().view();
  const auto refuse = [&](const auto&... why) {
    fail<ValueError>("q is ", describe(args.q), ", and ", why...,
                     "; expected [rows, Hq, D], the rows of all requests one after another");
  };
  if (plan.is_reserved()) refuse("the run is a reservation's, whose requests may differ in rows");
  if (args.zero_unused_rows) refuse("zero_unused_rows is given");
  const i64 rows = dim(args.q, 1);
  for (i32 r = 0; r < layout.num_requests; ++r)
    if (layout.qo_indptr[r + 1] - layout.qo_indptr[r] != rows)
      refuse("request ", r, " has ", layout.qo_indptr[r + 1] - layout.qo_indptr[r], " rows");
  return rows;
}

/// Raises where q, out or lse is not one of rows of heads, or of requests of such.
void check_rows(const AttentionSpec& spec, const Plan& plan, const RunArgs& args) {
  const bool apart = args.q.rank == 4;
  const i64 rows = apart ? check_requests_apart(plan, args) : rows_of_run(plan, args.q);
  const i64 requests = plan.layout().view().num_requests, heads = spec.num_qo_heads;
  const DType dtype_of_out = args.return_state ? DType::float32 : spec.dtype;
  const auto check = [&](const auto& checks, const char* name, const TensorRef& t, DType dtype,
                         std::initializer_list<i64> of_row) {
    i64 shape[4] = {requests, rows};
    std::copy(of_row.begin(), of_row.end(), shape + 2);
    const std::size_t skipped = apart ? 0 : 1;
    checks(name, t, dtype, std::span<const i64>(shape + skipped, 2 + of_row.size() - skipped));
  };
  check(check_tensor, "q", args.q, spec.dtype, {heads, spec.head_dim_qk});
  check(check_output, "out", args.out, dtype_of_out, {heads, spec.head_dim_vo});
  if (!args.lse.data) return;
  check(check_strided, "lse", args.lse, DType::float32, {heads});
  check_distinct("lse", args.lse);
}

/// Raises where a run's tensors do not suit spec and plan.
void check_run(const AttentionSpec& spec, const Plan& plan, const RunArgs& args) {
  const DeviceId device = plan.device();
  check_device("q", args.q, device);
  check_device("out", args.out, device);
  check_device("lse", args.lse, device);
  if (args.timeline.data && device.kind == DeviceId::Kind::cpu) [[unlikely]]
    fail<ValueError>(
        "timeline is given, and this attention computes on 'cpu'; expected a GPU attention: only "
        "there do workers mark what they do");
  check_device("timeline", args.timeline, device);
  for (const KvRef& pair : args.kv) {
    check_device("kv: k", pair.k, device);
    check_device("kv: v", pair.v, device);
  }
  check_rows(spec, plan, args);
  const bool sum = plan.variant().stages().scan == Scan::sum;
  if (args.lse.data && sum)
    fail<ValueError>("lse: a Scan::sum variant has no LSE; expected return_lse=False and no lse");
  if (!args.lse.data && args.return_state && !sum)
    fail<ValueError>("lse is missing; return_state needs it: a state is (O, LSE)");
  check_no_overlap(args);
  if (args.scale && !std::isfinite(*args.scale))
    fail<ValueError>("scale is ", *args.scale, "; expected a finite number");
  const std::size_t levels = plan.layout().levels().size();
  if (args.kv.size() != 1 && args.kv.size() != levels)
    fail<ValueError>("kv has ", args.kv.size(),
                     " pairs of K and V; expected 1, or one a level: ", levels);
}

/// A scale of K or V that have no 8 bits, which is one number.
float number_of(const std::string& name, const ScaleRef& scale, const std::string& pool_name,
                const TensorRef& pool) {
  const TensorRef& t = scale.tensor;
  i64 elements = 1;
  for (int i = 0; i < t.rank; ++i) elements *= dim(t, i);
  const auto refuse = [&](const auto&... found) {
    fail<ValueError>(name, found..., ", and ", pool_name, " is ", name_of(pool.dtype),
                     "; expected one number, on the host: only K and V of 8 bits have scales in "
                     "tensors");
  };
  if (t.data && elements != 1) refuse(" is ", describe(t));
  if (t.data && is_gpu(t.device)) refuse(" lies on device '", name_of(t.device), "'");
  if (t.data && t.dtype != DType::float32)
    fail<TypeError>(name, " is ", name_of(t.dtype), "; expected float32");
  const float value = t.data ? *static_cast<const float*>(t.data) : *scale.value;
  if (!std::isfinite(value)) fail<ValueError>(name, " is ", value, "; expected a finite number");
  return value;
}

/// The scale of K, or of V, of all levels, where they have no 8 bits; 1 where none is given.
float scale_of_levels(const char* name, char which, const RunArgs& args) {
  float all = 1.0f;
  for (std::size_t i = 0; i < args.kv.size(); ++i) {
    const KvRef& pair = args.kv[i];
    const ScaleRef& scale = which == 'k' ? pair.k_scale : pair.v_scale;
    float value = 1.0f;
    if (scale.is_given()) {
      const std::string suffix = args.kv.size() > 1 ? "[" + std::to_string(i) + "]" : "";
      value = number_of(name + suffix, scale, "kv" + suffix + ": " + which,
                        which == 'k' ? pair.k : pair.v);
    }
    if (i > 0 && value != all)
      fail<ValueError>(name, " is ", all, " of level 0 and ", value, " of level ", i,
                       "; expected one number of all: only levels of 8 bits have scales of their "
                       "own");
    all = value;
  }
  return all;
}

/// Scales of K and V that have no 8 bits: that of K becomes a part of the softmax scale, that of V
/// the kernels know.
void view_scales_of_levels(const AttentionSpec& spec, const Plan& plan, const RunArgs& args,
                           RunView& view) {
  const float of_k = scale_of_levels("k_scale", 'k', args);
  const float of_v = scale_of_levels("v_scale", 'v', args);
  for (std::size_t i = 0; i < plan.layout().levels().size(); ++i)
    view.kv_scales[i] = {constant_scale({}), constant_scale(of_v)};
  if (of_k == 1.0f && of_v == 1.0f) return;
  if (spec.k_extends_v && of_k != of_v)
    fail<ValueError>("k_scale is ", of_k, ", and v_scale ", of_v,
                     "; expected equal ones with k_extends_v=True, or K and V of 8 bits: a key "
                     "begins with its row of V");
  const auto check_part = [](const char* name, float value, const std::string& part,
                             const char* what) {
    if (value != 1.0f && !part.empty())
      fail<ValueError>(name, " is ", value, ", and the variant's ", part, " changes ", what,
                       ", so that no factor stands for it; expected 1, or K and V of 8 bits");
  };
  check_part("k_scale", of_k, plan.variant().own_part_of_keys(), "keys");
  check_part("v_scale", of_v, plan.variant().own_part_of_values(), "values");
  const float scale = view.scale * of_k;
  if (!std::isfinite(scale))
    fail<ValueError>("k_scale is ", of_k, ", and scale ", view.scale,
                     "; expected a finite product, which multiplies logits");
  view.scale = scale;
}

/// `apart`: requests are the first dimension. A row's number counts those of the requests before.
RowsView view_rows(const TensorRef& t, bool apart) {
  if (!apart) return {t.data, t.stride[0], t.stride[1]};
  return {t.data, t.stride[1], t.stride[2], t.stride[0] - t.shape[1] * t.stride[1]};
}

/// Checks a run's tensors against spec and plan, and views them; scratch is left null.
RunView view_run(const AttentionSpec& spec, const Plan& plan, const RunArgs& args) {
  check_run(spec, plan, args);
  RunView view{};
  const std::vector<Level>& levels = plan.layout().levels();
  const bool one = args.kv.size() == 1, quantized = has_8_bits(spec.stored_dtype());
  for (std::size_t i = 0; i < levels.size(); ++i) {
    const std::string suffix = one ? "" : "[" + std::to_string(i) + "]";
    const KvRef& pair = args.kv[one ? 0 : i];
    view.kv[i] = view_kv("kv" + suffix, pair, levels[i], spec);
    if (quantized) view.kv_scales[i] = view_scales(suffix, "kv" + suffix, pair, levels[i], spec);
  }
  const bool apart = args.q.rank == 4;
  view.q = view_rows(args.q, apart);
  view.out = view_rows(args.out, apart);
  if (args.lse.data) view.lse = view_rows(args.lse, apart);
  view.scale = args.scale ? *args.scale : spec.softmax_scale();
  if (!quantized) view_scales_of_levels(spec, plan, args, view);
  view.state_only = args.return_state;
  return view;
}

MemoryRange range_of(const MemberValue& value) {
  return std::visit(
      [](const auto& x) -> MemoryRange {
        if constexpr (std::is_same_v<std::decay_t<decltype(x)>, double>) {
          return {};
        } else {
          const auto* begin = reinterpret_cast<const u8*>(x.data());
          return {begin, begin + x.size() * sizeof(x.front())};
        }
      },
      value);
}

/// Arrays on a GPU lie on this attention's, and what a run writes is none of them.
void check_params(const Params& params, const RunArgs& args, DeviceId device) {
  const MemoryRange out = range_of(args.out), lse = range_of(args.lse);
  for (const auto& [name, value] : params) {
    if (const DeviceId found = device_of(value); is_gpu(found) && found != device)
      fail<ValueError>("params: '", name, "' lies on device '", name_of(found), "'; expected '",
                       name_of(device), "', this attention's device",
                       is_gpu(device) ? ", or host memory" : "");
    const MemoryRange read = range_of(value);
    if (read.meets(out) || read.meets(lse))
      fail<ValueError>(read.meets(out) ? "out" : "lse", " shares memory with params: '", name,
                       "'; expected memory of its own");
  }
}

/// The variant that a run computes: the plan's, with the run's members; checked against the batch.
std::shared_ptr<const BoundVariant> variant_of_run(const Plan& plan, const RunArgs& args) {
  auto variant = plan.variant_ptr();
  const bool has_params = args.params && !args.params->empty();
  if (has_params) {
    check_params(*args.params, args, plan.device());
    variant = variant->with(*args.params, ParamScope::run);
  }
  const LayoutView& layout = plan.layout().view();
  variant->check_batch(Batch{layout, shares_keys(layout), plan.positions()}, MemberTime::run);
  if ((has_params || !plan.arrays_suffice()) && !plan.made_on_device())
    if (const auto error = variant->find_short_array(layout, MemberTime::run))
      fail<ValueError>(*error);
  return variant;
}

}  // namespace

void Attention::run(const Plan& plan, const RunArgs& given, RunStats* stats) const {
  if (&plan.origin() != variant_.get() && !plan.origin().same_as(*variant_))
    fail<ValueError>(
        "plan is of another attention; expected one made by this Attention, or by one of an equal "
        "spec");
  if (plan.device() != device())
    fail<ValueError>("plan is for device '", name_of(plan.device()), "'; expected one for '",
                     name_of(device()), "', this attention's device");
  const std::optional<RunArgs> apart = unfolded(spec_, plan, given);
  const RunArgs& args = apart ? *apart : given;
  const RunView view = view_run(spec_, plan, args);
  const auto variant = variant_of_run(plan, args);
  plan.on_device().run(plan, view, *variant, args, stats);
}

}  // namespace raddle

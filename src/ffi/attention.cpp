// Attention objects, plans and runs.
#include "raddle/attention.h"

#include <tvm/ffi/extra/c_env_api.h>

#include <algorithm>
#include <charconv>
#include <optional>

#include "device/cuda/device.h"
#include "ffi/border.h"

namespace raddle::border {

Schedule parse_schedule(const std::string& text) {
  if (text == "auto") return Schedule::automatic;
  if (text == "linear") return Schedule::linear;
  if (text == "algorithm1") return Schedule::algorithm1;
  if (text == "one-per-request") return Schedule::one_per_request;
  fail<ValueError>("schedule is '", text,
                   "'; expected 'auto', 'linear', 'algorithm1' or 'one-per-request'");
}

void* current_stream(DeviceId device) {
  if (device.kind == DeviceId::Kind::cpu) return nullptr;
  return TVMFFIEnvGetStream(kDLCUDA, device.ordinal);
}

DeviceId parse_device(const std::string& text) {
  if (text == "cpu" || text == "cpu:0") return {};
  if (text == "cuda") return DeviceId::cuda(cuda::current_ordinal());
  i32 ordinal = -1;
  const std::string prefix = "cuda:";
  if (text.rfind(prefix, 0) == 0) {
    const char* end = text.data() + text.size();
    const auto parsed = std::from_chars(text.data() + prefix.size(), end, ordinal);
    if (parsed.ec != std::errc{} || parsed.ptr != end) ordinal = -1;
  }
  if (ordinal < 0)
    fail<ValueError>("device is '", text, "'; expected 'cpu', 'cuda' or 'cuda:<number>'");
  return DeviceId::cuda(ordinal);
}

namespace {

/// The stream that Python names by number, else the current one.
void* take_stream(Arguments& in, DeviceId device) {
  const i64 stream = in.integer("stream", 0);
  return stream ? reinterpret_cast<void*>(stream) : current_stream(device);
}

/// K or V of one tensor that holds both: [blocks, 2, …].
TensorRef half_of(const std::string& name, const TensorRef& both, i64 which) {
  if (both.rank < 2 || both.shape[1] != 2) {
    fail<ValueError>(
        name, " is one tensor",
        both.rank < 2 ? " of less than 2 dimensions"
                      : " whose dimension 1 is " + std::to_string(both.shape[1]),
        "; expected a pair (k, v), or one tensor with K and V in dimension 1: [pages, 2, …]");
  }
  TensorRef half = both;
  half.data = static_cast<char*>(both.data) + which * both.stride[1] * dtype_bytes(both.dtype);
  half.rank = both.rank - 1;
  for (std::size_t i = 1; i < static_cast<std::size_t>(half.rank); ++i) {
    half.shape[i] = both.shape[i + 1];
    half.stride[i] = both.stride[i + 1];
  }
  return half;
}

}  // namespace

KvRef take_pair(Arguments& in, const std::string& name, Where where, std::optional<DType> bytes,
                std::optional<DType> wanted) {
  const TensorRef k = in.tensor(name + ": k", where, bytes, wanted);
  const TensorRef v = in.optional_tensor(name + ": v", where, bytes, wanted);
  if (v.data) return KvRef{k, v};
  return KvRef{half_of(name, k, 0), half_of(name, k, 1)};
}

namespace {

ffi::ObjectRef make_attention(Arguments& in) {
  const AttentionSpec spec = to_spec(in.map("spec"));
  const DeviceId device = parse_device(in.string("device"));
  return wrap<AttentionObj>(std::make_unique<Attention>(spec, device));
}

ffi::ObjectRef make_plan(Arguments& in) {
  const Attention& attention = *in.object<AttentionObj>("attention").value;
  const LayoutPtr& layout = in.object<LayoutObj>("layout").value;
  PlanOptions options;
  options.num_workers = in.integer32("num_workers", 0);
  options.schedule = parse_schedule(in.string("schedule"));
  options.params = to_params(in.map("params"));
  options.stream = take_stream(in, attention.device());
  auto plan = ffi::make_object<PlanObj>();
  plan->value = attention.plan(layout, options);
  plan->head_dim_vo = attention.spec().head_dim_vo;
  return ffi::ObjectRef(std::move(plan));
}

ffi::ObjectRef make_reservation(Arguments& in) {
  const Attention& attention = *in.object<AttentionObj>("attention").value;
  const Maxima maxima = to_maxima(in.map("maxima"));
  ReserveOptions options;
  options.num_workers = in.integer32("num_workers", 0);
  options.schedule = parse_schedule(in.string("schedule"));
  options.params = to_params(in.map("params"));
  options.stream = take_stream(in, attention.device());
  options.device_lengths = in.boolean("device_lengths");
  return wrap<ReservationObj>(attention.reserve(maxima, options));
}

void update(Arguments& in) {
  Reservation& reservation = *in.object<ReservationObj>("reservation").value;
  const LayoutObj& layout = in.any_layout("layout");
  void* stream = take_stream(in, reservation.device());
  const Params params = to_params(in.map("params"));
  if (layout.on_device && !params.empty())
    fail<ValueError>("params is given with a layout on a GPU; expected none");
  if (layout.on_device)
    reservation.update(layout.on_device, stream);
  else
    reservation.update(layout.value, stream, params);
}

void check(Arguments& in) {
  const Reservation& reservation = *in.object<ReservationObj>("reservation").value;
  reservation.check(take_stream(in, reservation.device()));
}

ffi::ObjectRef plan_in_force(Arguments& in) {
  auto plan = ffi::make_object<PlanObj>();
  plan->value = in.object<ReservationObj>("reservation").value->plan();
  plan->head_dim_vo = static_cast<i32>(in.integer("head_dim_vo", 0));
  return ffi::ObjectRef(std::move(plan));
}

i64 reserved_bytes(Arguments& in) {
  return static_cast<i64>(in.object<ReservationObj>("reservation").value->bytes());
}

/// Which of the reservations that follow the layout is the smallest that fits.
i64 select_reservation(Arguments& in) {
  const LayoutPtr layout = in.object<LayoutObj>("layout").value;
  std::vector<ReservationPtr> all;
  while (in.more())
    all.push_back(
        in.object<ReservationObj>(("reservations[" + std::to_string(all.size()) + "]").c_str())
            .value);
  const ReservationPtr chosen = select(all, *layout);
  return std::find(all.begin(), all.end(), chosen) - all.begin();
}

/// A plan, or the one in force of a reservation.
PlanPtr take_plan(Arguments& in) {
  const ffi::AnyView value = in.take("plan");
  if (const auto* plan = value.as<PlanObj>()) return plan->value;
  if (const auto* reservation = value.as<ReservationObj>())
    if (reservation->value) return reservation->value->plan();
  fail<TypeError>("plan is ", kind_of(value), "; expected a raddle.Plan or a raddle.Reservation");
}

/// One for all levels, or a list of one a level; empty where None is given.
std::vector<ScaleRef> take_scales(Arguments& in, const std::string& name) {
  const ffi::AnyView value = in.take(name);
  if (value == nullptr) return {};
  const auto list = value.as<ffi::Array<ffi::Any>>();
  if (!list) return {to_scale(name, value)};
  std::vector<ScaleRef> scales;
  for (const ffi::Any& each : *list)
    scales.push_back(to_scale(name + "[" + std::to_string(scales.size()) + "]", each));
  return scales;
}

/// Gives each level its scale.
void set_scales(const char* name, const std::vector<ScaleRef>& scales, std::vector<KvRef>& kv,
                ScaleRef KvRef::*which) {
  if (scales.empty()) return;
  if (scales.size() != 1 && scales.size() != kv.size())
    fail<ValueError>(name, " has ", scales.size(), " entries; expected ", kv.size(),
                     ", one a pair of K and V");
  for (std::size_t i = 0; i < kv.size(); ++i) kv[i].*which = scales[scales.size() == 1 ? 0 : i];
}

/// Of this thread, so that concurrent runs do not mix. Two clock readings a worker: too little to
/// ask first.
thread_local RunStats last_run;

void run(Arguments& in) {
  const Attention& attention = *in.object<AttentionObj>("attention").value;
  const PlanPtr plan = take_plan(in);
  if (!plan) fail<ValueError>("plan is empty; expected one that was made");
  RunArgs args;
  args.stream = current_stream(attention.device());
  const AttentionSpec& spec = attention.spec();
  args.q = in.tensor("q", Where::anywhere, {}, spec.dtype);
  const ffi::AnyView out = in.take("out");
  args.lse = in.optional_tensor("lse", Where::anywhere);
  args.return_state = in.boolean("return_state");
  args.lse_base_2 = in.boolean("lse_base_2");
  args.zero_unused_rows = in.boolean("zero_unused_rows");
  args.out =
      to_tensor("out", out, Where::anywhere, {}, args.return_state ? DType::float32 : spec.dtype);
  args.scale = in.number("scale");
  args.timeline = in.optional_tensor("timeline", Where::anywhere);
  const Params params = to_params(in.map("params"), Members::borrowed);
  if (!params.empty()) args.params = &params;
  const std::vector<ScaleRef> k_scale = take_scales(in, "k_scale");
  const std::vector<ScaleRef> v_scale = take_scales(in, "v_scale");
  const auto bytes = has_8_bits(spec.stored_dtype()) ? spec.kv_dtype : std::nullopt;
  const bool one_level = in.left() == 2;
  while (in.more()) {
    const std::string name = one_level ? "kv" : "kv[" + std::to_string(args.kv.size()) + "]";
    args.kv.push_back(take_pair(in, name, Where::anywhere, bytes, spec.stored_dtype()));
  }
  set_scales("k_scale", k_scale, args.kv, &KvRef::k_scale);
  set_scales("v_scale", v_scale, args.kv, &KvRef::v_scale);
  attention.run(*plan, args, &last_run);
}

bool has_lse(Arguments& in) { return in.object<AttentionObj>("attention").value->has_lse(); }

/// "cuda:0": where an attention computes.
ffi::String attention_device(Arguments& in) {
  const DeviceId device = in.object<AttentionObj>("attention").value->device();
  if (device.kind == DeviceId::Kind::cpu) return "cpu";
  return "cuda:" + std::to_string(device.ordinal);
}

/// Microseconds that each thread of the calling thread's last run was busy.
ffi::Array<double> busy_us(Arguments&) {
  return ffi::Array<double>(last_run.busy_us.begin(), last_run.busy_us.end());
}

i64 scratch_bytes(const PlanObj& plan) {
  const PlanView& view = plan.value->view();
  const i64 counters = i64{view.num_contractions} * view.num_kv_heads;
  return scratch_offsets(view.num_partial_rows, counters, plan.head_dim_vo).end;
}

/// Items of the worker that has most; of those that are drawn, twice its share.
i32 longest_queue(const PlanView& plan) {
  i32 longest = 0;
  for (i32 w = 0; w < plan.num_workers; ++w)
    longest = std::max(longest, plan.queue_indptr[w + 1] - plan.queue_indptr[w]);
  const i32 open = plan.num_items - plan.queue_indptr[plan.num_workers];
  return longest + std::min(open, 2 * ceil_div(open, plan.num_workers));
}

ffi::Map<ffi::String, ffi::Any> plan_info(Arguments& in) {
  const PlanObj& plan = in.object<PlanObj>("plan");
  const PlanView& view = plan.value->view();
  ffi::Map<ffi::String, ffi::Any> fields;
  fields.Set("num_workers", view.num_workers);
  fields.Set("marks_timelines", plan.value->marks_timelines());
  if (plan.value->made_on_device()) return fields;  // which alone knows the rest
  fields.Set("num_query_tiles", view.num_query_tiles);
  fields.Set("num_items", view.num_items);
  fields.Set("longest_queue", longest_queue(view));
  fields.Set("num_contractions", view.num_contractions);
  fields.Set("num_partial_rows", view.num_partial_rows);
  fields.Set("workspace_bytes", scratch_bytes(plan));
  fields.Set("balance", plan.value->balance());
  fields.Set("estimated_us", plan.value->estimated_us());
  return fields;
}

ffi::String explain(Arguments& in) { return in.object<PlanObj>("plan").value->explain(); }

i64 bound_on_workspace(Arguments& in) {
  const AttentionSpec spec = to_spec(in.map("spec"));
  const std::optional<i32> given = in.optional_integer32("num_workers");
  if (given && *given < 1) fail<ValueError>("num_workers is ", *given, "; expected at least 1");
  const Maxima maxima = to_maxima(in.map("maxima"));
  const DeviceId device = parse_device(in.string("device"));
  return static_cast<i64>(workspace_bytes(spec, given.value_or(0), maxima, device));
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = ffi::reflection;
  refl::ObjectDef<AttentionObj>();
  refl::ObjectDef<PlanObj>();
  refl::ObjectDef<ReservationObj>();
  Exports()
      .def("raddle.attention", make_attention, "spec device")
      .def("raddle.plan", make_plan, "attention layout num_workers schedule params stream")
      .def("raddle.reserve", make_reservation,
           "attention maxima num_workers schedule params stream device_lengths")
      .def("raddle.update", update, "reservation layout stream params")
      .def("raddle.check", check, "reservation stream")
      .def("raddle.plan_in_force", plan_in_force, "reservation head_dim_vo")
      .def("raddle.reserved_bytes", reserved_bytes, "reservation")
      .def("raddle.select", select_reservation, "layout *reservations")
      .def(
          "raddle.run", run,
          "attention plan q out lse return_state lse_base_2 zero_unused_rows scale timeline params "
          "k_scale v_scale *kv")
      .def("raddle.has_lse", has_lse, "attention")
      .def("raddle.device", attention_device, "attention")
      .def("raddle.busy_us", busy_us)
      .def("raddle.plan_info", plan_info, "plan")
      .def("raddle.plan_explain", explain, "plan")
      .def("raddle.workspace_bytes", bound_on_workspace, "spec num_workers maxima device");
}

}  // namespace raddle::border

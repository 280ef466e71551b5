#include "api/reservation.h"

#include <algorithm>

#include "api/plan.h"
#include "layout/on_device.h"
#include "plan/device_planner.h"
#include "plan/heuristics.h"
#include "raddle/error.h"

namespace raddle {
namespace {

/// Bytes of plans and scratch under `m`, above what any of them needs: in floating point, since
/// integers end before some maxima do.
double bytes_under(const PlanConfig& config, const Maxima& m, i32 dim_vo) {
  const auto number = [](auto x) { return static_cast<double>(x); };
  const double heads = number(config.num_kv_heads), levels = number(m.max_levels);
  const double rows = number(max_tile_rows(config, m));
  const double fused = number(m.max_qo_tokens) * number(config.group_size);
  const double tiles = levels * (number(min(m.max_requests, m.max_qo_tokens)) + fused);
  // A chunk has at least one KV tile of 16 keys; each of them may leave a tile's partial rows.
  const double cuts =
      heads * (config.batch_invariant ? number(m.max_kv_tokens) / 16 : number(config.num_workers));
  const double partial_rows = 2 * cuts * rows + heads * fused * levels;
  const double per_tile = 64 * heads + number(sizeof(Run)) * number(runs_limit(m.max_runs));
  return partial_rows * (number(dim_vo) + 1) * 4 + tiles * per_tile;
}

}  // namespace

void check_maxima(const Maxima& m, const PlanConfig& config, i32 dim_vo, bool device_lengths) {
  const auto at_least = [](const char* name, i64 value, i64 least) {
    if (value < least) fail<ValueError>(name, " is ", value, "; expected at least ", least);
  };
  at_least("max_requests", m.max_requests, 1);
  at_least("max_qo_tokens", m.max_qo_tokens, 1);
  at_least("max_kv_tokens", m.max_kv_tokens, 0);
  at_least("max_levels", m.max_levels, 1);
  at_least("max_runs", m.max_runs, 0);
  at_least("max_qo_len", m.max_qo_len, 0);
  at_least("max_mask_bytes", m.max_mask_bytes, 0);
  at_least("page_size", m.page_size, 0);
  if (m.max_levels > max_levels)
    fail<ValueError>("max_levels is ", m.max_levels, "; expected at most ", max_levels);
  if (m.max_qo_len > 0 && m.max_levels > 1 && config.batch_invariant && !device_lengths)
    fail<ValueError>("max_qo_len is ", m.max_qo_len,
                     "; expected 0 with max_levels = ", m.max_levels,
                     " and batch_invariant, for a prefix has the rows of all that share it");
  constexpr double most = 1LL << 60;
  if (!(bytes_under(config, m, dim_vo) < most))
    fail<ValueError>("maxima: max_requests = ", m.max_requests,
                     ", max_qo_tokens = ", m.max_qo_tokens, ", max_kv_tokens = ", m.max_kv_tokens,
                     ", max_levels = ", m.max_levels, " and max_runs = ", m.max_runs,
                     " may take more than 2**60 bytes; expected smaller ones");
}

Reservation::Reservation(std::unique_ptr<State> state) : state_(std::move(state)) {}
Reservation::~Reservation() = default;

ReservationPtr Attention::reserve(const Maxima& most, const ReserveOptions& options) const {
  check_options(options);
  Maxima maxima = most;
  auto state = std::make_unique<Reservation::State>();
  state->backend = backend_;
  state->variant = variant_;
  state->options = options;
  state->planning = backend_->reserved_planning(maxima, options.num_workers, options.schedule);
  PlanConfig& config = state->planning.config;
  config.max_runs = maxima.max_runs;
  check_maxima(maxima, config, spec_.head_dim_vo, options.device_lengths);
  const auto variant =  // members are refused now
      options.params.empty() ? variant_ : variant_->with(options.params, ParamScope::plan);
  // Rows of a prefix, and those of longer requests where the host cannot check lengths, are
  // computed in tiles of short queries, too. Batch invariance lets no reservation change a shape:
  // there the planner refuses longer requests.
  const i64 usual_rows = i64{maxima.max_qo_len} * config.group_size;
  const bool only_short = usual_rows > 0 && usual_rows <= config.shapes[short_queries].rows;
  if (gpu_ && only_short && !config.batch_invariant &&
      (options.device_lengths || maxima.max_levels > 1))
    config = short_plan_config(config);
  if (options.device_lengths) {
    if (!config.batch_invariant) maxima.max_qo_len = 0;
    check_device_planning(config, maxima);
    config.schedule = Schedule::linear;
  }
  state->maxima = maxima;
  if (options.device_lengths && gpu_)
    state->planner =
        gpu_->reserve_planner(state->planning, maxima, *variant_, *variant, options.stream);
  else  // on a CPU the device's lengths are the host's
    state->store = backend_->reserve(state->planning, maxima, options.stream);
  return ReservationPtr(new Reservation(std::move(state)));
}

const Maxima& Reservation::maxima() const { return state_->maxima; }
DeviceId Reservation::device() const { return state_->backend->device(); }

std::size_t Reservation::bytes() const {
  const PlanConfig& config = state_->planning.config;
  const i64 plan = plan_offsets(plan_bounds(config, state_->maxima)).bytes;
  const i64 scratch = workspace_bytes(config, state_->maxima, state_->backend->spec().head_dim_vo);
  if (!state_->planner) return static_cast<std::size_t>(plan + scratch);
  const PlannerMemory there = planner_memory(config, state_->maxima, state_->variant->has_masks());
  return static_cast<std::size_t>(there.plan + there.layout + there.scratch + scratch);
}

namespace {

/// Why a level's keys do not lie in pages of that size, whole ones; empty: they do.
std::string other_pages(const Level& level, i32 page_size) {
  if (level.storage == KvStorage::paged && level.page_size == 0 && level.block_first.empty()) {
    if (level.block_size == page_size) return "";
    return "layout has pages of " + std::to_string(level.block_size) +
           " keys; expected page_size = " + std::to_string(page_size) + " of the reservation";
  }
  return "layout has keys that are not in pages; expected page_size = " +
         std::to_string(page_size) + " of the reservation";
}

}  // namespace

std::string Reservation::misfit(const Layout& layout) const {
  const Maxima& m = state_->maxima;
  const auto beyond = [](const std::string& what, i64 found, i64 most, const char* name) {
    if (found <= most) return std::string();
    return "layout has " + std::to_string(found) + " " + what + "; expected at most " + name +
           " = " + std::to_string(most) + " of the reservation";
  };
  const auto levels = static_cast<i64>(layout.levels().size());
  std::string text = beyond("levels", levels, m.max_levels, "max_levels");
  if (text.empty())
    text = beyond("query rows", layout.num_rows(), m.max_qo_tokens, "max_qo_tokens");
  if (text.empty())
    text = beyond("requests", layout.num_requests(), m.max_requests, "max_requests");
  for (std::size_t i = 0; text.empty() && i < layout.levels().size(); ++i) {
    const Level& level = layout.levels()[i];
    const LevelView& view = layout.view().levels[i];
    const std::string where = levels > 1 ? " on level " + std::to_string(i) : "";
    i64 keys = 0;
    for (const i32 columns : level.columns) keys += columns;
    text = beyond("keys" + where, keys, m.max_kv_tokens, "max_kv_tokens");
    if (text.empty() && m.page_size > 0) text = other_pages(level, m.page_size);
    const auto groups = static_cast<i64>(level.columns.size());
    if (text.empty()) text = beyond("groups" + where, groups, m.max_requests, "max_requests");
    const bool are_requests = static_cast<i64>(i) + 1 == levels;
    for (i32 g = 0; m.max_qo_len > 0 && are_requests && text.empty() && g < groups; ++g)
      text = beyond("query rows in request " + std::to_string(g), group_rows(view, g), m.max_qo_len,
                    "max_qo_len");
  }
  return text;
}

void Reservation::update(const LayoutPtr& layout, void* stream, const Params& params) {
  if (!layout) fail<ValueError>("layout is missing");
  if (state_->planner)
    fail<ValueError>("layout lies on the host; expected arrays on '", name_of(device()),
                     "', since the reservation was made with device_lengths=True");
  if (const std::string text = misfit(*layout); !text.empty()) fail<ValueError>(text);
  if (!params.empty()) state_->variant->check_of_batch(params, state_->maxima);
  const std::lock_guard lock(state_->mutex);
  state_->options.stream = stream;
  PlanOptions with_params;
  if (!params.empty()) {
    with_params = state_->options;
    for (const auto& [name, value] : params) with_params.params.insert_or_assign(name, value);
  }
  state_->plan =
      plan_layout(state_->variant, layout, params.empty() ? state_->options : with_params,
                  state_->backend->spec(), state_->planning, *state_->store, true);
}

void Reservation::update(const DeviceLayoutPtr& layout, void* stream) {
  if (!layout) fail<ValueError>("layout is missing");
  const Maxima& m = state_->maxima;
  if (layout->device != device())
    fail<ValueError>("layout lies on '", name_of(layout->device), "'; expected '",
                     name_of(device()), "', the reservation's device");
  if (!state_->planner)
    fail<ValueError>("layout lies on '", name_of(layout->device),
                     "'; expected host arrays, or a reservation made with device_lengths=True");
  if (layout->batch.num_requests > m.max_requests)
    fail<ValueError>("layout has ", layout->batch.num_requests,
                     " requests; expected at most max_requests = ", m.max_requests,
                     " of the reservation");
  if (layout->num_rows > m.max_qo_tokens)
    fail<ValueError>("num_rows is ", layout->num_rows,
                     "; expected at most max_qo_tokens = ", m.max_qo_tokens, " of the reservation");
  if (m.page_size > 0 && layout->batch.page_size != m.page_size)
    fail<ValueError>("page_size is ", layout->batch.page_size, "; expected ", m.page_size,
                     ", as of the reservation");
  if (layout->num_levels() != m.max_levels)
    fail<ValueError>("discover_prefixes is ", layout->batch.min_prefix,
                     m.max_levels > 1 ? "; expected more than 0" : "; expected False",
                     ", since max_levels of the reservation is ", m.max_levels);
  const std::lock_guard lock(state_->mutex);
  state_->options.stream = stream;
  state_->plan = plan_on_device(state_->variant, layout, state_->options, state_->planning.config,
                                m.max_qo_tokens, *state_->planner);
}

void Reservation::check(void* stream) const {
  if (!state_->planner) return;
  if (const std::string text = state_->planner->check(stream); !text.empty())
    fail<ValueError>(text);
}

PlanPtr Reservation::plan() const {
  const std::lock_guard lock(state_->mutex);
  if (!state_->plan) fail<ValueError>("reservation has no plan yet; expected an update before");
  return state_->plan;
}

ReservationPtr select(const std::vector<ReservationPtr>& reservations, const Layout& layout) {
  std::vector<ReservationPtr> sorted = reservations;
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const auto& a, const auto& b) { return a->bytes() < b->bytes(); });
  std::string last;
  for (const ReservationPtr& each : sorted)
    if ((last = each->misfit(layout)).empty()) return each;
  fail<ValueError>("reservations: the layout fits none of ", sorted.size(),
                   last.empty() ? "" : "; of the largest: ", last);
}

}  // namespace raddle

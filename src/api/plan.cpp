// Planning: checks a layout, has it planned, and the plan put where its device reads it.
#include "api/plan.h"

#include <algorithm>
#include <numeric>
#include <sstream>

#include "layout/on_device.h"
#include "plan/explain.h"
#include "plan/planner.h"
#include "raddle/error.h"
#include "variant/batch_checks.h"

namespace raddle {
namespace {

/// Entries of -1 are allowed only where no tile's coverage reaches.
void check_used_blocks(const Layout& layout, const PlanView& plan) {
  for (i32 t = 0; t < plan.num_query_tiles; ++t) {
    const QueryTile& tile = plan.query_tiles[t];
    const Level& level = layout.levels()[static_cast<std::size_t>(tile.level)];
    if (level.min_block >= 0 || level.blocks.empty()) continue;
    const auto group = static_cast<std::size_t>(tile.group);
    for (i32 r = tile.run_begin; r < tile.run_end; ++r) {
      const i32 begin = std::max(plan.runs[r].begin, tile.col_begin);
      const i32 end = std::min(plan.runs[r].end, tile.col_end);
      for (i32 b = begin / level.block_size; i64{b} * level.block_size < end; ++b)
        if (const i32 block = level.blocks[static_cast<std::size_t>(level.block_begin[group] + b)];
            block < 0)
          fail<ValueError>(level.storage == KvStorage::paged ? "page_indices" : "indices",
                           ": entry ", b,
                           level.groups_are_requests            ? " of request "
                           : level.storage == KvStorage::blocks ? " of row block "
                                                                : " of group ",
                           tile.group, " is ", block,
                           " and lies in a tile of keys of which the mask keeps some; expected a "
                           "page number");
    }
  }
}

/// Query rows of a group, one for each head that shares its keys, are counted in 32 bits.
void check_fused_rows(const Layout& layout, i32 group_size) {
  if (i64{layout.num_rows()} * group_size <= int_max) return;
  for (i32 l = 0; l < layout.view().num_levels; ++l) {
    const LevelView& level = layout.view().levels[l];
    for (i32 g = 0; g < level.num_groups; ++g)
      if (const i64 rows = group_rows(level, g); rows * group_size > int_max)
        fail<ValueError>("qo_indptr gives request or group ", g, " ", rows,
                         " rows; expected at most ", int_max / group_size, " with ", group_size,
                         " query heads a KV head");
  }
}

}  // namespace

// --- Plan ------------------------------------------------------------------------------------

Plan::Plan(LayoutPtr layout, std::shared_ptr<const PlanArrays> arrays,
           std::shared_ptr<const BoundVariant> origin, std::shared_ptr<const BoundVariant> variant,
           std::vector<Range> positions, std::shared_ptr<const PlanOnDevice> on_device,
           bool is_reserved, bool arrays_suffice)
    : layout_(std::move(layout)),
      arrays_(std::move(arrays)),
      origin_(std::move(origin)),
      variant_(std::move(variant)),
      positions_(std::move(positions)),
      on_device_(std::move(on_device)),
      is_reserved_(is_reserved),
      arrays_suffice_(arrays_suffice),
      view_(arrays_->view()) {}
Plan::~Plan() = default;

const PlanArrays& Plan::arrays() const { return *arrays_; }
DeviceId Plan::device() const { return on_device_->device(); }
bool Plan::made_on_device() const { return on_device_->made_on_device(); }
bool Plan::marks_timelines() const { return on_device_->marks_timelines(); }
double Plan::balance() const { return arrays_->stats().heaviest_over_mean(); }
double Plan::estimated_us() const { return raddle::estimated_us(arrays_->stats().time); }

std::string Plan::explain() const {
  std::ostringstream text;
  if (made_on_device()) {
    text << "schedule: linear (the plan is made on the device, which alone knows the lengths), for "
         << view_.num_workers << " workers\nkernels: " << on_device_->explain() << "\n";
    return text.str();
  }
  text << raddle::explain(*arrays_, variant_->read_bytes()) << "kernels: " << on_device_->explain()
       << "\n";
  const std::vector<Level>& levels = layout_->levels();
  for (std::size_t i = 0; levels.size() > 1 && i < levels.size(); ++i) {
    const auto keys = std::accumulate(levels[i].columns.begin(), levels[i].columns.end(), i64{0});
    const std::size_t groups = levels[i].columns.size();
    text << "level " << i << ": " << groups << (groups == 1 ? " group" : " groups")
         << " of requests, with " << keys << " keys\n";
  }
  if (!variant_->unknown_masks().empty())
    text << "coverage of " << variant_->unknown_masks()
         << " is unknown: there is no C++ compiler on the host, so every tile is read and masked\n";
  return text.str();
}

// --- Planning --------------------------------------------------------------------------------

void check_options(const PlanOptions& options) {
  if (options.num_workers > max_workers)
    fail<ValueError>("num_workers is ", options.num_workers, "; expected at most ", max_workers);
  if (options.num_workers < 0)
    fail<ValueError>("num_workers is ", options.num_workers,
                     "; expected at least 1, or 0 for the default");
}

CoverFns cover_fns(const BoundVariant& variant) {
  if (!variant.has_masks()) return {};
  if (const BoundStage* mask = variant.only_mask(); mask && mask->ops->coverage)
    return CoverFns{mask->self, mask->ops->kv_span, mask->ops->coverage};
  return CoverFns{&variant,
                  [](const void* self, const Tile& t) {
                    return static_cast<const BoundVariant*>(self)->kv_span(t);
                  },
                  [](const void* self, const Tile& t) {
                    return static_cast<const BoundVariant*>(self)->coverage(t);
                  }};
}

PlanPtr plan_layout(const std::shared_ptr<const BoundVariant>& attention, const LayoutPtr& given,
                    const PlanOptions& options, const AttentionSpec& spec, const Planning& planning,
                    PlanStore& store, bool is_reserved) {
  if (!given) fail<ValueError>("layout is missing");
  check_fused_rows(*given, spec.group_size());
  if (!given->levels().back().rows.empty())
    fail<ValueError>(
        "layout has qo_rows, so its groups are no requests; expected it as a level of a cascade");
  if (spec.batch_invariant && given->levels().size() > 1)
    fail<ValueError>(
        "layout is a cascade; expected a single level with batch_invariant=True, since which keys "
        "are shared depends on the batch");
  const LayoutPtr layout = store.fit(given);
  auto variant =
      options.params.empty() ? attention : attention->with(options.params, ParamScope::plan);
  // Coverage reads plan members, so they are checked first.
  auto positions =
      variant->needs_positions() ? positions_by_request(layout->view()) : std::vector<Range>{};
  const Batch batch{layout->view(), shares_keys(layout->view()), positions};
  variant->check_batch(batch, MemberTime::plan);
  if (const auto error = variant->find_short_array(layout->view(), MemberTime::plan))
    fail<ValueError>(*error);
  // A run may bring arrays of its own, so that those of the spec are only refused where it does
  // not.
  const bool arrays_suffice = !variant->find_short_array(layout->view(), MemberTime::run);
  store.check_captured(batch);
  auto arrays = std::make_shared<const PlanArrays>(
      make_plan(layout->view(), planning.config, cover_fns(*variant),
                planning.clusters ? &*planning.clusters : nullptr));
  check_used_blocks(*layout, arrays->view());
  auto on_device =
      store.put(*layout, *arrays, planning.kernel, *attention, *variant, options.stream);
  return std::make_shared<const Plan>(layout, std::move(arrays), attention, std::move(variant),
                                      std::move(positions), std::move(on_device), is_reserved,
                                      arrays_suffice);
}

PlanPtr plan_on_device(const std::shared_ptr<const BoundVariant>& attention,
                       const DeviceLayoutPtr& layout, const PlanOptions& options,
                       const PlanConfig& config, i32 max_qo_tokens, DevicePlanner& planner) {
  auto variant =
      options.params.empty() ? attention : attention->with(options.params, ParamScope::plan);
  LayoutPtr shape = stand_in(*layout, max_qo_tokens);
  const std::vector<Range> positions;
  const Batch batch{shape->view(), shares_keys(shape->view()), positions, false};
  variant->check_batch(batch, MemberTime::plan);
  planner.check_captured(batch);
  auto on_device = planner.plan(layout, *shape, options.stream);
  auto arrays = std::make_shared<const PlanArrays>(nullptr, PlanSizes{}, config, PlanStats{});
  return std::make_shared<const Plan>(std::move(shape), std::move(arrays), attention,
                                      std::move(variant), std::vector<Range>{},
                                      std::move(on_device), true, true);
}

PlanPtr Attention::plan(const LayoutPtr& layout, const PlanOptions& options) const {
  check_options(options);
  if (!layout) fail<ValueError>("layout is missing");
  return plan_layout(variant_, layout, options, spec_,
                     backend_->planning_of(*layout, options.num_workers, options.schedule),
                     backend_->plans(), false);
}

}  // namespace raddle

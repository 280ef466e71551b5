#include "api/planning.h"

#include <algorithm>
#include <cmath>

#include "backend/kv_tensors.h"
#include "layout/on_device.h"
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

void check_device(const char* name, const TensorRef& t, DeviceId expected) {
  if (t.data && t.device != expected) [[unlikely]]
    fail<ValueError>(name, " lies on device '", name_of(t.device), "'; expected '",
                     name_of(expected), "', this attention's device");
}

/// A reservation's tensors have room for larger batches than the present one.
i64 rows_of_run(const Plan& plan, const TensorRef& q) {
  const i64 rows = plan.layout().num_rows();
  return plan.is_reserved() && q.rank > 0 ? std::max<i64>(rows, q.shape[0]) : rows;
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
  const i64 rows = rows_of_run(plan, args.q);
  check_tensor("q", args.q, spec.dtype, {rows, spec.num_qo_heads, spec.head_dim_qk});
  check_output("out", args.out, args.return_state ? DType::float32 : spec.dtype,
               {rows, spec.num_qo_heads, spec.head_dim_vo});
  const bool sum = plan.variant().stages().scan == Scan::sum;
  if (args.lse.data) {
    if (sum)
      fail<ValueError>("lse: a Scan::sum variant has no LSE; expected return_lse=False and no lse");
    check_output("lse", args.lse, DType::float32, {rows, spec.num_qo_heads});
  } else if (args.return_state && !sum) {
    fail<ValueError>("lse is missing; return_state needs it: a state is (O, LSE)");
  }
  if (args.scale && !std::isfinite(*args.scale))
    fail<ValueError>("scale is ", *args.scale, "; expected a finite number");
  const std::size_t levels = plan.layout().levels().size();
  if (args.kv.size() != 1 && args.kv.size() != levels)
    fail<ValueError>("kv has ", args.kv.size(),
                     " pairs of K and V; expected 1, or one a level: ", levels);
}

bool shares_keys(const LayoutView& layout) {
  return std::any_of(layout.levels, layout.levels + layout.num_levels,
                     [](const LevelView& level) { return level.keys_are_shared; });
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

PlanPtr plan_layout(const std::shared_ptr<const BoundVariant>& attention, const LayoutPtr& layout,
                    const PlanOptions& options, const AttentionBackend& backend) {
  const PlanConfig config = backend.plan_config(options.num_workers, options.schedule);
  return plan_layout(attention, layout, options, backend, config, false, nullptr);
}

PlanPtr plan_layout(const std::shared_ptr<const BoundVariant>& attention, const LayoutPtr& given,
                    const PlanOptions& options, const AttentionBackend& backend,
                    const PlanConfig& config, bool is_reserved, ReservedMemory* reserved) {
  if (!given) fail<ValueError>("layout is missing");
  check_fused_rows(*given, backend.spec().group_size());
  if (!given->levels().back().rows.empty())
    fail<ValueError>(
        "layout has qo_rows, so its groups are no requests; expected it as a level of a cascade");
  if (backend.spec().batch_invariant && given->levels().size() > 1)
    fail<ValueError>(
        "layout is a cascade; expected a single level with batch_invariant=True, since which keys "
        "are shared depends on the batch");
  const LayoutPtr layout = reserved ? reserved->fit(given) : given;
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
  if (reserved) reserved->check_captured(batch);
  auto arrays =
      std::make_shared<const PlanArrays>(make_plan(layout->view(), config, cover_fns(*variant)));
  check_used_blocks(*layout, arrays->view());
  auto on_device = backend.upload(*layout, *arrays, *attention, *variant, reserved, options.stream);
  return std::make_shared<const Plan>(layout, std::move(arrays), attention, std::move(variant),
                                      std::move(positions), std::move(on_device), is_reserved,
                                      arrays_suffice);
}

PlanPtr plan_on_device(const std::shared_ptr<const BoundVariant>& attention,
                       const DeviceLayoutPtr& layout, const PlanOptions& options,
                       const AttentionBackend& backend, const PlanConfig& config, i32 max_qo_tokens,
                       ReservedMemory& reserved) {
  auto variant =
      options.params.empty() ? attention : attention->with(options.params, ParamScope::plan);
  LayoutPtr shape = stand_in(*layout, max_qo_tokens);
  const std::vector<Range> positions;
  const Batch batch{shape->view(), shares_keys(shape->view()), positions, false};
  variant->check_batch(batch, MemberTime::plan);
  reserved.check_captured(batch);
  auto on_device = backend.plan_on_device(layout, *shape, reserved, options.stream);
  auto arrays = std::make_shared<const PlanArrays>(nullptr, PlanSizes{}, config, PlanStats{});
  return std::make_shared<const Plan>(std::move(shape), std::move(arrays), attention,
                                      std::move(variant), std::vector<Range>{},
                                      std::move(on_device), true, true);
}

RunView view_run(const AttentionSpec& spec, const Plan& plan, const RunArgs& args) {
  check_run(spec, plan, args);
  RunView view{};
  const std::vector<Level>& levels = plan.layout().levels();
  const bool one = args.kv.size() == 1;
  for (std::size_t i = 0; i < levels.size(); ++i) {
    const std::string suffix = one ? "" : "[" + std::to_string(i) + "]";
    const KvRef& pair = args.kv[one ? 0 : i];
    view.kv[i] = view_kv("kv" + suffix, pair, levels[i], spec);
    view.kv_scales[i] = view_scales(suffix, "kv" + suffix, pair, levels[i], spec);
  }
  view.q = RowsView{args.q.data, args.q.stride[0], args.q.stride[1]};
  view.out = RowsView{args.out.data, args.out.stride[0], args.out.stride[1]};
  view.lse = static_cast<float*>(args.lse.data);
  view.lse_row_stride = args.lse.stride[0];
  view.lse_head_stride = args.lse.stride[1];
  view.scale = args.scale ? *args.scale : spec.softmax_scale();
  view.state_only = args.return_state;
  return view;
}

std::shared_ptr<const BoundVariant> variant_of_run(const Plan& plan, const RunArgs& args) {
  auto variant = plan.variant_ptr();
  const bool has_params = args.params && !args.params->empty();
  if (has_params) variant = variant->with(*args.params, ParamScope::run);
  const LayoutView& layout = plan.layout().view();
  variant->check_batch(Batch{layout, shares_keys(layout), plan.positions()}, MemberTime::run);
  if ((has_params || !plan.arrays_suffice()) && !plan.made_on_device())
    if (const auto error = variant->find_short_array(layout, MemberTime::run))
      fail<ValueError>(*error);
  return variant;
}

}  // namespace raddle

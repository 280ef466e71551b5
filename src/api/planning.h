// What every device's attention shares: planning a layout, and checking a run's tensors.
#pragma once

#include <memory>

#include "api/bound_variant.h"
#include "raddle/attention.h"

namespace raddle {

/// Checks `layout` and `options`, and plans with `config`; `attention` is the variant before the
/// plan's members. Raises ValueError for a layout that the spec cannot serve.
PlanPtr plan_layout(const AttentionSpec& spec, const std::shared_ptr<const BoundVariant>& attention,
                    const LayoutPtr& layout, const PlanOptions& options, const PlanConfig& config);

/// Raises where a run's tensors do not suit spec and plan.
void check_run(const AttentionSpec& spec, const Plan& plan, const RunArgs& args);

/// K and V of every level, checked.
std::vector<KvView> view_kv(const AttentionSpec& spec, const Plan& plan, const RunArgs& args);

/// The variant that a run computes: the plan's, with the run's members; checked against the batch.
std::shared_ptr<const BoundVariant> variant_of_run(const Plan& plan, const RunArgs& args);

}  // namespace raddle

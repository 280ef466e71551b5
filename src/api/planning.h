// What every device's attention shares: planning a layout, and checking a run's tensors.
#pragma once

#include <memory>

#include "api/attention_backend.h"
#include "api/bound_variant.h"
#include "raddle/attention.h"
#include "raddle/engine/kernel/run.h"

namespace raddle {

/// Checks `layout` and `options`, plans for `backend`, and sends the plan there; `attention` is the
/// variant before the plan's members. Raises ValueError for a layout that the spec cannot serve.
PlanPtr plan_layout(const AttentionSpec& spec, const std::shared_ptr<const BoundVariant>& attention,
                    const LayoutPtr& layout, const PlanOptions& options,
                    const AttentionBackend& backend);

/// Checks a run's tensors against spec and plan, and views them; scratch is left null.
RunView view_run(const AttentionSpec& spec, const Plan& plan, const RunArgs& args);

/// The variant that a run computes: the plan's, with the run's members; checked against the batch.
std::shared_ptr<const BoundVariant> variant_of_run(const Plan& plan, const RunArgs& args);

}  // namespace raddle

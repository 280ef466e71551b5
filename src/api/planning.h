// What every device's attention shares: planning a layout, and checking a run's tensors.
#pragma once

#include <memory>

#include "backend/backend.h"
#include "plan/planner.h"
#include "raddle/attention.h"
#include "raddle/engine/kernel/run.h"
#include "variant/bound_variant.h"

namespace raddle {

/// Raises ValueError where they ask for what no plan can be.
void check_options(const PlanOptions& options);

/// What a variant's masks keep, for the planner; it must live as long.
CoverFns cover_fns(const BoundVariant& variant);

/// The page table of `args` as the levels that suit `backend` best: Attention::share_prefixes.
SharedPrefixes share_prefixes(const std::shared_ptr<const BoundVariant>& attention,
                              const PagedArgs& args, const PlanOptions& options,
                              const AttentionBackend& backend);

/// Checks `layout` and `options`, plans for `backend`, and sends the plan there; `attention` is the
/// variant before the plan's members. Raises ValueError for a layout that the spec cannot serve.
PlanPtr plan_layout(const std::shared_ptr<const BoundVariant>& attention, const LayoutPtr& layout,
                    const PlanOptions& options, const AttentionBackend& backend);

/// The same with a configuration of one's own, into a reservation's memory, which is null on CPUs.
PlanPtr plan_layout(const std::shared_ptr<const BoundVariant>& attention, const LayoutPtr& layout,
                    const PlanOptions& options, const AttentionBackend& backend,
                    const PlanConfig& config, bool is_reserved, ReservedMemory* reserved);

/// A plan that the reservation's planner makes on the device, of `config`.
PlanPtr plan_on_device(const std::shared_ptr<const BoundVariant>& attention,
                       const DeviceLayoutPtr& layout, const PlanOptions& options,
                       const AttentionBackend& backend, const PlanConfig& config, i32 max_qo_tokens,
                       ReservedMemory& reserved);

/// Checks a run's tensors against spec and plan, and views them; scratch is left null.
RunView view_run(const AttentionSpec& spec, const Plan& plan, const RunArgs& args);

/// The variant that a run computes: the plan's, with the run's members; checked against the batch.
std::shared_ptr<const BoundVariant> variant_of_run(const Plan& plan, const RunArgs& args);

}  // namespace raddle

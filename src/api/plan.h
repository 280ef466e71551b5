// Planning a layout, for an attention and for its reservations.
#pragma once

#include <memory>

#include "backend/backend.h"
#include "plan/planner.h"
#include "raddle/attention.h"
#include "variant/bound_variant.h"

namespace raddle {

/// The most workers of a plan: more than any device has, and far from the ends of the planner's
/// integers.
constexpr i32 max_workers = 65536;

/// Raises ValueError where they ask for what no plan can be.
void check_options(const PlanOptions& options);

/// Raises ValueError for maxima that no plan of this configuration can have, or whose bytes no
/// integer counts.
/// `device_lengths`: they may be of a reservation whose plans the device makes.
void check_maxima(const Maxima& maxima, const PlanConfig& config, i32 dim_vo, bool device_lengths);

/// What a variant's masks keep, for the planner; it must live as long.
CoverFns cover_fns(const BoundVariant& variant);

/// Checks `layout` and `options`, plans with `planning`, and puts the plan into `store`;
/// `attention` is the variant before the plan's members. Raises ValueError for a layout that the
/// spec cannot serve. `is_reserved`: the store is a reservation's.
PlanPtr plan_layout(const std::shared_ptr<const BoundVariant>& attention, const LayoutPtr& layout,
                    const PlanOptions& options, const AttentionSpec& spec, const Planning& planning,
                    PlanStore& store, bool is_reserved);

/// A plan that a reservation's planner makes on the device, of `config`.
PlanPtr plan_on_device(const std::shared_ptr<const BoundVariant>& attention,
                       const DeviceLayoutPtr& layout, const PlanOptions& options,
                       const PlanConfig& config, i32 max_qo_tokens, DevicePlanner& planner);

}  // namespace raddle

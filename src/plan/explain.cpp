#include "plan/explain.h"

#include <cstdio>
#include <sstream>
#include <vector>

#include "plan/heuristics.h"

namespace raddle {
namespace {

/// Three significant digits in the largest unit that leaves at least 1; `units` grow by 1000.
std::string in_units(double value, const char* const* units, int num_units) {
  int unit = 0;
  while (unit + 1 < num_units && value >= 999.5) {
    value /= 1000.0;
    ++unit;
  }
  char text[64];
  const int decimals = value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
  std::snprintf(text, sizeof text, "%.*f %s", unit == 0 && value == 0.0 ? 0 : decimals, value,
                units[unit]);
  return text;
}

/// "1 work item", "2 work items".
std::string counted(i64 count, const char* noun) {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
}

/// Keys of a work item in KV tiles that its mask does not leave empty.
i64 keys_read(const PlanView& plan, const WorkItem& item) {
  const QueryTile& tile = plan.query_tiles[item.query_tile];
  i64 keys = 0;
  for (i32 r = tile.run_begin; r < tile.run_end; ++r) {
    const Run& run = plan.runs[r];
    const i32 begin = max(max(run.begin, item.col_begin), tile.col_begin);
    const i32 end = min(min(run.end, item.col_end), tile.col_end);
    if (run.kind != Coverage::empty && begin < end) keys += end - begin;
  }
  return keys;
}

void explain_reads(std::ostream& text, const PlanView& plan, i32 read_bytes) {
  i64 total = 0, most = 0;
  for (i32 w = 0; w <= plan.num_workers; ++w) {
    i64 keys = 0;
    for (i32 i = plan.queue_indptr[w]; i < plan.queue_indptr[w + 1]; ++i)
      keys += keys_read(plan, plan.items[i]);
    total += keys;
    // The last queue belongs to no worker: each draws its share while the plan runs.
    most = w < plan.num_workers ? max(most, keys) : most + keys / plan.num_workers;
  }
  text << "reads: " << in_bytes(static_cast<double>(total) * read_bytes)
       << " of keys and values, at most " << in_bytes(static_cast<double>(most) * read_bytes)
       << " per worker\n";
}

void explain_work(std::ostream& text, const PlanView& plan) {
  text << "work: " << counted(plan.num_query_tiles, "query tile") << " in "
       << counted(plan.num_items, "work item") << " for " << counted(plan.num_workers, "worker");
  if (plan.num_contractions > 0)
    text << "; " << counted(plan.num_contractions, "query tile")
         << " combined from partial results of " << counted(plan.num_partial_rows, "row");
  text << "\n";
}

}  // namespace

double estimated_us(i64 cost) { return static_cast<double>(cost) / cost_units_per_ns / 1000.0; }

std::string in_time(i64 cost) {
  static constexpr const char* units[] = {"us", "ms", "s"};
  return in_units(estimated_us(cost), units, 3);
}

std::string in_bytes(double bytes) {
  static constexpr const char* units[] = {"B", "kB", "MB", "GB", "TB"};
  return in_units(bytes, units, 5);
}

std::string PlanStats::explain() const {
  char over_mean[32];
  std::snprintf(over_mean, sizeof over_mean, "%.3f", heaviest_over_mean());
  std::string text = std::string("schedule: ") + schedule + " (" + reason +
                     ")\nestimated time: " + in_time(time) + " for the busiest of " +
                     counted(num_workers, "worker") + ", " + over_mean + " times their average\n";
  for (i32 i = 0; i < num_tried; ++i)
    text += (i == 0 ? "schedules tried: " : ", ") + std::string(tried[i].name) + " " +
            in_time(tried[i].time);
  return num_tried == 0 ? text : text + "\n";
}

std::string explain(const PlanArrays& plan, i32 read_bytes) {
  const PlanView view = plan.view();
  std::ostringstream text;
  text << plan.stats().explain();
  explain_reads(text, view, read_bytes);
  explain_work(text, view);
  const TileShape& of_short = view.shapes[short_queries];
  const TileShape& of_long = view.shapes[long_queries];
  text << "tile shapes: ";
  if (of_short.rows > 0)
    text << of_short.rows << " query rows x " << of_short.keys << " keys (short queries), "
         << of_long.rows << " x " << of_long.keys << " (long queries)\n";
  else
    text << of_long.rows << " query rows x " << of_long.keys << " keys\n";
  return text.str();
}

}  // namespace raddle

#include "variant/batch_checks.h"

#include <algorithm>

#include "raddle/error.h"
#include "variant/positions.h"

namespace raddle {
namespace {

template <class T>
const Array<T>& array_of(const BoundMember& member) {
  return std::get<Array<T>>(member.value);
}

void check_packed_mask(const std::string& part, const Array<std::uint8_t>& bits,
                       const Array<std::int32_t>& indptr, const LayoutView& layout) {
  const auto entries = static_cast<i64>(indptr.size());
  if (entries != i64{layout.num_requests} + 1)
    fail<ValueError>(part, ".indptr has ", entries, " entries; expected one more than requests, ",
                     i64{layout.num_requests} + 1);
  const std::int32_t* first = indptr.data();
  if (first[0] < 0) fail<ValueError>(part, ".indptr begins with ", first[0], "; expected 0");
  for (i32 i = 0; i < layout.num_requests; ++i) {
    const i64 rows = layout.qo_indptr[i + 1] - layout.qo_indptr[i];
    const i64 expected = ceil_div(rows * layout.kv_len[i], i64{8});
    const i64 given = i64{first[i + 1]} - first[i];
    if (given != expected)
      fail<ValueError>(part, ".indptr gives request ", i, " ", given, " bytes; expected ", expected,
                       ", for bits of ", rows, " rows x ", layout.kv_len[i], " keys");
  }
  const i64 end = first[layout.num_requests];
  if (static_cast<i64>(bits.size()) < end)
    fail<ValueError>(part, ".bits has ", bits.size(), " bytes; expected at least ", end, ", where ",
                     part, ".indptr ends");
}

void check_rope_tables(const std::string& part, const Array<float>& cos, const Array<float>& sin,
                       const Array<std::int32_t>& offset, const Batch& batch) {
  if (cos.shape() != sin.shape())
    fail<ValueError>(part, ".sin is [", sin.shape()[0], ", ", sin.shape()[1],
                     "]; expected the shape of ", part, ".cos, [", cos.shape()[0], ", ",
                     cos.shape()[1], "]");
  if (cos.size() == 0) fail<ValueError>(part, ".cos is empty; expected at least one row");
  check_on_host(offset, part + ".offset",
                "host memory: each run compares positions with the rows of the tables");
  for (std::size_t i = 0; i < batch.positions.size(); ++i) {
    const Range& at = batch.positions[i];
    if (is_empty(at)) continue;
    const i64 add = offset.data()[offset.size() == 1 ? 0 : i];
    if (at.first + add < 0 || at.last + add >= cos.shape()[0])
      fail<ValueError>(part, ".cos has ", cos.shape()[0], " rows; request ", i, " has positions ",
                       at.first + add, " to ", at.last + add, " (", part, ".offset ", add,
                       " included), expected a row for each of them");
  }
}

}  // namespace

bool shares_keys(const LayoutView& layout) {
  return std::any_of(layout.levels, layout.levels + layout.num_levels,
                     [](const LevelView& level) { return level.keys_are_shared; });
}

std::vector<Range> positions_by_request(const LayoutView& layout) {
  std::vector<Range> all(static_cast<std::size_t>(layout.num_requests));
  for (i32 i = 0; i < layout.num_requests; ++i)
    all[static_cast<std::size_t>(i)] = positions_of_rows(layout, i);
  visit_keys(layout, [&all](i32 request, Range keys) {
    widen(all[static_cast<std::size_t>(request)], keys);
  });
  return all;
}

void check_one_or_requests(const std::string& argument, const MemberValue& value,
                           const Batch& batch) {
  const i64 n = shape_of(value)[0];
  if (n == 1) return;
  if (n != batch.layout.num_requests)
    fail<ValueError>(argument, " has ", n, " elements; expected 1, or one a request, ",
                     batch.layout.num_requests);
  if (batch.shared_keys)
    fail<ValueError>(
        argument, " differs by request; expected one value on a layout whose requests share keys");
}

void check_shipped(const std::string& name, const std::string& part,
                   const std::vector<BoundMember>& members, const Batch& batch, MemberTime time) {
  if (name == "packed_mask" && time == MemberTime::plan && !batch.lengths_are_known)
    fail<ValueError>(part,
                     " has bits for every pair of a batch; expected lengths on the host, "
                     "where their number can be checked");
  if (name == "packed_mask" && time == MemberTime::plan)
    check_packed_mask(part, array_of<std::uint8_t>(members[0]), array_of<std::int32_t>(members[1]),
                      batch.layout);
  if (needs_positions(name) && time == MemberTime::run)
    check_rope_tables(part, array_of<float>(members[0]), array_of<float>(members[1]),
                      array_of<std::int32_t>(members[2]), batch);
}

bool needs_positions(const std::string& name) {
  return name == "rope_tables" || name == "rope_tables_interleaved";
}

}  // namespace raddle

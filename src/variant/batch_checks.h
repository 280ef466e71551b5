// Whether values of variants' members suit a batch: one a request, bits for every pair, rows of a
// table for every position.
#pragma once

#include <string>
#include <vector>

#include "raddle/engine/layout/layout.h"
#include "variant/member.h"

namespace raddle {

struct Batch {
  const LayoutView& layout;
  bool shared_keys;                     ///< some level's keys belong to several requests
  const std::vector<Range>& positions;  ///< by request, see positions_by_request
  bool lengths_are_known = true;        ///< false where only the device knows them
};

/// Whether some level's keys belong to several requests.
bool shares_keys(const LayoutView& layout);

/// Hull of the positions of each request's query rows and of the keys that they may see.
std::vector<Range> positions_by_request(const LayoutView& layout);

/// A member that has one value, or one a request.
void check_one_or_requests(const std::string& argument, const MemberValue& value,
                           const Batch& batch);

/// What the shipped variant `name` asks of a batch, beyond what its member list says. Errors speak
/// of it as `part`.
void check_shipped(const std::string& name, const std::string& part,
                   const std::vector<BoundMember>& members, const Batch& batch, MemberTime time);

/// Whether check_shipped reads positions.
bool needs_positions(const std::string& name);

}  // namespace raddle

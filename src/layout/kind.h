// What a captured graph keeps of a layout, whatever its lengths: how its levels are read, and which
// arrays they have. An absent array stands for a default; written out, layouts with and without it
// become one kind.
#pragma once

#include <array>

#include "raddle/engine/layout/layout.h"
#include "raddle/layout.h"

namespace raddle {

struct LevelKind {
  KvStorage storage = KvStorage::ragged;
  HeadOrder order = HeadOrder::nhd;
  i32 block_size = 0, block_rows = 0, page_size = 0;
  bool free_groups = false;  ///< not exactly the requests
  bool shared_keys = false;
  bool rows = false, kv_begin = false;
  bool block_index = false, block_pos = false, block_first = false, block_count = false;
  bool mask_bits = false;
  bool operator==(const LevelKind&) const = default;
};

struct LayoutKind {
  i32 num_levels = 0;
  std::array<LevelKind, max_levels> levels{};
  bool qo_pos = false, row_request = false;
  bool operator==(const LayoutKind&) const = default;
};

LayoutKind kind_of(const Layout& layout);

/// The kind in which layouts of both kinds can be written. Raises ValueError, which names `layout`
/// and the reservation's first layout, where numbers of levels, page sizes or orders differ.
LayoutKind common_kind(const LayoutKind& first, const LayoutKind& layout);

/// What `more` has that `less` lacks, in words ("kv_begin on level 1"); empty where nothing.
std::string beyond(const LayoutKind& less, const LayoutKind& more);

/// The layout with those arrays written out that `kind` has and it lacks; the layout itself where
/// it lacks none.
LayoutPtr as_kind(const LayoutPtr& layout, const LayoutKind& kind);

}  // namespace raddle

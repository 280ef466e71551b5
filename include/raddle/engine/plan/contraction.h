// Which partial states exist, and how they come together.
#pragma once

#include "raddle/engine/core/search.h"
#include "raddle/engine/plan/pieces.h"
#include "raddle/engine/plan/span_items.h"

namespace raddle {

/// The arrays of a contraction map while it is made. The functions below advance the counts; the
/// caller provides arrays that are large enough.
struct ContractionMap {
  Contraction* contractions;
  i32* expected;
  Source* sources;
  i32* dependents;
  i32 num_contractions;
  i32 num_sources;
  i32 num_dependents;
};

/// Where every query row lies in an earlier level of a cascade; group -1: nowhere. A row lies in at
/// most one group of a level.
struct RowMap {
  i32* group;  ///< [num_rows]
  i32* index;  ///< [num_rows] row in the group
};

}  // namespace raddle

RADDLE_ENGINE_BEGIN

/// Gives the tiles marked by split ≥ 0 their places in the splits, in tile order; returns how many
/// there are.
RADDLE_FN i32 number_splits(QueryTile* tiles, i32 num_tiles, i32 num_kv_heads) {
  i32 count = 0;
  for (i32 t = 0; t < num_tiles; ++t) {
    if (tiles[t].split >= 0) tiles[t].split = num_kv_heads * count++;
  }
  return count;
}

/// Marks the tiles that a linear split cuts into so many spans.
RADDLE_FN void mark_cut_tiles(const Cut* cuts, i32 num_spans, QueryTile* tiles) {
  for (i32 w = 1; w < num_spans; ++w) {
    if (cuts[w].k > 0) tiles[cuts[w].at.tile].split = 0;
  }
}

/// The splits of a linear split on one level: partial rows in the order of the cuts. Returns the
/// rows.
RADDLE_FN i32 fill_cut_splits(const Units& units, const Cut* cuts, i32 num_spans, i32 num_splits,
                              Split* splits) {
  for (i32 i = 0; i < num_splits; ++i) splits[i] = Split{-1, 0};
  i32 rows = 0;
  for (i32 w = 1; w < num_spans; ++w) {
    const Cut& c = cuts[w];
    if (c.k == 0) continue;
    Split& s = splits[units.tiles[c.at.tile].split + c.at.head];
    if (cut_adds(cuts, w).unit) s.partial_row = rows;
    s.num_chunks = c.chunk + 1;
    rows += cut_rows(units, cuts, w);
  }
  return rows;
}

/// Where the line was that of one KV head, which took `rows` rows: the splits of the others, whose
/// rows follow head by head. Returns the rows of all.
RADDLE_FN i32 split_all_heads(i32 num_kv_heads, i32 rows, i32 num_splits, Split* splits) {
  for (i32 i = 0; i < num_splits; i += num_kv_heads) {
    for (i32 h = 1; h < num_kv_heads; ++h)
      splits[i + h] = Split{splits[i].partial_row + h * rows, splits[i].num_chunks};
  }
  return num_kv_heads * rows;
}

/// The splits of a linear split on several levels, where every unit has one: rows in linear order.
RADDLE_FN i32 fill_all_splits(const Units& units, const Cut* cuts, i32 num_spans, Split* splits) {
  i32 rows = 0;
  i32 w = 1;
  i32 unit = 0;
  for (UnitAt at = first_cut(units).at; at.group < units.num_groups;
       at = next_unit(units, at), ++unit) {
    i32 chunks = 1;
    for (; w < num_spans && cuts[w].unit <= unit; ++w) {
      if (cuts[w].unit == unit && cuts[w].k > 0) chunks = cuts[w].chunk + 1;
    }
    const QueryTile& t = units.tiles[at.tile];
    splits[t.split + at.head] = Split{rows, chunks};
    rows += chunks * t.num_rows;
  }
  return rows;
}

/// The splits of pieces: rows in tile order.
RADDLE_FN i32 fill_piece_splits(const QueryTile* tiles, i32 num_tiles, i32 num_kv_heads,
                                const i32* piece_begin, Split* splits) {
  i32 rows = 0;
  for (i32 t = 0; t < num_tiles; ++t) {
    if (tiles[t].split < 0) continue;
    const i32 chunks = piece_begin[t + 1] - piece_begin[t];
    for (i32 h = 0; h < num_kv_heads; ++h) {
      splits[tiles[t].split + h] = Split{rows, chunks};
      rows += chunks * tiles[t].num_rows;
    }
  }
  return rows;
}

/// On one level: query tile t, the cth that is split, contracts its own chunks.
RADDLE_FN void contract_tile(QueryTile* tiles, i32 t, i32 c, const ContractionMap& map) {
  map.contractions[c] = Contraction{t, c, c + 1};
  map.sources[c] = Source{t, 0, 0, tiles[t].num_rows};
  map.dependents[c] = c;
  tiles[t].dependents_begin = c;
  tiles[t].dependents_end = c + 1;
}

/// Contracts every split tile. Splits and counters are numbered alike.
RADDLE_FN void contract_tiles(QueryTile* tiles, i32 num_tiles, i32 num_splits, const Split* splits,
                              ContractionMap& map) {
  for (i32 t = 0; t < num_tiles; ++t) {
    if (tiles[t].split >= 0) contract_tile(tiles, t, map.num_contractions++, map);
  }
  for (i32 i = 0; i < num_splits; ++i) map.expected[i] = splits[i].num_chunks;
  map.num_sources = map.num_dependents = map.num_contractions;
}

RADDLE_FN void map_rows(const LevelView& level, i32 num_rows, const RowMap& map) {
  for (i32 r = 0; r < num_rows; ++r) map.group[r] = -1;
  for (i32 g = 0; g < level.num_groups; ++g) {
    for (i32 i = 0; i < group_rows(level, g); ++i) {
      const i32 row = query_row(level, g, i);
      map.group[row] = g;
      map.index[row] = i;
    }
  }
}

/// The tile among [begin, end) that holds fused row `row` of its group; -1: none does.
RADDLE_FN i32 tile_holding(const QueryTile* tiles, i32 begin, i32 end, i32 row) {
  const i32 t =
      first_where(begin, end, [&](i32 i) { return row < tiles[i].row_begin + tiles[i].num_rows; });
  return t < end && row >= tiles[t].row_begin ? t : -1;
}

/// Appends the sources that one earlier level has of query tile `tile` of the last level;
/// neighbours are joined.
RADDLE_FN void append_sources(const QueryTile* tiles, const QueryTile& tile, const LevelView& last,
                              i32 group_size, const RowMap& rows, const i32* group_tile,
                              ContractionMap& map) {
  const i32 first_source = map.num_sources;
  i32 done = 0;
  while (done < tile.num_rows) {
    const i32 fused = tile.row_begin + done;
    const i32 head = fused % group_size;
    i32 count = min(group_size - head, tile.num_rows - done);  // the rest of this token's rows
    const i32 row = query_row(last, tile.group, fused / group_size);
    const i32 g = rows.group[row];
    const i32 at = g < 0 ? 0 : rows.index[row] * group_size + head;
    const i32 t = g < 0 ? -1 : tile_holding(tiles, group_tile[g], group_tile[g + 1], at);
    if (t >= 0) {
      const i32 offset = at - tiles[t].row_begin;
      count = min(count, tiles[t].num_rows - offset);
      Source* s = map.num_sources > first_source ? map.sources + map.num_sources - 1 : nullptr;
      if (s && s->query_tile == t && s->row + s->num_rows == offset &&
          s->dst_row + s->num_rows == done) {
        s->num_rows += count;
      } else {
        map.sources[map.num_sources++] = Source{t, offset, done, count};
      }
    } else if (g >= 0) {
      count = 1;  // that tile keeps nothing, but the next may hold the rest of this token's rows
    }
    done += count;
  }
}

/// On several levels: every query tile of the last level contracts the states that all levels have
/// of its rows.
/// `group_tile` counts groups over all levels; `rows` has an entry for every level but the last;
/// `seen` is scratch of num_tiles entries.
RADDLE_FN void contract_levels(const LayoutView& layout, QueryTile* tiles, i32 num_tiles,
                               const i32* group_tile, i32 num_kv_heads, i32 group_size,
                               const RowMap* rows, const Split* splits, i32* seen,
                               ContractionMap& map) {
  const LevelView& last = layout.levels[layout.num_levels - 1];
  for (i32 t = 0; t < num_tiles; ++t) {
    seen[t] = -1;
    tiles[t].dependents_end = 0;  // counts dependents first
  }
  for (i32 t = 0; t < num_tiles; ++t) {
    if (tiles[t].level != layout.num_levels - 1) continue;
    const i32 c = map.num_contractions++;
    const i32 begin = map.num_sources;
    i32 first_group = 0;
    for (i32 l = 0; l + 1 < layout.num_levels; ++l) {
      append_sources(tiles, tiles[t], last, group_size, rows[l], group_tile + first_group, map);
      first_group += layout.levels[l].num_groups;
    }
    map.sources[map.num_sources++] = Source{t, 0, 0, tiles[t].num_rows};
    map.contractions[c] = Contraction{t, begin, map.num_sources};
    for (i32 h = 0; h < num_kv_heads; ++h) map.expected[c * num_kv_heads + h] = 0;
    for (i32 s = begin; s < map.num_sources; ++s) {
      const i32 from = map.sources[s].query_tile;
      if (seen[from] == c) continue;
      seen[from] = c;
      ++tiles[from].dependents_end;
      for (i32 h = 0; h < num_kv_heads; ++h) {
        map.expected[c * num_kv_heads + h] += splits[tiles[from].split + h].num_chunks;
      }
    }
  }
  for (i32 t = 0; t < num_tiles; ++t) {
    const i32 count = tiles[t].dependents_end;
    tiles[t].dependents_begin = map.num_dependents;
    tiles[t].dependents_end = map.num_dependents;
    map.num_dependents += count;
    seen[t] = -1;
  }
  for (i32 c = 0; c < map.num_contractions; ++c) {
    for (i32 s = map.contractions[c].source_begin; s < map.contractions[c].source_end; ++s) {
      const i32 from = map.sources[s].query_tile;
      if (seen[from] == c) continue;
      seen[from] = c;
      map.dependents[tiles[from].dependents_end++] = c;
    }
  }
}

RADDLE_ENGINE_END

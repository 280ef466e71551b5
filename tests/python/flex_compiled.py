"""Traced functions compiled with the machine's C++ compiler, many in one translation unit, and called by ctypes."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np

_include = Path(__file__).parents[2] / "include"
_head = """
#include <vector>
#include "raddle/engine/variant/traced.h"
using namespace raddle;
template <class T> std::vector<T> pyramid(const T* data, i64 n) {
  std::vector<T> out(static_cast<std::size_t>(hull_size(n)) + 1);
  build_hull(data, n, out.data());
  return out;
}
template <class V> KvSpan span_of(const V& v, const Tile& t) {
  if constexpr (requires { v.kv_span(t); }) return v.kv_span(t);
  return KvSpan{everything, everything};
}
template <class V> KvSpan row_span_of(const V& v, const Row& r, RowKeys keys) {
  bool known = requires { v.row_span(r, keys); };
  if constexpr (requires { v.knows_spans(); }) known = known && v.knows_spans();
  if constexpr (requires { v.row_span(r, keys); })
    if (known) return v.row_span(r, keys);
  return KvSpan{everything, everything};
}
"""
_score = """
extern "C" void run{i}(const void* const* m, long n, const i32* at, const float* s, float* out) {{
  {bind}
  for (long j = 0; j < n; ++j) {{
    const Row r{{at[4 * j], 0, 0, at[4 * j + 2], at[4 * j + 1], 0, 0, 0}};
    out[j] = v.logits(s[j], r, Key{{at[4 * j], 0, at[4 * j + 3], 0}});
  }}
}}
"""
_mask = """
extern "C" void run{i}(const void* const* m, long n, const i32* at, const float*, u8* out) {{
  {bind}
  for (long j = 0; j < n; ++j) {{
    const Row r{{at[4 * j], 0, 0, at[4 * j + 2], at[4 * j + 1], 0, 0, 0}};
    out[j] = v.mask(r, Key{{at[4 * j], 0, at[4 * j + 3], 0}}) ? 1 : 0;
  }}
}}
extern "C" void cover{i}(const void* const* m, long n, const i32* at, i32* out) {{
  {bind}
  for (long j = 0; j < n; ++j, at += 8) {{
    const Tile t{{{{at[0], at[1]}}, everything, {{at[4], at[5]}}, {{at[2], at[3]}}, everything, {{at[6], at[7]}}}};
    out[j] = static_cast<i32>(v.coverage(t));
  }}
}}
extern "C" void span{i}(const void* const* m, long n, const i32* at, i32* out) {{
  {bind}
  for (long j = 0; j < n; ++j, at += 8, out += 2) {{
    const Tile t{{{{at[0], at[1]}}, everything, {{at[4], at[5]}}, {{at[2], at[3]}}, everything, {{at[6], at[7]}}}};
    const KvSpan span = span_of(v, t);
    out[0] = span.pos.first, out[1] = span.pos.last;
  }}
}}
extern "C" void row_span{i}(const void* const* m, long n, const i32* at, i32* out) {{
  {bind}
  i32 guess = 0;
  for (long j = 0; j < n; ++j, at += 8, out += 2) {{
    const Row r{{at[0], 0, 0, at[4], at[2], 0, 0, 0}};
    const KvSpan span = row_span_of(v, r, RowKeys{{{{at[6], at[7]}}, guess}});
    guess = span.pos.first;
    out[0] = span.pos.first, out[1] = span.pos.last;
  }}
}}
"""


def _element(array):
    return {"f": "float", "i": "i32", "u": "u8"}[array.dtype.kind]


def _bind(i, traced):
    """C++ that makes the variant's struct ``v`` of the pointers ``m``."""
    before, fields = [], []
    for k, value in enumerate(traced.values.values()):
        if not isinstance(value, np.ndarray):
            fields.append(f"*static_cast<const {'i32' if isinstance(value, int) else 'float'}*>(m[{k}])")
            continue
        data = f"static_cast<const {_element(value)}*>(m[{k}])"
        extents = "{" + ", ".join(map(str, value.shape)) + "}"
        if traced.is_mask:
            before.append(f"const auto hull{k} = pyramid({data}, {value.size}L);")
            order = f"find_order({data}, {value.size}L, {value.shape[-1]}L)"
            fields.append(f"{{{data}, hull{k}.data(), {order}, {extents}}}")
        else:
            fields.append(f"{{{data}, {extents}}}")
    unused = "" if fields else "(void)m; "
    return " ".join(before) + f" {unused}const v{i}::{traced.name} v{{{', '.join(fields)}}};"


class Compiled:
    """A shared library of traced functions."""

    def __init__(self, folder, traced):
        text = [_head]
        for i, t in enumerate(traced):
            text.append(f"RADDLE_ENGINE_BEGIN\nnamespace v{i} {{\n{t.source}}}\nRADDLE_ENGINE_END\n")
            text.append((_mask if t.is_mask else _score).format(i=i, bind=_bind(i, t)))
        source, library = Path(folder) / "traced.cpp", Path(folder) / "traced.so"
        source.write_text("".join(text))
        compiler = os.environ.get("CXX") or shutil.which("c++") or "g++"
        flags = "-std=c++20 -O1 -fPIC -shared -ffp-contract=off -Wall -Wextra -Wshadow -Wconversion -Werror".split()
        done = subprocess.run(
            [compiler, *flags, f"-I{_include}", str(source), "-o", str(library)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[:4000]
        self.traced, self._library = traced, ctypes.CDLL(str(library))

    def _members(self, i):
        self._alive = [
            np.ascontiguousarray(v) if isinstance(v, np.ndarray) else np.array(v, "i4" if isinstance(v, int) else "f4")
            for v in self.traced[i].values.values()
        ]
        return (ctypes.c_void_p * max(len(self._alive), 1))(*(a.ctypes.data for a in self._alive))

    def run(self, i, at, score):
        """at: [n, 4] b, h, q_idx, kv_idx; score: [n]. Floats of a score, bools of a mask."""
        at = np.ascontiguousarray(at, np.int32)
        score = np.ascontiguousarray(score, np.float32)
        mask = self.traced[i].is_mask
        out = np.full(len(at), 77 if mask else np.nan, np.uint8 if mask else np.float32)
        p = ctypes.c_void_p
        self._library[f"run{i}"](
            self._members(i), ctypes.c_long(len(at)), p(at.ctypes.data), p(score.ctypes.data), p(out.ctypes.data)
        )
        return out.astype(bool) if mask else out

    def cover(self, i, tiles):
        """tiles: [n, 4, 2] first and last of b, h, q_idx, kv_idx. 0: empty, 1: partial, 2: full."""
        return self._ask(f"cover{i}", i, tiles, ())

    def span(self, i, tiles):
        """[n, 2] first and last kv_idx that `kv_span` leaves of the tiles; all of int32 where there is none."""
        return self._ask(f"span{i}", i, tiles, (2,))

    def row_span(self, i, tiles):
        """[n, 2] first and last kv_idx that `row_span` says the tiles' first rows keep of keys from the first kv_idx to
        the last one; all of int32 where that is not known."""
        return self._ask(f"row_span{i}", i, tiles, (2,))

    def _ask(self, function, i, tiles, shape):
        tiles = np.ascontiguousarray(tiles, np.int32)
        out = np.full((len(tiles), *shape), -1, np.int32)
        p = ctypes.c_void_p
        self._library[function](self._members(i), ctypes.c_long(len(tiles)), p(tiles.ctypes.data), p(out.ctypes.data))
        return out

// Loops that do nothing but read memory: what the fastest of them reaches is the memory's read
// bandwidth.
#pragma once

#include <cstddef>
#include <vector>

#include "raddle/engine/core/config.h"

namespace raddle::cpu {

constexpr std::size_t line_bytes = 64;
/// A page of a KV cache as serving engines lay them out; smaller than what hardware prefetchers
/// follow.
constexpr std::size_t read_page_bytes = 4096;

/// Reads `lines` cache lines from `begin` on, one after another. Returns a sum over all of them.
using SequentialLoop = u64 (*)(const char* begin, std::size_t lines);
/// Reads the pages of `order` (numbers of pages from `begin` on), several at a time.
using PageLoop = u64 (*)(const char* begin, const std::vector<u32>& order);

// Which loop wins depends on the machine: hardware prefetchers follow few streams on one, more on
// another.
const std::vector<SequentialLoop>& sequential_loops();
const std::vector<PageLoop>& page_loops();

}  // namespace raddle::cpu

// The identity of content: FNV-1a with 128 bits. The cache checks who owns an entry, so the hash
// need not resist deliberate collisions.
#pragma once

#include <string>
#include <string_view>

namespace raddle::jit {

/// 32 hexadecimal digits.
inline std::string content_hash(std::string_view content) {
  __extension__ using u128 = unsigned __int128;
  constexpr u128 prime = (u128{1} << 88) + 0x13b;
  u128 hash = (u128{0x6c62272e07bb0142} << 64) + 0x62b821756295c58d;
  for (const char c : content) hash = (hash ^ static_cast<unsigned char>(c)) * prime;
  std::string digits;
  for (int i = 124; i >= 0; i -= 4)
    digits += "0123456789abcdef"[static_cast<unsigned>(hash >> i) & 15];
  return digits;
}

}  // namespace raddle::jit

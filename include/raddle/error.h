// The errors that Raddle's host code raises. Each names the argument, what was found, and what was
// expected; nothing has been written when one is thrown. The Python package maps them to
// ValueError, TypeError and raddle.CompileError (a RuntimeError).
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace raddle {

struct ValueError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

struct TypeError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

/// Source does not compile, or there is nothing to compile it with.
struct CompileError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// There is no GPU, or it failed.
struct DeviceError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Throws `E` with all parts written one after another: fail<ValueError>("kv_len[", i, "] is ", n,
/// "; expected …").
template <class E, class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw E(text.str());
}

}  // namespace raddle

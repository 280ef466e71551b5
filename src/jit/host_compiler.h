// The user's C++ compiler, which compiles the user's own variants for the CPU.
#pragma once

#include <string>
#include <vector>

namespace raddle::jit {

struct HostCompiler {
  std::string path;                    ///< absolute; empty: none was found
  std::vector<std::string> arguments;  ///< that precede all others: "g++" of "ccache g++"
  std::string identity;                ///< what it says about itself: version and target machine
  std::string origin;                  ///< "RADDLE_CXX", "CXX" or "PATH"
};

/// The first of RADDLE_CXX, CXX, c++, g++, clang++ that is there. Raises CompileError where it does
/// not run.
HostCompiler find_compiler();
/// That compiler, looked for once per process.
const HostCompiler& host_compiler();

/// The flags of an instruction set ("avx512"): those that the shipped kernels are compiled with.
std::vector<std::string> isa_flags(const std::string& isa);

/// Compiles one translation unit to a shared library and returns its bytes. `name` is the file name
/// of the user's own lines: they come first in the error that is raised where they do not compile.
/// Prints what it is doing when that takes more than a second.
std::string compile_shared(const HostCompiler& compiler, const std::vector<std::string>& flags,
                           const std::string& source, const std::string& name);

/// The options of every compilation; part of the cache's key.
const std::vector<std::string>& common_flags();

}  // namespace raddle::jit

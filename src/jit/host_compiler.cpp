#include "jit/host_compiler.h"

#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "jit/locks.h"
#include "jit/process.h"
#include "raddle/error.h"

namespace raddle::jit {
namespace {

namespace fs = std::filesystem;

/// The absolute path of a program; empty where there is none.
std::string find_program(const std::string& name) {
  const auto usable = [](const std::string& path) {
    std::error_code error;
    return access(path.c_str(), X_OK) == 0 && fs::is_regular_file(path, error);
  };
  std::error_code ignored;
  if (name.find('/') != std::string::npos)
    return usable(name) ? fs::absolute(name, ignored).string() : "";
  const char* path = std::getenv("PATH");
  std::istringstream folders(path ? path : "");
  for (std::string folder; std::getline(folders, folder, ':');)
    if (!folder.empty() && usable(folder + "/" + name))
      return fs::absolute(folder + "/" + name, ignored).string();
  return "";
}

/// A program, or one with arguments: "ccache g++". A path may contain blanks, so the whole string
/// is tried first.
HostCompiler named(const std::string& command, const char* origin) {
  HostCompiler found;
  found.origin = origin;
  found.path = find_program(command);
  std::istringstream words(command);
  std::string first;
  if (!found.path.empty() || !(words >> first)) return found;
  found.path = find_program(first);
  for (std::string word; words >> word;) found.arguments.push_back(word);
  return found;
}

std::vector<std::string> command_of(const HostCompiler& compiler) {
  std::vector<std::string> command = {compiler.path};
  command.insert(command.end(), compiler.arguments.begin(), compiler.arguments.end());
  return command;
}

/// What the compiler says of itself. The target separates machines that share a home folder.
std::string identify(const HostCompiler& compiler) {
  std::string identity;
  for (const char* question : {"--version", "-dumpmachine"}) {
    std::vector<std::string> command = command_of(compiler);
    command.emplace_back(question);
    const Outcome answer = run(command, {{"LC_ALL", "C"}}, "");
    if (answer.status > 0)
      fail<CompileError>(compiler.path, " ", question, " ends with ",
                         describe_status(answer.status), "; expected a C++ compiler (",
                         compiler.origin, ")\n", answer.output);
    identity += (identity.empty() ? "" : ", ") + answer.output.substr(0, answer.output.find('\n'));
  }
  for (const std::string& argument : compiler.arguments) identity += " " + argument;
  return identity.empty() ? compiler.path : identity;
}

/// The folder for a compilation's files; removes what killed processes left there.
PrivateFolder work_folder() {
  constexpr const char* prefix = ".raddle-compile-";
  const char* wanted = std::getenv("TMPDIR");
  for (const fs::path base : {wanted && *wanted ? wanted : "/tmp", "/tmp", "/dev/shm"}) {
    PrivateFolder folder(base, prefix);
    if (!folder.held()) continue;
    PrivateFolder::sweep(base, prefix);
    return folder;
  }
  fail<CompileError>("no temporary folder can be written; set TMPDIR to one that can");
}

/// The compiler's messages, those about the user's own lines first.
std::string explain_failure(const std::string& output, const std::string& name) {
  std::istringstream lines(output);
  std::string own, rest;
  bool in_own = false;
  for (std::string line; std::getline(lines, line);) {
    // Lines that quote source begin with a blank and belong to the message before them.
    if (line.empty() || line[0] != ' ')
      in_own = line.starts_with(name + ":") && (line.find(": error: ") != std::string::npos ||
                                                line.find(": note: ") != std::string::npos);
    (in_own ? own : rest) += line + "\n";
  }
  constexpr std::size_t most = 4000;
  if (rest.size() > most) rest = rest.substr(0, most) + "…\n";
  return own.empty() ? rest : own + "\nall that the compiler said besides:\n" + rest;
}

}  // namespace

HostCompiler find_compiler() {
  HostCompiler found;
  for (const char* variable : {"RADDLE_CXX", "CXX"}) {
    const char* value = std::getenv(variable);
    if (!value || !*value) continue;
    found = named(value, variable);
    // Where a named compiler is missing, another one must not be taken silently.
    if (found.path.empty() && std::strcmp(variable, "RADDLE_CXX") == 0)
      fail<CompileError>("RADDLE_CXX is '", value,
                         "', which is no program; expected a C++ compiler");
    if (!found.path.empty()) break;
  }
  for (const char* name : {"c++", "g++", "clang++"})
    if (found.path.empty()) found = named(name, "PATH");
  if (found.path.empty()) return {};
  found.identity = identify(found);
  return found;
}

const HostCompiler& host_compiler() {
  static const HostCompiler compiler = find_compiler();
  return compiler;
}

std::vector<std::string> isa_flags(const std::string& isa) {
  // From CMakeLists.txt, where the shipped kernels get theirs: "generic: ;avx2:-mavx2 -mfma …".
  std::istringstream table(RADDLE_ISA_FLAGS);
  for (std::string entry; std::getline(table, entry, '|');) {
    std::istringstream words(entry);
    std::string name, flag;
    words >> name;
    if (name != isa) continue;
    std::vector<std::string> flags;
    while (words >> flag) flags.push_back(flag);
    return flags;
  }
  fail<ValueError>("isa is '", isa, "'; expected one that the library was built for");
}

const std::vector<std::string>& common_flags() {
  static const std::vector<std::string> flags = {"-std=c++20",
                                                 "-O3",
                                                 "-fPIC",
                                                 "-shared",
                                                 "-nostdlib",
                                                 "-fvisibility=hidden",
                                                 "-fno-exceptions",
                                                 "-fno-rtti",
                                                 "-fno-math-errno",
                                                 "-fno-trapping-math",
                                                 "-ffp-contract=off",
                                                 "-w",
                                                 "-fmax-errors=20",
                                                 "-fdiagnostics-color=never",
                                                 "-x",
                                                 "c++"};
  return flags;
}

std::string compile_shared(const HostCompiler& compiler, const std::vector<std::string>& flags,
                           const std::string& source, const std::string& name) {
  if (compiler.path.empty())
    fail<CompileError>("variant '", name,
                       "' is not shipped and must be compiled, and there is no C++ compiler; "
                       "install one (on Debian and Ubuntu: apt install g++), or set RADDLE_CXX");
  const PrivateFolder folder = work_folder();
  const fs::path input = folder.path() / "variant.cpp", output = folder.path() / "variant.so";
  if (!(std::ofstream(input) << source).flush())
    fail<CompileError>(folder.path().string(), " cannot be written (", std::strerror(errno),
                       "); set TMPDIR to a folder with space");
  std::vector<std::string> command = command_of(compiler);
  const bool clang = compiler.identity.find("clang") != std::string::npos;
  for (const std::string& flag : common_flags())
    if (!clang || flag != "-fmax-errors=20") command.push_back(flag);
  command.insert(command.end(), flags.begin(), flags.end());
  command.insert(command.end(), {input.string(), "-o", output.string()});
  // The messages are parsed, so they must be in English. The compiler's own temporary files are
  // removed together with ours.
  const Outcome outcome = run(command, {{"LC_ALL", "C"}, {"TMPDIR", folder.path().string()}},
                              "compiling variant '" + name + "' with " + compiler.path);
  if (outcome.status > 0) {
    const std::string why = explain_failure(outcome.output, name);
    if (why.find("error") == std::string::npos)
      fail<CompileError>("variant '", name, "': ", compiler.path, " ends with ",
                         describe_status(outcome.status), "\n", why);
    fail<CompileError>("variant '", name, "' does not compile:\n", why);
  }
  std::ifstream in(output, std::ios::binary);
  std::ostringstream bytes;
  bytes << in.rdbuf();
  std::string binary = bytes.str();
  if (!binary.starts_with("\x7f"
                          "ELF"))
    fail<CompileError>("variant '", name, "': ", compiler.path,
                       " wrote no shared library; expected a C++ compiler (", compiler.origin,
                       ")\n", outcome.output);
  return binary;
}

}  // namespace raddle::jit

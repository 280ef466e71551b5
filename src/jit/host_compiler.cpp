#include "jit/host_compiler.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "raddle/error.h"

extern char** environ;

namespace raddle::jit {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

struct Outcome {
  int status = -1;
  std::string output;  ///< standard output and error
};

/// Runs a program and collects what it says; after a second prints `doing`, once.
Outcome run(const std::vector<std::string>& command, const std::string& doing) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0)
    fail<CompileError>("cannot start ", command[0], ": ", std::strerror(errno));
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, ends[1], 1);
  posix_spawn_file_actions_adddup2(&actions, ends[1], 2);
  std::vector<char*> args;
  args.reserve(command.size() + 1);
  for (const std::string& arg : command) args.push_back(const_cast<char*>(arg.c_str()));
  args.push_back(nullptr);
  pid_t child = 0;
  const int error =
      posix_spawn(&child, command[0].c_str(), &actions, nullptr, args.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  Outcome outcome;
  if (error != 0) {
    close(ends[0]);
    fail<CompileError>("cannot start ", command[0], ": ", std::strerror(error));
  }
  const auto start = Clock::now();
  bool said = doing.empty();
  char buffer[4096];
  for (;;) {
    pollfd wait{ends[0], POLLIN, 0};
    const int ready = poll(&wait, 1, said ? -1 : 100);
    if (!said && Clock::now() - start > std::chrono::seconds(1)) {
      std::fprintf(stderr, "raddle: %s\n", doing.c_str());
      said = true;
    }
    if (ready == 0 || (ready < 0 && errno == EINTR)) continue;
    const ssize_t n = read(ends[0], buffer, sizeof(buffer));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    outcome.output.append(buffer, static_cast<std::size_t>(n));
  }
  close(ends[0]);
  while (waitpid(child, &outcome.status, 0) < 0 && errno == EINTR) {
  }
  return outcome;
}

/// The absolute path of a program; empty where there is none.
std::string find_program(const std::string& name) {
  const auto usable = [](const std::string& path) { return access(path.c_str(), X_OK) == 0; };
  if (name.find('/') != std::string::npos) return usable(name) ? name : "";
  const char* path = std::getenv("PATH");
  std::istringstream folders(path ? path : "");
  for (std::string folder; std::getline(folders, folder, ':');)
    if (!folder.empty() && usable(folder + "/" + name)) return folder + "/" + name;
  return "";
}

HostCompiler find_compiler() {
  HostCompiler found;
  for (const char* variable : {"RADDLE_CXX", "CXX"}) {
    const char* value = std::getenv(variable);
    if (!value || !*value) continue;
    found = {find_program(value), "", variable};
    // A compiler that was asked for by name and is not there is no reason to take another one.
    if (found.path.empty() && std::strcmp(variable, "RADDLE_CXX") == 0)
      fail<CompileError>("RADDLE_CXX is '", value,
                         "', which is no program; expected a C++ compiler");
    if (!found.path.empty()) break;
  }
  for (const char* name : {"c++", "g++", "clang++"})
    if (found.path.empty()) found = {find_program(name), "", "PATH"};
  if (found.path.empty()) return {};
  const Outcome version = run({found.path, "--version"}, "");
  if (version.status != 0) fail<CompileError>(found.path, " --version fails:\n", version.output);
  found.identity = version.output.substr(0, version.output.find('\n'));
  return found;
}

/// A private folder that is gone when its owner is.
class WorkFolder {
 public:
  WorkFolder() {
    std::error_code none;
    for (const fs::path& base : {fs::temp_directory_path(none), fs::path("/dev/shm")}) {
      std::string pattern = (base / "raddle-XXXXXX").string();
      if (mkdtemp(pattern.data())) {
        path_ = pattern;
        return;
      }
    }
    fail<CompileError>("no temporary folder can be written; set TMPDIR to one that can");
  }
  ~WorkFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  WorkFolder(const WorkFolder&) = delete;
  WorkFolder& operator=(const WorkFolder&) = delete;
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

/// The compiler's words, those about the user's own lines first.
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
                       "install one (on Debian "
                       "and Ubuntu: apt install g++), or set RADDLE_CXX");
  const WorkFolder folder;
  const fs::path input = folder.path() / "variant.cpp", output = folder.path() / "variant.so";
  if (!(std::ofstream(input) << source).flush())
    fail<CompileError>(folder.path().string(), " is full; set TMPDIR to a folder with space");
  std::vector<std::string> command = {compiler.path};
  const bool clang = compiler.identity.find("clang") != std::string::npos;
  for (const std::string& flag : common_flags())
    if (!clang || flag != "-fmax-errors=20") command.push_back(flag);
  command.insert(command.end(), flags.begin(), flags.end());
  command.insert(command.end(), {input.string(), "-o", output.string()});
  const Outcome outcome = run(command, "compiling variant '" + name + "' with " + compiler.path);
  if (outcome.status != 0)
    fail<CompileError>("variant '", name, "' does not compile:\n",
                       explain_failure(outcome.output, name));
  std::ifstream in(output, std::ios::binary);
  std::ostringstream bytes;
  bytes << in.rdbuf();
  return bytes.str();
}

}  // namespace raddle::jit

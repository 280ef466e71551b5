#include "jit/process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>

#include "raddle/error.h"

extern char** environ;

namespace raddle::jit {
namespace {

using Clock = std::chrono::steady_clock;

std::atomic<void (*)()> interrupt_check = nullptr;

/// A child starts with no signal blocked, and with default actions for signals that programs often
/// ignore: with SIGCHLD ignored a compiler driver cannot wait for its own children.
class Attributes {
 public:
  Attributes() {
    posix_spawnattr_init(&value_);
    sigset_t none, defaults;
    sigemptyset(&none);
    sigemptyset(&defaults);
    for (const int signal : {SIGCHLD, SIGPIPE}) sigaddset(&defaults, signal);
    posix_spawnattr_setsigmask(&value_, &none);
    posix_spawnattr_setsigdefault(&value_, &defaults);
    // What can be interrupted is a group of its own, so that a driver's children end with it.
    posix_spawnattr_setflags(&value_, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF |
                                          (interrupt_check.load() ? POSIX_SPAWN_SETPGROUP : 0));
  }
  ~Attributes() { posix_spawnattr_destroy(&value_); }
  Attributes(const Attributes&) = delete;
  Attributes& operator=(const Attributes&) = delete;
  const posix_spawnattr_t* get() const { return &value_; }

 private:
  posix_spawnattr_t value_;
};

std::vector<char*> pointers(std::vector<std::string>& words) {
  std::vector<char*> result;
  result.reserve(words.size() + 1);
  for (std::string& word : words) result.push_back(word.data());
  result.push_back(nullptr);
  return result;
}

std::vector<std::string> environment(
    const std::vector<std::pair<std::string, std::string>>& variables) {
  std::vector<std::string> result;
  for (char** entry = environ; *entry; ++entry) {
    const std::string text = *entry;
    const auto replaced = [&](const auto& v) { return text.starts_with(v.first + "="); };
    if (std::none_of(variables.begin(), variables.end(), replaced)) result.push_back(text);
  }
  for (const auto& [name, value] : variables) result.push_back(name + "=" + value);
  return result;
}

/// Starts the program; returns the end of a pipe from which its output can be read.
int start(const std::vector<std::string>& command, std::vector<std::string> variables,
          pid_t& child) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0)
    fail<CompileError>("cannot start ", command[0], ": ", std::strerror(errno));
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, ends[1], 1);
  posix_spawn_file_actions_adddup2(&actions, ends[1], 2);
  std::vector<std::string> words = command;
  const Attributes attributes;
  const int error = posix_spawn(&child, command[0].c_str(), &actions, attributes.get(),
                                pointers(words).data(), pointers(variables).data());
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  if (error == 0) return ends[0];
  close(ends[0]);
  fail<CompileError>("cannot start ", command[0], ": ", std::strerror(error));
}

/// Reads what is there; false at the end.
bool read_some(int from, std::string& output) {
  char buffer[4096];
  const ssize_t n = read(from, buffer, sizeof(buffer));
  if (n > 0) output.append(buffer, static_cast<std::size_t>(n));
  return n > 0 || (n < 0 && errno == EINTR);
}

bool readable(int from, int milliseconds) {
  pollfd wait{from, POLLIN, 0};
  return poll(&wait, 1, milliseconds) > 0;
}

}  // namespace

void set_interrupt_check(void (*check)()) { interrupt_check = check; }

void check_interrupt() {
  if (const auto check = interrupt_check.load()) check();
}

void announce(const std::string& doing) {
  const std::string line = "raddle: " + doing + "\n";
  std::fwrite(line.data(), 1, line.size(), stderr);
}

std::string describe_status(int status) {
  if (status >= 0 && WIFEXITED(status)) return "exit status " + std::to_string(WEXITSTATUS(status));
  if (status >= 0 && WIFSIGNALED(status)) return "signal " + std::to_string(WTERMSIG(status));
  return "an unknown status";
}

Outcome run(const std::vector<std::string>& command,
            const std::vector<std::pair<std::string, std::string>>& variables,
            const std::string& doing) {
  pid_t child = 0;
  const int from = start(command, environment(variables), child);
  const auto begin = Clock::now();
  bool said = doing.empty();
  bool open = true, ended = false;
  Outcome outcome;
  // The end of the program counts, not that of the pipe: a compiler wrapper may leave a server
  // behind that holds the pipe open for ever.
  while (!ended) {
    try {
      check_interrupt();
    } catch (...) {
      kill(-child, SIGKILL);
      waitpid(child, nullptr, 0);
      close(from);
      throw;
    }
    if (open && readable(from, 20)) {
      open = read_some(from, outcome.output);
      if (open) continue;
    }
    if (!open) poll(nullptr, 0, 2);
    const pid_t found = waitpid(child, &outcome.status, WNOHANG);
    ended = found == child || (found < 0 && errno != EINTR);
    if (found < 0) outcome.status = -1;
    if (!said && Clock::now() - begin > std::chrono::seconds(1)) {
      announce(doing);
      said = true;
    }
  }
  while (open && readable(from, 0)) open = read_some(from, outcome.output);
  close(from);
  return outcome;
}

}  // namespace raddle::jit

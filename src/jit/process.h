// Runs a program and collects its output.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace raddle::jit {

struct Outcome {
  int status =
      -1;  ///< as waitpid returns it; -1: unknown, where the caller's program ignores SIGCHLD
  std::string output;  ///< standard output and error
  bool succeeded() const { return status == 0; }
};

/// Runs `command`, whose first word is a path, with a few variables of the environment changed.
/// Prints `doing` to stderr once it takes more than a second. Raises CompileError where the program
/// cannot start.
Outcome run(const std::vector<std::string>& command,
            const std::vector<std::pair<std::string, std::string>>& variables,
            const std::string& doing);

/// Has every wait for a program or a lock call `check` some fifty times a second; what it throws
/// ends the wait, and the program with all that it started. How Python's Ctrl-C arrives: without a
/// check a signal's own action does.
void set_interrupt_check(void (*check)());
/// Calls it, if there is one.
void check_interrupt();

/// "exit status 1", "signal 9".
std::string describe_status(int status);

/// Prints to stderr what is going on, as one write.
void announce(const std::string& doing);

}  // namespace raddle::jit

#include "jit/background.h"

#include <unistd.h>

#include <list>
#include <mutex>
#include <thread>

namespace raddle::jit {
namespace {

struct Job {
  std::shared_ptr<Watch> watch;
  std::shared_ptr<std::atomic<bool>> ended;
  std::thread thread;
};

/// Never destroyed: a forked process has copies of its parent's thread objects, which it can
/// neither join nor destroy.
struct Jobs {
  std::mutex mutex;
  std::list<Job>* list = new std::list<Job>;
  pid_t process = getpid();
};

Jobs& jobs() {
  static Jobs& all = *new Jobs;
  return all;
}

std::atomic<bool> promised = false;

/// Those of this process. Needs the lock.
std::list<Job>& own_jobs() {
  Jobs& all = jobs();
  if (all.process != getpid()) {
    all.list = new std::list<Job>;
    all.process = getpid();
  }
  return *all.list;
}

}  // namespace

void in_background(std::shared_ptr<Watch> watch, std::function<void()> work) {
  const std::lock_guard lock(jobs().mutex);
  std::list<Job>& list = own_jobs();
  list.remove_if([](Job& job) {
    if (!*job.ended) return false;
    job.thread.join();
    return true;
  });
  auto ended = std::make_shared<std::atomic<bool>>(false);
  list.push_back({std::move(watch), ended, std::thread([work = std::move(work), ended] {
                    work();
                    *ended = true;
                  })});
}

void stop_background() {
  std::list<Job> last;
  {
    const std::lock_guard lock(jobs().mutex);
    last.swap(own_jobs());
  }
  for (Job& job : last) job.watch->stop = true;
  for (Job& job : last) job.thread.join();
}

void stop_at_exit() {
  static const struct AtExit {
    ~AtExit() { stop_background(); }
  } at_exit;
}

void promise_to_stop() { promised = true; }
bool is_promised_to_stop() { return promised; }

}  // namespace raddle::jit

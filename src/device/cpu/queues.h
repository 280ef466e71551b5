// Work queues with stealing, for one launch. Items are numbers; queue q holds items
// queue_indptr[q] … queue_indptr[q + 1], in the order in which they should start.
#pragma once

#include <atomic>

#include "raddle/engine/core/config.h"

namespace raddle::cpu {

/// Next unstarted item of a queue. Two lines apart: the adjacent-line prefetcher couples
/// neighbours.
struct alignas(128) QueueHead {
  std::atomic<i32> next{0};
};

/// Items that a thread takes together, and the one that it would begin with next; -1: none.
struct ItemRun {
  i32 first;
  i32 end;
  i32 next;
};

/// Hands out every item exactly once. Thread t serves queues t, t + n, … to their ends, in runs;
/// then it takes single unstarted items from whichever queue has most left. Lock-free; any subset
/// of the n threads that keeps calling `next` will see all items done.
///
/// The plan's queues need not match the threads: a job that got one thread serves all queues in
/// order.
class ItemQueues {
 public:
  /// `heads` is scratch of num_queues entries, reused from launch to launch. Construct before the
  /// threads start.
  ItemQueues(const i32* queue_indptr, i32 num_queues, i32 num_threads, QueueHead* heads)
      : indptr_(queue_indptr), num_queues_(num_queues), num_threads_(num_threads), heads_(heads) {
    for (i32 q = 0; q < num_queues; ++q) {
      heads[q].next.store(queue_indptr[q], std::memory_order_relaxed);
    }
  }

  /// Gives `thread` its next items; false when nothing unstarted is left in any queue.
  /// run_end(first, end) says where a run ends that begins with `first`, at `end` at most.
  template <class RunEnd>
  bool next(i32 thread, ItemRun& run, RunEnd&& run_end) {
    for (i32 q = thread; q < num_queues_; q += num_threads_) {
      if (take_run(q, run, run_end)) return true;
    }
    for (i32 q = fullest(); q >= 0; q = fullest()) {
      if (take(q, run)) return true;
    }
    return false;
  }

 private:
  i32 left(i32 q) const { return indptr_[q + 1] - heads_[q].next.load(std::memory_order_relaxed); }

  /// Relaxed: items carry no data from thread to thread; the plan was published with the job.
  template <class RunEnd>
  bool take_run(i32 q, ItemRun& run, RunEnd& run_end) {
    const i32 end = indptr_[q + 1];
    i32 first = heads_[q].next.load(std::memory_order_relaxed);
    while (first < end) {
      const i32 behind = run_end(first, end);
      if (heads_[q].next.compare_exchange_weak(first, behind, std::memory_order_relaxed)) {
        run = ItemRun{first, behind, behind < end ? behind : -1};
        return true;
      }
    }
    return false;
  }

  /// Looks before it counts up, so that an exhausted queue's head grows by the number of threads at
  /// most.
  bool take(i32 q, ItemRun& run) {
    if (left(q) <= 0) return false;
    const i32 item = heads_[q].next.fetch_add(1, std::memory_order_relaxed);
    run = ItemRun{item, item + 1, -1};
    return item < indptr_[q + 1];
  }

  i32 fullest() const {
    i32 best = -1;
    i32 most = 0;
    for (i32 q = 0; q < num_queues_; ++q) {
      if (left(q) > most) {
        most = left(q);
        best = q;
      }
    }
    return best;
  }

  const i32* indptr_;
  i32 num_queues_;
  i32 num_threads_;
  QueueHead* heads_;
};

}  // namespace raddle::cpu

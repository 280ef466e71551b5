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

/// Hands out every item exactly once. Thread t serves queues t, t + n, … to their ends, then takes
/// single unstarted items from whichever queue has most left. Lock-free; any subset of the n
/// threads that keeps calling `next` will see all items done.
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

  /// Gives `thread` its next item; false when nothing unstarted is left in any queue.
  bool next(i32 thread, i32& item) {
    for (i32 q = thread; q < num_queues_; q += num_threads_) {
      if (take(q, item)) return true;
    }
    for (i32 q = fullest(); q >= 0; q = fullest()) {
      if (take(q, item)) return true;
    }
    return false;
  }

 private:
  i32 left(i32 q) const { return indptr_[q + 1] - heads_[q].next.load(std::memory_order_relaxed); }

  /// Looks before it counts up, so that an exhausted queue's head grows by the number of threads at
  /// most. Relaxed: items carry no data from thread to thread; the plan was published with the job.
  bool take(i32 q, i32& item) {
    if (left(q) <= 0) return false;
    item = heads_[q].next.fetch_add(1, std::memory_order_relaxed);
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

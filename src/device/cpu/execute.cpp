#include "device/cpu/execute.h"

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "device/cpu/pool.h"

namespace raddle::cpu {
namespace {

template <class Vector>
void grow(Vector& v, i64 n) {
  if (v.size() < static_cast<std::size_t>(n)) v.resize(static_cast<std::size_t>(n));
}

constexpr std::size_t cache_line = 64;

}  // namespace

void Scratch::prepare(CpuLaunch& launch, const CpuKernels& kernels, i32 num_threads) {
  const PlanView& plan = *launch.plan;
  grow(partial_o, i64{plan.num_partial_rows} * launch.dim_vo);
  grow(partial_lse, plan.num_partial_rows);
  grow(arrived, i64{plan.num_contractions} * plan.num_kv_heads);
  const auto workers = static_cast<std::size_t>(plan.num_workers);
  if (heads.size() < workers) heads = std::vector<QueueHead>(workers);
  const auto bytes = static_cast<std::size_t>(kernels.scratch_bytes(launch)) + cache_line;
  if (thread_bytes < bytes) {
    threads.clear();
    thread_bytes = bytes;
  }
  // Left uninitialised: each thread touches its own first.
  while (threads.size() < static_cast<std::size_t>(num_threads))
    threads.push_back(std::unique_ptr<std::byte[]>(new std::byte[thread_bytes]));
  launch.partial_o = partial_o.data();
  launch.partial_lse = partial_lse.data();
  launch.arrived = arrived.data();
}

void* Scratch::thread_memory(i32 thread) const {
  std::byte* p = threads[static_cast<std::size_t>(thread)].get();
  return p + (cache_line - reinterpret_cast<std::uintptr_t>(p) % cache_line) % cache_line;
}

ScratchPool::~ScratchPool() {
  for (const auto& slot : free_) delete slot.load();
}

std::unique_ptr<Scratch> ScratchPool::take() {
  for (auto& slot : free_)
    if (slot.load(std::memory_order_relaxed))
      if (Scratch* found = slot.exchange(nullptr, std::memory_order_acquire))
        return std::unique_ptr<Scratch>(found);
  return std::make_unique<Scratch>();
}

void ScratchPool::give_back(std::unique_ptr<Scratch> scratch) {
  for (auto& slot : free_) {
    Scratch* none = nullptr;
    if (slot.compare_exchange_strong(none, scratch.get(), std::memory_order_release)) {
      static_cast<void>(scratch.release());
      return;
    }
  }
}

void execute(CpuLaunch& launch, const CpuKernels& kernels, i32 num_threads, ScratchPool& pool,
             std::vector<double>* busy_us) {
  const PlanView& plan = *launch.plan;
  num_threads = std::clamp(num_threads, 1, std::max(plan.num_items, 1));
  auto scratch = pool.take();
  scratch->prepare(launch, kernels, num_threads);
  if (busy_us) busy_us->assign(static_cast<std::size_t>(num_threads), 0.0);

  // Should the pool give fewer threads than asked for, those that come take over the others'
  // queues.
  ItemQueues queues(plan.queue_indptr, plan.num_workers, num_threads, scratch->heads.data());
  const i32 threads = WorkerPool::instance().run(num_threads, [&](i32 thread, i32) {
    const auto start = std::chrono::steady_clock::now();
    const auto run_end = [&](i32 first, i32 end) {
      return first + kernels.run_length(launch, first, end);
    };
    for (ItemRun run; queues.next(thread, run, run_end);)
      kernels.attend(launch, run.first, run.end, run.next, scratch->thread_memory(thread));
    if (busy_us)
      (*busy_us)[static_cast<std::size_t>(thread)] =
          std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start)
              .count();
  });
  if (busy_us) busy_us->resize(static_cast<std::size_t>(threads));
  pool.give_back(std::move(scratch));
}

}  // namespace raddle::cpu

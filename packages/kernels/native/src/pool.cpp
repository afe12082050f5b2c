// A small pool of persistent threads.
//
// A job is (task, context, count) and a word that packs an epoch with the next free index. Threads
// take an index by compare-and-swap on that word, so a late thread can never take work of a newer
// job with an older job's context, and the caller waits for tasks, not for threads: a thread that
// the system has put aside delays nobody unless it holds a task.
//
// Which thread runs which index is arbitrary; kernels give each index its own outputs, so bits do
// not depend on it.

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#ifndef _WIN32
#include <pthread.h>
#endif
#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "common.h"

#define HR_EXPORT extern "C" __attribute__((visibility("default")))

namespace headrace {
namespace {

constexpr uint32_t CLOSED = 0xffffffffu;
constexpr int SPINS = 1500;  // some tens of microseconds: the gap between two kernels of a step

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

// Lets a thread run on that core alone; whether the system agreed.
bool bind_to_core(std::thread& thread, int core) {
#if defined(__linux__)
  if (core < 0 || core >= CPU_SETSIZE) return false;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  return pthread_setaffinity_np(thread.native_handle(), sizeof set, &set) == 0;
#else
  (void)thread, (void)core;
  return false;
#endif
}

void name_thread(std::thread& thread) {
#if defined(__linux__)
  pthread_setname_np(thread.native_handle(), "headrace-kernel");
#else
  (void)thread;
#endif
}

class Pool {
 public:
  explicit Pool(int size) : size_(size) {}

  int size() const { return size_; }

  // Gives the other threads a job, unless they have one (another Python thread is computing: two
  // callers already use two cores) or sharing is of no use. Then the caller owns the turn until end().
  bool begin(int64_t count, Task task, void* context) {
    if (size_ <= 1 || count <= 1 || count >= CLOSED || !turn_.try_lock()) return false;
    start();
    const uint64_t epoch = (head_.load(std::memory_order_relaxed) >> 32) + 1;
    head_.store(epoch << 32 | CLOSED);
    task_.store(task);
    context_.store(context);
    count_.store(static_cast<uint32_t>(count));
    done_.store(0);
    head_.store(epoch << 32);
    if (sleepers_.load() > 0) {
      std::lock_guard<std::mutex> lock(mutex_);
      wake_.notify_all();
    }
    return true;
  }

  // Takes part in the job until all of it is done.
  void end() {
    take_all();
    const int64_t count = count_.load(std::memory_order_relaxed);
    for (int spins = 0; done_.load(std::memory_order_acquire) < count; ++spins) {
      if (spins < SPINS) relax(); else std::this_thread::yield();
    }
    turn_.unlock();
  }

  void resize(int size) {
    std::lock_guard<std::mutex> turn(turn_);
    if (size == size_) return;
    stop();
    size_ = size;
  }

  // Between begin and end, threads that have begun to wait do not fall asleep.
  void begin_burst() { bursts_.fetch_add(1); }
  void end_burst() { bursts_.fetch_sub(1); }

  // From now on the i-th thread runs on cores[i] alone, except the first, the caller, which is not
  // ours, and those beyond the cores. Returns how many threads the system would not bind.
  int bind(std::vector<int> cores) {
    std::lock_guard<std::mutex> turn(turn_);
    if (cores == cores_) return 0;
    stop();
    cores_ = std::move(cores);
    return cores_.empty() ? 0 : start();
  }

 private:
  // Runs tasks of the current job until none is left to take; false if there was none. They are counted
  // once, at the end: that counter is a line of memory that all threads want. Until then the job cannot
  // end, so all of these tasks are its own.
  bool take_all() {
    int64_t taken = 0;
    while (take()) ++taken;
    if (taken > 0) done_.fetch_add(taken, std::memory_order_release);
    return taken > 0;
  }

  // Runs one task of the current job; false if none is left.
  bool take() {
    uint64_t head = head_.load(std::memory_order_acquire);
    for (;;) {
      const Task task = task_.load(std::memory_order_relaxed);
      void* context = context_.load(std::memory_order_relaxed);
      const uint32_t count = count_.load(std::memory_order_relaxed);
      const uint32_t index = static_cast<uint32_t>(head);
      if (index == CLOSED || index >= count) return false;
      if (head_.compare_exchange_weak(head, head + 1, std::memory_order_acq_rel,
                                      std::memory_order_acquire)) {
        task(context, index);
        return true;
      }
    }
  }

  void work() {
    for (;;) {
      // Read before taking: whatever is published after a take that found nothing changes this word.
      // (Comparing with a word read later would sleep through a job published in between.)
      const uint64_t seen = head_.load();
      if (take_all()) continue;
      for (int spins = 0; head_.load(std::memory_order_relaxed) == seen; ++spins) {
        if (spins >= SPINS && bursts_.load(std::memory_order_relaxed) == 0) break;
        relax();
      }
      if (head_.load() != seen) continue;
      if (stopping_.load()) return;
      std::unique_lock<std::mutex> lock(mutex_);
      sleepers_.fetch_add(1);
      wake_.wait(lock, [&] { return head_.load() != seen || stopping_.load(); });
      sleepers_.fetch_sub(1);
    }
  }

  // Returns how many of the threads that it started could not be bound.
  int start() {
    int failed = 0;
    while (static_cast<int>(workers_.size()) < size_ - 1) {
      workers_.emplace_back([this] { work(); });
      name_thread(workers_.back());
      const size_t thread = workers_.size();
      if (thread < cores_.size()) failed += !bind_to_core(workers_.back(), cores_[thread]);
    }
    return failed;
  }

  void stop() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_.store(true);
      wake_.notify_all();
    }
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
    stopping_.store(false);
  }

  int size_;
  std::vector<int> cores_;  // of the threads, the caller's first; empty = not bound
  std::mutex turn_;
  std::vector<std::thread> workers_;
  alignas(64) std::atomic<uint64_t> head_{CLOSED};
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<Task> task_{nullptr};
  std::atomic<void*> context_{nullptr};
  std::atomic<uint32_t> count_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<int> bursts_{0};
  std::atomic<bool> stopping_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
};

Pool* current = nullptr;

#ifndef _WIN32
// Threads do not survive a fork: the child begins with a new pool and leaks the old one. Its threads
// are not bound: the parent's are at work on those cores.
void after_fork_in_child() {
  if (current != nullptr) current = new Pool(current->size());
}
#endif

Pool& pool() {
  static const bool made = [] {
    current = new Pool(1);  // never destroyed: threads may outlive static destructors
#ifndef _WIN32
    pthread_atfork(nullptr, nullptr, after_fork_in_child);
#endif
    return true;
  }();
  (void)made;
  return *current;
}

struct Buffer {
  void* data = nullptr;
  size_t bytes = 0;
  ~Buffer() { std::free(data); }
};

thread_local Buffer buffers[SCRATCH_SLOTS];
thread_local bool alone = false;

}  // namespace

void run_parallel(int64_t count, Task task, void* context) {
  if (!alone && pool().begin(count, task, context)) return pool().end();
  for (int64_t i = 0; i < count; ++i) task(context, i);
}

bool begin_parallel(int64_t count, Task task, void* context) {
  if (alone || !pool().begin(count, task, context)) return false;
  return alone = true;
}

void end_parallel() {
  alone = false;
  pool().end();
}

int pool_size() { return alone ? 1 : pool().size(); }

Alone::Alone() : before_(std::exchange(alone, true)) {}
Alone::~Alone() { alone = before_; }

Burst::Burst() { pool().begin_burst(); }
Burst::~Burst() { pool().end_burst(); }

void* scratch(ScratchSlot slot, size_t bytes) {
  Buffer& buffer = buffers[slot];
  if (buffer.bytes < bytes) {
    std::free(buffer.data);
    buffer.bytes = (bytes + bytes / 4 + 4095) / 4096 * 4096;
    buffer.data = std::aligned_alloc(4096, buffer.bytes);
    if (buffer.data == nullptr) std::abort();  // memory is gone; torch would not survive either
  }
  return buffer.data;
}

}  // namespace headrace

HR_EXPORT void hr_set_num_threads(int32_t count) { headrace::pool().resize(count < 1 ? 1 : count); }
// Binds the pool's threads but the first to cores[1..count); count 0 lets new threads run anywhere.
// Returns how many could not be bound.
HR_EXPORT int32_t hr_bind_threads(const int32_t* cores, int32_t count) {
  return headrace::pool().bind(std::vector<int>(cores, cores + count));
}

// Runs `jobs` jobs, one after the other, of as many tasks as there are threads; each task waits until
// all of its job have begun, `patience` yields at most. Returns the jobs in which that happened: all,
// unless a thread sleeps through work. For tests.
HR_EXPORT int32_t hr_rendezvous(int32_t jobs, int32_t patience) {
  struct Rendezvous {
    std::atomic<int32_t> begun{0};
    std::atomic<int32_t> met{0};
    int32_t wanted, patience;
  };
  int32_t complete = 0;
  for (int32_t i = 0; i < jobs; ++i) {
    Rendezvous meeting;
    meeting.wanted = headrace::pool().size();
    meeting.patience = patience;
    headrace::run_parallel(meeting.wanted, [](void* context, int64_t) {
      Rendezvous& m = *static_cast<Rendezvous*>(context);
      m.begun.fetch_add(1);
      for (int32_t tries = 0; m.begun.load() < m.wanted && tries < m.patience; ++tries) {
        std::this_thread::yield();
      }
      if (m.begun.load() >= m.wanted) m.met.fetch_add(1);
    }, &meeting);
    complete += meeting.met.load() == meeting.wanted;
  }
  return complete;
}

HR_EXPORT int32_t hr_num_threads() { return headrace::pool().size(); }

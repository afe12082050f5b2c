// Waiting for a counter in shared memory that another process advances.
//
// Who waits spins for a while and then sleeps on the counter (futex). Sleepers wake now and then to see whether
// the processes that they depend on are alive: a process that was killed wakes nobody.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace headrace {

constexpr size_t LINE = 64;  // bytes of a cache line: no two writers share one

enum Status : int32_t {
  OK = 0,
  DIED = 1,      // a process ended without a word
  LEFT = 2,      // a rank closed its end
  FAILED = 3,    // a rank raised an error, and takes no further part
  TIMED_OUT = 4,
  MISMATCH = 5,  // two ranks called different operations
};

enum State : uint32_t { ABSENT = 0, JOINED = 1, GONE = 2, BROKEN = 3 };

// One participant's line: written by it alone, but for `sleepers`.
struct alignas(LINE) Line {
  std::atomic<uint32_t> counter;   // what others wait for; wraps around
  std::atomic<uint32_t> sleepers;  // how many sleep on it
  std::atomic<uint32_t> state;
  std::atomic<int32_t> pid;
  uint64_t calls[2];  // what the last two rounds are of (group.cpp)
};
static_assert(sizeof(Line) == LINE);
static_assert(std::atomic<uint32_t>::is_always_lock_free);

int64_t now_ns();

// Makes a line this process's own; false, with errno EBUSY, if it is or was another's.
bool claim(Line& line);

// Sets a counter, and wakes who sleeps on it. What was written before is seen by who reads the new value.
void advance(Line& line, uint32_t value);

// True if a counter has come to a value, or beyond: they wrap around.
inline bool reached(const Line& line, uint32_t value) {
  return static_cast<int32_t>(line.counter.load(std::memory_order_acquire) - value) >= 0;
}

struct Patience {
  int64_t spin_ns;     // before sleeping
  int64_t timeout_ns;  // in all; negative: for ever
};

struct Outcome {
  Status status;
  int32_t culprit;  // index of a line, or -1
};

// The processes behind some lines.
class Processes {
 public:
  Processes(Line* lines, int32_t count);
  ~Processes();
  // Hold on to all that have joined: a number may be another process's once its owner is gone.
  void watch();
  // The first that is not at a value and will not come to it, with the reason.
  Outcome missing(uint32_t value);

 private:
  bool dead(int32_t index);
  Line* lines_;
  int32_t count_;
  int* descriptors_;  // pidfds; -1 until needed
};

// Waits until lines[index] has come to a value, or one of the lines will not.
Outcome wait_for(Line* lines, int32_t index, uint32_t value, Processes& processes,
                 const Patience& patience);

}  // namespace headrace

#define HR_EXPORT extern "C" __attribute__((visibility("default")))

#include "waiting.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <ctime>
#include <utility>
#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

namespace headrace {
namespace {

constexpr int64_t LOOK_NS = 100'000'000;  // how often a sleeper looks whether others live
constexpr int SPINS_A_LOOK = 64;          // between two readings of the clock

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void sleep_on(std::atomic<uint32_t>& word, uint32_t seen, int64_t ns) {
  timespec time{static_cast<time_t>(ns / 1'000'000'000), static_cast<long>(ns % 1'000'000'000)};
  // Not FUTEX_PRIVATE: the word is shared between processes.
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &time, nullptr, 0);
}

}  // namespace

int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000LL + time.tv_nsec;
}

bool claim(Line& line) {
  uint32_t absent = ABSENT;
  // The number comes before the state for whoever looks whether the process lives.
  int32_t nobody = 0;
  if (!line.pid.compare_exchange_strong(nobody, getpid()) ||
      !line.state.compare_exchange_strong(absent, JOINED)) {
    errno = EBUSY;
    return false;
  }
  return true;
}

void advance(Line& line, uint32_t value) {
  // Both sequentially consistent: a sleeper counts itself before it compares, so one of the two sees the
  // other.
  line.counter.store(value, std::memory_order_seq_cst);
  if (line.sleepers.load(std::memory_order_seq_cst) != 0)
    syscall(SYS_futex, &line.counter, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

Processes::Processes(Line* lines, int32_t count)
    : lines_(lines), count_(count), descriptors_(new int[count]) {
  for (int32_t i = 0; i < count; ++i) descriptors_[i] = -1;
}

Processes::~Processes() {
  for (int32_t i = 0; i < count_; ++i)
    if (descriptors_[i] >= 0) close(descriptors_[i]);
  delete[] descriptors_;
}

bool Processes::dead(int32_t index) {
  const int32_t pid = lines_[index].pid.load(std::memory_order_acquire);
  if (pid <= 0) return false;
  int& descriptor = descriptors_[index];
  if (descriptor < 0) {
    descriptor = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
    if (descriptor < 0) return kill(pid, 0) != 0 && errno == ESRCH;  // also of kernels before 5.3
  }
  pollfd one{descriptor, POLLIN, 0};
  return poll(&one, 1, 0) > 0;
}

void Processes::watch() {
  for (int32_t i = 0; i < count_; ++i) dead(i);
}

Outcome Processes::missing(uint32_t value) {
  // Who is dead comes first: others withdraw because of it.
  for (int32_t i = 0; i < count_; ++i) {
    const Line& line = lines_[i];
    if (line.state.load(std::memory_order_acquire) == JOINED && !reached(line, value) && dead(i) &&
        !reached(line, value))
      return {DIED, i};
  }
  for (const auto& [state, status] : {std::pair{GONE, LEFT}, std::pair{BROKEN, FAILED}})
    for (int32_t i = 0; i < count_; ++i)
      if (lines_[i].state.load(std::memory_order_acquire) == state && !reached(lines_[i], value))
        return {status, i};
  return {OK, -1};
}

Outcome wait_for(Line* lines, int32_t index, uint32_t value, Processes& processes,
                 const Patience& patience) {
  Line& line = lines[index];
  if (reached(line, value)) return {OK, -1};
  const int64_t start = now_ns();
  do {
    for (int i = 0; i < SPINS_A_LOOK; ++i) {
      if (reached(line, value)) return {OK, -1};
      pause();
    }
  } while (now_ns() - start < patience.spin_ns);

  line.sleepers.fetch_add(1, std::memory_order_seq_cst);
  Outcome outcome{OK, -1};
  for (;;) {
    const uint32_t seen = line.counter.load(std::memory_order_seq_cst);
    if (static_cast<int32_t>(seen - value) >= 0) {
      outcome = {OK, -1};
      break;
    }
    if (outcome.status != OK) break;
    int64_t left = LOOK_NS;
    if (patience.timeout_ns >= 0) left = std::min(left, patience.timeout_ns - (now_ns() - start));
    if (left > 0) sleep_on(line.counter, seen, left);
    outcome = processes.missing(value);
    if (outcome.status == OK && left <= 0) outcome = {TIMED_OUT, index};
  }
  line.sleepers.fetch_sub(1, std::memory_order_seq_cst);
  return outcome;
}

}  // namespace headrace

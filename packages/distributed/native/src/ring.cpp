// Messages from one process to several through shared memory, in order, each to all.
//
// The segment is a line for the writer, one for each reader (waiting.h), and a ring of bytes. Counters
// count lines of 64 bytes, and wrap around with their 32 bits; they begin at 1, so that of a reader that
// has not joined is 0. A message is its length in 8 bytes and its content, padded to whole lines. The
// writer may be `capacity` lines ahead of the slowest reader. A message that is larger than the ring goes
// through it in pieces, which readers take while the writer writes.
#include <algorithm>
#include <cstring>
#include <new>
#include <sys/mman.h>
#include <unistd.h>

#include "waiting.h"

namespace headrace {
namespace {

uint32_t lines_of(int64_t length) { return static_cast<uint32_t>((8 + length + LINE - 1) / LINE); }

class Ring {
 public:
  Ring(void* segment, int64_t bytes, int32_t num_readers, uint32_t capacity, Line& own, Line* others,
       int32_t num_others, int64_t spin_ns)
      : spin_ns_(spin_ns), segment_(segment), bytes_(bytes), own_(own), others_(others),
        num_others_(num_others), capacity_(capacity), processes_(others, num_others),
        data_(static_cast<char*>(segment) + (1 + num_readers) * LINE) {
    advance(own_, 1);
    processes_.watch();
  }

  ~Ring() {
    if (own_.state.load() != BROKEN) own_.state.store(GONE);
    advance(own_, own_.counter.load());
    munmap(segment_, bytes_);
  }

  int32_t culprit() const { return outcome_.culprit; }

 protected:
  int32_t wait(int32_t other, uint32_t value, int64_t timeout_ns) {
    return (outcome_ = wait_for(others_, other, value, processes_, {spin_ns_, timeout_ns})).status;
  }

  // Copies between the ring, from a byte of it on, and other memory.
  void put(uint64_t at, const char* from, int64_t count) {
    const int64_t size = int64_t(capacity_) * LINE, first = std::min<int64_t>(size - at % size, count);
    std::memcpy(data_ + at % size, from, first);
    std::memcpy(data_, from + first, count - first);
  }
  void get(uint64_t at, char* to, int64_t count) const {
    const int64_t size = int64_t(capacity_) * LINE, first = std::min<int64_t>(size - at % size, count);
    std::memcpy(to, data_ + at % size, first);
    std::memcpy(to + first, data_, count - first);
  }

  int64_t spin_ns_;
  void* segment_;
  int64_t bytes_;
  Line& own_;
  Line* others_;
  int32_t num_others_;
  uint32_t capacity_;
  Processes processes_;
  char* data_;
  Outcome outcome_{OK, -1};
};

class Writer : public Ring {
 public:
  using Ring::Ring;

  int32_t send(const char* data, int64_t length, int64_t timeout_ns) {
    uint32_t left = lines_of(length);
    // A message that fits is written once there is room for all of it: a timeout leaves nothing behind.
    if (left <= capacity_ && !room(left, timeout_ns)) return outcome_.status;
    int64_t done = -8;  // the length comes first
    while (left > 0) {
      if (!room(1, timeout_ns)) return broken();
      const uint32_t now = std::min(left, free());
      int64_t bytes = int64_t(now) * LINE;
      uint64_t at = uint64_t(head() % capacity_) * LINE;
      if (done < 0) {
        put(at, reinterpret_cast<const char*>(&length), 8);
        at += 8, bytes -= 8, done = 0;
      }
      bytes = std::min(bytes, length - done);
      put(at, data + done, bytes);
      done += bytes, left -= now;
      advance(own_, head() + now);
    }
    return OK;
  }

  // Waits until all readers have joined.
  int32_t join(int64_t timeout_ns) {
    for (int32_t i = 0; i < num_others_; ++i)
      if (wait(i, 1, timeout_ns) != OK) break;
    return outcome_.status;
  }

  // Outcome of looking at the readers without waiting.
  int32_t look() { return (outcome_ = processes_.missing(head() + 1)).status; }

 private:
  uint32_t head() const { return own_.counter.load(std::memory_order_relaxed); }

  uint32_t free() const {
    uint32_t used = 0;
    for (int32_t i = 0; i < num_others_; ++i)
      used = std::max(used, head() - others_[i].counter.load(std::memory_order_acquire));
    return capacity_ - used;
  }

  bool room(uint32_t wanted, int64_t timeout_ns) {
    if (free() >= wanted) return true;
    for (int32_t i = 0; i < num_others_; ++i)
      if (wait(i, head() + wanted - capacity_, timeout_ns) != OK) return false;
    return true;
  }

  // Half a message is in the ring, and the rest will not follow.
  int32_t broken() {
    own_.state.store(BROKEN, std::memory_order_release);
    advance(own_, head());
    return outcome_.status;
  }
};

class Reader : public Ring {
 public:
  using Ring::Ring;

  // The length of the next message, waited for; a timeout leaves everything as it was.
  int32_t next(int64_t* length, int64_t timeout_ns) {
    if (wait(0, tail() + 1, timeout_ns) != OK) return outcome_.status;
    get(uint64_t(tail() % capacity_) * LINE, reinterpret_cast<char*>(length), 8);
    return OK;
  }

  // The next message, whose length is known.
  int32_t take(char* to, int64_t length, int64_t timeout_ns) {
    uint32_t left = lines_of(length);
    int64_t done = -8;
    while (left > 0) {
      if (wait(0, tail() + 1, timeout_ns) != OK) return outcome_.status;
      const uint32_t there = others_[0].counter.load(std::memory_order_acquire) - tail();
      const uint32_t now = std::min(left, there);
      int64_t bytes = int64_t(now) * LINE;
      uint64_t at = uint64_t(tail() % capacity_) * LINE;
      if (done < 0) at += 8, bytes -= 8, done = 0;
      bytes = std::min(bytes, length - done);
      get(at, to + done, bytes);
      done += bytes, left -= now;
      advance(own_, tail() + now);
    }
    return OK;
  }

 private:
  uint32_t tail() const { return own_.counter.load(std::memory_order_relaxed); }
};

}  // namespace

// Changes with any function here or in group.cpp: a library of other sources is told by it.
HR_EXPORT int32_t hr_shm_interface() { return 2; }

HR_EXPORT int64_t hr_ring_bytes(int32_t num_readers, int64_t capacity_bytes) {
  return (1 + num_readers) * LINE + capacity_bytes;
}

// `reader` is -1 for the writer. capacity_bytes is a power of two of 64 or more. Null, and errno, if the
// segment cannot be mapped or the end is another's.
HR_EXPORT void* hr_ring_open(int32_t descriptor, int32_t reader, int32_t num_readers,
                             int64_t capacity_bytes, int64_t spin_ns) {
  const int64_t bytes = hr_ring_bytes(num_readers, capacity_bytes);
  void* segment = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (segment == MAP_FAILED) return nullptr;
  Line* lines = static_cast<Line*>(segment);
  if (!claim(lines[1 + reader])) {
    munmap(segment, bytes);
    return nullptr;
  }
  const uint32_t capacity = static_cast<uint32_t>(capacity_bytes / LINE);
  if (reader < 0)
    return new (std::nothrow)
        Writer(segment, bytes, num_readers, capacity, lines[0], lines + 1, num_readers, spin_ns);
  return new (std::nothrow)
      Reader(segment, bytes, num_readers, capacity, lines[1 + reader], lines, 1, spin_ns);
}

HR_EXPORT int32_t hr_ring_send(void* ring, const void* data, int64_t length, int64_t timeout_ns) {
  return static_cast<Writer*>(ring)->send(static_cast<const char*>(data), length, timeout_ns);
}
HR_EXPORT int32_t hr_ring_join(void* ring, int64_t timeout_ns) {
  return static_cast<Writer*>(ring)->join(timeout_ns);
}
HR_EXPORT int32_t hr_ring_look(void* ring) { return static_cast<Writer*>(ring)->look(); }
HR_EXPORT int32_t hr_ring_next(void* ring, int64_t* length, int64_t timeout_ns) {
  return static_cast<Reader*>(ring)->next(length, timeout_ns);
}
HR_EXPORT int32_t hr_ring_take(void* ring, void* to, int64_t length, int64_t timeout_ns) {
  return static_cast<Reader*>(ring)->take(static_cast<char*>(to), length, timeout_ns);
}
HR_EXPORT int32_t hr_ring_culprit(void* ring) { return static_cast<Ring*>(ring)->culprit(); }
HR_EXPORT void hr_ring_close_writer(void* ring) { delete static_cast<Writer*>(ring); }
HR_EXPORT void hr_ring_close_reader(void* ring) { delete static_cast<Reader*>(ring); }

}  // namespace headrace

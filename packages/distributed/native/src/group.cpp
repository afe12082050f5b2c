// Collective operations of ranks that share a segment of memory.
//
// The segment is a line for each rank (waiting.h), then two slots for each. Every operation is a sequence
// of rounds. In round s a rank writes into its slot s % 2, advances its counter to s, waits until every
// counter is at s, and reads the others' slots s % 2. Nobody has to say that he has read: a rank writes
// slot s % 2 again in round s + 2, after all counters were at s + 1, and who is at s + 1 has done with
// reading in round s.
#include <cstring>
#include <new>
#include <sys/mman.h>
#include <unistd.h>

#include "sums.h"
#include "waiting.h"

namespace headrace {
namespace {

constexpr int32_t MOST_RANKS = 64;
constexpr int64_t HEAD = 4096;  // bytes of the lines, MOST_RANKS of 64

enum Call : uint64_t { JOIN = 1, BARRIER, ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST };

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

class Group {
 public:
  Group(void* segment, int64_t bytes, int32_t rank, int32_t world_size, int64_t slot_bytes,
        int64_t one_round_bytes, Patience patience)
      : lines_(static_cast<Line*>(segment)), segment_(segment), bytes_(bytes), rank_(rank),
        world_size_(world_size), slot_bytes_(slot_bytes), one_round_bytes_(one_round_bytes),
        patience_(patience), processes_(lines_, world_size) {
    std::memset(slot(rank_, 0), 0, 2 * slot_bytes_);  // pages of its own, and not in the first operation
  }

  ~Group() {
    Line& own = lines_[rank_];
    if (own.state.load() == JOINED) own.state.store(outcome_.status == OK ? GONE : BROKEN);
    wake(own);
    munmap(segment_, bytes_);
  }

  int32_t join() {
    if (!begin(JOIN, 0, 0) || !all_have_come()) return outcome_.status;
    processes_.watch();
    return OK;
  }

  int32_t barrier() {
    if (begin(BARRIER, 0, 0)) all_have_come();
    return outcome_.status;
  }

  int32_t all_reduce(void* data, int64_t count, int32_t dtype) {
    const int64_t size = size_of(dtype), bytes = count * size;
    char* at = static_cast<char*>(data);
    const int64_t step = slot_bytes_ / size;
    for (int64_t start = 0; start < count && outcome_.status == OK; start += step) {
      const int64_t now = least(step, count - start);
      const auto piece = now * size <= one_round_bytes_ ? &Group::reduce_whole : &Group::reduce_parts;
      (this->*piece)(at + start * size, now, dtype, bytes);
    }
    return outcome_.status;
  }

  // `in` has world_size tensors of `count`, one for each rank; `out` gets the sum of this rank's.
  int32_t reduce_scatter(const void* in, void* out, int64_t count, int32_t dtype) {
    const int64_t size = size_of(dtype), step = slot_bytes_ / size / world_size_ & ~int64_t(31);
    const void* parts[MOST_RANKS];
    for (int64_t start = 0; start < count; start += step) {
      const int64_t now = least(step, count - start);
      for (int32_t r = 0; r < world_size_; ++r)
        std::memcpy(slot(rank_, next()) + r * step * size,
                    static_cast<const char*>(in) + (r * count + start) * size, now * size);
      if (!begin(REDUCE_SCATTER, dtype, count) || !all_have_come()) break;
      for (int32_t r = 0; r < world_size_; ++r) parts[r] = slot(r, round_) + rank_ * step * size;
      sum(static_cast<char*>(out) + start * size, parts, world_size_, now, dtype);
    }
    return outcome_.status;
  }

  // `in` is [outer, inner] bytes, `out` is [outer, world_size, inner].
  int32_t all_gather(const void* in, void* out, int64_t outer, int64_t inner) {
    const int64_t bytes = outer * inner;
    for (int64_t start = 0; start < bytes; start += slot_bytes_) {
      const int64_t now = least(slot_bytes_, bytes - start);
      std::memcpy(slot(rank_, next()), static_cast<const char*>(in) + start, now);
      if (!begin(ALL_GATHER, 0, bytes) || !all_have_come()) break;
      for (int32_t r = 0; r < world_size_; ++r)
        place(static_cast<char*>(out) + r * inner, slot(r, round_), start, now, inner);
    }
    return outcome_.status;
  }

  int32_t broadcast(void* data, int64_t bytes, int32_t source) {
    for (int64_t start = 0; start < bytes; start += slot_bytes_) {
      const int64_t now = least(slot_bytes_, bytes - start);
      char* at = static_cast<char*>(data) + start;
      if (rank_ == source) std::memcpy(slot(rank_, next()), at, now);
      if (!begin(BROADCAST, source, bytes) || !all_have_come()) break;
      if (rank_ != source) std::memcpy(at, slot(source, round_), now);
    }
    return outcome_.status;
  }

  int32_t culprit() const { return outcome_.culprit; }
  uint64_t call_of(int32_t rank) const { return lines_[rank].calls[round_ % 2]; }

 private:
  // Every rank adds up everything: one round, each byte read by each rank.
  void reduce_whole(char* at, int64_t count, int32_t dtype, int64_t bytes) {
    const void* parts[MOST_RANKS];
    std::memcpy(slot(rank_, next()), at, count * size_of(dtype));
    if (!begin(ALL_REDUCE, dtype, bytes) || !all_have_come()) return;
    for (int32_t r = 0; r < world_size_; ++r) parts[r] = slot(r, round_);
    sum(at, parts, world_size_, count, dtype);
  }

  // Every rank adds up its part, and then reads the others': two rounds.
  void reduce_parts(char* at, int64_t count, int32_t dtype, int64_t bytes) {
    const int64_t size = size_of(dtype), line = LINE / size;
    const int64_t share = ((count + world_size_ - 1) / world_size_ + line - 1) / line * line;
    const void* parts[MOST_RANKS];
    std::memcpy(slot(rank_, next()), at, count * size);
    if (!begin(ALL_REDUCE, dtype, bytes) || !all_have_come()) return;
    const int64_t first = least(rank_ * share, count), own = least(share, count - first);
    for (int32_t r = 0; r < world_size_; ++r) parts[r] = slot(r, round_) + first * size;
    sum(slot(rank_, next()) + first * size, parts, world_size_, own, dtype);
    if (!begin(ALL_REDUCE, dtype, bytes)) return;
    for (int32_t step = 0; step < world_size_; ++step) {
      const int32_t r = (rank_ + step) % world_size_;  // not all from the same at once
      if (!has_come(r)) return;
      const int64_t from = least(r * share, count), now = least(share, count - from);
      std::memcpy(at + from * size, slot(r, round_) + from * size, now * size);
    }
  }

  // Bytes [start, start + count) of [outer, inner] to their rows, which lie world_size * inner apart.
  void place(char* out, const char* from, int64_t start, int64_t count, int64_t inner) const {
    while (count > 0) {
      const int64_t row = start / inner, column = start % inner, now = least(inner - column, count);
      std::memcpy(out + row * world_size_ * inner + column, from, now);
      from += now, start += now, count -= now;
    }
  }

  uint32_t next() const { return round_ + 1; }

  char* slot(int32_t rank, uint32_t round) const {
    return static_cast<char*>(segment_) + HEAD + (2 * rank + round % 2) * slot_bytes_;
  }

  // Begins a round: what this rank has written is there for the others.
  bool begin(uint64_t call, uint64_t detail, uint64_t size) {
    if (outcome_.status != OK) return false;  // for good: the ranks no longer agree on what is next
    ++round_;
    lines_[rank_].calls[round_ % 2] = call << 56 | (detail & 0xff) << 48 | (size & 0xffffffffffff);
    advance(lines_[rank_], round_);
    return true;
  }

  bool has_come(int32_t rank) {
    outcome_ = wait_for(lines_, rank, round_, processes_, patience_);
    if (outcome_.status == OK && lines_[rank].calls[round_ % 2] != lines_[rank_].calls[round_ % 2])
      outcome_ = {MISMATCH, rank};
    if (outcome_.status != OK) {
      lines_[rank_].state.store(BROKEN, std::memory_order_release);
      wake(lines_[rank_]);
    }
    return outcome_.status == OK;
  }

  bool all_have_come() {
    for (int32_t r = 0; r < world_size_; ++r)
      if (!has_come(r)) return false;
    return true;
  }

  // Whoever sleeps on a line looks at its state when it wakes.
  static void wake(Line& line) { advance(line, line.counter.load()); }

  Line* lines_;
  void* segment_;
  int64_t bytes_;
  int32_t rank_, world_size_;
  int64_t slot_bytes_, one_round_bytes_;
  Patience patience_;
  Processes processes_;
  uint32_t round_ = 0;
  Outcome outcome_{OK, -1};
};

// The arguments of a call in an array of words, as recorded steps have them.
union Word {
  int64_t integer;
  void* pointer;
};

}  // namespace

HR_EXPORT int64_t hr_group_bytes(int32_t world_size, int64_t slot_bytes) {
  return HEAD + 2 * world_size * slot_bytes;
}

HR_EXPORT int32_t hr_group_most_ranks() { return MOST_RANKS; }

// Null, and errno, if the segment cannot be mapped or the rank is another process's. slot_bytes is a
// multiple of 4096.
HR_EXPORT void* hr_group_open(int32_t descriptor, int32_t rank, int32_t world_size, int64_t slot_bytes,
                              int64_t one_round_bytes, int64_t spin_ns, int64_t timeout_ns) {
  const int64_t bytes = hr_group_bytes(world_size, slot_bytes);
  void* segment = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (segment == MAP_FAILED) return nullptr;
  if (!claim(static_cast<Line*>(segment)[rank])) {
    munmap(segment, bytes);
    return nullptr;
  }
  const int64_t one_round = one_round_bytes < slot_bytes ? one_round_bytes : slot_bytes;
  return new (std::nothrow) Group(segment, bytes, rank, world_size, slot_bytes, one_round,
                                  Patience{spin_ns, timeout_ns});
}

HR_EXPORT void hr_group_close(void* group) { delete static_cast<Group*>(group); }
HR_EXPORT int32_t hr_group_culprit(void* group) { return static_cast<Group*>(group)->culprit(); }
HR_EXPORT uint64_t hr_group_call_of(void* group, int32_t rank) {
  return static_cast<Group*>(group)->call_of(rank);
}
HR_EXPORT int32_t hr_group_join(void* group) { return static_cast<Group*>(group)->join(); }
HR_EXPORT int32_t hr_group_barrier(void* group) { return static_cast<Group*>(group)->barrier(); }
HR_EXPORT int32_t hr_group_all_reduce(void* group, void* data, int64_t count, int32_t dtype) {
  return static_cast<Group*>(group)->all_reduce(data, count, dtype);
}
HR_EXPORT int32_t hr_group_reduce_scatter(void* group, const void* in, void* out, int64_t count,
                                          int32_t dtype) {
  return static_cast<Group*>(group)->reduce_scatter(in, out, count, dtype);
}
HR_EXPORT int32_t hr_group_all_gather(void* group, const void* in, void* out, int64_t outer,
                                      int64_t inner) {
  return static_cast<Group*>(group)->all_gather(in, out, outer, inner);
}
HR_EXPORT int32_t hr_group_broadcast(void* group, void* data, int64_t bytes, int32_t source) {
  return static_cast<Group*>(group)->broadcast(data, bytes, source);
}

// The same with their arguments in words.
HR_EXPORT int32_t hr_group_all_reduce_packed(const Word* w) {
  return hr_group_all_reduce(w[0].pointer, w[1].pointer, w[2].integer, int32_t(w[3].integer));
}
HR_EXPORT int32_t hr_group_reduce_scatter_packed(const Word* w) {
  return hr_group_reduce_scatter(w[0].pointer, w[1].pointer, w[2].pointer, w[3].integer,
                                 int32_t(w[4].integer));
}
HR_EXPORT int32_t hr_group_all_gather_packed(const Word* w) {
  return hr_group_all_gather(w[0].pointer, w[1].pointer, w[2].pointer, w[3].integer, w[4].integer);
}
HR_EXPORT int32_t hr_group_broadcast_packed(const Word* w) {
  return hr_group_broadcast(w[0].pointer, w[1].pointer, w[2].integer, int32_t(w[3].integer));
}

}  // namespace headrace

// Runs a recorded sequence of kernel calls.
//
// A recording is an array of calls and the words that are their arguments. Words that depend on
// the step (addresses of its inputs, row counts) are patched first, from the step's values.

#include <atomic>
#include <chrono>
#include <thread>

#include "common.h"

#define HR_EXPORT extern "C" __attribute__((visibility("default")))

namespace headrace {

// One call: which kernel, and where its arguments begin. Layout as in graph_program.py.
struct Call {
  PackedFunction run;
  int64_t first_word;
};

// words[word] = values[value] * factor + offset
struct Patch {
  int64_t word, value, factor, offset;
};

// A program for one thread: its words are in that thread's memory.
struct Program {
  const Call* calls;
  int64_t count;
  Word* words;
  const Patch* patches;
  int64_t num_patches;
  int64_t* ends = nullptr;      // [count + 1], when the run began and each call ended, in nanoseconds; null = unwanted

  // Returns how many calls succeeded: `count`, or the index of the one that failed, its status in
  // *status. Later calls are then not made.
  int64_t run(const int64_t* values, int32_t* status) const {
    for (int64_t i = 0; i < num_patches; ++i) {
      const Patch& p = patches[i];
      words[p.word].integer = values[p.value] * p.factor + p.offset;
    }
    note_time(0);
    for (int64_t i = 0; i < count; ++i) {
      *status = calls[i].run(words + calls[i].first_word);
      if (*status != OK) return i;
      note_time(i + 1);
    }
    return count;
  }

  void note_time(int64_t i) const {
    if (ends == nullptr) return;
    ends[i] = std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
};

// Which of the lanes nobody uses: bits of one word.
class FreeLanes {
 public:
  explicit FreeLanes(int64_t count) : free_(count >= 64 ? ~uint64_t(0) : (uint64_t(1) << count) - 1) {}

  int take() {
    for (uint64_t free = free_.load();;) {
      if (free == 0) {  // more threads than lanes: the pool has grown
        std::this_thread::yield();
        free = free_.load();
      } else if (free_.compare_exchange_weak(free, free & (free - 1))) {
        return __builtin_ctzll(free);
      }
    }
  }

  void give_back(int lane) { free_.fetch_or(uint64_t(1) << lane); }

 private:
  std::atomic<uint64_t> free_;
};

// A program's runs for the parts of a step.
struct Parts {
  const Call* calls;
  int64_t count;
  Word* const* words;
  const Patch* patches;
  int64_t num_patches;
  const int64_t* values;
  int64_t num_values, num_parts;
  int64_t* done;
  int32_t* status;
  FreeLanes lanes;
  bool begun = false;

  void run(int64_t part) {
    const Alone alone;
    const int lane = lanes.take();
    const Program program{calls, count, words[lane], patches, num_patches};
    done[part] = program.run(values + part * num_values, status + part);
    lanes.give_back(lane);
  }

  static void task(void* context, int64_t part) { static_cast<Parts*>(context)->run(part); }
};

}  // namespace headrace

// Runs a program once. Returns as Program::run. ends: see Program.
HR_EXPORT int64_t hr_replay(const headrace::Call* calls, int64_t count, headrace::Word* words,
                            const headrace::Patch* patches, int64_t num_patches,
                            const int64_t* values, int32_t* status, int64_t* ends) {
  const headrace::Burst burst;
  return headrace::Program{calls, count, words, patches, num_patches, ends}.run(values, status);
}

// Runs a program for each part of a step, parts side by side, each by one thread from the first call to
// the last. The other threads begin at once; the caller may do something else, and takes part in
// hr_end_parts, which every job must be given to, by the thread that began it.
//
// words[lane], for lane < num_lanes <= 64, are instances of the program's words, each with memory of its
// own. The parts' values stand in rows of num_values. What Program::run says of a part goes to done[part]
// and status[part]. All arrays must stay until the end.
HR_EXPORT headrace::Parts* hr_begin_parts(const headrace::Call* calls, int64_t count,
                                          headrace::Word* const* words, int64_t num_lanes,
                                          const headrace::Patch* patches, int64_t num_patches,
                                          const int64_t* values, int64_t num_values,
                                          int64_t num_parts, int64_t* done, int32_t* status) {
  using headrace::Parts;
  Parts* const parts = new Parts{calls, count, words, patches, num_patches, values, num_values,
                                 num_parts, done, status, headrace::FreeLanes(num_lanes)};
  parts->begun = headrace::begin_parallel(num_parts, Parts::task, parts);
  return parts;
}

HR_EXPORT void hr_end_parts(headrace::Parts* parts) {
  if (parts->begun) {
    headrace::end_parallel();
  } else {
    for (int64_t part = 0; part < parts->num_parts; ++part) parts->run(part);
  }
  delete parts;
}

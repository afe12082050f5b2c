// Runs a recorded sequence of kernel calls.
//
// A recording is an array of calls and the words that are their arguments. Words that depend on
// the step (addresses of its inputs, row counts) are patched first, from the step's values.

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

}  // namespace headrace

// Returns how many calls succeeded: `count`, or the index of the one that failed, its status in
// *status. Later calls are then not made.
HR_EXPORT int64_t hr_replay(const headrace::Call* calls, int64_t count, headrace::Word* words,
                            const headrace::Patch* patches, int64_t num_patches,
                            const int64_t* values, int32_t* status) {
  const headrace::Burst burst;
  for (int64_t i = 0; i < num_patches; ++i) {
    const headrace::Patch& p = patches[i];
    words[p.word].integer = values[p.value] * p.factor + p.offset;
  }
  for (int64_t i = 0; i < count; ++i) {
    *status = calls[i].run(words + calls[i].first_word);
    if (*status != headrace::OK) return i;
  }
  return count;
}

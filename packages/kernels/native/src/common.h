// What every translation unit knows. Declarations only: anything defined inline here could be
// emitted with one instruction set and picked by the linker for another.
#pragma once

#include <cstddef>
#include <cstdint>

namespace headrace {

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

// Codes of the C ABI; the order is that of DTYPES in library.py.
enum DType : int32_t { F32 = 0, BF16 = 1, F16 = 2 };

// The order is that of headrace_core.ops.GATED_ACTIVATIONS; the last is only a gate.
enum Activation : int32_t { SILU = 0, GELU = 1, GELU_TANH = 2, RELU = 3, RELU2 = 4, CLAMPED_SWIGLU = 5 };

// The order is that of headrace_core.ops.SCORINGS.
enum Scoring : int32_t { SOFTMAX = 0, SIGMOID = 1, SPARSEMIXER = 2 };

// What kernels return. A kernel that meets a bad index skips it, goes on and reports; bad lengths
// stop it before it begins. One that is given values which are no numbers finishes and reports.
enum Status : int32_t { OK = 0, BAD_INDEX = 1, BAD_LENGTHS = 2, BAD_VALUES = 3 };

// One argument of a recorded call, see packed.h.
union Word { int64_t integer; const void* pointer; double real; };
using PackedFunction = int32_t (*)(const Word*);

// One kernel of one instruction set, plain and with its arguments in words. The signature has a letter
// for the result and one for each argument, as in library.py, which compares them.
struct Entry { const char* name; void* function; PackedFunction packed; const char* signature; };

// --- library.cpp ------------------------------------------------------------------------------

// Whether one stream that a thread reads in order comes as fast as the memory gives it. Asking for several ahead then
// costs more than it brings: AMD's first cache holds no chunk of side_by_side.h beside what is being read.
extern const bool machine_reads_ahead;

// --- pool.cpp ---------------------------------------------------------------------------------

using Task = void (*)(void* context, int64_t index);

// Runs task(context, i) for all i < count, in any order, on all threads; returns when all are done.
void run_parallel(int64_t count, Task task, void* context);

// The same in two halves: the others begin at once; the caller is free until end_parallel, works alone
// meanwhile, and takes part from then on. False: nobody begins, as they are at work for somebody else, or
// there is nobody; then nothing is to be ended.
bool begin_parallel(int64_t count, Task task, void* context);
void end_parallel();

// 1 for a thread that works alone.
int pool_size();

// While one lives, its thread runs what it would share with the others by itself.
class Alone {
 public:
  Alone();
  ~Alone();
  Alone(const Alone&) = delete;

 private:
  const bool before_;
};

// While one lives, threads that wait for work stay awake: to wake one takes as long as a small kernel.
struct Burst {
  Burst();
  ~Burst();
  Burst(const Burst&) = delete;
};

// A buffer of this thread, 64-byte aligned, content undefined; valid until the next request for
// the same slot. Callers own slot 0 and up; tasks own SCRATCH_TASK.
enum ScratchSlot { SCRATCH_A, SCRATCH_B, SCRATCH_C, SCRATCH_D, SCRATCH_TASK, SCRATCH_SLOTS };
void* scratch(ScratchSlot slot, size_t bytes);

}  // namespace headrace

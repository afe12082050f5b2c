// The C ABI: which instruction sets this library and this machine have, and where kernels are.

#include <cstring>

#if defined(HR_AVX512AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "common.h"

#define HR_EXPORT extern "C" __attribute__((visibility("default")))

namespace headrace {

namespace {
bool made_by_amd() {
#ifdef HR_X86
  __builtin_cpu_init();  // as this runs while the library is loaded
  return __builtin_cpu_is("amd");
#else
  return false;
#endif
}
}  // namespace

const bool machine_reads_ahead = made_by_amd();

namespace portable { extern const Entry entries[]; }
#ifdef HR_X86
namespace avx2 { extern const Entry entries[]; }
namespace avx512 { extern const Entry entries[]; }
#ifdef HR_AVX512BF16
namespace avx512_bf16 { extern const Entry entries[]; }
#ifdef HR_AVX512AMX
namespace avx512_amx { extern const Entry entries[]; }
#endif
#endif
#endif

namespace {

struct Level {
  const char* name;
  bool (*runs_here)();
  const Entry* entries;
};

bool always() { return true; }
#ifdef HR_X86
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#ifdef HR_AVX512BF16
// Every machine so far that multiplies bfloat16 pairs multiplies bytes too; one that did not would
// get the level below.
bool has_avx512_bf16() {
  return has_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
}
#ifdef HR_AVX512AMX
// A process asks Linux once for the state of its tiles, which its threads then have.
bool may_use_tiles() {
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
}
bool has_avx512_amx() {
  constexpr unsigned PAIRS = 1u << 22, TILES = 1u << 24, BYTES = 1u << 25;
  unsigned a, b, c, d;
  if (!has_avx512_bf16() || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || (~d & (PAIRS | TILES | BYTES)) != 0) return false;
  static const bool may = may_use_tiles();
  return may;
}
#endif
#endif
#endif

// Best first. What a level has no kernel for, the next one does.
const Level LEVELS[] = {
#ifdef HR_X86
#ifdef HR_AVX512AMX
    {"avx512_amx", has_avx512_amx, avx512_amx::entries},
#endif
#ifdef HR_AVX512BF16
    {"avx512_bf16", has_avx512_bf16, avx512_bf16::entries},
#endif
    {"avx512", has_avx512, avx512::entries},
    {"avx2", has_avx2, avx2::entries},
#endif
    {"portable", always, portable::entries},
};

// A kernel of a level that this machine can run, nullptr if there is none.
const Entry* entry_of(const char* level_name, const char* kernel) {
  bool reached = false;
  for (const Level& level : LEVELS) {
    if (std::strcmp(level.name, level_name) == 0) {
      if (!level.runs_here()) return nullptr;
      reached = true;
    }
    if (!reached) continue;
    for (const Entry* e = level.entries; e->name != nullptr; ++e) {
      if (std::strcmp(e->name, kernel) == 0) return e;
    }
  }
  return nullptr;
}

}  // namespace
}  // namespace headrace

HR_EXPORT const char* hr_version() { return HEADRACE_VERSION; }

// Name of the i-th best level that this machine can run, nullptr after the last.
HR_EXPORT const char* hr_level(int32_t i) {
  for (const headrace::Level& level : headrace::LEVELS) {
    if (level.runs_here() && i-- == 0) return level.name;
  }
  return nullptr;
}

// Address of a kernel, nullptr if the level or the kernel is not there; with `packed` of its form
// that takes words (packed.h).
HR_EXPORT void* hr_kernel(const char* level_name, const char* kernel, int32_t packed) {
  const headrace::Entry* const e = headrace::entry_of(level_name, kernel);
  if (e == nullptr) return nullptr;
  return packed ? reinterpret_cast<void*>(e->packed) : e->function;
}

// Letters of a kernel's result and arguments; nullptr as above.
HR_EXPORT const char* hr_signature(const char* level_name, const char* kernel) {
  const headrace::Entry* const e = headrace::entry_of(level_name, kernel);
  return e == nullptr ? nullptr : e->signature;
}

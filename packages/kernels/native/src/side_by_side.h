// Memory that is read once and in order, fetched a chunk ahead as several streams side by side.
//
// A machine follows by itself what is read in order, but it keeps few lines of one stream on their way and
// stops at every page. Where memory is far, as on large servers, a thread that reads one stream gets little more
// than half of what the memory gives to several. So while a chunk is read, the one behind it is fetched in
// STREAMS parts at once, each as long as a page. Chunks lie at multiples of their size, so nothing need
// be known of where a stretch began; the last one of a stretch fetches what lies behind, which is read next or
// was not worth a condition. Machines that follow a stream well by themselves are left alone (common.h).

namespace headrace::HR_ISA {
namespace {

constexpr int64_t CHUNK_LINES = 512, STREAMS = 8;  // of 64 bytes: 32 KiB, and a page each

// To be called every LINES lines of what is read: fetches so many lines of the next chunk.
template <int64_t LINES> HR_INLINE inline void fetch_next_chunk(const void* reads) {
  if (machine_reads_ahead) return;
  constexpr int64_t PART = CHUNK_LINES / STREAMS;
  const uintptr_t line = reinterpret_cast<uintptr_t>(reads) / 64;
  const char* const next = reinterpret_cast<const char*>((line / CHUNK_LINES + 1) * CHUNK_LINES * 64);
  const int64_t at = int64_t(line % CHUNK_LINES);
  if constexpr (LINES % STREAMS == 0) {
    const char* const from = next + at / STREAMS * 64;
    HR_UNROLL for (int64_t i = 0; i < LINES; ++i) __builtin_prefetch(from + (i % STREAMS * PART + i / STREAMS) * 64);
  } else {
    HR_UNROLL for (int64_t i = at; i < at + LINES; ++i) {
      __builtin_prefetch(next + (i % STREAMS * PART + i / STREAMS % PART) * 64);
    }
  }
}

// How panels are divided among threads that take one run after the other: ever shorter runs, so that a thread
// reads long stretches, whose chunks it has fetched, and all end together.
struct ShorterRuns {
  int64_t panels, threads;
  // A run's first panel; of the run behind the last: `panels`.
  int64_t begin(int64_t run) const {
    int64_t at = 0;
    for (; run >= threads && size(at) > 1; run -= threads) at += threads * size(at);
    return min_of(panels, at + run * size(at));
  }
  int64_t count() const {
    int64_t at = 0, runs = 0;
    for (; size(at) > 1; runs += threads) at += threads * size(at);
    return runs + panels - at;
  }

 private:
  int64_t size(int64_t at) const { return max_of(1, (panels - at) / (2 * threads)); }
};

}  // namespace
}  // namespace headrace::HR_ISA

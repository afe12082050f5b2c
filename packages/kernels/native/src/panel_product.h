// Packed weights, and rows times them by vectors.
//
// Packing cuts a weight [N, K] into panels of PANEL output features (the last may be narrower, in
// steps of W). Inside a panel the order is k-major: for each k (each pair of k's where the machine
// multiplies bfloat16 pairs) the panel's features lie side by side, so a step of the kernel loads
// whole vectors of weights and broadcasts one activation.
//
// Row invariance: an output element is one running sum over k = 0, 1, 2, ... in one lane of one
// register. Tiles of rows, panels, threads and the cutting of K into pieces (the running sum rests
// in float32 scratch meanwhile) change where that sum lives, never its order.
//
// Memory: with few rows the weights' way from memory is the whole cost. With more, a piece of a panel
// is multiplied by one tile of rows after another from the second cache, and each tile fetches its
// share of the next piece meanwhile, so that reading and multiplying overlap; a task takes
// neighbouring panels, as what comes next is then known.
//
// Arithmetic by weight type: float32 and float16 weights, and bfloat16 ones without the pair
// instruction, are widened in registers and go through float32 multiply-add; with it, bfloat16 uses
// vdpbf16ps for every number of rows.

namespace headrace::HR_ISA {
namespace {

constexpr int MAX_VECTORS = 4;                 // vectors of output features in a panel
constexpr int PANEL = MAX_VECTORS * W;
constexpr int MAX_ROWS = 6;                    // rows of a register tile
#if defined(HR_AVX512)
constexpr int ACCUMULATORS = 24;               // of 32 registers
#else
constexpr int ACCUMULATORS = 12;               // of 16 registers
#endif
constexpr int64_t PIECE_BYTES = 128 << 10;     // of a panel: stays in the second cache
constexpr int64_t ROWS_PIECE = 192;            // rows of a task, whole tiles
constexpr int64_t RUNS = 8;                    // tasks for each thread: evens out what delays one
constexpr int UNROLL = 4;                      // steps of K between two fetches
constexpr int64_t PAIR_LINES = 3;              // that the second of two tiles fetches at a time

// How activations of type T meet weights of type WT: the type in which rows are read, and K's step.
template <class WT> struct ActivationTraits { using A = float; static constexpr int STEP = 1; };
#if defined(HR_DOT_BF16)
template <> struct ActivationTraits<bf16> { using A = bf16; static constexpr int STEP = 2; };
#endif

// What a tile fetches on its way: `lines` cache lines from `at` on after every UNROLL steps, or, if there is no
// `at`, as many lines behind what it reads as it reads itself.
struct Prefetch {
  const char* at;
  int64_t lines;
  void fetch() {
    for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(at + 64 * i, 0, 2);
    at += 64 * lines;
  }
  template <int64_t LINES> HR_INLINE void fetch_behind(const void* reads) {
    if (at == nullptr) fetch_next_chunk<LINES>(reads);
    else fetch();
  }
};

// Lines of V vectors in UNROLL steps.
template <int V, class WT> constexpr int64_t step_lines() {
  const int64_t bytes = UNROLL * ActivationTraits<WT>::STEP * V * W * int64_t(sizeof(WT));
  return bytes < 64 ? 1 : bytes / 64;
}

template <int R, int V, class WT>
inline void fma_step(const float* const* a, int64_t k, const WT* b, vf (&acc)[R][V]) {
  vf weights[V];
  HR_UNROLL for (int v = 0; v < V; ++v) weights[v] = ld(b + v * W);
  HR_UNROLL for (int r = 0; r < R; ++r) {
    const vf x = vset(a[r][k]);
    HR_UNROLL for (int v = 0; v < V; ++v) acc[r][v] = vfma(x, weights[v], acc[r][v]);
  }
}

// Sums of a tile that go on later, or are finished from scratch: [rows][PANEL] floats.
struct PartialSums {
  float* sums;
  template <int R, int V> HR_INLINE void operator()(int at, const vf (&acc)[R][V]) const {
    HR_UNROLL for (int r = 0; r < R; ++r)
      HR_UNROLL for (int v = 0; v < V; ++v) st(sums + r * PANEL + (at + v) * W, acc[r][v]);
  }
};

// What sums begin with: nothing, or what a piece of K before has left.
template <int R, int V> HR_INLINE inline void begin_tile(vf (&acc)[R][V], const float* rest, int at) {
  HR_UNROLL for (int r = 0; r < R; ++r)
    HR_UNROLL for (int v = 0; v < V; ++v)
      acc[r][v] = rest == nullptr ? vzero() : ld(rest + r * PANEL + (at + v) * W);
}

// keep(at, acc), acc[r][v] (+)= sum over k of a[r][k] * b[k][v]; b has `width` features for each k, and the
// tile's first vector is the panel's `at`-th.
template <int R, int V, class WT, class Epilogue>
inline void tile_fma(const float* const* a, int64_t count, const WT* b, int64_t width, const float* rest,
                     int at, Prefetch ahead, const Epilogue& keep) {
  vf acc[R][V];
  begin_tile(acc, rest, at);
  int64_t k = 0;
  for (; k + UNROLL <= count; k += UNROLL) {
    ahead.fetch_behind<step_lines<V, WT>()>(b);
    HR_UNROLL for (int u = 0; u < UNROLL; ++u, b += width) fma_step<R, V>(a, k + u, b, acc);
  }
  for (; k < count; ++k, b += width) fma_step<R, V>(a, k, b, acc);
  keep(at, acc);
}

#if defined(HR_DOT_BF16)
inline __m512bh pair_of(const bf16* p) {
  int32_t pair;
  __builtin_memcpy(&pair, p, 4);
  return (__m512bh)_mm512_set1_epi32(pair);
}
template <int R, int V>
inline void dot_step(const bf16* const* a, int64_t k, const bf16* b, vf (&acc)[R][V]) {
  __m512bh weights[V];
  HR_UNROLL for (int v = 0; v < V; ++v) weights[v] = (__m512bh)_mm512_loadu_si512(b + v * 2 * W);
  HR_UNROLL for (int r = 0; r < R; ++r) {
    const __m512bh x = pair_of(a[r] + k);
    HR_UNROLL for (int v = 0; v < V; ++v) acc[r][v] = _mm512_dpbf16_ps(acc[r][v], weights[v], x);
  }
}
template <int R, int V, class Epilogue>
inline void tile_dot(const bf16* const* a, int64_t count, const bf16* b, int64_t width, const float* rest,
                     int at, Prefetch ahead, const Epilogue& keep) {
  vf acc[R][V];
  begin_tile(acc, rest, at);
  int64_t k = 0;
  for (; k + 2 * UNROLL <= count; k += 2 * UNROLL) {
    ahead.fetch_behind<step_lines<V, bf16>()>(b);
    HR_UNROLL for (int u = 0; u < UNROLL; ++u, b += 2 * width) dot_step<R, V>(a, k + 2 * u, b, acc);
  }
  for (; k + 2 <= count; k += 2, b += 2 * width) dot_step<R, V>(a, k, b, acc);
  if (k < count) {  // an odd K: the packed weight ends in zeros, the row does not
    bf16 last[R][2];
    const bf16* lasts[R];
    HR_UNROLL for (int r = 0; r < R; ++r) { last[r][0] = a[r][k]; last[r][1] = bf16{0}; lasts[r] = last[r]; }
    dot_step<R, V>(lasts, 0, b, acc);
  }
  keep(at, acc);
}
#endif

template <int R, int V, class WT, class A, class Epilogue>
inline void tile_block(const A* const* a, int64_t count, const WT* b, int64_t width, const float* rest,
                       int at, Prefetch ahead, const Epilogue& keep) {
#if defined(HR_DOT_BF16)
  if constexpr (ActivationTraits<WT>::STEP == 2) {
    tile_dot<R, V>(a, count, b, width, rest, at, ahead, keep);
    return;
  } else
#endif
  tile_fma<R, V>(a, count, b, width, rest, at, ahead, keep);
}

// A register tile of R rows and V vectors; in halves where the accumulators do not fit.
template <int R, int V, class WT, class A, class Epilogue>
inline void tile(const A* const* a, int64_t count, const WT* b, int64_t width, const float* rest, int at,
                 Prefetch ahead, const Epilogue& keep) {
  if constexpr (R * V <= ACCUMULATORS) {
    tile_block<R, V>(a, count, b, width, rest, at, ahead, keep);
  } else {
    constexpr int H = V / 2;
    tile<R, H>(a, count, b, width, rest, at, ahead, keep);
    tile<R, V - H>(a, count, b + H * W * ActivationTraits<WT>::STEP, width, rest, at + H, ahead, keep);
  }
}

template <int V, class WT, class A>
inline void tile_rows(int rows, const A* const* a, int64_t count, const WT* b, int64_t width,
                      const float* rest, Prefetch ahead, const PartialSums& keep) {
  switch (rows) {
    case 1: return tile<1, V>(a, count, b, width, rest, 0, ahead, keep);
    case 2: return tile<2, V>(a, count, b, width, rest, 0, ahead, keep);
    case 3: return tile<3, V>(a, count, b, width, rest, 0, ahead, keep);
    case 4: return tile<4, V>(a, count, b, width, rest, 0, ahead, keep);
    case 5: return tile<5, V>(a, count, b, width, rest, 0, ahead, keep);
    case 6: return tile<6, V>(a, count, b, width, rest, 0, ahead, keep);
  }
}

// Rows of activations: row i is at data + (index ? index[i] : i) * stride.
template <class A> struct Rows {
  const A* data;
  int64_t stride;
  const int32_t* index;
  const A* row(int64_t i) const { return data + (index == nullptr ? i : index[i]) * stride; }
};

// sums [rows][PANEL] = activations of rows [begin, begin + rows) times one panel. `after` is what will
// be read next, fetched on the way (a panel's last piece fetches the first of what comes after it).
// done(first, many, sums) takes rows [first, first + many) as soon as they are complete; if the panel is
// one piece, nobody reads them afterwards, and they lie in the first cache. If there is `whole`,
// whole.from(first) keeps full tiles instead, whose sums are never put down.
struct NoTiles {};
template <class WT, class A, class Done, class Whole = NoTiles>
inline void panel_product(const Rows<A>& x, int64_t begin, int64_t rows, int64_t K, const WT* panel,
                          int vectors, float* sums, const WT* after, const Done& done, const Whole& whole = {}) {
  const int64_t width = int64_t(vectors) * W;
  const int64_t tiles = ceil_div(rows, MAX_ROWS);
  const int64_t step_bytes = UNROLL * ActivationTraits<WT>::STEP * width * int64_t(sizeof(WT));
  const int64_t lines = tiles == 2 ? PAIR_LINES : ceil_div(step_bytes / 64, tiles);  // at each fetch
  const int64_t piece = tiles == 1 ? K : PIECE_BYTES / (PANEL * int64_t(sizeof(WT)));
  const int64_t apart = K <= piece ? 0 : PANEL;  // sums of rows that rest between pieces
  for (int64_t k = 0; k < K || k == 0; k += piece) {
    const int64_t count = min_of(piece, K - k), steps = count / (UNROLL * ActivationTraits<WT>::STEP);
    const WT* b = panel + k * width;
    const char* const contiguous = reinterpret_cast<const char*>(b + count * width);
    const char* next = k + count < K ? contiguous : reinterpret_cast<const char*>(after);
    const char* const end = next + steps * step_bytes;
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t first = i * rows / tiles, many = (i + 1) * rows / tiles - first;
      const A* a[MAX_ROWS];
      for (int64_t r = 0; r < many; ++r) a[r] = x.row(begin + first + r) + k;
      float* c = sums + first * apart;
      // A lone tile reads its panel once and in order. Most of the first of two tiles' piece the machine fetches
      // by itself, faster than it is told to.
      const int64_t own = tiles == 2 && i == 0 ? 0 : lines;
      const Prefetch ahead{tiles == 1 ? nullptr : next, next < end ? own : 0};
      next += 64 * own * steps;
      const float* const rest = k > 0 ? c : nullptr;
      if constexpr (!__is_same(Whole, NoTiles)) {
        if (k + count >= K && many == MAX_ROWS && vectors == MAX_VECTORS && whole.features == PANEL) {
          tile<MAX_ROWS, MAX_VECTORS>(a, count, b, width, rest, 0, ahead, whole.from(first));
          continue;
        }
      }
      switch (vectors) {
        case 1: tile_rows<1>(int(many), a, count, b, width, rest, ahead, PartialSums{c}); break;
        case 2: tile_rows<2>(int(many), a, count, b, width, rest, ahead, PartialSums{c}); break;
        case 3: tile_rows<3>(int(many), a, count, b, width, rest, ahead, PartialSums{c}); break;
        case 4: tile_rows<4>(int(many), a, count, b, width, rest, ahead, PartialSums{c}); break;
      }
      if (k + count >= K) done(first, many, static_cast<const float*>(c));
    }
    if (K == 0) break;
  }
}

// Where a packed weight's panels are.
template <class WT> struct Packed {
  const WT* data;
  int64_t N, K;
  static int64_t k_length(int64_t K) { return round_up(K, ActivationTraits<WT>::STEP); }
  static int64_t elements(int64_t N, int64_t K) { return round_up(N, W) * k_length(K); }
  int64_t panels() const { return ceil_div(N, PANEL); }
  const WT* panel(int64_t p) const { return data + p * PANEL * k_length(K); }
  int64_t features(int64_t p) const { return min_of(PANEL, N - p * PANEL); }
  int vectors(int64_t p) const { return int(ceil_div(features(p), W)); }
};

template <class WT>
inline void pack_weight(WT* out, const WT* weight, int64_t N, int64_t K, int64_t stride) {
  constexpr int STEP = ActivationTraits<WT>::STEP;
  const Packed<WT> packed{out, N, K};
  parallel(packed.panels(), N * K, [&](int64_t p) {
    pack_panel<WT, STEP>(out + p * PANEL * Packed<WT>::k_length(K), int64_t(packed.vectors(p)) * W,
                         weight + p * PANEL * stride, stride, packed.features(p), K);
  });
}

}  // namespace
}  // namespace headrace::HR_ISA

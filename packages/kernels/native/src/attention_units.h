// Attention over the paged cache, read in place; or over keys and values that lie in rows, without a
// cache (attention_varlen.h).
//
// A unit of work is (request, tile of query positions, kv head, run of partitions); its rows are
// (position, head of the group), so all query heads of a kv head share what is read of the cache.
// Both products are small matrix products of rows with packed keys and with packed values: lanes
// are 16 (8, 4) keys in the first and as many dimensions in the second. A word of four bytes is one
// float, or a pair of bf16 where the machine multiplies those (weights are then rounded to bf16).
// Where it has tiles for pairs, products of pairs are theirs (attention_tiles.h).
//
// The context is cut at multiples of PART keys, whatever the query. A partition gives each row a
// maximum, a sum and an unscaled output; partitions are merged in ascending order (Milakov &
// Gimelshein 2018, arXiv:1805.02867; Dao 2023, arXiv:2307.08691), so it does not matter whether one
// thread visits them all or several share them.
//
// Row invariance: what a row does depends on its own position, window and keys only.
//  - A score adds up its words over D in ascending order, in one lane.
//  - The maximum is exact; the sum of weights has a fixed lane for each key and a fixed tree.
//  - An output adds up its words over the keys of a partition in ascending order, in one lane. Keys
//    that a row does not see have weight 0, and where that is not enough (0 times infinity) they are
//    replaced by zeros for that row.
// Hence chunks of a prefill, the other requests, and threads change no bit, and a decode step equals
// the last row of a prefill.

namespace headrace::HR_ISA {
namespace {
namespace paged {

constexpr int PART = 512;        // keys of a partition; its border is part of the arithmetic
constexpr int KEYS = 64;         // keys of a tile, packed at a time
constexpr int TASK_ROWS = 256;   // rows of a unit, if there are so many queries
constexpr int BLOCK_ROWS = 12;   // rows whose scores stay in the first cache
constexpr int TILED_ROWS = 32;   // where tiles multiply: two of them read the same keys
constexpr int ROWS = 6;          // of a register tile
#if defined(HR_AVX512)
constexpr int VECTORS = 4;       // of a register tile
#else
constexpr int VECTORS = 2;
#endif
constexpr int WIDE = VECTORS * W;  // dimensions of a panel of packed values
constexpr float LOG2E = 1.44269504088896341f;
constexpr float LEAST = -3.402823466e38f;

// What is added to scaled scores by distance, [q_heads, 2 * reach - 1]: that of key j and query i is
// at reach - 1 + j - i.
struct Bias {
  const float* data;  // null = none
  int64_t reach;
};

struct Attention {
  void* out;
  const void* query;
  const int32_t* block_table;  // null = keys and values are the request's rows, as its queries are
  const int32_t* cu_seqlens_q;
  const int32_t* seq_lens;     // null = a request's context is its queries'; in rows, that of its first
  const float* sinks;
  Cache keys, values;
  int64_t tokens, requests, q_heads, kv_heads;
  int64_t dim;        // of a query and a key
  int64_t value_dim;  // of a value: as many of the first, if keys and values are the same
  int64_t q_row, q_head, table_stride, table_width;
  float scale, soft_cap;
  int64_t window;  // 0 = none
  int64_t chunk;   // 0 = none; else keys of the query's own chunk of positions are seen
  bool causal;     // false: keys after a query are seen too, with a window those less than it away
  const float* slopes;  // [q_heads] of ALiBi, null = none
  bool slope_roots;     // they weigh the root of the distance
  Bias bias;
  const void* rope_query;  // null = the query is one piece; else of its dimensions from value_dim on
  int64_t rope_row, rope_head;
  // What every row sees besides, [prefix, kv_heads, dim] of the query's dtype; 0 = nothing.
  const void *prefix_keys, *prefix_values;
  int64_t prefix;
  const float* temperatures = nullptr;  // by position, of capped scores; null = none
  int64_t num_temperatures = 0;
  bool visits_together = true;  // requests that share what they begin with; it keeps a state for each
  // [tokens]: the last key that each sees, of those behind it none whose own entry is less; null = its own.
  const int32_t* last_keys = nullptr;
  bool falls = false;  // entries fall within a request: some keys behind a query are not seen
  // [tokens]: how many of its request's first keys each sees, wherever it stands; null = by its position.
  const int32_t* key_counts = nullptr;
  float* lse = nullptr;  // [tokens, q_heads], to be written: logarithm of the sum of e^score; null = unused
};

inline int64_t context_of(const Attention& g, int64_t request) {
  if (g.seq_lens != nullptr) return g.seq_lens[request];
  return g.cu_seqlens_q[request + 1] - g.cu_seqlens_q[request];
}

// One past the last key that a causal query at position p, in row `row` of the call, may see.
inline int64_t end_seen(const Attention& g, int64_t p, int64_t row, int64_t context) {
  if (g.key_counts != nullptr) return min_of(max_of(0, int64_t(g.key_counts[row])), context);
  return g.last_keys == nullptr ? p + 1 : min_of(max_of(p, int64_t(g.last_keys[row])) + 1, context);
}

// The first key that a query at position p may see.
inline int64_t first_seen(const Attention& g, int64_t p) {
  if (g.chunk > 0) return max_of(0, p) / g.chunk * g.chunk;
  return g.window > 0 ? max_of(0, p - g.window + 1) : 0;
}

// --- words ------------------------------------------------------------------------------------

#if defined(HR_AVX512)
inline float row_max(vf a) { return _mm512_reduce_max_ps(a); }
inline vf floor_of(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
#else
inline float row_max(vf a) { return hmax(a); }
#endif

// 2^x for x up to about 0; 2^-inf is 0. The polynomial has relative error 3e-6 or 8e-8 on [0, 1).
template <bool coarse> inline vf exp2_of(vf x) {
#if defined(HR_AVX512)
  const vf r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x - floor(x)
#else
  const vf low = vset(-126.0f);
  const vf y = vmax(low, x), n = vround(vsub(y, vset(0.5f)));
  const vf r = vsub(y, n);
#endif
  vf p;
  if constexpr (coarse) {
    p = vfma(vset(0.013426687568426132f), r, vset(0.0522424690425396f));
    p = vfma(p, r, vset(0.2412802129983902f));
    p = vfma(p, r, vset(0.6930448412895203f));
  } else {
    p = vfma(vset(0.001867130515165627f), r, vset(0.009017029777169228f));
    p = vfma(p, r, vset(0.05579991266131401f));
    p = vfma(p, r, vset(0.24016444385051727f));
    p = vfma(p, r, vset(0.6931512951850891f));
  }
  p = vfma(p, r, vset(1.0f));
#if defined(HR_AVX512)
  return _mm512_scalef_ps(p, x);
#else
  return vless(x, low, vzero(), vmul(p, vpow2(n)));
#endif
}

// x, but -inf in the lanes [from, to).
inline vf outside(vf x, int from, int to) {
  alignas(64) static constexpr float lanes[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const vf lane = ld(lanes), hidden = vset(-__builtin_inff());
  const vf below = vless(lane, vset(float(to)), hidden, x);  // of the lanes before `to`
  return vless(lane, vset(float(from)), x, below);
}

// Whether any lane of any x so far was infinite or NaN, as bits: the largest magnitude of lanes of
// 32 bits (floats) or 16 (bf16).
#if defined(HR_AVX512)
using Worst = __m512i;
inline Worst worse(Worst a, vf x) {
  return _mm512_max_epu32(a, _mm512_and_si512((__m512i)x, _mm512_set1_epi32(0x7fffffff)));
}
inline bool infinite(Worst a) { return _mm512_cmpge_epu32_mask(a, _mm512_set1_epi32(0x7f800000)) != 0; }
#elif defined(HR_AVX2)
using Worst = __m256i;
inline Worst worse(Worst a, vf x) {
  return _mm256_max_epu32(a, _mm256_and_si256((__m256i)x, _mm256_set1_epi32(0x7fffffff)));
}
inline bool infinite(Worst a) {  // not negative as a signed number
  return _mm256_movemask_epi8(_mm256_cmpgt_epi32(a, _mm256_set1_epi32(0x7f7fffff))) != 0;
}
#else
using Worst = vi;
inline Worst worse(Worst a, vf x) {
  const vi b = (vi)x & 0x7fffffff;
  return a > b ? a : b;
}
inline bool infinite(Worst a) {
  bool found = false;
  for (int i = 0; i < W; ++i) found |= a[i] >= 0x7f800000;
  return found;
}
#endif

// A word is one float.
struct Single {
  static constexpr int STEP = 1;
  static constexpr bool COARSE = false;
  static vf mac(vf acc, vf a, vf b) { return vfma(a, b, acc); }
  using Bad = Worst;
  // The next W words of a line, zeros from `left` elements on.
  template <class T> static vf words(const T* p, int64_t left) {
    return left <= 0 ? vzero() : ld_upto(p, left);
  }
  // Packs W words of each of STEP lines of values into words of STEP keys; notes bad values.
  static void store_values(float* to, const vf* lines, Bad& bad) {
    bad = worse(bad, lines[0]);
    st(to, lines[0]);
  }
  static bool any(Bad bad) { return infinite(bad); }
  // Weights of W * STEP keys from scores, each times what stands at `by` (null: 1); returns sum + their
  // sum without that.
  static vf weights(const float* s, vf factor, vf shift, float* p, vf sum, const float* by) {
    const vf w = exp2_of<COARSE>(vfma(ld(s), factor, shift));
    st(p, by == nullptr ? w : vmul(w, ld(by)));
    return vadd(sum, w);
  }
};

#if defined(HR_DOT_BF16)
// A word is a pair of bf16.
struct Pair {
  static constexpr int STEP = 2;
  static constexpr bool COARSE = true;
  using Bad = __m512i;
  static vf mac(vf acc, vf a, vf b) { return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b); }
  static vf words(const bf16* p, int64_t left) {
    if (left >= 2 * W) return (vf)_mm512_loadu_si512(p);
    if (left <= 0) return vzero();
    return (vf)_mm512_maskz_loadu_epi16(__mmask32((uint64_t(1) << left) - 1), p);
  }
  // Sixteen bytes hold as many pairs; each half a byte chooses its bf16.
  static vf words(const nibbles* p, int64_t left) {
    if (left <= 0) return vzero();
    nibbles part[W] = {};
    if (left < 2 * W) {
      __builtin_memcpy(part, p, size_t(left / 2));
      p = part;
    }
    alignas(32) static constexpr uint16_t numbers[16] = {
        0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
        0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80};
    const __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m512i which = _mm512_or_si512(_mm512_and_si512(x, _mm512_set1_epi32(15)),
                                          _mm512_slli_epi32(_mm512_and_si512(x, _mm512_set1_epi32(240)), 12));
    const __m512i table = _mm512_broadcast_i64x4(_mm256_load_si256(reinterpret_cast<const __m256i*>(numbers)));
    return (vf)_mm512_permutexvar_epi16(which, table);
  }
  template <class T> static vf words(const T* p, int64_t left) {
    const vf low = left <= 0 ? vzero() : ld_upto(p, left);
    const vf high = left <= W ? vzero() : ld_upto(p + W, left - W);
    return (vf)_mm512_cvtne2ps_pbh(high, low);
  }
  static void store_values(float* to, const vf* lines, Bad& bad) {
    const __m512i magnitude = _mm512_set1_epi16(0x7fff);
    const __m512i a = (__m512i)lines[0], b = (__m512i)lines[1];
    bad = _mm512_max_epu16(bad, _mm512_max_epu16(_mm512_and_si512(a, magnitude), _mm512_and_si512(b, magnitude)));
    const __m512i first = _mm512_set_epi16(
        47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,
        39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
    st(to, (vf)_mm512_permutex2var_epi16(a, first, b));
    st(to + W, (vf)_mm512_permutex2var_epi16(a, second, b));
  }
  static bool any(Bad bad) { return _mm512_cmpge_epu16_mask(bad, _mm512_set1_epi16(0x7f80)) != 0; }
  static vf weights(const float* s, vf factor, vf shift, float* p, vf sum, const float* by) {
    const vf low = exp2_of<COARSE>(vfma(ld(s), factor, shift));
    const vf high = exp2_of<COARSE>(vfma(ld(s + W), factor, shift));
    if (by != nullptr) {
      st(p, (vf)_mm512_cvtne2ps_pbh(vmul(high, ld(by + W)), vmul(low, ld(by))));
      return vadd(sum, vadd(low, high));
    }
    const __m512bh both = _mm512_cvtne2ps_pbh(high, low);
    st(p, (vf)both);
    return _mm512_dpbf16_ps(sum, both, (__m512bh)_mm512_set1_epi16(0x3f80));  // times 1
  }
};
#endif

// Which words serve a query and a cache.
template <class TQ, class TC> struct Choice { using Words = Single; };
#if defined(HR_DOT_BF16)
template <> struct Choice<bf16, bf16> { using Words = Pair; };
// One-byte values are exact in bf16; their scale is applied to scores and to the output.
template <> struct Choice<bf16, int8_t> { using Words = Pair; };
template <> struct Choice<bf16, e4m3> { using Words = Pair; };
template <> struct Choice<bf16, e5m2> { using Words = Pair; };
template <> struct Choice<bf16, nibbles> { using Words = Pair; };
#endif

// W vectors of W words, transposed.
__attribute__((always_inline)) inline void transpose(vf* x) {
#if defined(HR_AVX512)
  vf t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    const __m512d a = (__m512d)t[i], b = (__m512d)t[i + 1], c = (__m512d)t[i + 2], d = (__m512d)t[i + 3];
    x[i] = (vf)_mm512_unpacklo_pd(a, c);
    x[i + 1] = (vf)_mm512_unpackhi_pd(a, c);
    x[i + 2] = (vf)_mm512_unpacklo_pd(b, d);
    x[i + 3] = (vf)_mm512_unpackhi_pd(b, d);
  }
  // x[4 * i + j] holds in its lane l (of 128 bits) word 4 * l + j of vectors 4 * i to 4 * i + 3.
  for (int j = 0; j < 4; ++j) {
    t[j] = _mm512_shuffle_f32x4(x[j], x[4 + j], 0x88);           // lanes 0, 2 of the first two
    t[4 + j] = _mm512_shuffle_f32x4(x[j], x[4 + j], 0xdd);       // lanes 1, 3
    t[8 + j] = _mm512_shuffle_f32x4(x[8 + j], x[12 + j], 0x88);
    t[12 + j] = _mm512_shuffle_f32x4(x[8 + j], x[12 + j], 0xdd);
  }
  for (int j = 0; j < 4; ++j) {
    x[j] = _mm512_shuffle_f32x4(t[j], t[8 + j], 0x88);
    x[8 + j] = _mm512_shuffle_f32x4(t[j], t[8 + j], 0xdd);
    x[4 + j] = _mm512_shuffle_f32x4(t[4 + j], t[12 + j], 0x88);
    x[12 + j] = _mm512_shuffle_f32x4(t[4 + j], t[12 + j], 0xdd);
  }
#elif defined(HR_AVX2)
  vf t[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    const __m256d a = (__m256d)t[i], b = (__m256d)t[i + 1], c = (__m256d)t[i + 2], d = (__m256d)t[i + 3];
    x[i] = (vf)_mm256_unpacklo_pd(a, c);
    x[i + 1] = (vf)_mm256_unpackhi_pd(a, c);
    x[i + 2] = (vf)_mm256_unpacklo_pd(b, d);
    x[i + 3] = (vf)_mm256_unpackhi_pd(b, d);
  }
  for (int j = 0; j < 4; ++j) {
    t[j] = _mm256_permute2f128_ps(x[j], x[4 + j], 0x20);
    t[4 + j] = _mm256_permute2f128_ps(x[j], x[4 + j], 0x31);
  }
  for (int j = 0; j < 8; ++j) x[j] = t[j];
#else
  for (int i = 0; i < W; ++i)
    for (int j = 0; j < i; ++j) {
      const float a = x[i][j];
      x[i][j] = x[j][i];
      x[j][i] = a;
    }
#endif
}

// c (+)= a b for R rows of words and V vectors of columns.
template <class A, int R, int V>
inline void product(const float* a, int64_t lda, const float* b, int64_t ldb, int64_t depth, float* c,
                    int64_t ldc, bool more) {
  vf acc[R][V];
  HR_UNROLL for (int r = 0; r < R; ++r)
    HR_UNROLL for (int v = 0; v < V; ++v) acc[r][v] = more ? ld(c + r * ldc + v * W) : vzero();
  for (int64_t k = 0; k < depth; ++k, b += ldb) {
    vf x[V];
    HR_UNROLL for (int v = 0; v < V; ++v) x[v] = ld(b + v * W);
    HR_UNROLL for (int r = 0; r < R; ++r) {
      const vf y = vset(a[r * lda + k]);
      HR_UNROLL for (int v = 0; v < V; ++v) acc[r][v] = A::mac(acc[r][v], y, x[v]);
    }
  }
  HR_UNROLL for (int r = 0; r < R; ++r)
    HR_UNROLL for (int v = 0; v < V; ++v) st(c + r * ldc + v * W, acc[r][v]);
}

template <class A, int R>
inline void product_of(int vectors, const float* a, int64_t lda, const float* b, int64_t ldb,
                       int64_t depth, float* c, int64_t ldc, bool more) {
  for (; vectors >= VECTORS; vectors -= VECTORS, b += WIDE, c += WIDE) {
    product<A, R, VECTORS>(a, lda, b, ldb, depth, c, ldc, more);
  }
  if constexpr (VECTORS > 2) {
    if (vectors == 3) return product<A, R, 3>(a, lda, b, ldb, depth, c, ldc, more);
    if (vectors == 2) return product<A, R, 2>(a, lda, b, ldb, depth, c, ldc, more);
  }
  if (vectors == 1) product<A, R, 1>(a, lda, b, ldb, depth, c, ldc, more);
}

template <class A>
inline void product_rows(int64_t rows, int vectors, const float* a, int64_t lda, const float* b,
                         int64_t ldb, int64_t depth, float* c, int64_t ldc, bool more) {
  for (; rows >= ROWS; rows -= ROWS, a += ROWS * lda, c += ROWS * ldc) {
    product_of<A, ROWS>(vectors, a, lda, b, ldb, depth, c, ldc, more);
  }
  switch (rows) {
    case 1: return product_of<A, 1>(vectors, a, lda, b, ldb, depth, c, ldc, more);
    case 2: return product_of<A, 2>(vectors, a, lda, b, ldb, depth, c, ldc, more);
    case 3: return product_of<A, 3>(vectors, a, lda, b, ldb, depth, c, ldc, more);
    case 4: return product_of<A, 4>(vectors, a, lda, b, ldb, depth, c, ldc, more);
    case 5: return product_of<A, 5>(vectors, a, lda, b, ldb, depth, c, ldc, more);
  }
}

// --- units ------------------------------------------------------------------------------------

// What partitions leave of some rows: an output without its divisor, the maximum (in powers of two),
// and the sum. A row that has seen nothing has maximum -inf.
struct State {
  float* acc;   // [rows][lanes]
  float* best;  // [rows]
  float* sum;   // [rows]
};

inline int64_t lanes_of(int64_t dim) { return round_up(dim, WIDE); }
inline int64_t state_floats(int64_t rows, int64_t dim) { return rows * lanes_of(dim) + 2 * round_up(rows, W); }
inline State state_at(float* memory, int64_t rows, int64_t dim) {
  float* best = memory + rows * lanes_of(dim);
  return {memory, best, best + round_up(rows, W)};
}

// A tile of a request's query positions; its partitions are [begin, end).
struct Tile {
  int32_t request, first, count;
  int32_t begin, end;
  int32_t own;      // partitions from here on are the tile's own; those before are visited in common
  int32_t alike;    // leading partitions that are the same blocks as those of the tile before
  int32_t pieces;   // units of its own, for each kv head
  bool kept;        // partial states are kept, and merged when all are there
  bool common;      // `count` requests of one new token each; all of them see all of [begin, end)
  int64_t partial;  // where the states are, in floats
};

inline int64_t position_of(const Attention& g, const Tile& t) {
  if (t.common) return int64_t(t.end) * PART;
  if (g.block_table == nullptr) return t.first;  // in rows, whatever of them is context
  const int64_t length = g.cu_seqlens_q[t.request + 1] - g.cu_seqlens_q[t.request];
  return context_of(g, t.request) - length + t.first;
}

// One key that every row sees, with its value, into the state of a row.
template <class TQ>
inline void see(const Attention& g, const State& state, int64_t r, const TQ* query, const TQ* key, const TQ* value,
                float value_scale) {
  const float score = g.scale * LOG2E * hsum(sum_lanes(g.dim, [&](int64_t d, int64_t left) {
    return vmul(ld_upto(query + d, left), ld_upto(key + d, left));
  }));
  const float now = state.best[r] > score ? state.best[r] : score;
  const vf keep = exp2_of<false>(vset(state.best[r] - now)), add = exp2_of<false>(vset(score - now));
  float kept[W], added[W];
  st(kept, keep);
  st(added, add);
  state.best[r] = now;
  state.sum[r] = state.sum[r] * kept[0] + added[0];
  const vf weight = vset(added[0] / value_scale);
  float* acc = state.acc + r * lanes_of(g.value_dim);
  for (int64_t d = 0; d < g.value_dim; d += W) {
    st(acc + d, vfma(ld_upto(value + d, g.value_dim - d), weight, vmul(ld(acc + d), keep)));
  }
}

// The state of a row before its first key: nothing, or the sink, which is e^sink more in the sum, and what
// every row sees.
template <class TQ>
inline void begin_row(const Attention& g, const Tile& t, const State& state, int64_t r, int64_t kv_head) {
  const int64_t group = g.q_heads / g.kv_heads, head = kv_head * group + r % group;
  const float sink = g.sinks != nullptr ? g.sinks[head] : -__builtin_inff();
  state.best[r] = sink * LOG2E;
  state.sum[r] = sink == -__builtin_inff() ? 0.0f : 1.0f;
  const int64_t lanes = lanes_of(g.value_dim);
  for (int64_t d = 0; d < lanes; d += W) st(state.acc + r * lanes + d, vzero());
  const int64_t token = g.cu_seqlens_q[t.request] + t.first + r / group;
  const TQ* query = static_cast<const TQ*>(g.query) + token * g.q_row + head * g.q_head;
  for (int64_t i = 0; i < g.prefix; ++i) {
    const int64_t at = i * g.kv_heads + kv_head;
    see(g, state, r, query, static_cast<const TQ*>(g.prefix_keys) + at * g.dim,
        static_cast<const TQ*>(g.prefix_values) + at * g.value_dim, scale_of(g.values, kv_head));
  }
}

inline void merge_row(const Attention& g, const State& into, const State& from, int64_t r) {
  if (from.best[r] == -__builtin_inff()) return;
  const float now = into.best[r] > from.best[r] ? into.best[r] : from.best[r];
  const vf a = exp2_of<false>(vset(into.best[r] - now)), b = exp2_of<false>(vset(from.best[r] - now));
  float keep[W], add[W];
  st(keep, a);
  st(add, b);
  into.best[r] = now;
  into.sum[r] = into.sum[r] * keep[0] + from.sum[r] * add[0];
  const int64_t lanes = lanes_of(g.value_dim);
  for (int64_t d = r * lanes; d < (r + 1) * lanes; d += W) {
    st(into.acc + d, vfma(ld(from.acc + d), b, vmul(ld(into.acc + d), a)));
  }
}

// Natural logarithm of the sum of e^score; -inf of a row that has seen nothing.
inline float lse_of(const State& state, int64_t r) {
  if (state.best[r] == -__builtin_inff()) return state.best[r];
  return float((double(state.best[r]) + __builtin_log2(double(state.sum[r]))) / double(LOG2E));
}

template <class TQ>
inline void finish_row(const Attention& g, const Tile& t, const State& state, int64_t r, int64_t kv_head) {
  const int64_t group = g.q_heads / g.kv_heads, lanes = lanes_of(g.value_dim);
  const int64_t token = g.cu_seqlens_q[t.request] + t.first + r / group;
  TQ* to = static_cast<TQ*>(g.out) + (token * g.q_heads + kv_head * group + r % group) * g.value_dim;
  if (g.lse != nullptr) g.lse[token * g.q_heads + kv_head * group + r % group] = lse_of(state, r);
  if (state.best[r] == -__builtin_inff()) {  // it saw nothing, and nobody wrote its output
    __builtin_memset(to, 0, size_t(g.value_dim) * sizeof(TQ));
    return;
  }
  const float sum = state.sum[r];
  const vf share = vset(scale_of(g.values, kv_head) / (sum > 0.0f || sum != sum ? sum : 1.0f));
  for (int64_t d = 0; d < g.value_dim; d += W) {
    // Plus zero: products of pairs may end in -0, which merging would have made 0.
    const vf acc = vadd(ld(state.acc + r * lanes + d), vzero());
    st_upto(to + d, vmul(acc, share), g.value_dim - d);
  }
}

struct Span {
  int from, to;
  bool empty() const { return from >= to; }
  bool operator==(Span other) const { return from == other.from && to == other.to; }
};

// Shapes of tiles for a unit's rows, while it lives; nothing where vectors multiply.
template <bool TILED> struct ShapesFor { explicit ShapesFor(int64_t) {} };
#if defined(HR_AMX)
template <> struct ShapesFor<true> : TileShapes {
  explicit ShapesFor(int64_t rows) : TileShapes(min_of(rows, LINES), LINES) {}
};
#endif

// What a unit does whatever the order of the cache: the rows' queries, what they see, their weights.
template <class TQ_, class A_>
struct UnitRows {
  using TQ = TQ_;
  using A = A_;
  static constexpr int STEP = A::STEP, CHUNK = W * STEP;
#if defined(HR_AMX)
  static constexpr bool TILED = STEP == 2;
#else
  static constexpr bool TILED = false;
#endif
  static constexpr int BLOCK = TILED ? TILED_ROWS : BLOCK_ROWS;
  static constexpr int LINE = TILED ? PART + W : PART;  // from one row's scores to the next: other sets of the cache

  const Attention& g;
  const Tile& t;
  int64_t kv_head, group, rows, position, context;
  int64_t words, q_width;  // of a query: in use, and packed
  int64_t depth;           // words that are multiplied: tiles take whole vectors
  int64_t q_apart;         // from one row's query to the next
  float scale;             // of scores: the call's and that of the keys
  bool last_head;          // of the task: the next one's keys are fetched ahead otherwise
  const float* q;
  float* s;
  const float* value_scales = nullptr;  // of the partition's rows of values, if each has its own
  State total, part;
  int32_t status = OK;

  UnitRows(const Attention& g, const Tile& t, int64_t kv_head, bool last_head)
      : g(g), t(t), kv_head(kv_head), last_head(last_head) {
    scale = g.scale * scale_of(g.keys, kv_head);
    group = g.q_heads / g.kv_heads;
    rows = t.count * group;
    position = position_of(g, t);
    context = context_of(g, t.request);
    words = ceil_div(g.dim, STEP);
    q_width = round_up(words, W);
    depth = TILED ? q_width : words;
  }

  // Rows of a buffer that tiles read: one may begin at any row.
  static int64_t padded(int64_t rows) { return TILED ? rows + W : rows; }

  // Takes the task's scratch: for queries, scores and states, and `more` floats, where it returns.
  float* take_scratch(int64_t more) {
    const int64_t state = state_floats(rows, g.value_dim), s_floats = padded(min_of(rows, BLOCK)) * LINE;
    const int64_t q_floats = queries_are_words() ? 0 : padded(rows) * q_width;
    const int64_t all = q_floats + s_floats + 2 * state + more;
    float* const copy = static_cast<float*>(scratch(SCRATCH_TASK, size_t(all) * sizeof(float)));
    s = copy + q_floats;
    total = state_at(s + s_floats, rows, g.value_dim);
    part = state_at(s + s_floats + state, rows, g.value_dim);
    find_query(copy);
    return s + s_floats + 2 * state;
  }

  // Whether queries can be read where they are: one head's rows, in words.
  bool queries_are_words() const {
    return !TILED && sizeof(TQ) * STEP == sizeof(float) && group == 1 && g.rope_query == nullptr && g.dim % STEP == 0 &&
           g.q_row % STEP == 0 && g.q_head % STEP == 0;
  }

  int64_t head_of(int64_t r) const { return kv_head * group + r % group; }

  void find_query(float* copy) {
    const int64_t begin = g.cu_seqlens_q[t.request] + t.first;
    if (queries_are_words()) {
      q = reinterpret_cast<const float*>(static_cast<const TQ*>(g.query) + begin * g.q_row + kv_head * g.q_head);
      q_apart = g.q_row / STEP;
      return;
    }
    q = copy;
    q_apart = q_width;
    if (g.rope_query != nullptr) return load_query_of_two(begin, copy);
    for (int64_t r = 0; r < rows; ++r) {
      const TQ* from = static_cast<const TQ*>(g.query) + (begin + r / group) * g.q_row + head_of(r) * g.q_head;
      for (int64_t w = 0; w < q_width; w += W) {
        st(copy + r * q_width + w, A::words(from + w * STEP, g.dim - w * STEP));
        if (!last_head) __builtin_prefetch(from + group * g.q_head + w * STEP);  // the next unit's
      }
    }
  }

  void load_query_of_two(int64_t begin, float* copy) {
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t token = begin + r / group, head = head_of(r);
      const TQ* first = static_cast<const TQ*>(g.query) + token * g.q_row + head * g.q_head;
      const TQ* second = static_cast<const TQ*>(g.rope_query) + token * g.rope_row + head * g.rope_head;
      for (int64_t w = 0; w < q_width; w += W) {
        const int64_t d = w * STEP, left = min_of(CHUNK, g.dim - d);
        TQ both[CHUNK] = {};
        for (int64_t i = 0; i < left; ++i) both[i] = d + i < g.value_dim ? first[d + i] : second[d + i - g.value_dim];
        st(copy + r * q_width + w, A::words(both, CHUNK));
      }
    }
  }

  // The keys of a partition that row r sees, from the partition's begin.
  Span span(int64_t r, int64_t base) const {
    const int64_t p = position + r / group, first = first_seen(g, p);
    const int64_t last = g.causal       ? end_seen(g, p, g.cu_seqlens_q[t.request] + t.first + r / group, context)
                         : g.window > 0 ? min_of(p + g.window, context)
                                        : context;
    return {int(min_of(max_of(first - base, 0), PART)), int(max_of(min_of(last - base, PART), 0))};
  }
  // ... that any of the rows [r, r + n) sees: positions rise with rows. What ends before it begins, as
  // windows past the context do, is empty where it begins.
  Span span(int64_t r, int64_t n, int64_t base) const {
    const int from = span(r, base).from;
    int to = span(r + n - 1, base).to;
    for (int64_t i = r; g.falls && i + 1 < r + n; i += group) to = int(max_of(to, span(i, base).to));
    return {from, int(max_of(from, to))};
  }

  // Whether scores are more than products times a scale.
  bool transforms() const {
    return g.soft_cap > 0 || scale < 0 || g.bias.data != nullptr || g.slopes != nullptr || g.temperatures != nullptr;
  }

  // Scores of row r -> weights in words at the same place, maximum and sum. `seen` is what any
  // row of the block sees: weights are written for all of that.
  void soften(int64_t r, int64_t base, float* line, Span seen, float* best, float* sum) {
    const Span own = span(r, base);
    const int begin = seen.from / CHUNK * CHUNK, end = int(round_up(seen.to, CHUNK));
    if (own.empty()) {
      *best = -__builtin_inff();
      *sum = 0.0f;
      __builtin_memset(line + begin / STEP, 0, size_t(end - begin) / STEP * sizeof(float));
      return;
    }
    const int from = own.from / CHUNK * CHUNK, to = int(round_up(own.to, CHUNK));
    float factor = scale * LOG2E;
    if (transforms()) {
      transform(line, from, to);
      if (g.temperatures != nullptr) warm(r, line, from, to);
      if (g.bias.data != nullptr) add_bias(r, base, line, own);
      if (g.slopes != nullptr) add_slope(r, base, line, from, to);
      factor = LOG2E;
    }
    hide(line, from, own.from);
    hide(line, own.to, to);
    if (g.falls && g.last_keys != nullptr) hide_lower(r, base, line, own);
    vf top = ld(line + from);
    for (int j = from + W; j < to; j += W) top = vmax(top, ld(line + j));
    float peak = row_max(top) * factor;
    if (peak < LEAST) peak = LEAST;
    const vf slope = vset(factor), shift = vset(-peak);
    vf adding = vzero();
    if (begin < from) __builtin_memset(line + begin / STEP, 0, size_t(from - begin) / STEP * sizeof(float));
    for (int j = from; j < to; j += CHUNK) {
      adding = A::weights(line + j, slope, shift, line + j / STEP, adding, scales_from(j));
    }
    if (to < end) __builtin_memset(line + to / STEP, 0, size_t(end - to) / STEP * sizeof(float));
    *best = peak;
    *sum = hsum(adding);
  }

  const float* scales_from(int j) const { return value_scales == nullptr ? nullptr : value_scales + j; }

  // soften for the rows [r, r + n). Rows that see the same keys go in fours, whose long chains of maxima,
  // powers and sums the machine then runs side by side.
  void soften_all(int64_t r, int64_t n, int64_t base, Span seen, const State& state) {
    const bool plain = !transforms() && !g.falls;
    for (int64_t i = 0; i < n;) {
      float *line = s + i * LINE, *best = state.best + r + i, *sum = state.sum + r + i;
      if (plain && i + 4 <= n && !seen.empty() && span(r + i, base) == seen && span(r + i + 3, base) == seen) {
        soften_four(line, seen, best, sum);
        i += 4;
      } else {
        soften(r + i, base, line, seen, best, sum);
        i += 1;
      }
    }
  }

  void soften_four(float* lines, Span seen, float* best, float* sum) {
    const int from = seen.from / CHUNK * CHUNK, to = int(round_up(seen.to, CHUNK));
    const float factor = scale * LOG2E;
    vf top[4], shift[4], adding[4];
    HR_UNROLL for (int i = 0; i < 4; ++i) {
      hide(lines + i * LINE, from, seen.from);
      hide(lines + i * LINE, seen.to, to);
      top[i] = ld(lines + i * LINE + from);
      adding[i] = vzero();
    }
    for (int j = from + W; j < to; j += W) {
      HR_UNROLL for (int i = 0; i < 4; ++i) top[i] = vmax(top[i], ld(lines + i * LINE + j));
    }
    hmax4(top[0], top[1], top[2], top[3], best);
    HR_UNROLL for (int i = 0; i < 4; ++i) {
      best[i] *= factor;
      if (best[i] < LEAST) best[i] = LEAST;
      shift[i] = vset(-best[i]);
    }
    const vf slope = vset(factor);
    for (int j = from; j < to; j += CHUNK) {
      HR_UNROLL for (int i = 0; i < 4; ++i) {
        float* const line = lines + i * LINE;
        adding[i] = A::weights(line + j, slope, shift[i], line + j / STEP, adding[i], scales_from(j));
      }
    }
    hsum4(adding[0], adding[1], adding[2], adding[3], sum);
  }

  // Steps of packed values: the first one of a span of keys, and the one past its last. Tiles take blocks.
  static int first_step(int key) { return TILED ? key / CHUNK * W : key / STEP; }
  static int end_step(int key) { return TILED ? int(ceil_div(key, CHUNK)) * W : int(ceil_div(key, STEP)); }

  // c (+)= a b for n rows of words and vectors of columns.
  void multiply(int64_t n, int vectors, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t steps, float* c,
                int64_t ldc, bool more) const {
#if defined(HR_AMX)
    if constexpr (TILED) return tile_product(n, min_of(rows, LINES), vectors, {a, lda}, Columns{b, ldb}, steps, c, ldc, more);
#endif
    product_rows<A>(n, vectors, a, lda, b, ldb, steps, c, ldc, more);
  }

  // -inf for the scores [from, to). Whole vectors are written, each where one was written before: what is
  // read next need not wait for pieces to reach the cache.
  static void hide(float* line, int from, int to) {
    for (int j = from / W * W; j < to; j += W) st(line + j, outside(ld(line + j), from - j, to - j));
  }

  // -inf for keys behind row r whose own last key is less than the row's.
  void hide_lower(int64_t r, int64_t base, float* line, Span own) const {
    const int32_t* const last_keys = g.last_keys + g.cu_seqlens_q[t.request] + t.first;  // of the tile's rows on
    const int64_t p = position + r / group;
    for (int64_t j = max_of(own.from, p + 1 - base); j < own.to; ++j) {
      if (last_keys[base + j - position] < last_keys[r / group]) line[j] = -__builtin_inff();
    }
  }

  void transform(float* line, int from, int to) const {
    for (int j = from; j < to; j += W) {
      vf x = vmul(ld(line + j), vset(scale));
      if (g.soft_cap > 0) x = vmul(vset(g.soft_cap), vtanh(vdiv(x, vset(g.soft_cap))));
      st(line + j, x);
    }
  }

  // Requests that are visited together stand at positions of their own.
  int64_t own_position(int64_t r) const {
    return t.common ? g.seq_lens[t.request + r / group] - 1 : position + r / group;
  }

  void warm(int64_t r, float* line, int from, int to) const {
    const int64_t p = min_of(max_of(own_position(r), 0), g.num_temperatures - 1);
    const vf temperature = vset(g.temperatures[p]);
    for (int j = from; j < to; j += W) st(line + j, vmul(ld(line + j), temperature));
  }

  // slope * (key's position - the row's), ATTN-REF's ALiBi; or less slope times the root of what the key
  // lies back.
  void add_slope(int64_t r, int64_t base, float* line, int from, int to) const {
    const int64_t p = own_position(r);
    const vf slope = vset(g.slopes[head_of(r)]);
    float distance[W];
    for (int i = 0; i < W; ++i) distance[i] = float(base + from + i - p);
    for (int j = from; j < to; j += W) {
      const vf away = vadd(ld(distance), vset(float(j - from)));
      st(line + j, vfma(slope, g.slope_roots ? vsub(vzero(), root_of(vsub(vzero(), away))) : away, ld(line + j)));
    }
  }

  // Of what is not negative; else 0.
  static vf root_of(vf x) {
    float part[W];
    st(part, vmax(vzero(), x));
    for (int i = 0; i < W; ++i) part[i] = __builtin_sqrtf(part[i]);
    return ld(part);
  }

  void add_bias(int64_t r, int64_t base, float* line, Span own) const {
    const int64_t width = 2 * g.bias.reach - 1, middle = g.bias.reach - 1 - (position + r / group);
    const float* bias = g.bias.data + head_of(r) * width + middle + base;
    for (int j = own.from; j < own.to; j += W) {
      st_upto(line + j, vadd(ld_upto(line + j, own.to - j), ld_upto(bias + j, own.to - j)), own.to - j);
    }
  }
};

// A unit over a cache [N, S, Hk, D] of any strides, or over rows, which is packed on the way.
template <class TQ_, class TC>
struct PlainUnit : UnitRows<TQ_, typename Choice<TQ_, TC>::Words> {
  using Base = UnitRows<TQ_, typename Choice<TQ_, TC>::Words>;
  using Base::g, Base::t, Base::kv_head, Base::group, Base::rows, Base::words, Base::q_width, Base::q_apart;
  using Base::last_head, Base::q, Base::s, Base::status, Base::span, Base::depth;
  using typename Base::A;
  static constexpr int STEP = Base::STEP, CHUNK = Base::CHUNK, BLOCK = Base::BLOCK, LINE = Base::LINE;

  bool once;  // few rows: each tile of the cache is packed, used and forgotten
  float *k, *v, *spare;
  const TC* key_lines[PART];
  const TC* value_lines[PART];
  float key_scales[2][PART];  // of the partition's rows, if each has its own; of its parts
  float scales_of_values[PART];

  PlainUnit(const Attention& g, const Tile& t, int64_t kv_head, bool last_head) : Base(g, t, kv_head, last_head) {
    once = rows <= BLOCK;
    const int64_t lanes = lanes_of(g.value_dim), packed = once ? KEYS : PART;
    const int64_t k_floats = packed * q_width, v_floats = packed / STEP * lanes;
    k = this->take_scratch(k_floats + v_floats + KEYS / STEP * lanes);
    v = k + k_floats;
    spare = v + v_floats;
    if (g.values.rows.data != nullptr) this->value_scales = scales_of_values;
  }

  // Fetches the scales of the rows that are seen: a block's are side by side, or behind its rows.
  void fetch_scales(const Cache& cache, int64_t base, Span seen) const {
    if (cache.rows.data == nullptr) return;
    const int32_t* blocks = g.block_table + t.request * g.table_stride;
    for (int64_t at = base + seen.from; at < base + seen.to; at += cache.block_size - at % cache.block_size) {
      const int64_t column = at / cache.block_size, block = column < g.table_width ? blocks[column] : 0;
      if (block >= 0 && block < cache.blocks) __builtin_prefetch(cache.rows.of(block, at % cache.block_size, kv_head));
    }
  }

  // Scales of a tile's keys that are seen.
  void find_key_scales(int64_t base, int tile, Span seen) {
    if (g.keys.rows.data == nullptr) return;
    const Span own{int(max_of(seen.from, tile * KEYS)), int(min_of(seen.to, (tile + 1) * KEYS))};
    for (int64_t i = 0; i < g.keys.rows.parts; ++i) find_scales(g.keys, base, own, i, key_scales[i]);
  }

  // Scales of the rows that are seen, and zeros up to the tiles' ends.
  void find_scales(const Cache& cache, int64_t base, Span seen, int64_t part, float* scales) const {
    const int32_t* blocks = g.block_table + t.request * g.table_stride;
    for (int j = seen.from / KEYS * KEYS; j < seen.from; ++j) scales[j] = 0.0f;
    for (int j = seen.from; j < seen.to;) {
      const int64_t at = base + j, column = at / cache.block_size, offset = at % cache.block_size;
      int64_t block = column < g.table_width ? blocks[column] : 0;
      if (block < 0 || block >= cache.blocks) block = 0;  // find_lines has told
      const float* from = cache.rows.of(block, offset, kv_head) + part;
      const int many = int(min_of(cache.block_size - offset, seen.to - j));
      for (int i = 0; i < many; ++i) scales[j + i] = from[i * cache.rows.token_stride];
      j += many;
    }
    for (int j = seen.to; j < round_up(seen.to, KEYS); ++j) scales[j] = 0.0f;
  }

  void find_lines(const Cache& cache, int64_t base, Span seen, const TC** lines) {
    if (g.block_table == nullptr) return find_rows(cache, base, seen, lines);
    const int32_t* blocks = g.block_table + t.request * g.table_stride;
    for (int j = seen.from; j < seen.to;) {
      const int64_t at = base + j, column = at / cache.block_size, offset = at % cache.block_size;
      int64_t block = column < g.table_width ? blocks[column] : -1;
      if (block < 0 || block >= cache.blocks) { block = 0; status = BAD_INDEX; }
      const TC* line = static_cast<const TC*>(cache.data) + block * cache.block_stride +
                       offset * cache.token_stride + kv_head * cache.head_stride;
      const int many = int(min_of(cache.block_size - offset, seen.to - j));
      for (int i = 0; i < many; ++i) lines[j + i] = line + i * cache.token_stride;
      j += many;
    }
  }

  void find_rows(const Cache& cache, int64_t base, Span seen, const TC** lines) {
    const TC* first = static_cast<const TC*>(cache.data) + kv_head * cache.head_stride;
    first += (g.cu_seqlens_q[t.request] + base) * cache.token_stride;
    for (int j = seen.from; j < seen.to; ++j) lines[j] = first + j * cache.token_stride;
  }

  // Blocks lie anywhere: no hardware prefetcher follows them. What stands at lines[at] on is fetched
  // next, if there is as much; otherwise `here`, once more.
  static const TC* const* coming(const TC* const* lines, Span seen, int at, int many, const TC* const* here) {
    return at >= seen.from && at + many <= seen.to ? lines + at : here;
  }

  // W words of a line of `dim` from dimension d on.
  vf line_words(const Cache& cache, const TC* line, int64_t dim, int64_t d) const {
    if (line == nullptr) return vzero();
    if (cache.dim_stride == 1) return A::words(number_at(line, d), dim - d);
    TC part[CHUNK] = {};
    for (int64_t i = 0; i < min_of(CHUNK, dim - d); ++i) part[i] = line[(d + i) * cache.dim_stride];
    return A::words(part, CHUNK);
  }

  // Packed keys [depth][KEYS] of a tile; lanes of keys that nobody sees are zeros.
  void pack_keys(int tile, Span seen, float* to) {
    const bool last = (tile + 1) * KEYS >= seen.to;
    const TC* const* next = last ? value_lines : key_lines;
    const int next_tile = last ? seen.from / KEYS : tile + 1;
    for (int j = 0; j < KEYS; j += W) {
      const int at = tile * KEYS + j;
      if (at + W <= seen.from || at >= seen.to) continue;
      const TC* lines[W];
      for (int i = 0; i < W; ++i) lines[i] = at + i >= seen.from && at + i < seen.to ? key_lines[at + i] : nullptr;
      int64_t w = 0;
      if (at >= seen.from && at + W <= seen.to && g.keys.dim_stride == 1) {
        const TC* const* ahead = coming(next, seen, next_tile * KEYS + j, W, lines);
        const int64_t full = g.dim / CHUNK * CHUNK;
        int fetched = 0;  // in the order of memory, which is what the hardware's own prefetcher extends
        int64_t fetched_d = 0;
        for (; (w + W) * STEP <= g.dim; w += W) {
          vf x[W];
          HR_UNROLL for (int i = 0; i < W; ++i) x[i] = A::words(number_at(lines[i], w * STEP), CHUNK);
          HR_UNROLL for (int i = 0; i < W; ++i) {
            __builtin_prefetch(number_at(ahead[fetched], fetched_d));
            fetched_d += CHUNK;
            const bool line_end = fetched_d == full;
            fetched += line_end;
            fetched_d = line_end ? 0 : fetched_d;
          }
          transpose(x);
          HR_UNROLL for (int i = 0; i < W; ++i) st(to + (w + i) * KEYS + j, x[i]);
        }
      }
      for (; w < words; w += W) {
        vf x[W];
        for (int i = 0; i < W; ++i) x[i] = line_words(g.keys, lines[i], g.dim, w * STEP);
        transpose(x);
        const int64_t many = min_of(W, depth - w);  // zeros behind the last word
        for (int64_t i = 0; i < many; ++i) st(to + (w + i) * KEYS + j, x[i]);
      }
    }
  }

  // Packed values of a tile, panels of [KEYS / STEP][WIDE], `apart` floats from one to the next;
  // keys outside `seen` are zeros. False if any value is infinite or NaN.
  bool pack_values(int tile, Span seen, float* to, int64_t apart) {
    typename A::Bad bad{};
    for (int j = 0; j < KEYS; j += STEP, to += WIDE) {
      const int at = tile * KEYS + j;
      const TC* lines[STEP];
      for (int i = 0; i < STEP; ++i) lines[i] = at + i >= seen.from && at + i < seen.to ? value_lines[at + i] : nullptr;
      int64_t d = 0;
      if (at >= seen.from && at + STEP <= seen.to && g.values.dim_stride == 1) {
        const TC* const* ahead = coming(value_lines, seen, at + KEYS, STEP, lines);
        const TC* keys[STEP];
        if (ahead == lines && !last_head) {
          const int first = min_of(seen.from / KEYS * KEYS + j, seen.to - STEP);
          for (int i = 0; i < STEP; ++i) keys[i] = key_lines[max_of(first, seen.from) + i] + g.keys.head_stride;
          ahead = keys;
        }
        for (; d + CHUNK <= g.value_dim; d += CHUNK) {
          vf x[STEP];
          for (int i = 0; i < STEP; ++i) x[i] = A::words(number_at(lines[i], d), CHUNK);
          for (int i = 0; i < STEP; ++i) __builtin_prefetch(number_at(ahead[i], d));
          A::store_values(to + d / WIDE * apart + d % WIDE, x, bad);
        }
      }
      for (; d < g.value_dim; d += CHUNK) {
        vf x[STEP];
        for (int i = 0; i < STEP; ++i) x[i] = line_words(g.values, lines[i], g.value_dim, d);
        A::store_values(to + d / WIDE * apart + d % WIDE, x, bad);
      }
    }
    return !A::any(bad);
  }

  // Scores of rows [r, r + n) against a packed tile.
  void score(int64_t r, int64_t n, int tile, Span seen, const float* packed) {
    const int from = int(max_of(seen.from - tile * KEYS, 0)) / W * W;
    const int to = int(min_of(seen.to - tile * KEYS, KEYS)), vectors = int(ceil_div(to - from, W));
    const int64_t first = g.keys.rows.parts > 1 ? g.value_dim / STEP : depth;  // of the words, with one scale
    const float* const query = q + r * q_apart;
    float* const line = s + tile * KEYS + from;
    this->multiply(n, vectors, query, q_apart, packed + from, KEYS, first, line, LINE, false);
    if (g.keys.rows.data == nullptr) return;
    const float* const scales = key_scales[0] + tile * KEYS + from;
    for (int64_t i = 0; i < n; ++i) {
      for (int j = 0; j < vectors * W; j += W) st(line + i * LINE + j, vmul(ld(line + i * LINE + j), ld(scales + j)));
    }
    if (first < depth) score_rest(n, vectors, query, first, packed + from, scales + PART, line);
  }

  // Adds what the words from `first` on give, which have scales of their own.
  void score_rest(int64_t n, int vectors, const float* query, int64_t first, const float* packed, const float* scales,
                  float* line) const {
    float rest[BLOCK * KEYS];
    this->multiply(n, vectors, query + first, q_apart, packed + first * KEYS, KEYS, depth - first, rest, KEYS, false);
    for (int64_t i = 0; i < n; ++i) {
      for (int j = 0; j < vectors * W; j += W) {
        st(line + i * LINE + j, vfma(ld(rest + i * KEYS + j), ld(scales + j), ld(line + i * LINE + j)));
      }
    }
  }

  // Outputs of rows [r, r + n) += weights times packed values, over the steps [from, to) of the
  // partition; `packed` begins at step `origin`.
  void weigh(int64_t r, int64_t n, const float* line, int from, int to, const float* packed, int origin,
             int64_t apart, const State& state, bool more) {
    const int64_t lanes = lanes_of(g.value_dim);
    for (int64_t d = 0; d < g.value_dim; d += WIDE) {
      const int vectors = int(min_of(VECTORS, ceil_div(g.value_dim - d, W)));
      this->multiply(n, vectors, line + from, LINE, packed + d / WIDE * apart + (from - origin) * WIDE, WIDE, to - from,
                     state.acc + r * lanes + d, lanes, more);
    }
  }

  // Tile by tile, packed as it comes. A row whose unseen keys are not finite gets zeros for them.
  void weigh_tiles(int64_t r, int64_t n, int64_t base, Span seen, const State& state) {
    constexpr int64_t apart = KEYS / STEP * WIDE;
    for (int tile = seen.from / KEYS; tile * KEYS < seen.to; ++tile) {
      const int from = Base::first_step(int(max_of(seen.from, tile * KEYS)));
      const int to = Base::end_step(int(min_of(seen.to, (tile + 1) * KEYS)));
      const int origin = tile * KEYS / STEP;
      const bool more = tile > seen.from / KEYS;
      if (pack_values(tile, seen, spare, apart) || n == group) {
        weigh(r, n, s, from, to, spare, origin, apart, state, more);
        continue;
      }
      for (int64_t i = 0; i < n; ++i) {
        pack_values(tile, span(r + i, base), spare, apart);
        weigh(r + i, 1, s + i * LINE, from, to, spare, origin, apart, state, more);
      }
    }
  }

  // The state of all rows after one partition alone.
  void visit(int64_t partition, const State& state) {
    const int64_t base = partition * PART;
    const Span all = span(0, rows, base);
    find_lines(g.keys, base, all, key_lines);
    find_lines(g.values, base, all, value_lines);
    fetch_scales(g.keys, base, all);
    fetch_scales(g.values, base, all);
    const int64_t tile_floats = KEYS * q_width, apart = PART / STEP * WIDE;
    const ShapesFor<Base::TILED> shapes(rows);
    bool finite = true;
    for (int tile = all.from / KEYS; !once && tile * KEYS < all.to; ++tile) {
      pack_keys(tile, all, k + tile * tile_floats);
      find_key_scales(base, tile, all);
      finite &= pack_values(tile, all, v + tile * (KEYS / STEP) * WIDE, apart);
    }
    for (int64_t r = 0; r < rows; r += BLOCK) {
      const int64_t n = min_of(BLOCK, rows - r);
      const Span seen = span(r, n, base);
      for (int tile = seen.from / KEYS; tile * KEYS < seen.to; ++tile) {
        if (once) {
          pack_keys(tile, seen, k);
          find_key_scales(base, tile, seen);
        }
        score(r, n, tile, seen, k + (once ? 0 : tile * tile_floats));
      }
      if (r == 0 && g.values.rows.data != nullptr) find_scales(g.values, base, all, 0, scales_of_values);
      this->soften_all(r, n, base, seen, state);
      if (seen.empty()) continue;
      if (once || !finite) {
        weigh_tiles(r, n, base, seen, state);
      } else {
        weigh(r, n, s, Base::first_step(seen.from), Base::end_step(seen.to), v, 0, apart, state, false);
      }
    }
  }
};

}  // namespace paged
}  // namespace
}  // namespace headrace::HR_ISA

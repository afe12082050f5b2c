// Attention over a paired cache: the order in which both products read, so nothing is packed.
//
// Where the machine multiplies pairs of bf16, a word is a pair. In each block and kv head, keys are
// [S / 16][D / 2][16][2] (a word of 16 keys is one vector) and values [S / 2][D][2] (a word holds
// two keys' values of one dimension). Words, lanes and order of sums are those of a PlainUnit over
// the same numbers, so the bits are the same.
//
// With few rows the cache's way from memory is the cost. Blocks lie anywhere, which no hardware
// prefetcher follows: each step fetches what comes a tile later, keys before values before the keys
// of what the task does next.

namespace headrace::HR_ISA {
namespace {
namespace paged {

#if defined(HR_DOT_BF16)

constexpr int GROUPS = KEYS / W;             // groups of 16 keys in a tile
constexpr int ROWS_AHEAD = KEYS / 2;         // rows of values fetched ahead

// Into the second cache: what is fetched ahead is as large as half of the first one, and lies a page apart, in the
// same few of its sets as what is being read. There it was mostly gone before its turn.
inline void fetch(const float* line) { __builtin_prefetch(line, 0, 2); }

// c = a b for R rows of words and V groups of keys; fetches as much from `ahead` on.
template <int R, int V, bool AHEAD>
inline void key_product(const float* a, int64_t lda, const float* const* groups, int64_t words, float* c,
                        int64_t ldc, const float* const* ahead) {
  vf acc[R][V];
  HR_UNROLL for (int r = 0; r < R; ++r)
    HR_UNROLL for (int v = 0; v < V; ++v) acc[r][v] = vzero();
  for (int64_t w = 0; w < words; ++w) {
    vf x[V];
    HR_UNROLL for (int v = 0; v < V; ++v) x[v] = ld(groups[v] + w * W);
    if constexpr (AHEAD)
      HR_UNROLL for (int v = 0; v < V; ++v) fetch(ahead[v] + w * W);
    HR_UNROLL for (int r = 0; r < R; ++r) {
      const vf y = vset(a[r * lda + w]);
      HR_UNROLL for (int v = 0; v < V; ++v) acc[r][v] = Pair::mac(acc[r][v], y, x[v]);
    }
  }
  HR_UNROLL for (int r = 0; r < R; ++r)
    HR_UNROLL for (int v = 0; v < V; ++v) st(c + r * ldc + v * W, acc[r][v]);
}

template <int R, bool AHEAD>
inline void key_product_of(int groups_seen, const float* a, int64_t lda, const float* const* groups,
                           int64_t words, float* c, int64_t ldc, const float* const* ahead) {
  switch (groups_seen) {
    case 1: return key_product<R, 1, AHEAD>(a, lda, groups, words, c, ldc, ahead);
    case 2: return key_product<R, 2, AHEAD>(a, lda, groups, words, c, ldc, ahead);
    case 3: return key_product<R, 3, AHEAD>(a, lda, groups, words, c, ldc, ahead);
    case 4: return key_product<R, 4, AHEAD>(a, lda, groups, words, c, ldc, ahead);
  }
}

// c = a b for R rows of weights and V vectors of dimensions, over the rows [from, to) of values;
// with each, fetches `lines` vectors of the row ROWS_AHEAD later.
template <int R, int V>
inline void value_product(const float* a, const float* const* rows, int from, int to, int64_t at, int lines,
                          float* c, int64_t ldc) {
  vf acc[R][V];
  HR_UNROLL for (int r = 0; r < R; ++r)
    HR_UNROLL for (int v = 0; v < V; ++v) acc[r][v] = vzero();
  for (int k = from; k < to; ++k) {
    const float* const b = rows[k] + at;
    vf x[V];
    HR_UNROLL for (int v = 0; v < V; ++v) x[v] = ld(b + v * W);
    for (int i = 0; i < lines; ++i) fetch(rows[k + ROWS_AHEAD] + i * W);
    HR_UNROLL for (int r = 0; r < R; ++r) {
      const vf y = vset(a[r * PART + k]);
      HR_UNROLL for (int v = 0; v < V; ++v) acc[r][v] = Pair::mac(acc[r][v], y, x[v]);
    }
  }
  HR_UNROLL for (int r = 0; r < R; ++r)
    HR_UNROLL for (int v = 0; v < V; ++v) st(c + r * ldc + v * W, acc[r][v]);
}

template <int R>
inline void value_product_of(int64_t dim, const float* a, const float* const* rows, int from, int to,
                             bool ahead, float* c, int64_t ldc) {
  int lines = ahead ? int(dim / W) : 0;
  int64_t at = 0;
  for (; R <= 3 && at + 2 * WIDE <= dim; at += 2 * WIDE, lines = 0) {
    value_product<R, R <= 3 ? 2 * VECTORS : 1>(a, rows, from, to, at, lines, c + at, ldc);
  }
  for (; at + WIDE <= dim; at += WIDE, lines = 0) {
    value_product<R, VECTORS>(a, rows, from, to, at, lines, c + at, ldc);
  }
  switch ((dim - at) / W) {
    case 1: return value_product<R, 1>(a, rows, from, to, at, lines, c + at, ldc);
    case 2: return value_product<R, 2>(a, rows, from, to, at, lines, c + at, ldc);
    case 3: return value_product<R, 3>(a, rows, from, to, at, lines, c + at, ldc);
  }
}

// f(number of rows, first row) over register tiles of n rows; the number is a compile-time one.
template <int R> struct Number { static constexpr int value = R; };
template <class F> inline void over_row_tiles(int64_t n, const F& f) {
  int64_t r = 0;
  for (; r + ROWS <= n; r += ROWS) f(Number<ROWS>{}, r);
  switch (n - r) {
    case 1: return f(Number<1>{}, r);
    case 2: return f(Number<2>{}, r);
    case 3: return f(Number<3>{}, r);
    case 4: return f(Number<4>{}, r);
    case 5: return f(Number<5>{}, r);
  }
}

// Where a unit's keys and values are in a paired cache; the block size is a multiple of 16.
struct PairedRows : UnitRows<bf16, Pair> {
  const float* key_groups[PART / W];                 // [D / 2][16] words each
  const float* value_groups[PART / W];               // [8][D] words each
  const float* value_rows[PART / 2 + ROWS_AHEAD];    // [D] words each
  const float* next_keys[GROUPS];                    // what the task reads after these values

  using UnitRows::UnitRows;

  const float* group_of(const Cache& cache, int64_t key, int64_t head) {
    const int64_t column = key / cache.block_size, offset = key % cache.block_size;
    int64_t block = column < g.table_width ? g.block_table[t.request * g.table_stride + column] : -1;
    if (block < 0 || block >= cache.blocks) { block = 0; status = BAD_INDEX; }
    return reinterpret_cast<const float*>(static_cast<const bf16*>(cache.data) + block * cache.block_stride +
                                          head * cache.head_stride + offset * g.dim);
  }

  void find_groups(int64_t partition, Span seen) {
    const int64_t base = partition * PART;
    for (int j = seen.from / W; j * W < seen.to; ++j) {
      key_groups[j] = group_of(g.keys, base + j * W, kv_head);
      value_groups[j] = group_of(g.values, base + j * W, kv_head);
    }
    for (int i = 0; i < GROUPS; ++i) next_keys[i] = nullptr;
    const bool more = partition + 1 < t.end;
    if (!more && last_head) return;
    const int64_t from = more ? base + PART : t.begin * PART + span(0, t.begin * PART).from / KEYS * KEYS;
    for (int i = 0; i < GROUPS; ++i) {
      const int64_t key = from + i * W;
      if (key < g.seq_lens[t.request]) next_keys[i] = group_of(g.keys, key, more ? kv_head : kv_head + 1);
    }
  }

  const float* value_row(int k) const { return value_groups[k * 2 / W] + k % (W / 2) * g.dim; }

  // Rows of values from their groups; behind the last one that is seen, what is fetched after it.
  void find_rows(Span seen) {
    const int end = int(ceil_div(seen.to, 2));
    for (int k = seen.from / 2; k < end; ++k) value_rows[k] = value_row(k);
    for (int i = 0; i < ROWS_AHEAD; ++i) {
      const float* next = next_keys[i / (W / 2)];
      value_rows[end + i] = next == nullptr ? value_rows[end - 1] : next + i % (W / 2) * g.dim;
    }
  }

  // What is fetched while a tile's keys are read: the next tile's, or the first values.
  void find_ahead(int tile, Span seen, const float** ahead) const {
    const bool last = (tile + 1) * KEYS >= seen.to;
    const float* const* from = last ? value_groups : key_groups;
    const int first = last ? seen.from / W : (tile + 1) * GROUPS;
    for (int i = 0; i < GROUPS; ++i) {
      ahead[i] = (first + i) * W < seen.to ? from[first + i] : key_groups[seen.from / W];
    }
  }
};

#if !defined(HR_AMX)

// A unit over a paired cache; D is a multiple of 16, the block size too.
struct PairedUnit : PairedRows {
  float* spare;  // three rows: two edges, and zeros

  PairedUnit(const Attention& g, const Tile& t, int64_t kv_head, bool last_head)
      : PairedRows(g, t, kv_head, last_head) {
    spare = take_scratch(3 * g.dim);
    __builtin_memset(spare + 2 * g.dim, 0, size_t(g.dim) * sizeof(float));
  }

  const float* masked(const float* row, uint32_t mask, float* to) const {
    for (int64_t d = 0; d < g.dim; d += W) {
      _mm512_storeu_si512(to + d, _mm512_and_si512(_mm512_loadu_si512(row + d), _mm512_set1_epi32(int(mask))));
    }
    return to;
  }

  // A row of two keys of which one is not seen is replaced by a copy with zeros for that one.
  void cut_edges(Span seen) {
    if (seen.from % 2 != 0) {
      value_rows[seen.from / 2] = masked(value_rows[seen.from / 2], 0xffff0000u, spare);
    }
    if (seen.to % 2 != 0) {
      value_rows[seen.to / 2] = masked(value_rows[seen.to / 2], 0x0000ffffu, spare + g.dim);
    }
  }

  // The rows as they were before cut_edges.
  void mend_edges(Span seen) {
    if (seen.from % 2 != 0) value_rows[seen.from / 2] = value_row(seen.from / 2);
    if (seen.to % 2 != 0) value_rows[seen.to / 2] = value_row(seen.to / 2);
  }

  // Whether all values that any row sees are finite.
  bool are_finite(Span seen) {
    Pair::Bad bad{};
    cut_edges(seen);
    for (int k = seen.from / 2; k * 2 < seen.to; ++k) {
      for (int64_t d = 0; d < g.dim; d += W) {
        const __m512i x = _mm512_loadu_si512(value_rows[k] + d);
        bad = _mm512_max_epu16(bad, _mm512_and_si512(x, _mm512_set1_epi16(0x7fff)));
      }
    }
    mend_edges(seen);
    return !Pair::any(bad);
  }

  template <bool AHEAD> void score(int64_t r, int64_t n, int tile, Span seen) {
    const float* ahead[GROUPS];
    if constexpr (AHEAD) find_ahead(tile, seen, ahead);
    const int from = int(max_of(seen.from - tile * KEYS, 0)) / W;
    const int to = int(ceil_div(min_of(seen.to - tile * KEYS, KEYS), W));
    const float* const* groups = key_groups + tile * GROUPS + from;
    float* const c = s + tile * KEYS + from * W;
    over_row_tiles(n, [&](auto number, int64_t i) {
      constexpr int R = decltype(number)::value;
      const float* a = q + (r + i) * q_apart;
      if (AHEAD && i == 0) {
        key_product_of<R, true>(to - from, a, q_apart, groups, words, c, PART, ahead);
      } else {
        key_product_of<R, false>(to - from, a, q_apart, groups, words, c + i * PART, PART, nullptr);
      }
    });
  }

  void weigh(int64_t r, int64_t n, Span seen, const float* weights, bool ahead, const State& state) {
    const int64_t lanes = lanes_of(g.value_dim);
    over_row_tiles(n, [&](auto number, int64_t i) {
      constexpr int R = decltype(number)::value;
      value_product_of<R>(g.dim, weights + i * PART, value_rows, seen.from / 2, int(ceil_div(seen.to, 2)),
                          ahead && i == 0, state.acc + (r + i) * lanes, lanes);
    });
  }

  // One row, with zeros for the keys that it does not see: weight 0 times infinity is not 0.
  void weigh_alone(int64_t r, Span own, Span seen, const float* weights, const State& state) {
    find_rows(seen);
    for (int k = seen.from / 2; k * 2 < seen.to; ++k) {
      if (own.empty() || k < own.from / 2 || k >= ceil_div(own.to, 2)) value_rows[k] = spare + 2 * g.dim;
    }
    if (!own.empty()) cut_edges(own);
    weigh(r, 1, seen, weights, false, state);
  }

  // The state of all rows after one partition alone.
  void visit(int64_t partition, const State& state) {
    const int64_t base = partition * PART;
    const Span all = span(0, rows, base);
    find_groups(partition, all);
    if (!all.empty()) find_rows(all);
    const bool together = t.count == 1 || t.common || all.empty() || are_finite(all);
    for (int64_t r = 0; r < rows; r += BLOCK_ROWS) {
      const int64_t n = min_of(BLOCK_ROWS, rows - r);
      const Span seen = span(r, n, base);
      for (int tile = seen.from / KEYS; tile * KEYS < seen.to; ++tile) {
        r == 0 ? score<true>(r, n, tile, seen) : score<false>(r, n, tile, seen);
      }
      soften_all(r, n, base, seen, state);
      if (seen.empty()) continue;
      if (together) {
        cut_edges(seen);
        weigh(r, n, seen, s, r == 0, state);
        mend_edges(seen);
      } else {
        for (int64_t i = 0; i < n; ++i) weigh_alone(r + i, span(r + i, base), seen, s + i * PART, state);
      }
    }
  }
};

#endif

#endif

}  // namespace paged
}  // namespace
}  // namespace headrace::HR_ISA

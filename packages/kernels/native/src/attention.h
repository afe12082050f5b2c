// Causal attention over the paged cache, read in place.
//
// A task is (request, tile of query positions, kv head); its rows are (position, head of the group),
// so all query heads of a kv head read a key once. Keys are visited in tiles of KEYS whose borders
// stand at fixed absolute positions, with a running maximum and sum per row (Milakov & Gimelshein
// 2018, arXiv:1805.02867; Dao 2023, arXiv:2307.08691).
//
// Row invariance: what a row does depends on its own position, window and keys only.
//  - A score is one dot product: lanes over D in order, then a fixed tree.
//  - A tile in which a row sees nothing is not visited for that row; in others the maximum and the
//    sum of its 64 places are taken in a fixed order, unseen places holding -inf.
//  - The output sums p * v over seen keys in ascending order, one lane per d.
// Hence chunks of a prefill, the other requests, and threads change no bit, and a decode step equals
// the last row of a prefill.

namespace headrace::HR_ISA {
namespace {

constexpr int KEYS = 64;           // keys of a tile
constexpr int TARGET_ROWS = 32;    // rows of a task, if there are so many queries
constexpr int AHEAD = 8;           // keys between a fetch and its use
constexpr int COPY_ROWS = 12;      // from here on it pays to widen a tile of the cache first
#if defined(HR_AVX512)
constexpr int DOT_ROWS = 4;
#else
constexpr int DOT_ROWS = 2;
#endif

struct Attention {
  void* out;
  const void* query;
  const int32_t* block_table;
  const int32_t* cu_seqlens_q;
  const int32_t* seq_lens;
  const float* sinks;
  Cache keys, values;
  int64_t tokens, requests, q_heads, kv_heads, dim;
  int64_t q_row, q_head, table_stride, table_width;
  float scale, soft_cap;
  int64_t window;  // 0 = none
};

// s[r][j] = q[r] . k[j] for NQ rows and 4 keys; `padded` says that k may be read up to `lanes`.
template <int NQ, class T>
inline void dots(const float* q, int64_t lanes, const T* const* k, int64_t dim, float* s) {
  vf acc[NQ][4];
  for (int r = 0; r < NQ; ++r)
    for (int j = 0; j < 4; ++j) acc[r][j] = vzero();
  int64_t d = 0;
  for (; d + W <= dim; d += W) {
    const vf k0 = ld(k[0] + d), k1 = ld(k[1] + d), k2 = ld(k[2] + d), k3 = ld(k[3] + d);
    for (int r = 0; r < NQ; ++r) {
      const vf x = ld(q + r * lanes + d);
      acc[r][0] = vfma(x, k0, acc[r][0]);
      acc[r][1] = vfma(x, k1, acc[r][1]);
      acc[r][2] = vfma(x, k2, acc[r][2]);
      acc[r][3] = vfma(x, k3, acc[r][3]);
    }
  }
  if (d < dim) {
    for (int j = 0; j < 4; ++j) {
      const vf y = ldn(k[j] + d, dim - d);
      for (int r = 0; r < NQ; ++r) acc[r][j] = vfma(ld(q + r * lanes + d), y, acc[r][j]);
    }
  }
  for (int r = 0; r < NQ; ++r) hsum4(acc[r][0], acc[r][1], acc[r][2], acc[r][3], s + r * KEYS);
}

// acc[r] += sum over j in [from, to) of p[r][j] * v[j], for NQ rows and NV vectors of D.
template <int NQ, int NV, class T>
inline void weigh(const float* p, const T* const* v, int from, int to, int64_t d, int64_t lanes, float* acc) {
  vf a[NQ][NV];
  for (int r = 0; r < NQ; ++r)
    for (int i = 0; i < NV; ++i) a[r][i] = ld(acc + r * lanes + d + i * W);
  for (int j = from; j < to; ++j) {
    vf x[NV];
    for (int i = 0; i < NV; ++i) x[i] = ld(v[j] + d + i * W);
    for (int r = 0; r < NQ; ++r) {
      const vf w = vset(p[r * KEYS + j]);
      for (int i = 0; i < NV; ++i) a[r][i] = vfma(w, x[i], a[r][i]);
    }
  }
  for (int r = 0; r < NQ; ++r)
    for (int i = 0; i < NV; ++i) st(acc + r * lanes + d + i * W, a[r][i]);
}

template <int NQ, class T>
inline void weigh_all(const float* p, const T* const* v, int from, int to, int64_t dim, int64_t lanes,
                      float* acc) {
  if (from >= to) return;
  constexpr int NV = NQ == 1 ? 2 * DOT_ROWS : 4;  // accumulators enough to hide an addition's latency
  int64_t d = 0;
  for (; d + NV * W <= dim; d += NV * W) weigh<NQ, NV>(p, v, from, to, d, lanes, acc);
  for (; d + W <= dim; d += W) weigh<NQ, 1>(p, v, from, to, d, lanes, acc);
  if (d < dim) {
    for (int r = 0; r < NQ; ++r) {
      vf a = ld(acc + r * lanes + d);
      for (int j = from; j < to; ++j) a = vfma(vset(p[r * KEYS + j]), ldn(v[j] + d, dim - d), a);
      st(acc + r * lanes + d, a);
    }
  }
}

// Scratch of one task.
struct Work {
  int64_t rows, lanes;
  float* q;       // [rows][lanes], zeros past D
  float* acc;     // [rows][lanes]
  float* p;       // [rows][KEYS], scores and then weights
  float* best;    // [rows]
  float* sum;     // [rows]
  float* wide_k;  // [KEYS][lanes]
  float* wide_v;  // [KEYS][lanes]
};

inline Work make_work(int64_t rows, int64_t dim) {
  const int64_t lanes = round_up(dim, W);
  const int64_t floats = rows * (2 * lanes + KEYS) + 2 * round_up(rows, W) + 2 * KEYS * lanes;
  float* at = static_cast<float*>(scratch(SCRATCH_TASK, size_t(floats) * sizeof(float)));
  Work w{rows, lanes, at, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};
  w.acc = w.q + rows * lanes;
  w.p = w.acc + rows * lanes;
  w.wide_k = w.p + rows * KEYS;
  w.wide_v = w.wide_k + KEYS * lanes;
  w.best = w.wide_v + KEYS * lanes;
  w.sum = w.best + round_up(rows, W);
  return w;
}

// The keys [from, to) of a tile (indices within it) that the row at position p sees.
struct Span { int from, to; };
inline Span seen(const Attention& g, int64_t p, int64_t tile) {
  const int64_t first = g.window > 0 ? max_of(0, p - g.window + 1) : 0;
  const int64_t from = max_of(first - tile, 0), to = min_of(p + 1 - tile, KEYS);
  return {int(min_of(from, KEYS)), int(max_of(to, 0))};
}

// Pointers to the keys (or values) [from, to) of a tile; widened copies if asked for.
template <class T>
inline bool point_at(const Cache& cache, const int32_t* blocks, int64_t table_width, int64_t head,
                     int64_t tile, Span span, const T** out) {
  bool good = true;
  for (int j = span.from; j < span.to;) {
    const int64_t at = tile + j, column = at / cache.block_size, offset = at % cache.block_size;
    int64_t block = column < table_width ? blocks[column] : -1;
    if (block < 0 || block >= cache.blocks) { block = 0; good = false; }
    const T* token = static_cast<const T*>(cache.data) + block * cache.block_stride +
                     offset * cache.token_stride + head * cache.head_stride;
    const int many = int(min_of(cache.block_size - offset, span.to - j));
    for (int i = 0; i < many; ++i) out[j + i] = token + i * cache.token_stride;
    j += many;
  }
  return good;
}

template <class T>
inline void widen(const T* const* from, Span span, int64_t dim, int64_t dim_stride, int64_t lanes,
                  float* to, const float** out) {
  for (int j = span.from; j < span.to; ++j) {
    float* line = to + j * lanes;
    if (dim_stride == 1) {
      for (int64_t d = 0; d < dim; d += W) st(line + d, ld_upto(from[j] + d, dim - d));
    } else {
      for (int64_t d = 0; d < lanes; ++d) line[d] = d < dim ? to_float(from[j][d * dim_stride]) : 0.0f;
    }
    out[j] = line;
  }
}

// Blocks lie anywhere: no hardware prefetcher follows them.
template <class T> inline void fetch(const T* line, int64_t dim) {
  for (int64_t d = 0; d < dim; d += 64 / int64_t(sizeof(T))) __builtin_prefetch(line + d);
}

// Scores of NQ rows against the keys of a span; four keys at a time, the last one repeated.
// If asked to, it fetches the keys to come and the values that will be weighed next.
template <int NQ, class T>
inline void score(const float* q, const Work& w, const T* const* k, const T* const* v, bool fetching,
                  Span span, int64_t dim, float* s) {
  for (int j = span.from; j < span.to; j += 4) {
    const T* four[4];
    const int last = span.to - 1;
    for (int i = 0; i < 4; ++i) four[i] = k[j + i < last ? j + i : last];
    for (int i = 0; fetching && i < 4; ++i) {
      fetch(k[j + i + AHEAD < last ? j + i + AHEAD : last], dim);
      fetch(v[j + i < last ? j + i : last], dim);
    }
    if (j + 4 <= KEYS) {
      dots<NQ>(q, w.lanes, four, dim, s + j);
    } else {
      float spill[DOT_ROWS * KEYS];
      dots<NQ>(q, w.lanes, four, dim, spill);
      for (int r = 0; r < NQ; ++r)
        for (int i = 0; j + i < span.to; ++i) s[r * KEYS + j + i] = spill[r * KEYS + i];
    }
  }
}

// Scores -> weights of one row; its running maximum and sum; its accumulator rescaled.
inline void soften(const Attention& g, const Work& w, int64_t r, Span span) {
  float* s = w.p + r * KEYS;
  const vf scale = vset(g.scale);
  for (int j = 0; j < KEYS; j += W) {
    vf x = vmul(ld(s + j), scale);
    if (g.soft_cap > 0) x = vmul(vset(g.soft_cap), vtanh(vdiv(x, vset(g.soft_cap))));
    st(s + j, x);
  }
  for (int j = 0; j < span.from; ++j) s[j] = -__builtin_inff();
  for (int j = span.to; j < KEYS; ++j) s[j] = -__builtin_inff();
  vf top = ld(s);
  for (int j = W; j < KEYS; j += W) top = vmax(top, ld(s + j));
  const float best = hmax(top), before = w.best[r], now = best > before ? best : before;
  if (now == -__builtin_inff()) {  // every score is -inf: nothing to weigh
    for (int j = 0; j < KEYS; ++j) s[j] = 0.0f;
    return;
  }
  vf total = vzero();
  for (int j = 0; j < KEYS; j += W) {
    const vf e = vexp(vsub(ld(s + j), vset(now)));
    st(s + j, e);
    total = vadd(total, e);
  }
  if (now != before) {
    const vf shrink = vexp(vsub(vset(before), vset(now)));
    float first[W];
    st(first, shrink);
    w.sum[r] *= first[0];
    for (int64_t d = 0; d < w.lanes; d += W) st(w.acc + r * w.lanes + d, vmul(ld(w.acc + r * w.lanes + d), shrink));
    w.best[r] = now;
  }
  w.sum[r] += hsum(total);
}

// One tile for all rows. Rows go in packs of DOT_ROWS; what not every row of a pack sees is weighed
// row by row, before and after the common part: ascending for each.
template <class T>
inline void visit(const Attention& g, const Work& w, const T* const* k, const T* const* v,
                  const Span* spans) {
  int64_t r = 0;
  while (r < w.rows) {
    const int64_t many = r + DOT_ROWS <= w.rows ? DOT_ROWS : 1;
    Span all = spans[r], common = spans[r];
    for (int64_t i = 1; i < many; ++i) {
      const Span s = spans[r + i];
      if (s.from < s.to) {
        if (all.from >= all.to) all = s;
        all = {int(min_of(all.from, s.from)), int(max_of(all.to, s.to))};
      }
      common = {int(max_of(common.from, s.from)), int(min_of(common.to, s.to))};
    }
    if (all.from < all.to) {
      const float* q = w.q + r * w.lanes;
      float* p = w.p + r * KEYS;
      const bool fetching = r == 0 && w.rows < COPY_ROWS;
      if (many == DOT_ROWS) {
        score<DOT_ROWS>(q, w, k, v, fetching, all, g.dim, p);
      } else {
        score<1>(q, w, k, v, fetching, all, g.dim, p);
      }
      for (int64_t i = 0; i < many; ++i) {
        if (spans[r + i].from < spans[r + i].to) soften(g, w, r + i, spans[r + i]);
      }
      float* acc = w.acc + r * w.lanes;
      const bool shared = many == DOT_ROWS && common.from < common.to;
      if (shared) {
        for (int64_t i = 0; i < many; ++i) {
          weigh_all<1>(p + i * KEYS, v, spans[r + i].from, common.from, g.dim, w.lanes, acc + i * w.lanes);
        }
        weigh_all<DOT_ROWS>(p, v, common.from, common.to, g.dim, w.lanes, acc);
      }
      for (int64_t i = 0; i < many; ++i) {
        const int from = shared ? common.to : spans[r + i].from;
        weigh_all<1>(p + i * KEYS, v, from, spans[r + i].to, g.dim, w.lanes, acc + i * w.lanes);
      }
    }
    r += many;
  }
}

template <class T>
inline int32_t attend(const Attention& g, int64_t request, int64_t first, int64_t queries, int64_t kv_head) {
  const int64_t group = g.q_heads / g.kv_heads;
  const int64_t begin = g.cu_seqlens_q[request], length = g.cu_seqlens_q[request + 1] - begin;
  const int64_t position = g.seq_lens[request] - length + first;  // of the first query
  const Work w = make_work(queries * group, g.dim);
  const int32_t* blocks = g.block_table + request * g.table_stride;

  for (int64_t r = 0; r < w.rows; ++r) {
    const int64_t head = kv_head * group + r % group;
    const T* from = static_cast<const T*>(g.query) + (begin + first + r / group) * g.q_row + head * g.q_head;
    for (int64_t d = 0; d < w.lanes; d += W) {
      st(w.q + r * w.lanes + d, ld_upto(from + d, g.dim - d));
      st(w.acc + r * w.lanes + d, vzero());
    }
    w.best[r] = g.sinks != nullptr ? g.sinks[head] : -__builtin_inff();
    w.sum[r] = w.best[r] == -__builtin_inff() ? 0.0f : 1.0f;  // the sink itself: e^0
  }

  int32_t status = OK;
  const int64_t last = position + queries - 1;
  const int64_t lowest = g.window > 0 ? max_of(0, position - g.window + 1) : 0;
  const bool copies = sizeof(T) != sizeof(float) && w.rows >= COPY_ROWS;
  const T* k[KEYS];
  const T* v[KEYS];
  const float* wide_k[KEYS];
  const float* wide_v[KEYS];
  Span* spans = static_cast<Span*>(__builtin_alloca(size_t(w.rows) * sizeof(Span)));
  for (int64_t tile = lowest / KEYS * KEYS; tile <= last; tile += KEYS) {
    Span all{KEYS, 0};
    for (int64_t r = 0; r < w.rows; ++r) {
      spans[r] = seen(g, position + r / group, tile);
      if (spans[r].from >= spans[r].to) continue;
      all = {int(min_of(all.from, spans[r].from)), int(max_of(all.to, spans[r].to))};
    }
    if (all.from >= all.to) continue;
    const bool good_k = point_at(g.keys, blocks, g.table_width, kv_head, tile, all, k);
    const bool good_v = point_at(g.values, blocks, g.table_width, kv_head, tile, all, v);
    if (!good_k || !good_v) status = BAD_INDEX;
    if (copies || g.keys.dim_stride != 1 || g.values.dim_stride != 1) {
      widen(k, all, g.dim, g.keys.dim_stride, w.lanes, w.wide_k, wide_k);
      widen(v, all, g.dim, g.values.dim_stride, w.lanes, w.wide_v, wide_v);
      visit(g, w, wide_k, wide_v, spans);
    } else {
      visit(g, w, k, v, spans);
    }
  }

  for (int64_t r = 0; r < w.rows; ++r) {
    const int64_t head = kv_head * group + r % group;
    T* to = static_cast<T*>(g.out) + ((begin + first + r / group) * g.q_heads + head) * g.dim;
    const vf divisor = vset(w.sum[r] > 0.0f || w.sum[r] != w.sum[r] ? w.sum[r] : 1.0f);
    for (int64_t d = 0; d < g.dim; d += W) st_upto(to + d, vdiv(ld(w.acc + r * w.lanes + d), divisor), g.dim - d);
  }
  return status;
}

// geometry: as for cache_write.
int32_t paged_attention(void* out, const void* query, const void* key_cache, const void* value_cache,
                        const int32_t* block_table, const int32_t* cu_seqlens_q, const int32_t* seq_lens,
                        const float* sinks, const int64_t* geometry, int64_t tokens, int64_t requests,
                        int64_t q_heads, int64_t kv_heads, int64_t dim, int64_t q_row, int64_t q_head,
                        int64_t table_stride, int64_t table_width, int64_t window, float scale,
                        float soft_cap, int32_t dtype) {
  TokenWork caches{};
  set_caches(caches, const_cast<void*>(key_cache), const_cast<void*>(value_cache), geometry);
  const Attention g{out, query, block_table, cu_seqlens_q, seq_lens, sinks, caches.key_cache,
                    caches.value_cache, tokens, requests, q_heads, kv_heads, dim, q_row, q_head,
                    table_stride, table_width, scale, soft_cap, window};

  // Tiles of query positions: (request, first position).
  const int64_t per_tile = max_of(1, TARGET_ROWS / (q_heads / kv_heads));
  int64_t tiles = 0, work = 0;
  for (int64_t b = 0; b < requests; ++b) {
    const int64_t length = cu_seqlens_q[b + 1] - cu_seqlens_q[b];
    if (length < 0 || cu_seqlens_q[b] < 0 || cu_seqlens_q[b + 1] > tokens) return BAD_LENGTHS;
    tiles += ceil_div(length, per_tile);
    work += length * (window > 0 ? min_of(window, seq_lens[b]) : seq_lens[b]);
  }
  int32_t* tile_list = static_cast<int32_t*>(scratch(SCRATCH_A, size_t(2 * tiles + 1) * sizeof(int32_t)));
  int64_t at = 0;
  for (int64_t b = 0; b < requests; ++b) {
    const int64_t length = cu_seqlens_q[b + 1] - cu_seqlens_q[b];
    for (int64_t first = 0; first < length; first += per_tile, ++at) {
      tile_list[2 * at] = int32_t(b);
      tile_list[2 * at + 1] = int32_t(first);
    }
  }

  int32_t status = OK;
  with_dtype(dtype, [&](auto* t) {
    using T = typename pointee<decltype(t)>::type;
    parallel(tiles * kv_heads, work * q_heads * dim / 16, [&](int64_t task) {
      // Late tiles of a prefill see most keys: they go first.
      const int64_t i = tiles - 1 - task / kv_heads, b = tile_list[2 * i], first = tile_list[2 * i + 1];
      const int64_t length = cu_seqlens_q[b + 1] - cu_seqlens_q[b];
      if (attend<T>(g, b, first, min_of(per_tile, length - first), task % kv_heads) != OK) {
        __atomic_store_n(&status, int32_t(BAD_INDEX), __ATOMIC_RELAXED);
      }
    });
    const int64_t covered = requests > 0 ? cu_seqlens_q[requests] : 0;
    if (covered < tokens) {
      __builtin_memset(static_cast<T*>(out) + covered * q_heads * dim, 0,
                       size_t((tokens - covered) * q_heads * dim) * sizeof(T));
    }
  });
  return status;
}

}  // namespace
}  // namespace headrace::HR_ISA

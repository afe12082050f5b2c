// The lightning indexer (DeepSeek-AI 2025, arXiv:2512.02556): scores of cached keys, and the best of them.
//
// A tile is a few positions of a request; its rows, (position, head), share what is packed of the keys,
// as in attention_units.h. Scores of some tiles are made, by runs of keys, and then the best of each
// position are chosen: by the bits of the worst of them, which are found from the highest bits down.
//
// Row invariance: a product adds up its words in ascending order in one lane, a score its heads in ascending
// order, and of equal scores the earlier keys are chosen.

namespace headrace::HR_ISA {
namespace {
namespace indexing {

constexpr int64_t POSITIONS = 4;           // of a tile
constexpr int64_t KEYS = paged::KEYS;      // packed at a time
constexpr int64_t RUN = 16 * KEYS;         // keys of a task
constexpr int64_t SCORES = int64_t(1) << 22;  // that are kept at a time, if a tile has no more

struct Index {
  int32_t* out;
  const void *query, *weights;
  Cache keys;
  const int32_t *block_table, *cu_seqlens_q, *seq_lens;
  int64_t tokens, requests, heads, dim, q_row, q_head, w_row, table_stride, table_width, picks;
};

struct Tile {
  int32_t request, first, count, runs;
  int64_t position;  // of its first row
  int64_t width;     // scores of a row
  float* scores;
};

// Ascending bits for ascending numbers.
inline uint32_t rank_of(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof(bits));
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The positions of the best `many` of n scores, ascending. `n` is more than `many`.
inline void choose(const float* scores, int64_t n, int64_t many, int32_t* out) {
  uint32_t least = 0;  // the bits of the worst that is chosen, as far as they are known
  int64_t left = many;  // to be found among those that begin with these bits
  for (int shift = 24; shift >= 0; shift -= 8) {
    int64_t counts[256] = {};
    const uint32_t known = shift == 24 ? 0 : ~uint32_t(0) << (shift + 8);
    for (int64_t j = 0; j < n; ++j) {
      const uint32_t rank = rank_of(scores[j]);
      if ((rank & known) == least) ++counts[rank >> shift & 255];
    }
    int digit = 255;
    for (; counts[digit] < left; --digit) left -= counts[digit];
    least |= uint32_t(digit) << shift;
  }
  for (int64_t j = 0; many > 0 && j < n; ++j) {
    const uint32_t rank = rank_of(scores[j]);
    if (rank < least || (rank == least && left-- <= 0)) continue;
    *out++ = int32_t(j);
    --many;
  }
}

// The scores of a tile's positions for the keys [begin, end), which one task packs and asks.
template <class T> struct Scorer {
  using A = typename paged::Choice<T, T>::Words;
  static constexpr int STEP = A::STEP, CHUNK = W * STEP;
  const Index& g;
  const Tile& t;
  int64_t rows, words, q_width;
  float *q, *weights, *packed, *products;
  int32_t status = OK;

  Scorer(const Index& g, const Tile& t) : g(g), t(t) {
    rows = t.count * g.heads;
    words = ceil_div(g.dim, STEP);
    q_width = round_up(words, W);
    const int64_t own = rows * q_width + round_up(rows, W), all = own + KEYS * q_width + rows * KEYS;
    q = static_cast<float*>(scratch(SCRATCH_TASK, size_t(all) * sizeof(float)));
    weights = q + rows * q_width;
    packed = q + own;
    products = packed + KEYS * q_width;
    const int64_t token = g.cu_seqlens_q[t.request] + t.first;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t row = token + r / g.heads, head = r % g.heads;
      const T* from = static_cast<const T*>(g.query) + row * g.q_row + head * g.q_head;
      for (int64_t w = 0; w < q_width; w += W) st(q + r * q_width + w, A::words(from + w * STEP, g.dim - w * STEP));
      weights[r] = to_float(static_cast<const T*>(g.weights)[row * g.w_row + head]);
    }
  }

  const T* line_of(int64_t key) {
    const int64_t column = key / g.keys.block_size;
    int64_t block = column < g.table_width ? g.block_table[t.request * g.table_stride + column] : -1;
    if (block < 0 || block >= g.keys.blocks) { block = 0; status = BAD_INDEX; }
    return static_cast<const T*>(g.keys.data) + block * g.keys.block_stride + key % g.keys.block_size * g.keys.token_stride;
  }

  // [words][KEYS]; lanes behind `many` are zeros.
  void pack(int64_t first, int64_t many) {
    for (int64_t j = 0; j < KEYS; j += W) {
      const T* lines[W];
      for (int i = 0; i < W; ++i) lines[i] = j + i < many ? line_of(first + j + i) : nullptr;
      for (int64_t w = 0; w < words; w += W) {
        vf x[W];
        for (int i = 0; i < W; ++i) {
          x[i] = lines[i] == nullptr ? vzero() : A::words(lines[i] + w * STEP, g.dim - w * STEP);
        }
        paged::transpose(x);
        for (int64_t i = 0; i < min_of(W, words - w); ++i) st(packed + (w + i) * KEYS + j, x[i]);
      }
    }
  }

  void run(int64_t begin, int64_t end) {
    for (int64_t key = begin; key < end; key += KEYS) {
      pack(key, min_of(KEYS, end - key));
      paged::product_rows<A>(rows, int(KEYS / W), q, q_width, packed, KEYS, words, products, KEYS, false);
      for (int64_t i = 0; i < t.count; ++i) {
        for (int64_t j = 0; j < KEYS; j += W) {
          vf sum = vzero();
          for (int64_t r = i * g.heads; r < (i + 1) * g.heads; ++r) {
            sum = vfma(vset(weights[r]), vmax(ld(products + r * KEYS + j), vzero()), sum);
          }
          st(t.scores + i * t.width + key + j, vadd(sum, vzero()));  // plus zero: -0 is no other score
        }
      }
    }
  }
};

// Tiles from row `next` of request b on whose scores fit; where to go on is left in both.
inline int64_t next_tiles(const Index& g, int64_t& b, int64_t& next, Tile* tiles, int64_t most) {
  int64_t count = 0, floats = 0;
  for (; b < g.requests; ++b, next = 0) {
    const int64_t length = g.cu_seqlens_q[b + 1] - g.cu_seqlens_q[b];
    for (; next < length; next += POSITIONS) {
      const int64_t rows = min_of(POSITIONS, length - next), position = g.seq_lens[b] - length + next;
      const int64_t seen = max_of(0, position + rows), width = seen > g.picks ? round_up(seen, KEYS) : 0;
      if (count == most || (count > 0 && floats + rows * width > SCORES)) return count;
      tiles[count++] = {int32_t(b), int32_t(next), int32_t(rows), int32_t(ceil_div(width, RUN)), position, width, nullptr};
      floats += rows * width;
    }
  }
  return count;
}

inline void choose_of(const Index& g, const Tile& t) {
  for (int64_t i = 0; i < t.count; ++i) {
    int32_t* to = g.out + (g.cu_seqlens_q[t.request] + t.first + i) * g.picks;
    const int64_t seen = max_of(0, t.position + i + 1), many = min_of(seen, g.picks);
    if (seen > many) {
      choose(t.scores + i * t.width, seen, many, to);
    } else {
      for (int64_t j = 0; j < many; ++j) to[j] = int32_t(j);
    }
    for (int64_t j = many; j < g.picks; ++j) to[j] = -1;
  }
}

template <class T> inline int32_t run(const Index& g) {
  constexpr int64_t MOST = 512;  // tiles at a time
  Tile* tiles = static_cast<Tile*>(scratch(SCRATCH_A, size_t(MOST) * sizeof(Tile)));
  int32_t status = OK;
  for (int64_t b = 0, next = 0; b < g.requests;) {
    const int64_t count = next_tiles(g, b, next, tiles, MOST);
    int64_t floats = 0, runs = 0;
    for (int64_t i = 0; i < count; ++i) floats += tiles[i].count * tiles[i].width, runs += tiles[i].runs;
    float* scores = static_cast<float*>(scratch(SCRATCH_B, size_t(floats + 1) * sizeof(float)));
    int32_t* tile_of = static_cast<int32_t*>(scratch(SCRATCH_C, size_t(2 * runs + 1) * sizeof(int32_t)));
    int64_t at = 0;
    for (int64_t i = 0; i < count; ++i) {
      tiles[i].scores = scores;
      scores += tiles[i].count * tiles[i].width;
      for (int32_t r = 0; r < tiles[i].runs; ++r, ++at) tile_of[2 * at] = int32_t(i), tile_of[2 * at + 1] = r;
    }
    parallel(runs, floats * g.heads * g.dim / 16, [&](int64_t task) {
      const Tile& t = tiles[tile_of[2 * task]];
      Scorer<T> scorer(g, t);
      const int64_t begin = tile_of[2 * task + 1] * RUN;
      scorer.run(begin, min_of(begin + RUN, t.position + t.count));
      if (scorer.status != OK) __atomic_store_n(&status, scorer.status, __ATOMIC_RELAXED);
    });
    parallel(count, floats + count * POSITIONS * g.picks, [&](int64_t i) { choose_of(g, tiles[i]); });
  }
  return status;
}

}  // namespace indexing

int32_t index_tokens(int32_t* out, const void* query, const void* weights, const void* cache,
                     const int32_t* block_table, const int32_t* cu_seqlens_q, const int32_t* seq_lens,
                     int64_t tokens, int64_t requests, int64_t heads, int64_t dim, int64_t q_row, int64_t q_head,
                     int64_t w_row, int64_t blocks, int64_t block_size, int64_t block_stride, int64_t token_stride,
                     int64_t table_stride, int64_t table_width, int64_t picks, int32_t dtype) {
  const Cache keys{const_cast<void*>(cache), blocks, block_size, block_stride, token_stride, 0, 1, AS_COMPUTED, nullptr};
  const indexing::Index g{out, query, weights, keys, block_table, cu_seqlens_q, seq_lens, tokens, requests, heads, dim,
                          q_row, q_head, w_row, table_stride, table_width, picks};
  for (int64_t b = 0; b < requests; ++b) {
    if (cu_seqlens_q[b] < 0 || cu_seqlens_q[b + 1] < cu_seqlens_q[b] || cu_seqlens_q[b + 1] > tokens) return BAD_LENGTHS;
  }
  int32_t status = OK;
  with_dtype(dtype, [&](auto* t) {
    using T = typename pointee<decltype(t)>::type;
    status = indexing::run<T>(g);
  });
  const int64_t covered = requests > 0 ? cu_seqlens_q[requests] : 0;
  for (int64_t i = covered * picks; i < tokens * picks; ++i) out[i] = -1;
  return status;
}

}  // namespace
}  // namespace headrace::HR_ISA

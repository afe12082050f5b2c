// Products of attention by AMX tiles: words are pairs of bfloat16, 16 rows by 16 columns by 16 words in one
// instruction (Intel, "Intrinsics Guide", TDPBF16PS).
//
// Row invariance: every number of rows goes through that instruction. A sum goes over blocks of 16 words in
// ascending order, from word 0 of a query on, and from a multiple of 32 keys on; what a row does not see of a
// block has weight 0 and adds nothing. Rows behind the last one of a tile are computed and thrown away.

#if defined(HR_AMX)

namespace headrace::HR_ISA {
namespace {
namespace paged {

constexpr int64_t LINES = 16;  // of a tile: rows of a query, or words
constexpr int64_t SQUARE = LINES * W;

// Columns side by side: W of them from column v * W on, in rows of `apart` words.
struct Columns {
  const float* data;
  int64_t apart;
  const float* at(int v) const { return data + v * W; }
  void fetch(int, int64_t) const {}
};

// Rows of words; those behind the last one, up to a multiple of LINES, can be read.
struct TileLines {
  const float* data;
  int64_t apart;
};

template <int T, int V> HR_INLINE inline void begin_tiles(const float* c, int64_t ldc, bool more) {
  if (!more) {
    HR_TILE_ZERO(0); HR_TILE_ZERO(1); HR_TILE_ZERO(2); HR_TILE_ZERO(3);
    return;
  }
  HR_TILE_LOAD(0, c, ldc * 4);
  if constexpr (V == 2) HR_TILE_LOAD(1, c + W, ldc * 4);
  if constexpr (T == 2) HR_TILE_LOAD(2, c + LINES * ldc, ldc * 4);
  if constexpr (T == 2 && V == 2) HR_TILE_LOAD(3, c + LINES * ldc + W, ldc * 4);
}

template <int T, int V>
HR_INLINE inline void add_block(const float* a, int64_t lda, const float* b, const float* second, int64_t ldb) {
  HR_TILE_LOAD(4, a, lda * 4);
  HR_TILE_LOAD(6, b, ldb * 4);
  HR_TILE_DOT_BF16(0, 4, 6);
  if constexpr (V == 2) {
    HR_TILE_LOAD(7, second, ldb * 4);
    HR_TILE_DOT_BF16(1, 4, 7);
  }
  if constexpr (T == 2) {
    HR_TILE_LOAD(5, a + LINES * lda, lda * 4);
    HR_TILE_DOT_BF16(2, 5, 6);
    if constexpr (V == 2) HR_TILE_DOT_BF16(3, 5, 7);
  }
}

template <int T, int V> HR_INLINE inline void end_tiles(float* c, int64_t ldc) {
  HR_TILE_STORE(0, c, ldc * 4);
  if constexpr (V == 2) HR_TILE_STORE(1, c + W, ldc * 4);
  if constexpr (T == 2) HR_TILE_STORE(2, c + LINES * ldc, ldc * 4);
  if constexpr (T == 2 && V == 2) HR_TILE_STORE(3, c + LINES * ldc + W, ldc * 4);
}

// `many` words of n lines, zeros behind them, in a tile of its own.
inline void copy_words(const float* from, int64_t apart, int64_t n, int64_t many, float* to) {
  const __mmask16 mask = __mmask16((1u << many) - 1);
  for (int64_t i = 0; i < n; ++i) _mm512_store_ps(to + i * W, _mm512_maskz_loadu_ps(mask, from + i * apart));
}

// Lines of columns from `from` on, zeros behind them.
inline void copy_lines(const float* from, int64_t apart, int64_t many, float* to) {
  for (int64_t i = 0; i < LINES; ++i) {
    _mm512_store_ps(to + i * W, i < many ? _mm512_loadu_ps(from + i * apart) : _mm512_setzero_ps());
  }
}

// What a depth that ends within a block leaves: both sides with zeros behind.
template <int T, int V>
inline void add_rest(const TileLines& a, int64_t lines, const float* b, const float* second, int64_t ldb, int64_t many) {
  alignas(64) float left[2 * SQUARE], right[2 * SQUARE];
  copy_words(a.data, a.apart, (T - 1) * LINES + lines, many, left);
  copy_lines(b, ldb, many, right);
  if constexpr (V == 2) copy_lines(second, ldb, many, right + SQUARE);
  add_block<T, V>(left, W, right, right + SQUARE, W);
}

// c (+)= a b for T tiles of rows and V vectors of columns from the v-th on.
template <int T, int V, class B>
inline void tile_square(const TileLines& a, int64_t lines, const B& b, int v, int64_t depth, float* c, int64_t ldc,
                        bool more) {
  const float *first = b.at(v), *second = V == 2 ? b.at(v + 1) : first;
  begin_tiles<T, V>(c, ldc, more);
  int64_t k = 0;
  for (; k + LINES <= depth; k += LINES, first += LINES * b.apart, second += LINES * b.apart) {
    b.fetch(v, k);
    if constexpr (V == 2) b.fetch(v + 1, k);
    add_block<T, V>(a.data + k, a.apart, first, second, b.apart);
  }
  if (k < depth) add_rest<T, V>({a.data + k, a.apart}, lines, first, second, b.apart, depth - k);
  end_tiles<T, V>(c, ldc);
}

// The same for the last rows, which are fewer than the lines of a tile.
template <int V, class B>
inline void tile_edge(const TileLines& a, int64_t rows, int64_t lines, const B& b, int v, int64_t depth, float* c,
                      int64_t ldc, bool more) {
  alignas(64) float all[2 * SQUARE];
  for (int64_t r = 0; more && r < rows; ++r)
    HR_UNROLL for (int i = 0; i < V; ++i) st(all + r * 2 * W + i * W, ld(c + r * ldc + i * W));
  tile_square<1, V>(a, lines, b, v, depth, all, 2 * W, more);
  for (int64_t r = 0; r < rows; ++r)
    HR_UNROLL for (int i = 0; i < V; ++i) st(c + r * ldc + i * W, ld(all + r * 2 * W + i * W));
}

template <int V, class B>
inline void tile_column(int64_t rows, int64_t lines, TileLines a, const B& b, int v, int64_t depth, float* c,
                        int64_t ldc, bool more) {
  for (; rows >= 2 * LINES; rows -= 2 * LINES, a.data += 2 * LINES * a.apart, c += 2 * LINES * ldc) {
    tile_square<2, V>(a, lines, b, v, depth, c, ldc, more);
  }
  for (; rows >= lines; rows -= lines, a.data += lines * a.apart, c += lines * ldc) {
    tile_square<1, V>(a, lines, b, v, depth, c, ldc, more);
  }
  if (rows > 0) tile_edge<V>(a, rows, lines, b, v, depth, c, ldc, more);
}

// c (+)= a b for rows of words and vectors of columns; `lines` is that of the TileShapes which live.
template <class B>
inline void tile_product(int64_t rows, int64_t lines, int vectors, const TileLines& a, const B& b, int64_t depth,
                         float* c, int64_t ldc, bool more) {
  int v = 0;
  for (; v + 2 <= vectors; v += 2) tile_column<2>(rows, lines, a, b, v, depth, c + v * W, ldc, more);
  if (v < vectors) tile_column<1>(rows, lines, a, b, v, depth, c + v * W, ldc, more);
}

}  // namespace paged
}  // namespace
}  // namespace headrace::HR_ISA

#endif

// Products of bfloat16 rows with packed panels by AMX: 16 rows by 16 features by 32 inputs in one instruction
// (Intel, "Intrinsics Guide", TDPBF16PS).
//
// A packed panel is what a tile of weights reads: pairs of inputs, 16 features of a pair to a line. Rows are
// copied once a call, 32 inputs of all rows together ("block"), so that a tile may begin at any row and reads
// whole lines in order.
//
// Row invariance: every number of rows goes through the same instruction. It sums up the even and the odd inputs
// of a block apart and adds both to what the blocks before have left; blocks follow each other in order. Shapes
// of tiles, pieces and threads change where a sum lives, never its order.
//
// Memory: one or two tiles of rows are faster than the weights come. With more, a piece of two vectors of
// features stays in the first cache while all rows of the task, which stay in the second, pass by.

#if defined(HR_AMX)

namespace headrace::HR_ISA {
namespace {

constexpr int64_t BLOCK = 32;           // inputs of a tile
constexpr int64_t TILE_ROWS = 16;
constexpr int64_t PIECE_BLOCKS = 12;    // of two vectors of features: 24 KiB
constexpr int64_t TASK_BYTES = 1 << 20;  // of a task's rows: half of the second cache
constexpr int64_t MIN_TASK_ROWS = 64, MAX_TASK_ROWS = 384;

// Rows of activations in blocks: [ceil(K / BLOCK)][rows, and what a last tile reads beyond them][BLOCK].
struct TileRows {
  const bf16* data;
  int64_t block;  // elements from block to block
  const bf16* at(int64_t row, int64_t b) const { return data + b * block + row * BLOCK; }
};

// Copies row pick(i) of x to row i, for i < rows; zeros follow the K inputs.
template <class Pick>
inline TileRows tile_rows(const bf16* x, int64_t rows, int64_t K, int64_t stride, ScratchSlot slot, const Pick& pick) {
  const int64_t blocks = ceil_div(K, BLOCK), block = ((rows + TILE_ROWS) | 1) * BLOCK;  // odd: other sets of the caches
  bf16* const data = static_cast<bf16*>(scratch(slot, size_t(blocks * block + 1) * sizeof(bf16)));
  parallel_ranges(rows, rows * K / 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const bf16* from = x + pick(i) * stride;
      bf16* to = data + i * BLOCK;
      for (int64_t k = 0; k < K; k += BLOCK, to += block) {
        const int64_t many = min_of(BLOCK, K - k);
        const __mmask32 mask = many == BLOCK ? ~__mmask32(0) : (__mmask32(1) << many) - 1;
        _mm512_store_si512(to, _mm512_maskz_loadu_epi16(mask, from + k));
      }
    }
  });
  return {data, block};
}

// A panel in blocks; where K ends within one, that block is a copy with zeros behind.
class TilePanel {
 public:
  TilePanel(const bf16* panel, int64_t width, int64_t K) : panel_(panel), step_(width * BLOCK), whole_(K / BLOCK) {
    if (K % BLOCK == 0) return;
    const int64_t rest = round_up(K % BLOCK, 2) * width;
    __builtin_memcpy(last_, panel + whole_ * step_, size_t(rest) * sizeof(bf16));
    __builtin_memset(last_ + rest, 0, size_t(step_ - rest) * sizeof(bf16));
  }
  const bf16* block(int64_t b) const { return b < whole_ ? panel_ + b * step_ : last_; }
  int64_t step() const { return step_; }
  int64_t whole() const { return whole_; }

 private:
  const bf16* const panel_;
  const int64_t step_, whole_;
  alignas(64) bf16 last_[PANEL * BLOCK];
};

// One block of T tiles of rows, `apart` elements from row to row being BLOCK, times V vectors of features.
template <int T, int V> HR_INLINE inline void square_block(const bf16* rows, const bf16* weights, int64_t line) {
  HR_TILE_LOAD(4, rows, BLOCK * 2);
  HR_TILE_LOAD(6, weights, line);
  HR_TILE_DOT_BF16(0, 4, 6);
  if constexpr (V == 2) {
    HR_TILE_LOAD(7, weights + 2 * W, line);
    HR_TILE_DOT_BF16(1, 4, 7);
  }
  if constexpr (T == 2) {
    HR_TILE_LOAD(5, rows + TILE_ROWS * BLOCK, BLOCK * 2);
    HR_TILE_DOT_BF16(2, 5, 6);
    if constexpr (V == 2) HR_TILE_DOT_BF16(3, 5, 7);
  }
}

template <int T, int V> HR_INLINE inline void begin_square(const float* sums, bool begins) {
  if (begins) {
    HR_TILE_ZERO(0); HR_TILE_ZERO(1); HR_TILE_ZERO(2); HR_TILE_ZERO(3);
    return;
  }
  HR_TILE_LOAD(0, sums, PANEL * 4);
  if constexpr (V == 2) HR_TILE_LOAD(1, sums + W, PANEL * 4);
  if constexpr (T == 2) HR_TILE_LOAD(2, sums + TILE_ROWS * PANEL, PANEL * 4);
  if constexpr (T == 2 && V == 2) HR_TILE_LOAD(3, sums + TILE_ROWS * PANEL + W, PANEL * 4);
}

template <int T, int V> HR_INLINE inline void end_square(float* sums) {
  HR_TILE_STORE(0, sums, PANEL * 4);
  if constexpr (V == 2) HR_TILE_STORE(1, sums + W, PANEL * 4);
  if constexpr (T == 2) HR_TILE_STORE(2, sums + TILE_ROWS * PANEL, PANEL * 4);
  if constexpr (T == 2 && V == 2) HR_TILE_STORE(3, sums + TILE_ROWS * PANEL + W, PANEL * 4);
}

// Blocks [b, end) of T tiles from row `row` on times V vectors of a panel from the `at`-th on.
template <int T, int V>
inline void square(const TileRows& x, int64_t row, const TilePanel& panel, int at, int64_t line, int64_t b, int64_t end,
                   float* sums, Prefetch& ahead) {
  begin_square<T, V>(sums, b == 0);
  for (; b < end; ++b) {
    ahead.fetch();
    square_block<T, V>(x.at(row, b), panel.block(b) + at * 2 * W, line);
  }
  end_square<T, V>(sums);
}

// sums [16][PANEL] = a lone tile of rows times V vectors of features: a panel is read once and in order.
template <int V>
inline void lone_tile(const TileRows& x, int64_t row, const TilePanel& panel, int64_t line, int64_t blocks,
                      float* sums) {
  HR_TILE_ZERO(0); HR_TILE_ZERO(1); HR_TILE_ZERO(2); HR_TILE_ZERO(3);
  for (int64_t b = 0; b < blocks; ++b) {
    const bf16* weights = panel.block(b);
    fetch_next_chunk<V * BLOCK / 2>(weights);
    HR_TILE_LOAD(4, x.at(row, b), BLOCK * 2);
    HR_TILE_LOAD(6, weights, line);
    HR_TILE_DOT_BF16(0, 4, 6);
    if constexpr (V > 1) {
      HR_TILE_LOAD(7, weights + 2 * W, line);
      HR_TILE_DOT_BF16(1, 4, 7);
    }
    if constexpr (V > 2) {
      HR_TILE_LOAD(6, weights + 4 * W, line);
      HR_TILE_DOT_BF16(2, 4, 6);
    }
    if constexpr (V > 3) {
      HR_TILE_LOAD(7, weights + 6 * W, line);
      HR_TILE_DOT_BF16(3, 4, 7);
    }
  }
  HR_TILE_STORE(0, sums, PANEL * 4);
  if constexpr (V > 1) HR_TILE_STORE(1, sums + W, PANEL * 4);
  if constexpr (V > 2) HR_TILE_STORE(2, sums + 2 * W, PANEL * 4);
  if constexpr (V > 3) HR_TILE_STORE(3, sums + 3 * W, PANEL * 4);
}

// Pieces of a panel, each for all rows; what comes next is fetched meanwhile.
inline void many_tiles(const TileRows& x, int64_t begin, int64_t rows, const TilePanel& panel, int vectors,
                       int64_t blocks, float* sums, const char* after) {
  const int64_t line = int64_t(vectors) * W * 4, tiles = ceil_div(rows, TILE_ROWS);
  for (int64_t b = 0; b < blocks || b == 0; b += PIECE_BLOCKS) {
    const int64_t end = min_of(blocks, b + PIECE_BLOCKS), visits = ceil_div(tiles, 2) * ceil_div(vectors, 2);
    const char* const next = end < panel.whole() ? reinterpret_cast<const char*>(panel.block(end)) : after;
    Prefetch ahead{next, ceil_div(panel.step() * 2 / 64, visits)};
    for (int v = 0; v < vectors; v += 2) {
      for (int64_t t = 0; t < tiles; t += 2) {
        float* const to = sums + t * TILE_ROWS * PANEL + v * W;
        const int64_t row = begin + t * TILE_ROWS;
        const bool pair = t + 1 < tiles, two = v + 1 < vectors;
        if (pair && two) square<2, 2>(x, row, panel, v, line, b, end, to, ahead);
        else if (two) square<1, 2>(x, row, panel, v, line, b, end, to, ahead);
        else if (pair) square<2, 1>(x, row, panel, v, line, b, end, to, ahead);
        else square<1, 1>(x, row, panel, v, line, b, end, to, ahead);
      }
    }
  }
}

// See panel_product.h. There is no `whole`: tiles come through the sums anyway.
template <class Done, class Whole = NoTiles>
inline void panel_product(const TileRows& x, int64_t begin, int64_t rows, int64_t K, const bf16* panel,
                          int vectors, float* sums, const bf16* after, const Done& done, const Whole& = {}) {
  const int64_t width = int64_t(vectors) * W, blocks = ceil_div(K, BLOCK);
  const TilePanel weights(panel, width, K);
  const char* const next = reinterpret_cast<const char*>(after);
  const TileShapes shapes(min_of(rows, TILE_ROWS), BLOCK / 2);
  if (rows > TILE_ROWS) {
    many_tiles(x, begin, rows, weights, vectors, blocks, sums, next);
  } else {
    switch (vectors) {
      case 1: lone_tile<1>(x, begin, weights, width * 4, blocks, sums); break;
      case 2: lone_tile<2>(x, begin, weights, width * 4, blocks, sums); break;
      case 3: lone_tile<3>(x, begin, weights, width * 4, blocks, sums); break;
      case 4: lone_tile<4>(x, begin, weights, width * 4, blocks, sums); break;
    }
  }
  done(0, rows, static_cast<const float*>(sums));
}

}  // namespace
}  // namespace headrace::HR_ISA

#endif

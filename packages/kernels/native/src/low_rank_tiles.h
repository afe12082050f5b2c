// Products of low_rank.h by AMX, for bfloat16 (Intel, "Intrinsics Guide", TDPBF16PS).
//
// Lines of `down` are what a tile of activations reads as they lie; rows of x are turned, pairs of inputs of all
// rows side by side. Lines of `up` lie in pairs already. y, which is in float32, is three bfloat16 numbers whose
// sum it is; each goes through the same instruction.
//
// Row invariance: every number of rows goes through the same instructions, see linear_tiles.h.

namespace headrace::HR_ISA {
namespace {

// Steps in which factors are held, see low_rank.h; and outputs of a panel.
constexpr int64_t RANK_STEP = 16, INPUT_STEP = 32, UP_STEP = 8, UP_PANEL = 64;

#if defined(HR_AMX)

constexpr int64_t TERMS = 3;  // of bfloat16, that make a float

// pairs [K / 32][16][rows]: of x [rows][apart], zeros where there are fewer rows than 16, but for a lone one.
inline const bf16* paired_rows(bf16* pairs, const bf16* x, int64_t apart, int64_t rows, int64_t K) {
  if (rows == 1) return x;
  const auto row = [&](int64_t r, int64_t k) { return ld(reinterpret_cast<const float*>(x + r * apart + k)); };
  for (int64_t k = 0; k < K; k += BLOCK) {
    vf words[W];
    for (int64_t r = 0; r < W; ++r) words[r] = r < rows ? row(r, k) : vzero();
    paged::transpose(words);
    for (int64_t p = 0; p < W; ++p) st(reinterpret_cast<float*>(pairs + k * W) + p * W, words[p]);
  }
  return pairs;
}

// sums [Q * 16][16] = Q tiles of lines times `columns` rows, 1 or 16.
template <int Q>
inline void down_square(const bf16* lines, int64_t K, const bf16* pairs, int64_t columns, float* sums) {
  const int64_t apart = RANK_STEP * K;
  HR_TILE_ZERO(0); HR_TILE_ZERO(1); HR_TILE_ZERO(2); HR_TILE_ZERO(3);
  for (int64_t k = 0; k < K; k += BLOCK) {
    const bf16* const at = lines + k;
    HR_TILE_LOAD(6, pairs + k * columns, 4 * columns);
    HR_TILE_LOAD(4, at, 2 * K);
    HR_TILE_DOT_BF16(0, 4, 6);
    if constexpr (Q > 1) {
      HR_TILE_LOAD(5, at + apart, 2 * K);
      HR_TILE_DOT_BF16(1, 5, 6);
    }
    if constexpr (Q > 2) {
      HR_TILE_LOAD(4, at + 2 * apart, 2 * K);
      HR_TILE_DOT_BF16(2, 4, 6);
    }
    if constexpr (Q > 3) {
      HR_TILE_LOAD(5, at + 3 * apart, 2 * K);
      HR_TILE_DOT_BF16(3, 5, 6);
    }
  }
  HR_TILE_STORE(0, sums, 64);
  if constexpr (Q > 1) HR_TILE_STORE(1, sums + RANK_STEP * W, 64);
  if constexpr (Q > 2) HR_TILE_STORE(2, sums + 2 * RANK_STEP * W, 64);
  if constexpr (Q > 3) HR_TILE_STORE(3, sums + 3 * RANK_STEP * W, 64);
}

// y[row][q] = scale times line q times the row, of `tiles` tiles of lines, at most 4.
inline void down_tiles(const bf16* lines, int64_t tiles, int64_t K, const bf16* pairs, int64_t rows, float scale,
                       float* y, int64_t y_apart) {
  alignas(64) float sums[4 * RANK_STEP * W];
  const int64_t columns = rows == 1 ? 1 : W;
  switch (tiles) {
    case 1: down_square<1>(lines, K, pairs, columns, sums); break;
    case 2: down_square<2>(lines, K, pairs, columns, sums); break;
    case 3: down_square<3>(lines, K, pairs, columns, sums); break;
    case 4: down_square<4>(lines, K, pairs, columns, sums); break;
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t q = 0; q < tiles * RANK_STEP; ++q) y[r * y_apart + q] = scale * sums[q * W + r];
  }
}

// The first n values, none of them if n is not above 0, zeros after them.
inline vf ld_some(const float* p, int64_t n) { return n > 0 ? ld_upto(p, n) : vzero(); }

// Ranks in a tile of `up`: whole ones alone, as a panel ends with its rank.
inline int64_t ranks_of_tile(int64_t rank) {
  const int64_t whole = round_up(rank, UP_STEP);
  return whole <= BLOCK || whole % BLOCK == 0 ? min_of(whole, BLOCK) : whole % 16 == 0 ? 16 : UP_STEP;
}

// terms [ranks / step][TERMS][16][32]: y [rank] of `rows` rows, zeros behind it.
inline void split_rows(bf16* terms, const float* y, int64_t apart, int64_t rows, int64_t rank, int64_t step) {
  for (int64_t j = 0; j < rank; j += step, terms += TERMS * TILE_ROWS * BLOCK) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < step; i += W) {
        vf rest = ld_some(y + r * apart + j + i, min_of(step - i, rank - j - i));
        for (int64_t t = 0; t < TERMS; ++t) {
          bf16* const to = terms + (t * TILE_ROWS + r) * BLOCK + i;
          st(to, rest);
          const vf next = vsub(rest, ld(to));
          rest = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(next, next, _CMP_ORD_Q), next);  // nothing is left of infinity
        }
      }
    }
  }
}

// sums [16][UP_PANEL] = `rows` rows of terms times a panel, pairs of ranks side by side.
inline void up_square(const bf16* terms, const bf16* panel, int64_t rank, int64_t step, float* sums) {
  constexpr int64_t TERM = TILE_ROWS * BLOCK, LINE = UP_PANEL * 4;
  HR_TILE_ZERO(0); HR_TILE_ZERO(1); HR_TILE_ZERO(2); HR_TILE_ZERO(3);
  for (int64_t j = 0; j < rank; j += step, terms += TERMS * TERM, panel += step * UP_PANEL) {
    HR_TILE_LOAD(4, terms, 64);
    HR_TILE_LOAD(5, terms + TERM, 64);
    HR_TILE_LOAD(6, panel, LINE);
    HR_TILE_DOT_BF16(0, 4, 6);
    HR_TILE_DOT_BF16(0, 5, 6);
    HR_TILE_LOAD(7, panel + 2 * W, LINE);
    HR_TILE_DOT_BF16(1, 4, 7);
    HR_TILE_DOT_BF16(1, 5, 7);
    HR_TILE_LOAD(6, panel + 4 * W, LINE);
    HR_TILE_DOT_BF16(2, 4, 6);
    HR_TILE_DOT_BF16(2, 5, 6);
    HR_TILE_LOAD(7, panel + 6 * W, LINE);
    HR_TILE_DOT_BF16(3, 4, 7);
    HR_TILE_DOT_BF16(3, 5, 7);
    HR_TILE_LOAD(4, terms + 2 * TERM, 64);
    HR_TILE_DOT_BF16(3, 4, 7);
    HR_TILE_LOAD(6, panel, LINE);
    HR_TILE_DOT_BF16(0, 4, 6);
    HR_TILE_LOAD(7, panel + 2 * W, LINE);
    HR_TILE_DOT_BF16(1, 4, 7);
    HR_TILE_LOAD(6, panel + 4 * W, LINE);
    HR_TILE_DOT_BF16(2, 4, 6);
  }
  HR_TILE_STORE(0, sums, LINE);
  HR_TILE_STORE(1, sums + W, LINE);
  HR_TILE_STORE(2, sums + 2 * W, LINE);
  HR_TILE_STORE(3, sums + 3 * W, LINE);
}

#endif

}  // namespace
}  // namespace headrace::HR_ISA

// Products of fixed-point activations with packed weights by AMX: 16 lines by 16 features by 64 inputs in one
// instruction (Intel, "Intrinsics Guide", TDPBSSD).
//
// Sums of a group are the same whole numbers as those of quant_tiles.h, and the floats that follow are the same
// operations in the same order, so every bit is the same too: a row may be multiplied here beside many others,
// and there alone. Codes are written as signed bytes first, their zero points subtracted, in the order in which
// a tile of weights is read: four inputs of 16 features are 64 bytes.
//
// Lines are rows times limbs. In long groups a square of two by two tiles sums up a whole group before anybody
// looks at it. In short ones the float sums of a few rows stay in registers from group to group, and each
// group's whole numbers come through the first cache. Where a block's sum is a whole number, codes are multiplied by
// their group's scale before, and stand in two bytes: a square sums up the block, first of the upper ones.

#if defined(HR_AMX)

namespace headrace::HR_ISA {
namespace {
namespace quant {

constexpr int64_t TILE_STEPS = 16;         // of a tile, at most
constexpr int64_t SHORT_STEPS = 16;        // of a group whose sums come through memory one by one
constexpr int64_t TILE_PIECE_STEPS = 128;  // of a panel: in signed bytes they stay in the first cache
constexpr int64_t BLOCK_PIECE_STEPS = 64;  // the same of codes in two bytes
constexpr int64_t LEAST_LINES = 24;        // fewer are multiplied as vectors

// Lines of a tile: whole rows.
constexpr int64_t tile_lines(int limbs) { return 16 / limbs * limbs; }

// Steps of a tile: as many as divide a group. A panel's last tile may be longer than what is left.
inline int64_t tile_steps(const Panel& p) {
  const int64_t whole = p.by_blocks ? p.block_groups * p.group_steps : p.group_steps;
  if (whole >= p.steps) return TILE_STEPS;
  int64_t steps = min_of(TILE_STEPS, whole);
  while (whole % steps != 0) --steps;
  return steps;
}

// True if codes without their zero points are signed bytes, and tiles would not be too small.
inline bool suits_tiles(const Panel& p, int limbs, int64_t rows) {
  const Layout& l = *p.layout;
  const bool signed_bytes = l.kind < 8 || (!l.has_zeros && l.zero == 128);
  return rows * limbs >= LEAST_LINES && signed_bytes && p.steps > 0 && tile_steps(p) >= 4;
}

// What tiles work on: a piece of a panel, in signed bytes.
struct Piece {
  const Panel* panel;
  int64_t begin, end;      // steps
  int64_t depth;           // steps of a tile
  const uint8_t* bytes;    // [vectors][steps][16 features][4], zeros behind the end, up to a whole tile
  int64_t apart;           // bytes from vector to vector
  const float* scales;     // [groups of the piece][QPANEL]
  bool begins;             // the first group is the first of all passes
  const int8_t* lines;
  int64_t line;            // bytes from line to line
  Sums sums;
  const uint8_t* codes(int64_t step, int v) const { return bytes + v * apart + (step - begin) * VECTOR_BYTES; }
};

// What a float sum begins with. A product plus -0 has the product's bits, be it 0 or -0.
inline vf nothing() { return vset(-0.0f); }

// Adds one group to float sums: R rows' limbs are joined and scaled.
template <int LIMBS, int R, int V>
HR_INLINE inline void add_group(const int32_t* whole, int64_t stride, const float* scales, vf (&real)[R][V]) {
  HR_UNROLL for (int v = 0; v < V; ++v) {
    const vf scale = ld(scales + v * W);
    HR_UNROLL for (int r = 0; r < R; ++r) {
      const int32_t* from = whole + r * LIMBS * stride + v * W;
      vf y = to_floats(ild(from));
      HR_UNROLL for (int j = 1; j < LIMBS; ++j) y = vfma(y, vset(256.0f), to_floats(ild(from + j * stride)));
      real[r][v] = vfma(y, scale, real[r][v]);
    }
  }
}

// --- short groups -----------------------------------------------------------------------------

// Sums of lines times V vectors of features, over the steps of one group: in tiles 0 and 1, or 2 and 3.
template <int V, int TURN>
HR_INLINE inline void short_group(const Piece& w, const int8_t* lines, int64_t s, int64_t stop, int v0) {
  if constexpr (TURN == 0) {
    HR_TILE_ZERO(0);
    if constexpr (V == 2) HR_TILE_ZERO(1);
  } else {
    HR_TILE_ZERO(2);
    if constexpr (V == 2) HR_TILE_ZERO(3);
  }
  for (; s < stop; s += w.depth) {
    const uint8_t* codes = w.codes(s, v0);
    if constexpr (TURN == 0) {
      HR_TILE_LOAD(4, lines + 4 * s, w.line);
      HR_TILE_LOAD(6, codes, VECTOR_BYTES);
      HR_TILE_DOT(0, 4, 6);
      if constexpr (V == 2) {
        HR_TILE_LOAD(7, codes + w.apart, VECTOR_BYTES);
        HR_TILE_DOT(1, 4, 7);
      }
    } else {
      HR_TILE_LOAD(5, lines + 4 * s, w.line);
      HR_TILE_LOAD(6, codes, VECTOR_BYTES);
      HR_TILE_DOT(2, 5, 6);
      if constexpr (V == 2) {
        HR_TILE_LOAD(7, codes + w.apart, VECTOR_BYTES);
        HR_TILE_DOT(3, 5, 7);
      }
    }
  }
}

template <int V, int TURN> HR_INLINE inline void store_group(int32_t* whole) {
  if constexpr (TURN == 0) {
    HR_TILE_STORE(0, whole, V * W * 4);
    if constexpr (V == 2) HR_TILE_STORE(1, whole + W, V * W * 4);
  } else {
    HR_TILE_STORE(2, whole, V * W * 4);
    if constexpr (V == 2) HR_TILE_STORE(3, whole + W, V * W * 4);
  }
}

// One tile of lines times a piece. Three groups are on their way: one is multiplied, one put down, one added.
template <int LIMBS>
inline void short_groups(const Piece& w, int64_t first_line) {
  constexpr int V = LIMBS == 1 ? 1 : 2, R = int(16 / LIMBS);
  alignas(64) int32_t whole[2][16 * V * W];
  const int64_t steps = w.panel->group_steps, groups = ceil_div(w.end - w.begin, steps);
  const int8_t* lines = w.lines + first_line * w.line;
  float* const sums = w.sums.real + first_line / LIMBS * QPANEL;
  for (int v0 = 0; v0 < QV; v0 += V) {
    vf real[R][V];
    HR_UNROLL for (int r = 0; r < R; ++r) {
      HR_UNROLL for (int v = 0; v < V; ++v) real[r][v] = w.begins ? nothing() : ld(sums + r * QPANEL + (v0 + v) * W);
    }
    const float* scales = w.scales + v0 * W;
    int64_t s = w.begin;
    for (int64_t g = 0; g < groups + 2; g += 2, s += 2 * steps) {
      if (g < groups) short_group<V, 0>(w, lines, s, min_of(s + steps, w.end), v0);
      if (g > 0 && g <= groups) store_group<V, 1>(whole[1]);
      if (g > 1) {
        add_group<LIMBS, R, V>(whole[0], V * W, scales, real);
        scales += QPANEL;
      }
      if (g + 1 < groups) short_group<V, 1>(w, lines, s + steps, min_of(s + 2 * steps, w.end), v0);
      if (g < groups) store_group<V, 0>(whole[0]);
      if (g > 0 && g < groups + 1) {
        add_group<LIMBS, R, V>(whole[1], V * W, scales, real);
        scales += QPANEL;
      }
    }
    HR_UNROLL for (int r = 0; r < R; ++r) {
      HR_UNROLL for (int v = 0; v < V; ++v) st(sums + r * QPANEL + (v0 + v) * W, real[r][v]);
    }
  }
}

// --- long groups ------------------------------------------------------------------------------

// Steps [s, stop) of a group: two tiles of lines (if there are two) times two vectors of features.
template <int LIMBS, bool TWO>
HR_INLINE inline void square(const Piece& w, const int8_t* lines, int64_t s, int64_t stop, int v0) {
  const int64_t next = tile_lines(LIMBS) * w.line;
  for (; s < stop; s += w.depth) {
    const uint8_t* codes = w.codes(s, v0);
    HR_TILE_LOAD(4, lines + 4 * s, w.line);
    HR_TILE_LOAD(6, codes, VECTOR_BYTES);
    HR_TILE_DOT(0, 4, 6);
    HR_TILE_LOAD(7, codes + w.apart, VECTOR_BYTES);
    HR_TILE_DOT(1, 4, 7);
    if constexpr (TWO) {
      HR_TILE_LOAD(5, lines + 4 * s + next, w.line);
      HR_TILE_DOT(2, 5, 6);
      HR_TILE_DOT(3, 5, 7);
    }
  }
}

// Whole sums of a square, one line `stride` behind the other; the second tile's begin at `second`.
template <bool TWO> HR_INLINE inline void load_square(const int32_t* first, const int32_t* second, int64_t stride) {
  HR_TILE_LOAD(0, first, 4 * stride);
  HR_TILE_LOAD(1, first + W, 4 * stride);
  if constexpr (TWO) {
    HR_TILE_LOAD(2, second, 4 * stride);
    HR_TILE_LOAD(3, second + W, 4 * stride);
  }
}
template <bool TWO> HR_INLINE inline void store_square(int32_t* first, int32_t* second, int64_t stride) {
  HR_TILE_STORE(0, first, 4 * stride);
  HR_TILE_STORE(1, first + W, 4 * stride);
  if constexpr (TWO) {
    HR_TILE_STORE(2, second, 4 * stride);
    HR_TILE_STORE(3, second + W, 4 * stride);
  }
}

// One or two tiles of lines times a piece.
template <int LIMBS, bool TWO>
inline void long_groups(const Piece& w, int64_t first_line) {
  constexpr int64_t LINES = tile_lines(LIMBS), ROWS = (TWO ? 2 : 1) * LINES / LIMBS;
  alignas(64) int32_t done[2 * LINES][2 * W];
  const Panel& p = *w.panel;
  const int8_t* lines = w.lines + first_line * w.line;
  for (int v0 = 0; v0 < QV; v0 += 2) {
    const float* scales = w.scales + v0 * W;
    int32_t* const cut = w.sums.whole + first_line * QPANEL + v0 * W;
    float* const real = w.sums.real + first_line / LIMBS * QPANEL + v0 * W;
    bool begins = w.begins;
    for (int64_t s = w.begin, stop; s < w.end; s = stop, scales += QPANEL, begins = false) {
      const int64_t start = s / p.group_steps * p.group_steps, finish = min_of(start + p.group_steps, p.steps);
      stop = min_of(finish, w.end);
      if (s == start) {
        HR_TILE_ZERO(0); HR_TILE_ZERO(1); HR_TILE_ZERO(2); HR_TILE_ZERO(3);
      } else {
        load_square<TWO>(cut, cut + LINES * QPANEL, QPANEL);
      }
      square<LIMBS, TWO>(w, lines, s, stop, v0);
      if (stop < finish) {
        store_square<TWO>(cut, cut + LINES * QPANEL, QPANEL);
        break;
      }
      store_square<TWO>(done[0], done[LINES], 2 * W);
      for (int64_t r = 0; r < ROWS; ++r) {
        float* const to = real + r * QPANEL;
        vf sum[1][2] = {{begins ? nothing() : ld(to), begins ? nothing() : ld(to + W)}};
        add_group<LIMBS, 1, 2>(done[r * LIMBS], 2 * W, scales, sum);
        st(to, sum[0][0]);
        st(to + W, sum[0][1]);
      }
    }
  }
}

// --- blocks -----------------------------------------------------------------------------------

// Adds one block to a row's float sums.
template <int LIMBS>
HR_INLINE inline void add_block(const int32_t* upper, const int32_t* lower, const float* scales, bool begins, float* to) {
  HR_UNROLL for (int v = 0; v < 2; ++v) {
    vf y = vzero();
    HR_UNROLL for (int j = 0; j < LIMBS; ++j) {
      const int64_t at = j * 2 * W + v * W;
      const vf part = to_floats(iadd(_mm512_slli_epi32(ild(upper + at), 8), ild(lower + at)));
      y = j == 0 ? part : vfma(y, vset(256.0f), part);
    }
    st(to + v * W, vfma(y, ld(scales + v * W), begins ? nothing() : ld(to + v * W)));
  }
}

// One or two tiles of lines times a piece of whole blocks, whose lower bytes lie `planes` behind the upper ones.
template <int LIMBS, bool TWO>
inline void block_sums(const Piece& w, int64_t first_line, int64_t planes) {
  constexpr int64_t LINES = tile_lines(LIMBS), ROWS = (TWO ? 2 : 1) * LINES / LIMBS;
  alignas(64) int32_t done[2][2 * LINES][2 * W];
  const int64_t steps = w.panel->block_groups * w.panel->group_steps;
  const int8_t* lines = w.lines + first_line * w.line;
  for (int v0 = 0; v0 < QV; v0 += 2) {
    const float* scales = w.scales + v0 * W;
    float* const real = w.sums.real + first_line / LIMBS * QPANEL + v0 * W;
    bool begins = w.begins;
    for (int64_t s = w.begin; s < w.end; s += steps, scales += QPANEL, begins = false) {
      Piece half = w;
      for (int i = 0; i < 2; ++i, half.bytes += planes) {
        HR_TILE_ZERO(0); HR_TILE_ZERO(1); HR_TILE_ZERO(2); HR_TILE_ZERO(3);
        square<LIMBS, TWO>(half, lines, s, min_of(s + steps, w.end), v0);
        store_square<TWO>(done[i][0], done[i][LINES], 2 * W);
      }
      for (int64_t r = 0; r < ROWS; ++r) {
        add_block<LIMBS>(done[0][r * LIMBS], done[1][r * LIMBS], scales, begins, real + r * QPANEL);
      }
    }
  }
}

// A group's scales [W] as words, each four times: of 8 features, and of the other 8.
struct WordScales {
  vi low, high;
  explicit WordScales(const uint8_t* scales) {
    const vi each = imul(kept(ild_signed(scales), iset(0xffff)), iset(0x10001));
    low = _mm512_shuffle_epi32(_mm512_cvtepu32_epi64(_mm512_castsi512_si256(each)), _MM_PERM_CCAA);
    high = _mm512_shuffle_epi32(_mm512_cvtepu32_epi64(_mm512_extracti64x4_epi64(each, 1)), _MM_PERM_CCAA);
  }
};

// Signed codes of a vector times their scales, as two planes of bytes.
HR_INLINE inline void put_scaled(Raw codes, const WordScales& scales, uint8_t* upper, uint8_t* lower) {
  const auto put = [](__m256i half, vi times, uint8_t* high, uint8_t* low) HR_INLINE {
    const vi words = _mm512_mullo_epi16(_mm512_cvtepi8_epi16(half), times);
    _mm256_storeu_si256((__m256i*)low, _mm512_cvtepi16_epi8(words));
    const vi raised = _mm512_add_epi16(words, _mm512_set1_epi16(128));
    _mm256_storeu_si256((__m256i*)high, _mm512_cvtepi16_epi8(_mm512_srai_epi16(raised, 8)));
  };
  put(_mm512_castsi512_si256(codes), scales.low, upper, lower);
  put(_mm512_extracti64x4_epi64(codes, 1), scales.high, upper + VECTOR_BYTES / 2, lower + VECTOR_BYTES / 2);
}

// Codes of steps [begin, end) less their zero points, times their groups' whole scales; each vector `apart` bytes
// behind the one before, lower bytes `planes` behind the upper ones.
template <int KIND>
void expand_scaled(const Panel& p, int pass, int64_t begin, int64_t end, uint8_t* to, int64_t apart, int64_t planes) {
  walk_codes<KIND>(p, pass, begin, end, [&](const uint8_t* header) {
    Raw zeros[QV];
    group_zeros<true>(*p.layout, header, zeros);
    const WordScales scales[QV] = {WordScales(header), WordScales(header + W), WordScales(header + 2 * W),
                                   WordScales(header + 3 * W)};
    return [&, zeros, scales](const Raw (&codes)[QV]) HR_INLINE {
      HR_UNROLL for (int v = 0; v < QV; ++v) {
        put_scaled(less(codes[v], zeros[v]), scales[v], to + v * apart, to + v * apart + planes);
      }
      to += VECTOR_BYTES;
    };
  });
}

using ExpandScaled = void (*)(const Panel&, int, int64_t, int64_t, uint8_t*, int64_t, int64_t);

inline ExpandScaled scaled_expand(int32_t kind) {
  switch (kind) {
    case 2: return &expand_scaled<2>;
    case 3: return &expand_scaled<3>;
    case 5: return &expand_scaled<5>;
    case 6: return &expand_scaled<6>;
    case TABLE: return &expand_scaled<TABLE>;
    case TABLE_OF_8: return &expand_scaled<TABLE_OF_8>;
    default: return &expand_scaled<4>;
  }
}

// --- panels -----------------------------------------------------------------------------------

inline Expand centred_expand(int32_t kind) {
  switch (kind) {
    case 2: return &expand<2, true>;
    case 3: return &expand<3, true>;
    case 4: return &expand<4, true>;
    case 5: return &expand<5, true>;
    case 6: return &expand<6, true>;
    case TABLE: return &expand<TABLE, true>;
    case TABLE_OF_8: return &expand<TABLE_OF_8, true>;
    default: return &expand<8, true>;
  }
}

// Scales of the groups that have steps in [begin, end), of their blocks included; or those of blocks alone, where
// codes are multiplied by their groups'.
inline void piece_scales(const Panel& p, int pass, int64_t begin, int64_t end, float* to) {
  const Layout& l = *p.layout;
  float factor = l.factor;
  for (int i = pass + 1; i < l.tables; ++i) factor *= 256.0f;
  const int64_t every = p.by_blocks ? p.block_groups : 1;
  for (int64_t g = begin / p.group_steps; g * p.group_steps < end; g += every, to += QPANEL) {
    vf scales[QV], outer[QV];
    if (p.by_blocks) HR_UNROLL for (int v = 0; v < QV; ++v) scales[v] = vset(1.0f);
    else values_of<QV>(p.header(g), l.scales, 0, scales);
    HR_UNROLL for (int v = 0; v < QV; ++v) outer[v] = vset(factor);
    if (l.block_scales != ABSENT) {
      values_of<QV>(p.front + g / p.block_groups * QPANEL * bytes_of_stored(l.block_scales), l.block_scales, 0, outer);
      HR_UNROLL for (int v = 0; v < QV; ++v) outer[v] = vmul(outer[v], vset(factor));
    }
    HR_UNROLL for (int v = 0; v < QV; ++v) st(to + v * W, vmul(scales[v], outer[v]));
  }
}

// Steps of a panel that are multiplied at a time: whole groups or blocks, or a part of one that is longer.
inline int64_t piece_steps(const Panel& p, int64_t depth, bool few) {
  if (p.by_blocks) {
    const int64_t block = p.block_groups * p.group_steps;
    return block * max_of(1, BLOCK_PIECE_STEPS / block);
  }
  const int64_t whole = few || p.group_steps < TILE_PIECE_STEPS ? p.group_steps : depth;
  return TILE_PIECE_STEPS / whole * whole;
}

// See panel_pass.
template <int LIMBS>
inline void tiles_pass(const Panel& p, int pass, const FixedRows& f, int64_t begin, int64_t rows, Sums sums) {
  constexpr int64_t LINES = tile_lines(LIMBS);
  const Layout& l = *p.layout;
  const int64_t depth = tile_steps(p), lines = rows * LIMBS;
  const bool few = !p.by_blocks && p.group_steps <= SHORT_STEPS && p.group_steps < p.steps;
  const int64_t piece = piece_steps(p, depth, few);
  const TileShapes shapes(LINES, depth);
  for (int64_t s = 0; s < p.steps; s += piece) {
    const int64_t end = min_of(s + piece, p.steps), padded = round_up(end - s, depth);
    const int64_t apart = padded * VECTOR_BYTES, planes = p.by_blocks ? QV * apart : 0;
    if (p.by_blocks) scaled_expand(l.kind)(p, pass, s, end, sums.bytes, apart, planes);
    else centred_expand(l.kind)(p, pass, s, end, sums.bytes, apart);
    for (int v = 0; v < (p.by_blocks ? 2 * QV : QV) && padded > end - s; ++v) {
      __builtin_memset(sums.bytes + v * apart + (end - s) * VECTOR_BYTES, 0, size_t((padded - end + s) * VECTOR_BYTES));
    }
    piece_scales(p, pass, s, end, sums.scales);
    const Piece w{&p, s, end, depth, sums.bytes, apart, sums.scales, pass == 0 && s < p.group_steps,
                  f.bytes + begin * LIMBS * f.line, f.line, sums};
    int64_t i = 0;
    if (few) {
      for (; i < lines; i += LINES) short_groups<LIMBS>(w, i);
      continue;
    }
    for (; i + LINES < lines; i += 2 * LINES) {
      if (p.by_blocks) block_sums<LIMBS, true>(w, i, planes);
      else long_groups<LIMBS, true>(w, i);
    }
    if (i < lines && p.by_blocks) block_sums<LIMBS, false>(w, i, planes);
    else if (i < lines) long_groups<LIMBS, false>(w, i);
  }
}

}  // namespace quant
}  // namespace
}  // namespace headrace::HR_ISA

#endif

// Products of float activations with weights in floats of 8 bits (FP8) or 6 (MXFP6).
//
// Values of FP8 span up to 40 binary places: they are no sums of few bytes, and are multiplied as floats. A code
// keeps its bits in memory; one of 6 bits chooses from a table of numbers of E4M3. In registers it becomes bfloat16, which holds every such value exactly: two
// inputs of a feature lie side by side, as the machine multiplies them where it multiplies pairs; elsewhere, and for
// activations that bfloat16 does not hold, each is widened to float32. Sums of a group are
// float32, in the order of inputs; then they are scaled and added to the output's sum.
//
// Layout: a step of 4 inputs is two steps of 2. Of each, two vectors of features share VECTOR_BYTES bytes: of every 16,
// the first eight are 2 inputs of 4 features of the even vector, the last eight those of the odd one.

namespace headrace::HR_ISA {
namespace {
namespace quant {

constexpr int64_t WIDE_PAIR_BYTES = 4 * QPANEL; // a step of 2 inputs in bfloat16
constexpr int32_t WIDE = 0;                     // "kind" of codes that are bfloat16 already
#if defined(HR_AVX512)
constexpr int FLOAT_V = 4;                      // vectors of a tile
#else
constexpr int FLOAT_V = 2;
#endif

// How an 8-bit float becomes the two bytes of a bfloat16. Its exponent is split between them: `fraction` bits and
// the exponent's last bit belong to the lower one.
template <int KIND> struct Float8 {
  static constexpr int MOVED = KIND == E4M3 ? 4 : 3;              // bits of the code in the lower byte
  static constexpr uint8_t LOWER = KIND == E4M3 ? 0xf0 : 0xe0;
  static constexpr uint8_t UPPER = KIND == E4M3 ? 0x07 : 0x0f;
  static constexpr uint8_t BIAS = KIND == E4M3 ? 60 : 56;         // half the difference of exponents' biases
  static constexpr uint8_t EXPONENT = KIND == E4M3 ? 0x78 : 0x7c;
  static constexpr uint8_t FRACTION = KIND == E4M3 ? 0x07 : 0x03;
};

// Bytes of numbers without exponent, which bfloat16 has: by fraction, in eighths of 2^-6 and quarters of 2^-14.
alignas(16) constexpr uint8_t TINY_UPPER[2][16] = {{0, 59, 59, 59, 60, 60, 60, 60}, {0, 55, 56, 56}};
alignas(16) constexpr uint8_t TINY_LOWER[2][16] = {{0, 0, 0x80, 0xc0, 0, 0x20, 0x40, 0x60}, {0, 0x80, 0, 0x40}};

#if defined(HR_AVX512)
inline Raw interleaved_low(Raw a, Raw b) { return _mm512_unpacklo_epi8(a, b); }
inline Raw interleaved_high(Raw a, Raw b) { return _mm512_unpackhi_epi8(a, b); }
inline Raw raw_sum(Raw a, Raw b) { return _mm512_add_epi8(a, b); }
inline Raw raised(Raw x, int n) { return _mm512_sllv_epi32(x, iset(n)); }
inline Raw where_none(Raw x, Raw mask, Raw a, Raw b) { return _mm512_mask_blend_epi8(_mm512_testn_epi8_mask(x, mask), b, a); }
inline vf first_of(Raw pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
inline vf second_of(Raw pairs) { return _mm512_castsi512_ps(_mm512_and_si512(pairs, iset(int32_t(0xffff0000)))); }
#elif defined(HR_AVX2)
inline Raw interleaved_low(Raw a, Raw b) { return _mm256_unpacklo_epi8(a, b); }
inline Raw interleaved_high(Raw a, Raw b) { return _mm256_unpackhi_epi8(a, b); }
inline Raw raw_sum(Raw a, Raw b) { return _mm256_add_epi8(a, b); }
inline Raw raised(Raw x, int n) { return _mm256_sll_epi32(x, _mm_cvtsi32_si128(n)); }
inline Raw where_none(Raw x, Raw mask, Raw a, Raw b) {
  return _mm256_blendv_epi8(b, a, _mm256_cmpeq_epi8(kept(x, mask), _mm256_setzero_si256()));
}
inline vf first_of(Raw pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
inline vf second_of(Raw pairs) { return _mm256_castsi256_ps(_mm256_and_si256(pairs, iset(int32_t(0xffff0000)))); }
#else
inline Raw interleaved_low(Raw a, Raw b) {
  Raw x;
  for (int i = 0; i < 16; ++i) x[i] = i % 2 ? b[i / 2] : a[i / 2];
  return x;
}
inline Raw interleaved_high(Raw a, Raw b) {
  Raw x;
  for (int i = 0; i < 16; ++i) x[i] = i % 2 ? b[8 + i / 2] : a[8 + i / 2];
  return x;
}
inline Raw raw_sum(Raw a, Raw b) { return a + b; }
inline Raw raised(Raw x, int n) { return (Raw)((vw)x << uint32_t(n)); }
inline Raw where_none(Raw x, Raw mask, Raw a, Raw b) { return (x & mask) == 0 ? a : b; }
inline vf first_of(Raw pairs) { return (vf)((vw)pairs << 16); }
inline vf second_of(Raw pairs) { return (vf)((vw)pairs & 0xffff0000u); }
#endif

// The lower and upper bytes of bfloat16, from those of 8-bit floats.
template <int KIND> HR_INLINE inline void widen(Raw x, Raw& lower, Raw& upper) {
  using F = Float8<KIND>;
  const Raw fraction = kept(x, raw_mask(F::FRACTION));
  lower = kept(raised(x, 8 - F::MOVED), raw_mask(F::LOWER));
  upper = raw_sum(kept(lowered(x, F::MOVED), raw_mask(F::UPPER)), raw_mask(F::BIAS));
  lower = where_none(x, raw_mask(F::EXPONENT), looked_up(raw_table(TINY_LOWER[KIND == E5M2]), fraction), lower);
  upper = where_none(x, raw_mask(F::EXPONENT), looked_up(raw_table(TINY_UPPER[KIND == E5M2]), fraction), upper);
  upper = either(upper, kept(x, raw_mask(0x80)));
}

// Reads the j-th vector of a step, as the bytes of bfloat16.
template <int KIND> struct FloatCodes {
  explicit FloatCodes(const Layout&) {}
  HR_INLINE void read(const uint8_t* step, int j, Raw& lower, Raw& upper) const {
    widen<KIND>(raw_codes(step + j * VECTOR_BYTES), lower, upper);
  }
};
template <> struct FloatCodes<WIDE> {
  explicit FloatCodes(const Layout&) {}
};
template <> struct FloatCodes<FLOAT6> {
  Raw lowers[2], uppers[2];  // of entries 0 to 15, and 16 to 31
  explicit FloatCodes(const Layout& l) {
    for (int i = 0; i < 2; ++i) widen<E4M3>(raw_table(l.table[i]), lowers[i], uppers[i]);
  }
  HR_INLINE void read(const uint8_t* step, int j, Raw& lower, Raw& upper) const {
    const Field f = FIELDS<6>.at[0][j];
    const Raw main = kept(raw_codes(step + f.vector * VECTOR_BYTES), raw_mask(f.mask));
    const Raw plane = rotated(raw_codes(step + plane_at(FLOAT6)), f.rotate);
    const Raw code = lowered(either(main, kept(plane, raw_mask(f.plane_mask))), f.shift);
    const Raw low = kept(code, raw_mask(15)), large = raw_mask(16);
    lower = where_none(code, large, looked_up(lowers[0], low), looked_up(lowers[1], low));
    upper = where_none(code, large, looked_up(uppers[0], low), looked_up(uppers[1], low));
    upper = raw_sum(upper, kept(raised(code, 2), raw_mask(0x80)));  // the sign turns
  }
};

// Rows of activations, in bfloat16 or float32, padded with zeros to whole steps.
template <class A> struct FloatRows {
  A* data;
  int64_t line;   // values from row to row
  float* scales;  // [rows]
};

// x [K] as it is, or with dynamic int8 its codes; the row's scale.
template <class A, class T>
inline float float_row(A* line, const T* x, int64_t K, bool int8) {
  if (!int8) {
    for (int64_t k = 0; k < K; k += W) st_upto(line + k, ld_upto(x + k, K - k), K - k);
    return 1.0f;
  }
  const Extent extent = extent_of(x, K);
  const float scale = extent.largest > 0 ? extent.largest / largest_code(1) : 1.0f;
  const Quotient quotient(scale);
  for (int64_t k = 0; k < K; k += W) st_upto(line + k, vround(quotient.of(ld_upto(x + k, K - k))), K - k);
  return scale + extent.poison;
}

// Rows 0 to `rows`, row(i) being the i-th; all in SCRATCH_A.
template <class A, class Row>
inline FloatRows<A> float_rows(const Row& row, int64_t rows, const Layout& l, bool int8) {
  FloatRows<A> f;
  f.line = round_up(4 * l.steps(), 64) + 64 / int64_t(sizeof(A));
  const int64_t bytes = rows * f.line * int64_t(sizeof(A)) + 64;
  f.data = static_cast<A*>(scratch(SCRATCH_A, size_t(bytes + rows * 4)));
  f.scales = reinterpret_cast<float*>(reinterpret_cast<uint8_t*>(f.data) + bytes);
  parallel_ranges(rows, rows * l.K / 2, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      A* line = f.data + i * f.line;
      f.scales[i] = float_row(line, row(i), l.K, int8);
      for (int64_t k = l.K; k < 4 * l.steps(); ++k) line[k] = A{};
    }
  });
  return f;
}

// What a tile works on: rows times steps of a panel.
template <class A> struct FloatWork {
  const Panel* panel;
  const uint8_t* wide;  // the steps' weights in bfloat16, or null
  const A* rows;
  int64_t line;
  float *part, *real;   // [rows][QPANEL]: of a group that a piece of K has cut, and of those that are done
};

// Two inputs of R rows times V vectors of pairs.
template <int R, int V>
HR_INLINE inline void multiply_pairs(const float* x, int64_t line, const Raw (&pairs)[V], vf (&sum)[R][V]) {
  HR_UNROLL for (int v = 0; v < V; ++v) {
    const vf first = first_of(pairs[v]), second = second_of(pairs[v]);
    HR_UNROLL for (int r = 0; r < R; ++r) {
      sum[r][v] = vfma(vset(x[r * line]), first, sum[r][v]);
      sum[r][v] = vfma(vset(x[r * line + 1]), second, sum[r][v]);
    }
  }
}
#if defined(HR_DOT_BF16)
template <int R, int V>
HR_INLINE inline void multiply_pairs(const bf16* x, int64_t line, const Raw (&pairs)[V], vf (&sum)[R][V]) {
  HR_UNROLL for (int r = 0; r < R; ++r) {
    const __m512bh two = pair_of(x + r * line);
    HR_UNROLL for (int v = 0; v < V; ++v) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], (__m512bh)pairs[v], two);
  }
}
#endif

// The u-th two inputs of a step of four, V vectors from the v0-th on.
template <int KIND, int V>
HR_INLINE inline void pairs_of(const FloatCodes<KIND>& codes, const uint8_t* step, int u, int v0, Raw (&pairs)[V]) {
  if constexpr (KIND == WIDE) {
    HR_UNROLL for (int v = 0; v < V; ++v) pairs[v] = raw_codes(step + u * WIDE_PAIR_BYTES + (v0 + v) * VECTOR_BYTES);
  } else {
    HR_UNROLL for (int v = 0; v < V; v += 2) {
      Raw lower, upper;
      codes.read(step, 2 * u + (v0 + v) / 2, lower, upper);
      pairs[v] = interleaved_low(lower, upper);
      pairs[v + 1] = interleaved_high(lower, upper);
    }
  }
}

template <int KIND, class A, int R, int V>
inline void float_vectors(const FloatWork<A>& w, int64_t begin, int64_t end, int at) {
  constexpr int64_t STEP_BYTES = KIND == WIDE ? 2 * WIDE_PAIR_BYTES : unit_bytes(KIND);
  const int v0 = V == QV ? 0 : at;
  const Panel& p = *w.panel;
  const Layout& l = *p.layout;
  const FloatCodes<KIND> codes(l);
  for (int64_t s = begin, stop, g = begin / p.group_steps; s < end; s = stop, ++g) {
    const int64_t start = g * p.group_steps, finish = min_of(start + p.group_steps, p.steps);
    stop = min_of(finish, end);
    const uint8_t* step = KIND == WIDE ? w.wide + (s - begin) * STEP_BYTES
                                       : p.header(g) + p.header_bytes + (s - start) * STEP_BYTES;
    vf sum[R][V];
    HR_UNROLL for (int r = 0; r < R; ++r) {
      HR_UNROLL for (int v = 0; v < V; ++v) sum[r][v] = s == start ? vzero() : ld(w.part + r * QPANEL + (v0 + v) * W);
    }
    for (int64_t i = s; i < stop; ++i, step += STEP_BYTES) {
      if (KIND != WIDE && v0 == 0) {
        fetch_next_chunk<(STEP_BYTES + 63) / 64>(step);
      }
      HR_UNROLL for (int u = 0; u < 2; ++u) {
        Raw pairs[V];
        pairs_of(codes, step, u, v0, pairs);
        multiply_pairs<R, V>(w.rows + 4 * i + 2 * u, w.line, pairs, sum);
      }
    }
    if (stop < finish) {
      HR_UNROLL for (int r = 0; r < R; ++r) {
        HR_UNROLL for (int v = 0; v < V; ++v) st(w.part + r * QPANEL + (v0 + v) * W, sum[r][v]);
      }
      return;
    }
    vf scales[V], outer[V];
    values_of<V>(p.header(g), l.scales, v0, scales);
    if (l.block_scales != ABSENT) {
      const int64_t b = g / p.block_groups;
      values_of<V>(p.front + b * QPANEL * bytes_of_stored(l.block_scales), l.block_scales, v0, outer);
      HR_UNROLL for (int v = 0; v < V; ++v) scales[v] = vmul(scales[v], outer[v]);
    }
    HR_UNROLL for (int v = 0; v < V; ++v) {
      HR_UNROLL for (int r = 0; r < R; ++r) {
        float* to = w.real + r * QPANEL + (v0 + v) * W;
        st(to, g == 0 ? vmul(sum[r][v], scales[v]) : vfma(sum[r][v], scales[v], ld(to)));
      }
    }
  }
}

template <int KIND, class A, int R> inline void float_tile(const FloatWork<A>& w, int64_t begin, int64_t end) {
  for (int v0 = 0; v0 < QV; v0 += FLOAT_V) float_vectors<KIND, A, R, FLOAT_V>(w, begin, end, v0);
}

template <class A> inline void float_tile_rows(const FloatWork<A>& w, int64_t rows, int64_t begin, int64_t end) {
  switch (rows) {
    case 1: return float_tile<WIDE, A, 1>(w, begin, end);
    case 2: return float_tile<WIDE, A, 2>(w, begin, end);
    case 3: return float_tile<WIDE, A, 3>(w, begin, end);
    case 4: return float_tile<WIDE, A, 4>(w, begin, end);
    case 5: return float_tile<WIDE, A, 5>(w, begin, end);
    case 6: return float_tile<WIDE, A, 6>(w, begin, end);
  }
}

// Weights of steps [begin, end) in bfloat16.
template <int KIND> void widen_steps(const Panel& p, int64_t begin, int64_t end, uint8_t* to) {
  const FloatCodes<KIND> codes(*p.layout);
  for (int64_t s = begin; s < end; ++s, to += 2 * WIDE_PAIR_BYTES) {
    const int64_t g = s / p.group_steps;
    const uint8_t* step = p.header(g) + p.header_bytes + (s - g * p.group_steps) * unit_bytes(KIND);
    HR_UNROLL for (int u = 0; u < 2; ++u) {
      Raw pairs[QV];
      pairs_of(codes, step, u, 0, pairs);
      HR_UNROLL for (int v = 0; v < QV; ++v) put_raw(to + u * WIDE_PAIR_BYTES + v * VECTOR_BYTES, pairs[v]);
    }
  }
}

template <int KIND, class A>
inline void float_panel(const Panel& p, const FloatRows<A>& f, int64_t begin, int64_t rows, Sums sums) {
  constexpr int64_t TILE_ROWS = 6;
  const int64_t tiles = ceil_div(rows, TILE_ROWS), steps = p.steps;
  FloatWork<A> w{&p, nullptr, f.data + begin * f.line, f.line, reinterpret_cast<float*>(sums.whole), sums.real};
  if (rows == 1) return float_tile<KIND, A, 1>(w, 0, steps);
  w.wide = sums.bytes;
  const int64_t piece = (tiles <= FEW_TILES ? PIECE_BYTES : MANY_PIECE_BYTES) / (2 * WIDE_PAIR_BYTES);
  for (int64_t s = 0; s < steps; s += piece) {
    const int64_t end = min_of(s + piece, steps);
    widen_steps<KIND>(p, s, end, sums.bytes);
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t first = i * rows / tiles, many = (i + 1) * rows / tiles - first;
      FloatWork<A> own = w;
      own.rows += first * f.line;
      own.part += first * QPANEL;
      own.real += first * QPANEL;
      float_tile_rows(own, many, s, end);
    }
  }
}

template <class A>
inline void panel_rows_of(const Panel& p, const uint8_t*, const FloatRows<A>& f, int64_t begin, int64_t rows, Sums sums) {
  if (p.steps == 0) __builtin_memset(sums.real, 0, size_t(rows * QPANEL) * sizeof(float));
  switch (p.layout->kind) {
    case E4M3: return float_panel<E4M3>(p, f, begin, rows, sums);
    case E5M2: return float_panel<E5M2>(p, f, begin, rows, sums);
    default: return float_panel<FLOAT6>(p, f, begin, rows, sums);
  }
}

}  // namespace quant
}  // namespace
}  // namespace headrace::HR_ISA

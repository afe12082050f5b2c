// Linear layers with integer weights of 8 or 4 bits.
//
// Everything is integer multiplication. A row of activations is written as fixed-point numbers over
// its largest magnitude, in one, two or three signed bytes ("limbs"): one is dynamic int8, two keep
// what 16-bit floats say, three what float32 says. Weights are unsigned bytes or nibbles, code =
// value + 2^(bits-1). Within a group of inputs that share a scale, sum (code - zero) * limb is an
// exact 32-bit integer, so tiles of rows, panels, threads, the cutting of K and the instruction set
// cannot change it. Floats begin where a group ends: limbs are joined, scaled and added to the
// output's running float32 sum, group after group.
//
// Row invariance follows: a row's fixed-point form is its own, the sums are exact, and the float
// steps of one output are the same ones in the same order whatever stands beside it.
//
// Packing cuts a weight [N, K] into panels of QPANEL output features; features past N are zeros. A
// panel is the sequence of its groups, a group is
//   scales [QPANEL], as float32 or bfloat16
//   zero points [QPANEL] uint8, if the weight has any
//   steps of 4 inputs: QV vectors of W features x 4 codes; of 4 bits, two vectors share their bytes
//     (the even one in the low halves).

namespace headrace::HR_ISA {
namespace {
namespace quant {

constexpr int QV = 4;                     // vectors of a panel
constexpr int QPANEL = QV * W;            // features of a panel
constexpr int VECTOR_BYTES = 4 * W;
constexpr int MAX_LIMB_ROWS = 6;          // rows times limbs of a register tile
constexpr int64_t FEW_TILES = 4;          // so many share pieces that stay in the first cache,
constexpr int64_t PIECE_BYTES = 16 << 10; // of this size; more share
constexpr int64_t MANY_PIECE_BYTES = 128 << 10;  // in the second cache
constexpr int64_t AHEAD = 8192;           // bytes that a lone tile fetches ahead
constexpr int64_t TASK_LINES = 192;       // rows times limbs of a task
constexpr int64_t RUNS = 8;               // tasks for each thread: evens out what delays one
constexpr int UNROLL = 4;                 // steps of K between two fetches

// --- vectors of integers ----------------------------------------------------------------------

// vi: W int32. Codes and Bytes: 4 codes a lane, and 4 limbs repeated in all lanes, made ready for
// dot(), which adds each lane's four products.
#if defined(HR_AVX512)
using vi = __m512i;
inline vi iset(int32_t x) { return _mm512_set1_epi32(x); }
inline vi ild(const int32_t* p) { return _mm512_loadu_si512(p); }
inline void ist(int32_t* p, vi x) { _mm512_storeu_si512(p, x); }
inline vi imul(vi a, vi b) { return _mm512_mullo_epi32(a, b); }
inline vi ild_bytes(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
inline vf to_floats(vi x) { return _mm512_cvtepi32_ps(x); }
inline vi raw_codes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline vi low_halves(vi x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
inline vi high_halves(vi x) { return _mm512_and_si512(x, _mm512_set1_epi8(int8_t(0xf0))); }
#if defined(HR_DOT_BF16)  // every such machine multiplies bytes as well
constexpr int TILE_V = 4;
using Codes = vi;
using Bytes = vi;
inline Codes codes_of(vi x) { return x; }
inline Bytes bytes_of(int32_t four) { return iset(four); }
inline vi dot(vi sum, Codes codes, Bytes limbs) { return _mm512_dpbusd_epi32(sum, codes, limbs); }
#else
constexpr int TILE_V = 2;
struct Codes { vi even, odd; };
struct Bytes { vi even, odd; };
inline Codes codes_of(vi x) {
  return {_mm512_and_si512(x, _mm512_set1_epi16(255)), _mm512_srli_epi16(x, 8)};
}
inline Bytes bytes_of(int32_t four) {
  const vi x = iset(four);
  return {_mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8), _mm512_srai_epi16(x, 8)};
}
inline vi dot(vi sum, const Codes& codes, const Bytes& limbs) {
  sum = _mm512_add_epi32(sum, _mm512_madd_epi16(codes.even, limbs.even));
  return _mm512_add_epi32(sum, _mm512_madd_epi16(codes.odd, limbs.odd));
}
#endif
#elif defined(HR_AVX2)
constexpr int TILE_V = 1;
using vi = __m256i;
struct Codes { vi even, odd; };
struct Bytes { vi even, odd; };
inline vi iset(int32_t x) { return _mm256_set1_epi32(x); }
inline vi ild(const int32_t* p) { return _mm256_loadu_si256((const vi*)p); }
inline void ist(int32_t* p, vi x) { _mm256_storeu_si256((vi*)p, x); }
inline vi imul(vi a, vi b) { return _mm256_mullo_epi32(a, b); }
inline vi ild_bytes(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
inline vf to_floats(vi x) { return _mm256_cvtepi32_ps(x); }
inline vi raw_codes(const uint8_t* p) { return _mm256_loadu_si256((const vi*)p); }
inline vi low_halves(vi x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
inline vi high_halves(vi x) { return _mm256_and_si256(x, _mm256_set1_epi8(int8_t(0xf0))); }
inline Codes codes_of(vi x) {
  return {_mm256_and_si256(x, _mm256_set1_epi16(255)), _mm256_srli_epi16(x, 8)};
}
inline Bytes bytes_of(int32_t four) {
  const vi x = iset(four);
  return {_mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), _mm256_srai_epi16(x, 8)};
}
inline vi dot(vi sum, const Codes& codes, const Bytes& limbs) {
  sum = _mm256_add_epi32(sum, _mm256_madd_epi16(codes.even, limbs.even));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(codes.odd, limbs.odd));
}
#else
constexpr int TILE_V = 1;
typedef int32_t vi __attribute__((vector_size(16)));
typedef uint8_t vb __attribute__((vector_size(16)));
using Codes = vb;
struct Bytes { int32_t of[4]; };
inline vi iset(int32_t x) { return vi{x, x, x, x}; }
inline vi ild(const int32_t* p) { vi x; __builtin_memcpy(&x, p, 16); return x; }
inline void ist(int32_t* p, vi x) { __builtin_memcpy(p, &x, 16); }
inline vi imul(vi a, vi b) { return a * b; }
inline vi ild_bytes(const uint8_t* p) { return vi{p[0], p[1], p[2], p[3]}; }
inline vf to_floats(vi x) { return __builtin_convertvector(x, vf); }
inline vb raw_codes(const uint8_t* p) { vb x; __builtin_memcpy(&x, p, 16); return x; }
inline vb low_halves(vb x) { return x & 15; }
inline vb high_halves(vb x) { return x & 0xf0; }
inline Codes codes_of(vb x) { return x; }
inline Bytes bytes_of(int32_t four) {
  int8_t b[4];
  __builtin_memcpy(b, &four, 4);
  return {{b[0], b[1], b[2], b[3]}};
}
inline vi dot(vi sum, const Codes& codes, const Bytes& limbs) {
  for (int lane = 0; lane < W; ++lane) {
    for (int i = 0; i < 4; ++i) sum[lane] += int32_t(codes[4 * lane + i]) * limbs.of[i];
  }
  return sum;
}
#endif

// What a tile fetches on its way: `lines` lines of cache from `at` on after every UNROLL steps.
struct Fetch {
  const uint8_t* at;
  int64_t lines;
  void step() {
    for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(at + 64 * i, 0, 2);
    at += 64 * lines;
  }
};

// --- weights ----------------------------------------------------------------------------------

// Where a packed weight's parts are. `group` is a multiple of 4, or at least K.
struct Layout {
  int64_t N, K, group;
  int32_t bits, has_zeros, scale_dtype;

  int64_t panels() const { return ceil_div(N, QPANEL); }
  int64_t steps() const { return ceil_div(K, 4); }
  int64_t group_steps() const { return group >= K ? max_of(1, steps()) : group / 4; }
  int64_t groups() const { return max_of(1, ceil_div(steps(), group_steps())); }
  int64_t step_bytes() const { return int64_t(QV) * VECTOR_BYTES * bits / 8; }
  int64_t scale_bytes() const { return int64_t(QPANEL) * (scale_dtype == F32 ? 4 : 2); }
  int64_t header_bytes() const { return scale_bytes() + (has_zeros ? QPANEL : 0); }
  int64_t group_bytes() const { return header_bytes() + group_steps() * step_bytes(); }
  int64_t panel_bytes() const { return round_up(groups() * header_bytes() + steps() * step_bytes(), 64); }
  int32_t middle() const { return 1 << (bits - 1); }
};

template <class T> inline void put_scale(uint8_t* to, int64_t n, float scale) {
  T stored;
  from_float(scale, stored);
  __builtin_memcpy(to + n * int64_t(sizeof(T)), &stored, sizeof(T));
}

// Steps of one group, from rows of values: code = value + middle, in two's complement a flipped bit.
inline void pack_steps(const Layout& l, uint8_t* to, const int8_t* values, int64_t stride,
                       int64_t features, int64_t inputs) {
  constexpr int64_t BLOCK = 16;
  uint32_t columns[BLOCK * QPANEL];  // four values a unit
  for (int64_t k = 0; k < inputs; k += 4 * BLOCK) {
    const int64_t left = inputs - k, whole = min_of(BLOCK, left / 4), many = min_of(BLOCK, ceil_div(left, 4));
    rows_to_columns(columns, QPANEL, reinterpret_cast<const char*>(values + k), stride, features, whole);
    for (int64_t n = 0; whole < many && n < QPANEL; ++n) {
      columns[whole * QPANEL + n] = 0;
      if (n < features) __builtin_memcpy(columns + whole * QPANEL + n, values + n * stride + k + 4 * whole, size_t(left % 4));
    }
    for (int64_t s = 0; s < many; ++s, to += l.step_bytes()) {
      const uint32_t* from = columns + s * QPANEL;
      uint32_t step[QPANEL];
      if (l.bits == 8) {
        for (int64_t i = 0; i < QPANEL; ++i) step[i] = from[i] ^ 0x80808080u;
      } else {
        for (int64_t v = 0; v < QV; v += 2) {
          const uint32_t *low = from + v * W, *high = low + W;
          for (int64_t i = 0; i < W; ++i) {
            step[v / 2 * W + i] = ((low[i] & 0x0f0f0f0fu) | (high[i] & 0x0f0f0f0fu) << 4) ^ 0x88888888u;
          }
        }
      }
      __builtin_memcpy(to, step, size_t(l.step_bytes()));
    }
  }
}

inline void pack_panel(const Layout& l, uint8_t* to, const int8_t* values, int64_t stride,
                       const float* scales, const int8_t* zeros, int64_t features) {
  const int64_t groups = l.groups(), group_inputs = 4 * l.group_steps();
  for (int64_t g = 0; g < groups; ++g) {
    uint8_t* header = to + g * l.group_bytes();
    __builtin_memset(header, 0, size_t(l.header_bytes()));
    for (int64_t n = 0; n < features; ++n) {
      const float scale = scales[n * groups + g];
      if (l.scale_dtype == F32) put_scale<float>(header, n, scale); else put_scale<bf16>(header, n, scale);
      if (l.has_zeros) header[l.scale_bytes() + n] = uint8_t(zeros[n * groups + g] + l.middle());
    }
    const int64_t first = g * group_inputs;
    pack_steps(l, header + l.header_bytes(), values + first, stride, features, min_of(group_inputs, l.K - first));
  }
}

// --- activations ------------------------------------------------------------------------------

// The largest fixed-point magnitude: 127 in each limb; of three, what vround() rounds everywhere.
inline float largest_code(int limbs) { return limbs == 1 ? 127.f : limbs == 2 ? 32639.f : 4161407.f; }

// Rows in fixed point. Row i has `limbs` lines, the highest limb first, each padded with zeros to
// whole steps; line i * limbs + j has `groups` sums of its limbs.
struct FixedRows {
  int8_t* bytes;
  int64_t line;         // bytes from line to line
  float* scales;        // [rows]
  int32_t* sums;        // [rows * limbs][groups]
  int limbs;
  int64_t groups;
};

// W values already divided by the row's scale, to their bytes in each limb.
inline void split(vf x, int limbs, int8_t* out, int64_t line, int64_t n) {
#if defined(HR_AVX512)
  vi q = _mm512_cvtps_epi32(x);  // to nearest, ties to even
  const __mmask16 some = __mmask16(n >= W ? 0xffff : (1 << n) - 1);
  for (int j = limbs - 1; j > 0; --j) {
    _mm512_mask_cvtepi32_storeu_epi8(out + j * line, some, q);
    q = _mm512_srai_epi32(_mm512_add_epi32(q, iset(128)), 8);
  }
  _mm512_mask_cvtepi32_storeu_epi8(out, some, q);
#else
  float lanes[W];
  st(lanes, vround(x));
  for (int64_t i = 0; i < min_of(n, W); ++i) {
    int32_t q = lanes[i] == lanes[i] ? int32_t(lanes[i]) : 0;
    for (int j = limbs - 1; j > 0; --j) {
      out[j * line + i] = int8_t(q & 255);
      q = (q + 128) >> 8;
    }
    out[i] = int8_t(q);
  }
#endif
}

inline int32_t sum_of(const int8_t* p, int64_t n) {
  int32_t sum = 0;
  int64_t i = 0;
#if defined(HR_DOT_BF16)
  vi sums = iset(0);
  for (; i + 64 <= n; i += 64) sums = _mm512_dpbusd_epi32(sums, _mm512_set1_epi8(1), _mm512_loadu_si512(p + i));
  if (i > 0) sum = _mm512_reduce_add_epi32(sums);
#endif
  for (; i < n; ++i) sum += p[i];
  return sum;
}

// x / divisor, lane by lane. Where multiply-add rounds once, two corrections of x * (1 / divisor)
// give the same bits in a fraction of the time: the first leaves an error below a unit in the last
// place, from where the second is known to round correctly (Markstein, "Computation of elementary
// functions on the IBM RISC System/6000 processor", 1990). Not so if a remainder is subnormal,
// hence the bounds; of quotients below a quarter, which round to zero, it may be.
struct Quotient {
  vf divisor, inverse;
  bool by_inverse;
  explicit Quotient(float d) : divisor(vset(d)), inverse(vset(1.0f / d)) {
#if defined(HR_AVX512) || defined(HR_AVX2)
    by_inverse = d > 0x1p-90f && d < 0x1p90f;
#else
    by_inverse = false;
#endif
  }
  vf of(vf x) const {
    if (!by_inverse) return vdiv(x, divisor);
    const vf minus = vsub(vzero(), divisor);
    vf q = vmul(x, inverse);
    q = vfma(vfma(minus, q, x), inverse, q);
    return vfma(vfma(minus, q, x), inverse, q);
  }
};

// The largest magnitude in x [n], and zero or, if it holds NaN or infinity, NaN.
struct Extent { float largest, poison; };

template <class T> inline Extent extent_of(const T* x, int64_t n) {
  constexpr int CHAINS = 4;  // so that none of them waits
  vf most[CHAINS], poison[CHAINS];
  for (int c = 0; c < CHAINS; ++c) most[c] = poison[c] = vzero();
  int64_t k = 0;
  for (; k + CHAINS * W <= n; k += CHAINS * W) {
    for (int c = 0; c < CHAINS; ++c) {
      const vf v = ld(x + k + c * W);
      most[c] = vmax(most[c], vabs(v));
      poison[c] = vfma(v, vzero(), poison[c]);
    }
  }
  for (; k < n; k += W) {
    const vf v = ld_upto(x + k, n - k);
    most[0] = vmax(most[0], vabs(v));
    poison[0] = vfma(v, vzero(), poison[0]);
  }
  for (int c = 1; c < CHAINS; ++c) {
    most[0] = vmax(most[0], most[c]);
    poison[0] = vadd(poison[0], poison[c]);
  }
  return {hmax(most[0]), hsum(poison[0])};
}

template <int LIMBS, class T>
inline void split_row(const T* x, int64_t n, float scale, int8_t* lines, int64_t line) {
  const Quotient quotient(scale);
  int64_t k = 0;
  for (; k + W <= n; k += W) split(quotient.of(ld(x + k)), LIMBS, lines + k, line, W);
  if (k < n) split(quotient.of(ldn(x + k, n - k)), LIMBS, lines + k, line, n - k);
}

template <class T>
inline void fix_row(const FixedRows& f, int64_t row, const T* x, const Layout& l) {
  const Extent extent = extent_of(x, l.K);
  const float scale = extent.largest > 0 ? extent.largest / largest_code(f.limbs) : 1.0f;
  int8_t* lines = f.bytes + row * f.limbs * f.line;
  switch (f.limbs) {
    case 1: split_row<1>(x, l.K, scale, lines, f.line); break;
    case 2: split_row<2>(x, l.K, scale, lines, f.line); break;
    case 3: split_row<3>(x, l.K, scale, lines, f.line); break;
  }
  f.scales[row] = scale + extent.poison;
  const int64_t inputs = 4 * l.group_steps();
  for (int j = 0; j < f.limbs; ++j) {
    int8_t* line = lines + j * f.line;
    for (int64_t k = l.K; k < 4 * l.steps(); ++k) line[k] = 0;
    int32_t* sums = f.sums + (row * f.limbs + j) * f.groups;
    for (int64_t g = 0; g < f.groups; ++g) sums[g] = sum_of(line + g * inputs, min_of(inputs, l.K - g * inputs));
  }
}

// Rows 0 to `rows` in fixed point, row(i) being the i-th; all in SCRATCH_A.
template <class Row>
inline FixedRows fix_rows(const Row& row, int64_t rows, const Layout& l, int limbs) {
  FixedRows f;
  f.limbs = limbs;
  f.groups = l.groups();
  f.line = round_up(4 * l.steps(), 64) + 64;  // an odd number of lines of cache: no two rows collide
  f.line += f.line / 64 % 2 ? 0 : 64;
  const int64_t bytes = rows * limbs * f.line + 64;  // whole lines of cache
  f.bytes = static_cast<int8_t*>(scratch(SCRATCH_A, size_t(bytes + rows * (1 + limbs * f.groups) * 4 + 64)));
  f.scales = reinterpret_cast<float*>(f.bytes + bytes);
  f.sums = reinterpret_cast<int32_t*>(f.scales + rows);
  parallel_ranges(rows, rows * l.K / 2, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) fix_row(f, i, row(i), l);
  });
  return f;
}

// --- tiles ------------------------------------------------------------------------------------

// One panel's running sums for the rows of a task.
struct Sums {
  int32_t* whole;   // [rows * limbs][QPANEL]: of a group that a piece of K has cut
  float* real;      // [rows][QPANEL]: of the groups that are done, without the row's scale
};

// What a tile works on: lines of fixed-point rows times steps [begin, end) of a panel.
struct Work {
  const Layout* layout;
  const uint8_t* panel;
  const int8_t* lines;
  int64_t line;
  const int32_t* line_sums;   // of the first line
  int64_t groups;
  Sums sums;                  // from the first line on
  Fetch fetch;
};

inline vf scales_at(const uint8_t* header, int32_t dtype, int v) {
  return dtype == F32 ? ld(reinterpret_cast<const float*>(header) + v * W)
                      : ld(reinterpret_cast<const bf16*>(header) + v * W);
}

// Accumulators stay in registers only if every loop over them is unrolled before the compiler
// decides where arrays live.

template <int BITS, int V> inline void load_codes(const uint8_t* step, int v0, Codes* codes) {
  if constexpr (BITS == 8) {
    HR_UNROLL for (int v = 0; v < V; ++v) codes[v] = codes_of(raw_codes(step + (v0 + v) * VECTOR_BYTES));
  } else if constexpr (V == 1) {
    const auto raw = raw_codes(step + v0 / 2 * VECTOR_BYTES);
    codes[0] = codes_of(v0 % 2 ? high_halves(raw) : low_halves(raw));
  } else {
    HR_UNROLL for (int v = 0; v < V; v += 2) {
      const auto raw = raw_codes(step + (v0 + v) / 2 * VECTOR_BYTES);
      codes[v] = codes_of(low_halves(raw));
      codes[v + 1] = codes_of(high_halves(raw));
    }
  }
}

// Nibbles from high halves stay there: codes of odd vectors, and their sums, are this many times as
// large, and their scales as much smaller.
template <int BITS> constexpr int weight_of(int v) { return BITS == 4 && v % 2 == 1 ? 16 : 1; }

// A group begins: minus its zero points times the sum of a line's limbs.
template <int BITS> inline vi first_sum(const Layout& l, const uint8_t* header, int v, int32_t line_sum) {
  if (!l.has_zeros) return iset(-l.middle() * weight_of<BITS>(v) * line_sum);
  return imul(ild_bytes(header + l.scale_bytes() + v * W), iset(-weight_of<BITS>(v) * line_sum));
}

// One step of 4 inputs: R lines (rows times limbs) by V vectors of features.
template <int BITS, int R, int V>
inline void dot_step(const uint8_t* step, int v0, const int8_t* bytes, int64_t line, vi (&sum)[R][V]) {
  Codes codes[V];
  load_codes<BITS, V>(step, v0, codes);
  HR_UNROLL for (int r = 0; r < R; ++r) {
    int32_t four;
    __builtin_memcpy(&four, bytes + r * line, 4);
    const Bytes limbs = bytes_of(four);
    HR_UNROLL for (int v = 0; v < V; ++v) sum[r][v] = dot(sum[r][v], codes[v], limbs);
  }
}

template <int BITS, int LIMBS, int R, int V>
inline void tile_vectors(const Work& w, int64_t begin, int64_t end, int v0, Fetch fetch) {
  const Layout& l = *w.layout;
  constexpr int64_t STEP_BYTES = int64_t(QV) * VECTOR_BYTES * BITS / 8;
  const int64_t group_steps = l.group_steps(), group_bytes = l.group_bytes(), steps = l.steps();
  const int64_t line = w.line;
  for (int64_t s = begin, stop; s < end; s = stop) {
    const int64_t g = s / group_steps, start = g * group_steps, finish = min_of(start + group_steps, steps);
    stop = min_of(finish, end);
    const uint8_t* header = w.panel + g * group_bytes;
    const uint8_t* step = header + l.header_bytes() + (s - start) * STEP_BYTES;
    vi sum[R][V];
    if (s == start) {
      HR_UNROLL for (int r = 0; r < R; ++r) {
        const int32_t line_sum = w.line_sums[r * w.groups + g];
        HR_UNROLL for (int v = 0; v < V; ++v) sum[r][v] = first_sum<BITS>(l, header, v0 + v, line_sum);
      }
    } else {
      HR_UNROLL for (int r = 0; r < R; ++r) {
        HR_UNROLL for (int v = 0; v < V; ++v) sum[r][v] = ild(w.sums.whole + r * QPANEL + (v0 + v) * W);
      }
    }
    const int8_t* bytes = w.lines + 4 * s;
    int64_t i = s;
    for (; i + UNROLL <= stop; i += UNROLL) {
      fetch.step();
      for (int u = 0; u < UNROLL; ++u, step += STEP_BYTES, bytes += 4) {
        dot_step<BITS, R, V>(step, v0, bytes, line, sum);
      }
    }
    for (; i < stop; ++i, step += STEP_BYTES, bytes += 4) dot_step<BITS, R, V>(step, v0, bytes, line, sum);
    if (stop < finish) {
      HR_UNROLL for (int r = 0; r < R; ++r) {
        HR_UNROLL for (int v = 0; v < V; ++v) ist(w.sums.whole + r * QPANEL + (v0 + v) * W, sum[r][v]);
      }
      continue;
    }
    // The group ends: limbs are joined, scaled and added to the running sum.
    HR_UNROLL for (int v = 0; v < V; ++v) {
      vf scale = scales_at(header, l.scale_dtype, v0 + v);
      if (BITS == 4) scale = vmul(scale, vset(1.0f / weight_of<BITS>(v0 + v)));
      HR_UNROLL for (int r = 0; r < R; r += LIMBS) {
        vf y = to_floats(sum[r][v]);
        HR_UNROLL for (int j = 1; j < LIMBS; ++j) y = vfma(y, vset(256.0f), to_floats(sum[r + j][v]));
        float* real = w.sums.real + r / LIMBS * QPANEL + (v0 + v) * W;
        st(real, g == 0 ? vmul(y, scale) : vfma(y, scale, ld(real)));
      }
    }
  }
}

template <int BITS, int LIMBS, int R>
inline void tile(const Work& w, int64_t begin, int64_t end) {
  tile_vectors<BITS, LIMBS, R, TILE_V>(w, begin, end, 0, w.fetch);
  for (int v0 = TILE_V; v0 < QV; v0 += TILE_V) {
    tile_vectors<BITS, LIMBS, R, TILE_V>(w, begin, end, v0, Fetch{nullptr, 0});
  }
}

template <int BITS, int LIMBS>
inline void tile_lines(const Work& w, int64_t lines, int64_t begin, int64_t end) {
  switch (lines / LIMBS) {
    case 1: return tile<BITS, LIMBS, LIMBS>(w, begin, end);
    case 2: return tile<BITS, LIMBS, 2 * LIMBS>(w, begin, end);
    case 3: if constexpr (LIMBS <= 2) return tile<BITS, LIMBS, 3 * LIMBS>(w, begin, end); break;
    case 4: if constexpr (LIMBS == 1) return tile<BITS, LIMBS, 4>(w, begin, end); break;
    case 5: if constexpr (LIMBS == 1) return tile<BITS, LIMBS, 5>(w, begin, end); break;
    case 6: if constexpr (LIMBS == 1) return tile<BITS, LIMBS, 6>(w, begin, end); break;
  }
}

// sums.real [rows][QPANEL] = fixed-point rows [begin, begin + rows) times one panel; `after` is the one
// that will be read next, whose beginning is fetched on the way.
template <int BITS, int LIMBS>
inline void panel_rows(const Layout& l, const uint8_t* panel, const uint8_t* after, const FixedRows& f,
                       int64_t begin, int64_t rows, Sums sums) {
  constexpr int64_t TILE_ROWS = MAX_LIMB_ROWS / LIMBS;
  const int64_t tiles = ceil_div(rows, TILE_ROWS), steps = l.steps();
  const int64_t lines = ceil_div(UNROLL * l.step_bytes() / 64, tiles);  // of each tile, at each fetch
  const int64_t shared = (tiles <= FEW_TILES ? PIECE_BYTES : MANY_PIECE_BYTES) / l.step_bytes();
  const int64_t piece = tiles == 1 ? max_of(1, steps) : shared;
  for (int64_t s = 0; s < steps || s == 0; s += piece) {
    const int64_t end = min_of(s + piece, steps), share = (end - s) / UNROLL * 64 * lines;
    const uint8_t* next = panel + (end / l.group_steps() + 1) * l.header_bytes() + end * l.step_bytes();
    if (end == steps) next = after;
    if (tiles == 1) next = panel + AHEAD;
    const uint8_t* const last = next + (end - s) * l.step_bytes();
    for (int64_t i = 0; i < tiles; ++i, next += share) {
      const int64_t first = i * rows / tiles, many = (i + 1) * rows / tiles - first;
      const int64_t line = (begin + first) * LIMBS;
      const Work w{&l, panel, f.bytes + line * f.line, f.line, f.sums + line * f.groups, f.groups,
                   {sums.whole + first * LIMBS * QPANEL, sums.real + first * QPANEL},
                   {next, next < last ? lines : 0}};
      tile_lines<BITS, LIMBS>(w, many * LIMBS, s, end);
    }
  }
}

inline void panel_rows_of(const Layout& l, const uint8_t* panel, const uint8_t* after, const FixedRows& f,
                          int64_t begin, int64_t rows, Sums sums) {
  if (l.bits == 8) {
    switch (f.limbs) {
      case 1: return panel_rows<8, 1>(l, panel, after, f, begin, rows, sums);
      case 2: return panel_rows<8, 2>(l, panel, after, f, begin, rows, sums);
      case 3: return panel_rows<8, 3>(l, panel, after, f, begin, rows, sums);
    }
  } else {
    switch (f.limbs) {
      case 1: return panel_rows<4, 1>(l, panel, after, f, begin, rows, sums);
      case 2: return panel_rows<4, 2>(l, panel, after, f, begin, rows, sums);
      case 3: return panel_rows<4, 3>(l, panel, after, f, begin, rows, sums);
    }
  }
}

// As st(), but for bfloat16 by the machine's own instruction: numbers below 2^-126 become zero.
template <class T> inline void store(T* p, vf x, int64_t n) { st_upto(p, x, n); }
#if defined(HR_DOT_BF16)
inline void store(bf16* p, vf x, int64_t n) {
  const __m256i y = (__m256i)_mm512_cvtneps_pbh(x);
  if (n >= W) _mm256_storeu_si256((__m256i*)p, y);
  else _mm256_mask_storeu_epi16(p, __mmask16((1 << n) - 1), y);
}
#endif

// out[n] = real[n] * scale + bias[n]
template <class T, class B>
inline void finish_row(T* out, const float* real, float scale, const B* bias, int64_t n) {
  for (int64_t j = 0; j < n; j += W) {
    vf y = vmul(ld(real + j), vset(scale));
    if (bias != nullptr) y = vadd(y, ld_upto(bias + j, n - j));
    store(out + j, y, n - j);
  }
}

// f(begin, many, p, sums) for every panel p < panels and piece of the rows, on all threads; sums.real
// has room for SUMS panels of `many` rows. A task takes neighbouring panels, so that what it prefetches
// is its own.
template <int SUMS, class F>
inline void over_panels(const Layout& l, int64_t rows, int64_t panels, int limbs, const F& f) {
  const int64_t pieces = ceil_div(rows * limbs, TASK_LINES);
  const int64_t runs = min_of(panels, max_of(1, ceil_div(RUNS * pool_size(), pieces)));
  parallel(runs * pieces, rows * limbs * l.N * l.K / 64, [&](int64_t task) {
    const int64_t piece = task / runs, run = task % runs;
    const int64_t begin = piece * rows / pieces, many = (piece + 1) * rows / pieces - begin;
    const size_t lines = size_t(TASK_LINES) * QPANEL;
    Sums sums;
    sums.real = static_cast<float*>(scratch(SCRATCH_TASK, lines * size_t(SUMS + limbs) * 4));
    sums.whole = reinterpret_cast<int32_t*>(sums.real + SUMS * lines);
    for (int64_t p = run * panels / runs; p < (run + 1) * panels / runs; ++p) f(begin, many, p, sums);
  });
}

template <class T>
inline void run(T* out, const T* x, const uint8_t* packed, const T* bias, int64_t rows, int64_t stride,
                const Layout& l, int limbs) {
  if (rows == 0) return;
  const FixedRows f = fix_rows([=](int64_t i) { return x + i * stride; }, rows, l, limbs);
  over_panels<1>(l, rows, l.panels(), limbs, [&](int64_t begin, int64_t many, int64_t p, Sums sums) {
    const uint8_t* panel = packed + p * l.panel_bytes();
    panel_rows_of(l, panel, panel + l.panel_bytes(), f, begin, many, sums);
    const int64_t at = p * QPANEL, features = min_of(QPANEL, l.N - at);
    for (int64_t i = 0; i < many; ++i) {
      finish_row(out + (begin + i) * l.N + at, sums.real + i * QPANEL, f.scales[begin + i],
                 bias == nullptr ? nullptr : bias + at, features);
    }
  });
}

// out [rows, N / 2] = act(gates) * ups, the first half of the outputs being the gates; the bits are
// those of run() and then activation_and_mul (see run_linear_gated). N / 2 is a multiple of QPANEL.
template <class T>
inline void run_gated(T* out, const T* x, const uint8_t* packed, const T* bias, int64_t rows, int64_t stride,
                      const Layout& l, int limbs, int32_t kind) {
  if (rows == 0) return;
  const int64_t I = l.N / 2, panels = I / QPANEL;
  const FixedRows f = fix_rows([=](int64_t i) { return x + i * stride; }, rows, l, limbs);
  over_panels<2>(l, rows, panels, limbs, [&](int64_t begin, int64_t many, int64_t p, Sums gates) {
    const uint8_t* gate = packed + p * l.panel_bytes();
    const uint8_t* up = gate + panels * l.panel_bytes();
    const Sums ups{gates.whole, gates.real + many * QPANEL};
    panel_rows_of(l, gate, up, f, begin, many, gates);
    panel_rows_of(l, up, gate + l.panel_bytes(), f, begin, many, ups);
    const int64_t at = p * QPANEL;
    for (int64_t i = 0; i < many; ++i) {
      T rounded_gates[QPANEL], rounded_ups[QPANEL];
      const float scale = f.scales[begin + i];
      finish_row(rounded_gates, gates.real + i * QPANEL, scale, bias == nullptr ? nullptr : bias + at, QPANEL);
      finish_row(rounded_ups, ups.real + i * QPANEL, scale, bias == nullptr ? nullptr : bias + I + at, QPANEL);
      act_mul_row(kind, out + (begin + i) * I + at, rounded_gates, rounded_ups, QPANEL);
    }
  });
}


}  // namespace quant

int64_t quant_linear_packed_bytes(int64_t N, int64_t K, int64_t group, int32_t bits, int32_t has_zeros,
                                  int32_t scale_dtype) {
  const quant::Layout l{N, K, group, bits, has_zeros, scale_dtype};
  return l.panels() * l.panel_bytes();
}

// values [N, K] int8 (rows `stride` apart), scales [N, groups] float32, zeros [N, groups] int8 or null.
void quant_linear_pack(void* out, const void* values, const void* scales, const void* zeros, int64_t N,
                       int64_t K, int64_t stride, int64_t group, int32_t bits, int32_t scale_dtype) {
  const quant::Layout l{N, K, group, bits, zeros != nullptr, scale_dtype};
  parallel(l.panels(), N * K, [&](int64_t p) {
    const int64_t at = p * quant::QPANEL;
    quant::pack_panel(l, static_cast<uint8_t*>(out) + p * l.panel_bytes(),
                      static_cast<const int8_t*>(values) + at * stride, stride,
                      static_cast<const float*>(scales) + at * l.groups(),
                      zeros == nullptr ? nullptr : static_cast<const int8_t*>(zeros) + at * l.groups(),
                      min_of(quant::QPANEL, N - at));
  });
}

// limbs: bytes of a fixed-point activation, 1 to 3.
void quant_linear(void* out, const void* x, const void* packed, const void* bias, int64_t rows, int64_t N,
                  int64_t K, int64_t stride, int64_t group, int32_t bits, int32_t has_zeros,
                  int32_t scale_dtype, int32_t limbs, int32_t dtype) {
  const quant::Layout l{N, K, group, bits, has_zeros, scale_dtype};
  with_dtype(dtype, [&](auto* t) {
    using T = typename pointee<decltype(t)>::type;
    quant::run(static_cast<T*>(out), static_cast<const T*>(x), static_cast<const uint8_t*>(packed),
               static_cast<const T*>(bias), rows, stride, l, limbs);
  });
}

// The packed weight's first half of N outputs are gates, the second ups: out [rows, N / 2].
void quant_linear_gated(void* out, const void* x, const void* packed, const void* bias, int64_t rows, int64_t N,
                        int64_t K, int64_t stride, int64_t group, int32_t bits, int32_t has_zeros,
                        int32_t scale_dtype, int32_t limbs, int32_t kind, int32_t dtype) {
  const int64_t I = N / 2;
  if (I % quant::QPANEL != 0) {  // ups begin inside a panel
    void* both = scratch(SCRATCH_C, size_t(rows * N) * sizeof(float));
    quant_linear(both, x, packed, bias, rows, N, K, stride, group, bits, has_zeros, scale_dtype, limbs, dtype);
    activation_and_mul(out, both, rows, I, N, kind, dtype);
    return;
  }
  const quant::Layout l{N, K, group, bits, has_zeros, scale_dtype};
  with_dtype(dtype, [&](auto* t) {
    using T = typename pointee<decltype(t)>::type;
    quant::run_gated(static_cast<T*>(out), static_cast<const T*>(x), static_cast<const uint8_t*>(packed),
                     static_cast<const T*>(bias), rows, stride, l, limbs, kind);
  });
}

}  // namespace
}  // namespace headrace::HR_ISA

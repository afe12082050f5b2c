// Products of fixed-point activations with packed weights of 2 to 8 bits.
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
// Where the parts of a weight are: quant_layout.h. Where scales of groups are whole numbers and blocks are short,
// a block is summed up in whole numbers before its scale multiplies it; else scales of blocks multiply those of
// groups as these end. Minimums of groups are
// multiplied by the sums of the row's inputs, in floats, once a panel's products are done. A table
// whose entries are no small whole numbers is two or three, of high bytes and of lower ones, one after the other.
//
// One row is multiplied by codes as they are unpacked. For more rows, codes that take a while to unpack are
// first written as bytes, a piece of the panel at a time; sums are the same whole numbers.

namespace headrace::HR_ISA {
namespace {
namespace quant {

constexpr int MAX_LIMB_ROWS = 6;          // rows times limbs of a register tile
constexpr int64_t FEW_TILES = 4;          // so many share pieces that stay in the first cache,
constexpr int64_t PIECE_BYTES = 16 << 10; // of this size; more share
constexpr int64_t MANY_PIECE_BYTES = 128 << 10;  // in the second cache
#if defined(HR_AMX)
constexpr int64_t TASK_LINES = 512;       // rows times limbs of a task: unpacking codes is the smaller part
#else
constexpr int64_t TASK_LINES = 192;
#endif
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
inline vi iadd(vi a, vi b) { return _mm512_add_epi32(a, b); }
inline vi ild_bytes(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
inline vi ild_signed(const uint8_t* p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)); }
inline vf to_floats(vi x) { return _mm512_cvtepi32_ps(x); }
using Raw = vi;
inline Raw raw_codes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline void put_raw(uint8_t* p, Raw x) { _mm512_storeu_si512(p, x); }
inline Raw raw_mask(uint8_t mask) { return _mm512_set1_epi8(int8_t(mask)); }
inline Raw kept(Raw x, Raw mask) { return _mm512_and_si512(x, mask); }
inline Raw either(Raw a, Raw b) { return _mm512_or_si512(a, b); }
inline Raw less(Raw a, Raw b) { return _mm512_sub_epi8(a, b); }
inline Raw rotated(Raw x, int n) { return _mm512_rorv_epi32(x, iset(n)); }
inline Raw lowered(Raw x, int n) { return _mm512_srlv_epi32(x, iset(n)); }
inline Raw raw_table(const uint8_t* p) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p)); }
inline Raw looked_up(Raw table, Raw codes) { return _mm512_shuffle_epi8(table, codes); }
#if defined(HR_DOT_BF16)  // every such machine multiplies bytes as well
constexpr int TILE_V = 4;
using Codes = vi;
using Bytes = vi;
inline Codes codes_of(Raw x) { return x; }
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
inline vi iadd(vi a, vi b) { return _mm256_add_epi32(a, b); }
inline vi ild_bytes(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
inline vi ild_signed(const uint8_t* p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
inline vf to_floats(vi x) { return _mm256_cvtepi32_ps(x); }
using Raw = vi;
inline Raw raw_codes(const uint8_t* p) { return _mm256_loadu_si256((const vi*)p); }
inline void put_raw(uint8_t* p, Raw x) { _mm256_storeu_si256((vi*)p, x); }
inline Raw raw_mask(uint8_t mask) { return _mm256_set1_epi8(int8_t(mask)); }
inline Raw kept(Raw x, Raw mask) { return _mm256_and_si256(x, mask); }
inline Raw either(Raw a, Raw b) { return _mm256_or_si256(a, b); }
inline Raw less(Raw a, Raw b) { return _mm256_sub_epi8(a, b); }
inline Raw lowered(Raw x, int n) { return _mm256_srl_epi32(x, _mm_cvtsi32_si128(n)); }
inline Raw rotated(Raw x, int n) { return either(lowered(x, n), _mm256_sll_epi32(x, _mm_cvtsi32_si128(32 - n))); }
inline Raw raw_table(const uint8_t* p) { return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p)); }
inline Raw looked_up(Raw table, Raw codes) { return _mm256_shuffle_epi8(table, codes); }
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
inline vi iadd(vi a, vi b) { return a + b; }
inline vi ild_bytes(const uint8_t* p) { return vi{p[0], p[1], p[2], p[3]}; }
inline vi ild_signed(const uint8_t* p) { return vi{int8_t(p[0]), int8_t(p[1]), int8_t(p[2]), int8_t(p[3])}; }
inline vf to_floats(vi x) { return __builtin_convertvector(x, vf); }
using Raw = vb;
typedef uint32_t vw __attribute__((vector_size(16)));
inline Raw raw_codes(const uint8_t* p) { Raw x; __builtin_memcpy(&x, p, 16); return x; }
inline void put_raw(uint8_t* p, Raw x) { __builtin_memcpy(p, &x, 16); }
inline Raw raw_mask(uint8_t mask) { return Raw{} + mask; }
inline Raw kept(Raw x, Raw mask) { return x & mask; }
inline Raw either(Raw a, Raw b) { return a | b; }
inline Raw less(Raw a, Raw b) { return a - b; }
inline Raw lowered(Raw x, int n) { return (Raw)((vw)x >> uint32_t(n)); }
inline Raw rotated(Raw x, int n) { return n == 0 ? x : (Raw)((vw)x >> uint32_t(n) | (vw)x << uint32_t(32 - n)); }
inline Raw raw_table(const uint8_t* p) { return raw_codes(p); }
inline Raw looked_up(Raw table, Raw codes) {
  Raw found;
  for (int i = 0; i < 16; ++i) found[i] = table[codes[i]];
  return found;
}
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

// What a tile fetches on its way, after every UNROLL steps: LINES lines of cache behind what it reads itself, or
// `lines` from `at` on.
struct Fetch {
  const uint8_t* at;
  int64_t lines;
  bool own;
  template <int LINES> HR_INLINE void step(const uint8_t* reads) {
    if (own) {
      fetch_next_chunk<LINES>(reads);
      return;
    }
    for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(at + 64 * i, 0, 2);
    at += 64 * lines;
  }
  void header(const uint8_t* reads, int64_t bytes) const {
    for (int64_t i = 0; own && i < bytes; i += 64) fetch_next_chunk<1>(reads + i);
  }
};

// --- activations ------------------------------------------------------------------------------

// The largest fixed-point magnitude: 127 in each limb; of three, what vround() rounds everywhere.
inline float largest_code(int limbs) { return limbs == 1 ? 127.f : limbs == 2 ? 32639.f : 4161407.f; }

// Rows in fixed point. Row i has `limbs` lines, the highest limb first, each padded with zeros to
// whole steps; line i * limbs + j has `groups` sums of its limbs.
struct FixedRows {
  int8_t* bytes;
  int64_t line;         // bytes from line to line
  float* scales;        // [rows]
  int32_t* sums;        // [rows * limbs][groups]; not set if every code's zero is 0
  float* totals;        // [rows][groups]: sums with limbs joined; null if there are no minimums
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

// Sums of a line's groups; behind the line are zeros up to a multiple of 64 bytes.
inline void sum_groups(const int8_t* line, const Layout& l, int32_t* sums) {
  const int64_t group_steps = l.group_steps(), inputs = 4 * group_steps, groups = l.groups();
  int64_t g = 0;
#if defined(HR_DOT_BF16)
  for (; (group_steps == 4 || group_steps == 8) && g < groups; g += 16 / group_steps) {
    vi x = _mm512_dpbusd_epi32(iset(0), _mm512_set1_epi8(1), _mm512_loadu_si512(line + g * inputs));
    x = iadd(x, _mm512_shuffle_epi32(x, _MM_PERM_BADC));
    x = iadd(x, _mm512_shuffle_epi32(x, _MM_PERM_CDAB));
    if (group_steps == 8) x = iadd(x, _mm512_shuffle_i64x2(x, x, 0xb1));
    const int32_t many = int32_t(min_of(16 / group_steps, groups - g));
    x = _mm512_maskz_compress_epi32(group_steps == 4 ? 0x1111 : 0x0101, x);
    _mm512_mask_storeu_epi32(sums + g, __mmask16((1 << many) - 1), x);
  }
#endif
  for (; g < groups; ++g) sums[g] = sum_of(line + g * inputs, min_of(inputs, l.K - g * inputs));
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
  int32_t* sums = f.sums + row * f.limbs * f.groups;
  for (int j = 0; j < f.limbs; ++j) {
    int8_t* line = lines + j * f.line;
    for (int64_t k = l.K; k < round_up(4 * l.steps(), 64); ++k) line[k] = 0;
    if (l.has_zeros || l.zero != 0 || f.totals != nullptr) sum_groups(line, l, sums + j * f.groups);
  }
  for (int64_t g = 0; f.totals != nullptr && g < f.groups; ++g) {
    float total = 0.0f;
    for (int j = 0; j < f.limbs; ++j) total = total * 256.0f + float(sums[j * f.groups + g]);
    f.totals[row * f.groups + g] = total;
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
  const bool totals = l.minimums != ABSENT;
  const int64_t bytes = rows * limbs * f.line + 64;  // whole lines of cache
  f.bytes = static_cast<int8_t*>(
      scratch(SCRATCH_A, size_t(bytes + max_of(16 * f.line, rows * (1 + (limbs + totals) * f.groups) * 4 + 64))));
  f.scales = reinterpret_cast<float*>(f.bytes + bytes);
  f.sums = reinterpret_cast<int32_t*>(f.scales + rows);
  f.totals = totals ? reinterpret_cast<float*>(f.sums + rows * limbs * f.groups) : nullptr;
  parallel_ranges(rows, rows * l.K / 2, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) fix_row(f, i, row(i), l);
  });
  return f;
}

// --- codes ------------------------------------------------------------------------------------

// Unpacks V vectors of a step, from the v0-th on. Codes stay shifted (Field). Where V is QV the compiler knows
// every mask.
template <int KIND, int V> struct Decoder {
  static constexpr int UNIT = unit_steps(KIND);
  Raw masks[V], plane_masks[V], table;
  Field fields[UNIT][V];

  Decoder(const Layout& l, int pass, int v0) {
    if (is_table(KIND)) table = raw_table(l.table[pass]);
    HR_UNROLL for (int v = 0; v < V; ++v) {
      HR_UNROLL for (int u = 0; u < UNIT; ++u) fields[u][v] = FIELDS<KIND>.at[u][v0 + v];
      masks[v] = raw_mask(fields[0][v].mask);
      plane_masks[v] = raw_mask(fields[0][v].plane_mask);
    }
  }

  // How far codes of vector v stay shifted.
  HR_INLINE int shift(int v) const {
    if (is_table(KIND)) return 0;
    return V == QV ? FIELDS<KIND>.at[0][v].shift : fields[0][v].shift;
  }

  template <int U> HR_INLINE void decode(const uint8_t* unit, Raw (&codes)[V]) const {
    codes[0] = vector<U, 0>(unit);
    if constexpr (V > 1) codes[1] = vector<U, 1>(unit);
    if constexpr (V > 2) codes[2] = vector<U, 2>(unit);
    if constexpr (V > 3) codes[3] = vector<U, 3>(unit);
  }

 private:
  template <int U, int I> HR_INLINE Raw vector(const uint8_t* unit) const {
    constexpr Field known = field(KIND, I, U);
    const Field f = V == QV ? known : fields[U][I];
    const Raw x = raw_codes(unit + (U * step_vectors(KIND) + f.vector) * VECTOR_BYTES);
    if constexpr (KIND == 8) return x;
    if constexpr (KIND == TABLE) return looked_up(table, kept(lowered(x, f.shift), raw_mask(15)));
    const Raw main = kept(x, V == QV ? raw_mask(known.mask) : masks[I]);
    if constexpr (known.plane_mask == 0) return main;
    const Raw plane = rotated(raw_codes(unit + plane_at(KIND)), f.rotate);
    const Raw code = either(main, kept(plane, V == QV ? raw_mask(known.plane_mask) : plane_masks[I]));
    if constexpr (KIND == TABLE_OF_8) return looked_up(table, kept(lowered(code, f.shift), raw_mask(7)));
    return code;
  }
};

// --- tiles ------------------------------------------------------------------------------------

// What a task adds up for its rows and one panel.
struct Sums {
  int32_t* whole;   // [rows * limbs][QPANEL]: of a group that a piece of K has cut
  int32_t* blocks;  // likewise, of a block's groups that are done, where a block's sum is whole
  float* real;      // [rows][QPANEL]: of the groups that are done, without the row's scale
  uint8_t* bytes;   // room for a piece of a panel, a byte a code
  float* scales;    // and for the scales of its groups, of four steps at least
};

// A panel, and what its layout says of it.
struct Panel {
  const Layout* layout;
  const uint8_t* front;
  const uint8_t* groups;
  int64_t steps, group_steps, group_bytes, header_bytes, block_groups, minimums_at, block_minimums_at;
  bool by_blocks;  // Layout::sums_blocks()
  const uint8_t* header(int64_t g) const { return groups + g * group_bytes; }
};

// The panels of a weight. Whatever takes a division is computed once: for a panel of one row it would take as long
// as a thirtieth of the product.
class Panels {
 public:
  Panels(const Layout& l, const void* packed)
      : layout_(l), first_(l.panel(packed, 0)), bytes_(l.panel_bytes()), groups_at_(l.groups_at()),
        alike_{nullptr, nullptr, nullptr, l.steps(), l.group_steps(), l.group_bytes(), l.header_bytes(), l.block_groups(),
               l.minimums_at(), l.block_minimums_at(), l.sums_blocks()} {}
  Panels(const Panels&) = delete;
  const uint8_t* front(int64_t p) const { return first_ + p * bytes_; }
  Panel operator[](int64_t p) const {
    Panel panel = alike_;
    panel.layout = &layout_;
    panel.front = front(p);
    panel.groups = panel.front + groups_at_;
    return panel;
  }

 private:
  const Layout layout_;
  const uint8_t* const first_;
  const int64_t bytes_, groups_at_;
  const Panel alike_;
};

// What a tile works on: lines of fixed-point rows times steps of a panel.
struct Work {
  const Panel* panel;
  int pass;                   // which of the tables
  const uint8_t* bytes;       // the steps' codes, unpacked; or null
  const int8_t* lines;
  int64_t line;
  const int32_t* line_sums;   // of the first line
  int64_t groups;
  Sums sums;                  // from the first line on
  Fetch fetch;
};

// Powers of two, by their exponents.
#if defined(HR_AVX512)
inline vf ld_powers(const uint8_t* p) { return _mm512_castsi512_ps(_mm512_slli_epi32(ild_bytes(p), 23)); }
#elif defined(HR_AVX2)
inline vf ld_powers(const uint8_t* p) { return _mm256_castsi256_ps(_mm256_slli_epi32(ild_bytes(p), 23)); }
#else
inline vf ld_powers(const uint8_t* p) { return (vf)(ild_bytes(p) << 23); }
#endif

// V vectors of stored scales or minimums, from the v0-th on; asks once how they are stored. A call for each vector
// took a twentieth of a product of one row.
template <int V> HR_INLINE inline void values_of(const uint8_t* at, int32_t stored, int v0, vf (&x)[V]) {
  switch (stored) {
    case F32: HR_UNROLL for (int v = 0; v < V; ++v) x[v] = ld(reinterpret_cast<const float*>(at) + (v0 + v) * W); return;
    case BF16: HR_UNROLL for (int v = 0; v < V; ++v) x[v] = ld(reinterpret_cast<const bf16*>(at) + (v0 + v) * W); return;
    case F16: HR_UNROLL for (int v = 0; v < V; ++v) x[v] = ld(reinterpret_cast<const f16*>(at) + (v0 + v) * W); return;
    case SIGNED_BYTE: HR_UNROLL for (int v = 0; v < V; ++v) x[v] = to_floats(ild_signed(at + (v0 + v) * W)); return;
    case EXPONENT_BYTE: HR_UNROLL for (int v = 0; v < V; ++v) x[v] = ld_powers(at + (v0 + v) * W); return;
    case E4M3_BYTE: HR_UNROLL for (int v = 0; v < V; ++v) x[v] = ld(reinterpret_cast<const e4m3*>(at) + (v0 + v) * W); return;
    default: HR_UNROLL for (int v = 0; v < V; ++v) x[v] = to_floats(ild_bytes(at + (v0 + v) * W)); return;
  }
}

// Accumulators stay in registers only if every loop over them is unrolled before the compiler
// decides where arrays live.

// A group begins: minus its zero points times the sum of a line's limbs.
inline vi first_sum(const Layout& l, const uint8_t* header, int v, int32_t weighted_sum) {
  if (!l.has_zeros) return iset(-l.zero * weighted_sum);
  return imul(ild_bytes(header + l.scale_bytes() + v * W), iset(-weighted_sum));
}

// One step of 4 inputs: R lines (rows times limbs) by V vectors of features.
template <int R, int V>
HR_INLINE inline void dot_step(const Raw (&raw)[V], const int8_t* bytes, int64_t line, vi (&sum)[R][V]) {
  Codes codes[V];
  HR_UNROLL for (int v = 0; v < V; ++v) codes[v] = codes_of(raw[v]);
  HR_UNROLL for (int r = 0; r < R; ++r) {
    int32_t four;
    __builtin_memcpy(&four, bytes + r * line, 4);
    const Bytes limbs = bytes_of(four);
    HR_UNROLL for (int v = 0; v < V; ++v) sum[r][v] = dot(sum[r][v], codes[v], limbs);
  }
}

// Steps [i, stop) of a group, whose first is in `unit`.
template <int KIND, int R, int V>
HR_INLINE inline void dot_steps(const Decoder<KIND, V>& decoder, const uint8_t* unit, int64_t i, int64_t stop,
                                const int8_t* bytes, int64_t line, Fetch& fetch, vi (&sum)[R][V]) {
  constexpr int UNIT = unit_steps(KIND);
  Raw codes[V];
  const auto first = [&]() HR_INLINE {
    decoder.template decode<0>(unit, codes);
    dot_step<R, V>(codes, bytes, line, sum);
    bytes += 4;
  };
  const auto whole = [&]() HR_INLINE {
    first();
    if constexpr (UNIT == 2) {
      decoder.template decode<1>(unit, codes);
      dot_step<R, V>(codes, bytes, line, sum);
      bytes += 4;
    }
    unit += unit_bytes(KIND);
  };
  for (; i + UNROLL <= stop; i += UNROLL) {
    fetch.template step<int((UNROLL / UNIT * unit_bytes(KIND) + 63) / 64)>(unit);
    HR_UNROLL for (int j = 0; j < UNROLL / UNIT; ++j) whole();
  }
  for (; i + UNIT <= stop; i += UNIT) whole();
  if (i < stop) first();
}

// A group ends: limbs are joined, scaled and added to the running sum, unless it begins here.
template <int LIMBS, int R, int V>
HR_INLINE inline void add_to_real(const vf (&scales)[V], bool begins, float* real, int v0, const vi (&sum)[R][V]) {
  HR_UNROLL for (int v = 0; v < V; ++v) {
    HR_UNROLL for (int r = 0; r < R; r += LIMBS) {
      vf y = to_floats(sum[r][v]);
      HR_UNROLL for (int j = 1; j < LIMBS; ++j) y = vfma(y, vset(256.0f), to_floats(sum[r + j][v]));
      float* to = real + r / LIMBS * QPANEL + (v0 + v) * W;
      st(to, begins ? vmul(y, scales[v]) : vfma(y, scales[v], ld(to)));
    }
  }
}

// sum = what a block's groups have so far plus the group's own times its whole scales.
template <int R, int V>
HR_INLINE inline void add_to_block(const uint8_t* scales, bool begins, const int32_t* blocks, vi (&sum)[R][V]) {
  HR_UNROLL for (int v = 0; v < V; ++v) {
    const vi scale = ild_signed(scales + v * W);
    HR_UNROLL for (int r = 0; r < R; ++r) {
      sum[r][v] = imul(sum[r][v], scale);
      if (!begins) sum[r][v] = iadd(sum[r][v], ild(blocks + r * QPANEL + v * W));
    }
  }
}

// Steps [begin, end) of V vectors. Codes are of KIND, or bytes (KIND 8).
template <int KIND, int LIMBS, int R, int V>
inline void tile_vectors(const Work& w, int64_t begin, int64_t end, int at, Fetch fetch) {
  constexpr int UNIT = unit_steps(KIND);
  const int v0 = V == QV ? 0 : at;
  const Panel& p = *w.panel;
  const Layout& l = *p.layout;
  const Decoder<KIND, V> decoder(l, w.pass, v0);
  vf outer[V];  // of the block
  float factor = l.factor;
  for (int i = w.pass + 1; i < l.tables; ++i) factor *= 256.0f;
  float of_shifted[V];
  HR_UNROLL for (int v = 0; v < V; ++v) of_shifted[v] = factor / float(1 << decoder.shift(v));
  HR_UNROLL for (int v = 0; v < V; ++v) outer[v] = vset(of_shifted[v]);
  int64_t g = begin / p.group_steps, b = g / p.block_groups, in_block = g % p.block_groups;
  const auto enter_block = [&]() HR_INLINE {
    if (l.block_scales == ABSENT) return;
    values_of<V>(p.front + b * QPANEL * bytes_of_stored(l.block_scales), l.block_scales, v0, outer);
    HR_UNROLL for (int v = 0; v < V; ++v) outer[v] = vmul(outer[v], vset(of_shifted[v]));
  };
  enter_block();
  for (int64_t s = begin, stop; s < end; s = stop, ++g) {
    const int64_t start = g * p.group_steps, finish = min_of(start + p.group_steps, p.steps);
    stop = min_of(finish, end);
    const uint8_t* header = p.header(g);
    const uint8_t* unit = KIND == 8 && w.bytes != nullptr ? w.bytes + (s - begin) * unit_bytes(8)
                                                          : header + p.header_bytes + (s - start) / UNIT * unit_bytes(KIND);
    fetch.header(header, p.header_bytes);
    vi sum[R][V];
    if (s == start) {
      HR_UNROLL for (int r = 0; r < R; ++r) {
        const int32_t line_sum = l.has_zeros || l.zero != 0 ? w.line_sums[r * w.groups + g] : 0;
        HR_UNROLL for (int v = 0; v < V; ++v) sum[r][v] = first_sum(l, header, v0 + v, line_sum << decoder.shift(v));
      }
    } else {
      HR_UNROLL for (int r = 0; r < R; ++r) {
        HR_UNROLL for (int v = 0; v < V; ++v) sum[r][v] = ild(w.sums.whole + r * QPANEL + (v0 + v) * W);
      }
    }
    dot_steps<KIND, R, V>(decoder, unit, s, stop, w.lines + 4 * s, w.line, fetch, sum);
    if (stop < finish) {
      HR_UNROLL for (int r = 0; r < R; ++r) {
        HR_UNROLL for (int v = 0; v < V; ++v) ist(w.sums.whole + r * QPANEL + (v0 + v) * W, sum[r][v]);
      }
      return;
    }
    if (p.by_blocks) {
      int32_t* const blocks = w.sums.blocks + v0 * W;
      add_to_block<R, V>(header + v0 * W, in_block == 0, blocks, sum);
      const bool whole = in_block + 1 == p.block_groups || finish == p.steps;
      if (whole) add_to_real<LIMBS, R, V>(outer, w.pass == 0 && b == 0, w.sums.real, v0, sum);
      else HR_UNROLL for (int r = 0; r < R; ++r) HR_UNROLL for (int v = 0; v < V; ++v) ist(blocks + r * QPANEL + v * W, sum[r][v]);
    } else {
      vf scales[V];
      values_of<V>(header, l.scales, v0, scales);
      HR_UNROLL for (int v = 0; v < V; ++v) scales[v] = vmul(scales[v], outer[v]);
      add_to_real<LIMBS, R, V>(scales, w.pass == 0 && g == 0, w.sums.real, v0, sum);
    }
    if (++in_block == p.block_groups) {
      in_block = 0, ++b;
      if (stop < end) enter_block();
    }
  }
}

template <int KIND, int LIMBS, int R>
inline void tile(const Work& w, int64_t begin, int64_t end) {
  tile_vectors<KIND, LIMBS, R, TILE_V>(w, begin, end, 0, w.fetch);
  for (int v0 = TILE_V; v0 < QV; v0 += TILE_V) {
    tile_vectors<KIND, LIMBS, R, TILE_V>(w, begin, end, v0, Fetch{nullptr, 0, false});
  }
}

template <int KIND, int LIMBS>
void tile_rows(const Work& w, int64_t rows, int64_t begin, int64_t end) {
  switch (rows) {
    case 1: return tile<KIND, LIMBS, LIMBS>(w, begin, end);
    case 2: return tile<KIND, LIMBS, 2 * LIMBS>(w, begin, end);
    case 3: if constexpr (LIMBS <= 2) return tile<KIND, LIMBS, 3 * LIMBS>(w, begin, end); break;
    case 4: if constexpr (LIMBS == 1) return tile<KIND, LIMBS, 4>(w, begin, end); break;
    case 5: if constexpr (LIMBS == 1) return tile<KIND, LIMBS, 5>(w, begin, end); break;
    case 6: if constexpr (LIMBS == 1) return tile<KIND, LIMBS, 6>(w, begin, end); break;
  }
}

template <int KIND, int LIMBS>
void tile_one(const Work& w, int64_t, int64_t begin, int64_t end) { tile<KIND, LIMBS, LIMBS>(w, begin, end); }

// A group's zero points, each as often as a vector has codes of its feature.
template <bool CENTRED> HR_INLINE inline void group_zeros(const Layout& l, const uint8_t* header, Raw (&zeros)[QV]) {
  if constexpr (CENTRED) {
    HR_UNROLL for (int v = 0; v < QV; ++v) {
      zeros[v] = l.has_zeros ? (Raw)imul(ild_bytes(header + l.scale_bytes() + v * W), iset(int32_t(EACH)))
                             : raw_mask(uint8_t(l.zero));
    }
  }
}

// enter(header) for each group that has steps in [begin, end), and what it returns for each of these: of the codes
// of the step's vectors.
template <int KIND, class F>
HR_INLINE inline void walk_codes(const Panel& p, int pass, int64_t begin, int64_t end, const F& enter) {
  constexpr int UNIT = unit_steps(KIND);
  const Decoder<KIND, QV> decoder(*p.layout, pass, 0);
  int64_t g = begin / p.group_steps;
  for (int64_t s = begin, stop; s < end; s = stop, ++g) {
    const int64_t start = g * p.group_steps;
    stop = min_of(start + p.group_steps, end);
    const uint8_t* codes = p.header(g) + p.header_bytes;
    const auto put = enter(p.header(g));
    for (int64_t i = s - start; i < stop - start; ++i) {
      Raw found[QV];
      const uint8_t* unit = codes + i / UNIT * unit_bytes(KIND);
      if (UNIT == 2 && i % 2) decoder.template decode<UNIT - 1>(unit, found);
      else decoder.template decode<0>(unit, found);
      HR_UNROLL for (int v = 0; v < QV; ++v) found[v] = lowered(found[v], decoder.shift(v));
      put(found);
    }
  }
}

// Codes of steps [begin, end), a byte each: a step's vectors one after the other. With CENTRED less their zero
// points, and each vector `apart` bytes behind the one before.
template <int KIND, bool CENTRED = false>
void expand(const Panel& p, int pass, int64_t begin, int64_t end, uint8_t* to, int64_t apart = VECTOR_BYTES) {
  walk_codes<KIND>(p, pass, begin, end, [&](const uint8_t* header) HR_INLINE {
    Raw zeros[QV];
    group_zeros<CENTRED>(*p.layout, header, zeros);
    return [&to, apart, zeros](const Raw (&codes)[QV]) HR_INLINE {
      HR_UNROLL for (int v = 0; v < QV; ++v) {
        if constexpr (CENTRED) put_raw(to + v * apart, less(codes[v], zeros[v]));
        else put_raw(to + v * VECTOR_BYTES, codes[v]);
      }
      to += CENTRED ? VECTOR_BYTES : QV * VECTOR_BYTES;
    };
  });
}

using Expand = void (*)(const Panel&, int pass, int64_t begin, int64_t end, uint8_t* to, int64_t apart);

// How a kind's codes are multiplied, for so many rows: as they are, or as bytes if there is `expand`.
struct Method {
  void (*tile)(const Work&, int64_t rows, int64_t begin, int64_t end);
  Expand expand;
};

template <int KIND, int LIMBS> inline Method method_of(int64_t rows) {
  if (rows == 1) return {&tile_one<KIND, LIMBS>, nullptr};
  return {&tile_rows<8, LIMBS>, &expand<KIND>};
}

template <int LIMBS> inline Method method_for(int32_t kind, int64_t rows) {
  switch (kind) {
    case 2: return method_of<2, LIMBS>(rows);
    case 3: return method_of<3, LIMBS>(rows);
    case 4: return {&tile_rows<4, LIMBS>, nullptr};
    case 5: return method_of<5, LIMBS>(rows);
    case 6: return method_of<6, LIMBS>(rows);
    case TABLE: return method_of<TABLE, LIMBS>(rows);
    case TABLE_OF_8: return method_of<TABLE_OF_8, LIMBS>(rows);
    default: return {&tile_rows<8, LIMBS>, nullptr};
  }
}

// sums.real [rows][QPANEL] = fixed-point rows [begin, begin + rows) times one panel; `after` is the one
// that will be read next, whose beginning is fetched on the way. A later pass adds to those before.
template <int LIMBS>
inline void panel_pass(const Panel& p, int pass, const uint8_t* after, const FixedRows& f, int64_t begin,
                       int64_t rows, Sums sums) {
  constexpr int64_t TILE_ROWS = MAX_LIMB_ROWS / LIMBS;
  const Layout& l = *p.layout;
  const Method method = method_for<LIMBS>(l.kind, rows);
  const int64_t step_bytes = l.step_bytes(), unpacked = method.expand ? unit_bytes(8) : step_bytes;
  const int64_t tiles = ceil_div(rows, TILE_ROWS), steps = p.steps;
  const int64_t lines = ceil_div(ceil_div(UNROLL * step_bytes, 64), tiles);  // of each tile, at each fetch
  const int64_t shared = (tiles <= FEW_TILES ? PIECE_BYTES : MANY_PIECE_BYTES) / unpacked;
  const bool alone = tiles == 1 && !method.expand;
  const int64_t piece = alone ? max_of(1, steps) : shared;
  for (int64_t s = 0; s < steps; s += piece) {
    const int64_t end = min_of(s + piece, steps), share = (end - s) / UNROLL * 64 * lines;
    const uint8_t* next = p.groups + (end / p.group_steps + 1) * p.header_bytes + end * step_bytes;
    if (end == steps) next = after;
    const uint8_t* const last = next + (end - s) * step_bytes;
    if (method.expand) method.expand(p, pass, s, end, sums.bytes, VECTOR_BYTES);
    for (int64_t i = 0; i < tiles; ++i, next += share) {
      const int64_t first = i * rows / tiles, many = (i + 1) * rows / tiles - first;
      const int64_t line = (begin + first) * LIMBS, at = first * LIMBS * QPANEL;
      const Work w{&p, pass, method.expand ? sums.bytes : nullptr, f.bytes + line * f.line, f.line,
                   f.sums + line * f.groups, f.groups,
                   {sums.whole + at, sums.blocks + at, sums.real + first * QPANEL, nullptr, nullptr},
                   {next, next < last ? lines : 0, alone}};
      method.tile(w, many, s, end);
    }
  }
}

}  // namespace quant
}  // namespace
}  // namespace headrace::HR_ISA

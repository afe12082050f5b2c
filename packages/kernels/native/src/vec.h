// Vectors of W floats for one instruction set, and conversions to and from memory types.
//
// Everything is in the namespace of the instruction set and has internal linkage. Functions use no
// standard headers with inline code, for the reason given in common.h.

#if defined(HR_AVX2) || defined(HR_AVX512)
#include <immintrin.h>
#endif

// For loops over a tile's accumulators: GCC 12 leaves those that it unrolls by itself on the stack,
// from where it fetches them and where it puts them at both ends of the loop over K.
#define HR_UNROLL _Pragma("GCC unroll 16")

// For what gets a tile's accumulators: they stay in registers where they are.
#define HR_INLINE __attribute__((always_inline))

namespace headrace::HR_ISA {
namespace {

// --- scalars ----------------------------------------------------------------------------------

inline float bits_float(uint32_t u) { float f; __builtin_memcpy(&f, &u, 4); return f; }
inline uint32_t float_bits(float f) { uint32_t u; __builtin_memcpy(&u, &f, 4); return u; }

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return bits_float(uint32_t(x.bits) << 16); }
inline float to_float(f16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000u) << 16, rest = x.bits & 0x7fffu;
  if (rest >= 0x7c00u) return bits_float(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  // Multiplying by 2^112 rebases the exponent and makes subnormals right.
  return bits_float(sign | float_bits(bits_float(rest << 13) * 0x1p112f));
}

inline void from_float(float x, float& out) { out = x; }
inline void from_float(float x, bf16& out) {
  uint32_t u = float_bits(x);
#if defined(HR_DOT_BF16)
  if ((u & 0x7f800000u) == 0) u &= 0x80000000u;  // as the machine's conversion below does
#endif
  out.bits = x != x ? uint16_t(u >> 16 | 0x40u) : uint16_t((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}
inline void from_float(float x, f16& out) {
  const uint32_t u = float_bits(x), sign = u >> 16 & 0x8000u;
  float a = bits_float(u & 0x7fffffffu);
  uint32_t rest;
  if (a != a) {
    rest = 0x7e00u;
  } else if (a >= 65520.0f) {
    rest = 0x7c00u;
  } else if (a < 0x1p-14f) {
    rest = float_bits(a + 0.5f) - 0x3f000000u;  // subnormal: the adder does the rounding
  } else {
    const uint32_t v = float_bits(a);
    rest = (v - 0x38000000u + 0xfffu + (v >> 13 & 1u)) >> 13;
  }
  out.bits = uint16_t(sign | rest);
}

// x rounded to T and back.
template <class T> inline float rounded(float x) {
  T t;
  from_float(x, t);
  return to_float(t);
}

inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// --- vectors ----------------------------------------------------------------------------------

#if defined(HR_AVX512)

constexpr int W = 16;
using vf = __m512;

inline vf vset(float x) { return _mm512_set1_ps(x); }
inline vf vadd(vf a, vf b) { return _mm512_add_ps(a, b); }
inline vf vsub(vf a, vf b) { return _mm512_sub_ps(a, b); }
inline vf vmul(vf a, vf b) { return _mm512_mul_ps(a, b); }
inline vf vdiv(vf a, vf b) { return _mm512_div_ps(a, b); }
inline vf vfma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
// Of two, the second if either is NaN.
inline vf vmin(vf a, vf b) { return _mm512_min_ps(a, b); }
inline vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
inline vf vround(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// a < b ? x : y, lane by lane.
inline vf vless(vf a, vf b, vf x, vf y) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}
inline vf vabs(vf a) { return _mm512_abs_ps(a); }
inline vf vcopysign(vf a, vf sign) {
  const __m512i m = _mm512_set1_epi32(int(0x80000000u));
  return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(m, _mm512_castps_si512(sign), _mm512_castps_si512(a), 0xca));
}
// 2^n for integral n in [-126, 127].
inline vf vpow2(vf n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}

inline vf ld(const float* p) { return _mm512_loadu_ps(p); }
inline vf ld(const bf16* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline vf ld(const f16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline vf ld(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
inline void st(float* p, vf x) { _mm512_storeu_ps(p, x); }
#if defined(HR_DOT_BF16)
// Subnormal numbers (below 1.2e-38) become 0, as they do in this level's products.
inline void st(bf16* p, vf x) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x)); }
#else
inline void st(bf16* p, vf x) {
  const __m512i u = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_epi32(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  r = _mm512_mask_or_epi32(r, nan, _mm512_srli_epi32(u, 16), _mm512_set1_epi32(0x40));
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(r));
}
#endif
inline void st(f16* p, vf x) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline __m128 fold(vf x) {
  const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  return _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
}

inline __m128 fold_max(vf x) {
  const __m256 h = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  return _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
}

#elif defined(HR_AVX2)

constexpr int W = 8;
using vf = __m256;

inline vf vset(float x) { return _mm256_set1_ps(x); }
inline vf vadd(vf a, vf b) { return _mm256_add_ps(a, b); }
inline vf vsub(vf a, vf b) { return _mm256_sub_ps(a, b); }
inline vf vmul(vf a, vf b) { return _mm256_mul_ps(a, b); }
inline vf vdiv(vf a, vf b) { return _mm256_div_ps(a, b); }
inline vf vfma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
inline vf vmin(vf a, vf b) { return _mm256_min_ps(a, b); }
inline vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
inline vf vround(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vf vless(vf a, vf b, vf x, vf y) { return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
inline vf vabs(vf a) { return _mm256_andnot_ps(vset(-0.0f), a); }
inline vf vcopysign(vf a, vf sign) {
  return _mm256_or_ps(_mm256_andnot_ps(vset(-0.0f), a), _mm256_and_ps(vset(-0.0f), sign));
}
inline vf vpow2(vf n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}

inline vf ld(const float* p) { return _mm256_loadu_ps(p); }
inline vf ld(const bf16* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline vf ld(const f16* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline vf ld(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
inline void st(float* p, vf x) { _mm256_storeu_ps(p, x); }
inline void st(bf16* p, vf x) {
  const __m256i u = _mm256_castps_si256(x);
  const __m256i high = _mm256_srli_epi32(u, 16);
  const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
  const __m256i r = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd), 16);
  const __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i s = _mm256_blendv_epi8(r, quiet, nan);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(s, s), 0x08);
  _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(packed));
}
inline void st(f16* p, vf x) { _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }
inline __m128 fold(vf x) { return _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)); }
inline __m128 fold_max(vf x) { return _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)); }

#else  // portable: GCC's and Clang's vectors of four, lowered to whatever the machine has

constexpr int W = 4;
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));

inline vf vset(float x) { return vf{x, x, x, x}; }
inline vf vadd(vf a, vf b) { return a + b; }
inline vf vsub(vf a, vf b) { return a - b; }
inline vf vmul(vf a, vf b) { return a * b; }
inline vf vdiv(vf a, vf b) { return a / b; }
inline vf vfma(vf a, vf b, vf c) { return a * b + c; }  // rounded twice
inline vf vmin(vf a, vf b) { return a < b ? a : b; }
inline vf vmax(vf a, vf b) { return a > b ? a : b; }
inline vf vround(vf a) { return (a + vset(12582912.0f)) - vset(12582912.0f); }  // |a| < 2^22
inline vf vless(vf a, vf b, vf x, vf y) { return a < b ? x : y; }
inline vf vabs(vf a) { return (vf)((vi)a & 0x7fffffff); }
inline vf vcopysign(vf a, vf sign) {
  return (vf)(((vi)a & 0x7fffffff) | ((vi)sign & vi{INT32_MIN, INT32_MIN, INT32_MIN, INT32_MIN}));
}
inline vf vpow2(vf n) { return (vf)((__builtin_convertvector(n, vi) + 127) << 23); }

template <class T> inline vf ld(const T* p) {
  return vf{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])};
}
inline vf ld(const float* p) { vf x; __builtin_memcpy(&x, p, 16); return x; }
inline vf ld(const int8_t* p) { return vf{float(p[0]), float(p[1]), float(p[2]), float(p[3])}; }
template <class T> inline void st(T* p, vf x) { for (int i = 0; i < W; ++i) from_float(x[i], p[i]); }
inline void st(float* p, vf x) { __builtin_memcpy(p, &x, 16); }

#endif

inline vf vzero() { return vset(0.0f); }

// The first n < W values, zeros after them.
template <class T> inline vf ldn(const T* p, int64_t n) {
  T part[W] = {};
  __builtin_memcpy(part, p, size_t(n) * sizeof(T));
  return ld(part);
}
template <class T> inline void stn(T* p, vf x, int64_t n) {
  T part[W];
  st(part, x);
  __builtin_memcpy(p, part, size_t(n) * sizeof(T));
}
// The next W values, or as many as are left.
template <class T> inline vf ld_upto(const T* p, int64_t left) { return left >= W ? ld(p) : ldn(p, left); }
template <class T> inline void st_upto(T* p, vf x, int64_t left) { left >= W ? st(p, x) : stn(p, x, left); }
// x rounded to T and back.
template <class T> inline vf vrounded(vf x) {
  T part[W];
  st(part, x);
  return ld(part);
}
template <> inline vf vrounded<float>(vf x) { return x; }

// Sums of the lanes of four vectors. The tree is the same for each of the four.
#if defined(HR_AVX512) || defined(HR_AVX2)
inline void hsum4(vf a, vf b, vf c, vf d, float* out) {
  __m128 x = fold(a), y = fold(b), z = fold(c), w = fold(d);
  _MM_TRANSPOSE4_PS(x, y, z, w);
  _mm_storeu_ps(out, _mm_add_ps(_mm_add_ps(x, z), _mm_add_ps(y, w)));
}
#else
inline void hsum4(vf a, vf b, vf c, vf d, float* out) {
  const vf all[4] = {a, b, c, d};
  for (int i = 0; i < 4; ++i) out[i] = (all[i][0] + all[i][2]) + (all[i][1] + all[i][3]);
}
#endif
// Of one vector, by the same tree.
#if defined(HR_AVX512) || defined(HR_AVX2)
inline float hsum(vf a) {
  const __m128 x = fold(a), y = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
#else
inline float hsum(vf a) { return (a[0] + a[2]) + (a[1] + a[3]); }
#endif
inline float hmax(vf a) {
  float lanes[W];
  st(lanes, a);
  float best = lanes[0];
  for (int i = 1; i < W; ++i) best = lanes[i] > best ? lanes[i] : best;
  return best;
}
// Largest lanes of four vectors.
#if defined(HR_AVX512) || defined(HR_AVX2)
inline void hmax4(vf a, vf b, vf c, vf d, float* out) {
  __m128 x = fold_max(a), y = fold_max(b), z = fold_max(c), w = fold_max(d);
  _MM_TRANSPOSE4_PS(x, y, z, w);
  _mm_storeu_ps(out, _mm_max_ps(_mm_max_ps(x, z), _mm_max_ps(y, w)));
}
#else
inline void hmax4(vf a, vf b, vf c, vf d, float* out) {
  const vf all[4] = {a, b, c, d};
  for (int i = 0; i < 4; ++i) out[i] = hmax(all[i]);
}
#endif


// --- functions --------------------------------------------------------------------------------

// e^x; coefficients of Cephes' expf. Below -86.5 it is 0, above 88.7 the largest finite value.
HR_INLINE inline vf vexp(vf x) {
  const vf low = vset(-86.5f);
  const vf y = vmax(low, vmin(vset(88.3762626f), x));
  const vf n = vround(vmul(y, vset(1.44269504088896341f)));
  vf r = vfma(n, vset(-0.693359375f), y);
  r = vfma(n, vset(2.12194440e-4f), r);
  vf p = vset(1.9875691500e-4f);
  p = vfma(p, r, vset(1.3981999507e-3f));
  p = vfma(p, r, vset(8.3334519073e-3f));
  p = vfma(p, r, vset(4.1665795894e-2f));
  p = vfma(p, r, vset(1.6666665459e-1f));
  p = vfma(p, r, vset(5.0000001201e-1f));
  const vf e = vadd(vfma(p, vmul(r, r), r), vset(1.0f));
  return vless(x, low, vzero(), vmul(e, vpow2(n)));
}

// tanh x; Cephes' tanhf near 0, (1 - e^-2|x|) / (1 + e^-2|x|) elsewhere: nothing overflows.
inline vf vtanh(vf x) {
  const vf a = vabs(x), z = vmul(x, x);
  vf p = vset(-5.70498872745e-3f);
  p = vfma(p, z, vset(2.06390887954e-2f));
  p = vfma(p, z, vset(-5.37397155531e-2f));
  p = vfma(p, z, vset(1.33314422036e-1f));
  p = vfma(p, z, vset(-3.33332819422e-1f));
  const vf near = vfma(vmul(p, z), x, x);
  const vf t = vexp(vmul(a, vset(-2.0f)));
  const vf far = vdiv(vsub(vset(1.0f), t), vadd(vset(1.0f), t));
  return vless(a, vset(0.625f), near, vcopysign(far, x));
}

// a / b for b that is neither 0 nor beyond 2^126 in magnitude, to an ulp or two: a third of a division's
// time where the machine guesses reciprocals well.
inline vf vquotient(vf a, vf b) {
#if defined(HR_AVX512)
  const vf guess = _mm512_rcp14_ps(b);
  return vmul(a, vmul(guess, _mm512_fnmadd_ps(b, guess, vset(2.0f))));
#else
  return vdiv(a, b);
#endif
}

// erf x; below 3.92 a quotient of polynomials in x^2 (minimax, error 3.5e-7), from there 1.
inline vf verf(vf x) {
  const vf z = vmul(x, x);
  vf p = vset(2.03467084e-06f);
  p = vfma(p, z, vset(2.87459698e-04f));
  p = vfma(p, z, vset(3.86790931e-03f));
  p = vfma(p, z, vset(5.30591905e-02f));
  p = vfma(p, z, vset(1.92755759e-01f));
  p = vfma(p, z, vset(1.12837899e+00f));
  vf q = vset(3.80689307e-05f);
  q = vfma(q, z, vset(1.18799368e-03f));
  q = vfma(q, z, vset(1.51714804e-02f));
  q = vfma(q, z, vset(1.15081012e-01f));
  q = vfma(q, z, vset(5.04157007e-01f));
  q = vfma(q, z, vset(1.0f));
  return vless(vabs(x), vset(3.92f), vquotient(vmul(p, x), q), vcopysign(vset(1.0f), x));
}

// --- loops ------------------------------------------------------------------------------------

// f(i) for all i < count; on all threads if `work` (in units of about a nanosecond) is worth it.
template <class F> inline void parallel(int64_t count, int64_t work, const F& f) {
  if (work < 20000 || count < 2) {
    for (int64_t i = 0; i < count; ++i) f(i);
    return;
  }
  run_parallel(count, [](void* context, int64_t i) { (*static_cast<const F*>(context))(i); },
               const_cast<F*>(&f));
}

// Work of a piece at least. Threads take pieces one at a time, and wait for each other meanwhile: with many of
// them smaller pieces cost more than they are.
constexpr int64_t LEAST_PIECE = 2500;

// f(begin, end) over contiguous pieces of [0, count).
template <class F> inline void parallel_ranges(int64_t count, int64_t work, const F& f) {
  const int64_t most = min_of(4 * int64_t(pool_size()), work / LEAST_PIECE);
  const int64_t pieces = work < 20000 ? 1 : min_of(count, most);
  if (pieces <= 1) {
    if (count > 0) f(0, count);
    return;
  }
  parallel(pieces, work, [&](int64_t i) { f(i * count / pieces, (i + 1) * count / pieces); });
}

// Calls f with a null pointer of the C++ type of a dtype code.
template <class F> inline void with_dtype(int32_t dtype, const F& f) {
  switch (dtype) {
    case F32: f((float*)nullptr); break;
    case BF16: f((bf16*)nullptr); break;
    case F16: f((f16*)nullptr); break;
  }
}

template <class P> struct pointee;
template <class T> struct pointee<T*> { using type = T; };

// --- one byte a value -------------------------------------------------------------------------

// OCP 8-bit floats (OFP8): 4 bits of exponent, 3 of mantissa, no infinity; and 5 and 2, as half
// precision's upper byte. From float they round to nearest even and saturate; NaN stays NaN.
struct e4m3 { uint8_t bits; };
struct e5m2 { uint8_t bits; };

// Branch-free, so that loops become vectors. `unit` is what is added to a subnormal to bring its
// last bit to the last bit of a float.
template <int MANTISSA, int BIAS>
inline uint32_t to_float8(float x, float largest, float smallest, float unit, uint32_t nan) {
  const uint32_t u = float_bits(x), sign = u >> 24 & 0x80u;
  float a = bits_float(u & 0x7fffffffu);
  const bool is_nan = a != a;
  a = a > largest ? largest : a;
  constexpr int DROP = 23 - MANTISSA;
  const uint32_t v = float_bits(a);
  const uint32_t normal = (v + ((1u << (DROP - 1)) - 1) + (v >> DROP & 1u)) >> DROP;
  const uint32_t tiny = float_bits(a + unit) - float_bits(unit);
  const uint32_t rest = a < smallest ? tiny : normal - (uint32_t(127 - BIAS) << MANTISSA);
  return sign | (is_nan ? nan : rest);
}
inline void from_float(float x, e4m3& out) {
  out.bits = uint8_t(to_float8<3, 7>(x, 448.0f, 0x1p-6f, 0x1p14f, 0x7f));
}
inline void from_float(float x, e5m2& out) {
  out.bits = uint8_t(to_float8<2, 15>(x, 57344.0f, 0x1p-14f, 0x1p7f, 0x7f));
}
// Saturates at 127 on both sides; NaN becomes 0.
inline void from_float(float x, int8_t& out) {
  const float a = x > 127.0f ? 127.0f : x < -127.0f ? -127.0f : x;
  const float rounded = (a + 12582912.0f) - 12582912.0f;
  out = int8_t(x == x ? int32_t(rounded) : 0);
}

inline float to_float(e5m2 x) { return to_float(f16{uint16_t(x.bits << 8)}); }
inline float to_float(e4m3 x) {  // as a half, its exponent is 8 too low
  const uint16_t half = uint16_t((x.bits & 0x80u) << 8 | (x.bits & 0x7fu) << 7);
  return (x.bits & 0x7fu) == 0x7fu ? __builtin_nanf("") : to_float(f16{half}) * 256.0f;
}
inline float to_float(int8_t x) { return float(x); }

// Two whole numbers of four bits, two's complement; the first is in the low half.
struct nibbles { uint8_t bits; };
inline float low_of(nibbles x) { return float(int8_t(uint8_t(x.bits << 4)) >> 4); }
inline float high_of(nibbles x) { return float(int8_t(x.bits) >> 4); }

// The next W numbers.
inline vf ld_numbers(const nibbles* p) {
#if defined(HR_AVX512) || defined(HR_AVX2)
  int64_t raw = 0;
  __builtin_memcpy(&raw, p, W / 2);
  const __m128i both = _mm_cvtsi64_si128(raw), low = _mm_and_si128(both, _mm_set1_epi8(15));
  const __m128i high = _mm_and_si128(_mm_srli_epi16(both, 4), _mm_set1_epi8(15)), eight = _mm_set1_epi8(8);
  const __m128i bytes = _mm_sub_epi8(_mm_xor_si128(_mm_unpacklo_epi8(low, high), eight), eight);
#if defined(HR_AVX512)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
#else
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
#endif
#else
  return vf{low_of(p[0]), high_of(p[0]), low_of(p[1]), high_of(p[1])};
#endif
}
// The next W numbers, or as many as are left, an even number.
inline vf ld_upto(const nibbles* p, int64_t left) {
  if (left >= W) return ld_numbers(p);
  nibbles part[W / 2] = {};
  __builtin_memcpy(part, p, size_t(left / 2));
  return ld_numbers(part);
}

// Where number d of a line is; d is even where two are in a byte.
template <class T> inline const T* number_at(const T* line, int64_t d) { return line + d; }
inline const nibbles* number_at(const nibbles* line, int64_t d) { return line + d / 2; }

#if defined(HR_AVX512) || defined(HR_AVX2)
inline vf not_480(vf x) { return vless(vset(479.0f), vabs(x), vset(__builtin_nanf("")), x); }
#endif
#if defined(HR_AVX512)
inline vf ld(const e5m2* p) {
  const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p));
  return _mm512_cvtph_ps(_mm256_slli_epi16(wide, 8));
}
inline vf ld(const e4m3* p) {
  const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), 7);
  const __m256i half = _mm256_and_si256(wide, _mm256_set1_epi16(int16_t(0xbf80)));
  return not_480(vmul(_mm512_cvtph_ps(half), vset(256.0f)));
}
#elif defined(HR_AVX2)
inline vf ld(const e5m2* p) {
  const __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)p));
  return _mm256_cvtph_ps(_mm_slli_epi16(wide, 8));
}
inline vf ld(const e4m3* p) {
  const __m128i wide = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)p)), 7);
  const __m128i half = _mm_and_si128(wide, _mm_set1_epi16(int16_t(0xbf80)));
  return not_480(vmul(_mm256_cvtph_ps(half), vset(256.0f)));
}
#endif

}  // namespace
}  // namespace headrace::HR_ISA

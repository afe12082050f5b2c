// From real weights to the numbers of GGUF's k-quants, while a checkpoint is loaded.
//
// The definition is headrace_reference/round_k_quant.py, and results are bit-equal to it: every
// operation below is one float32 operation there, sums are in its order. Scales are searched for W groups
// side by side, one a lane.

namespace headrace::HR_ISA {
namespace {
namespace k_quant {

using quant::split;

constexpr int64_t BLOCK = 256;  // inputs
constexpr int CANDIDATES = 4;
constexpr double SHRINKS[CANDIDATES] = {1.0, 0.92, 0.84, 0.76};
constexpr float TINY = 1e-30f;

struct Fitted { vf scale, minimum; };

inline vf inverse(vf scale) { return vless(vabs(scale), vset(TINY), vzero(), vdiv(vset(1.0f), scale)); }
inline float inverse(float scale) { return __builtin_fabsf(scale) < TINY ? 0.0f : 1.0f / scale; }

inline vf clamped(vf x, float low, float high) { return vmax(vmin(x, vset(high)), vset(low)); }

// x to the nearest whole number within [low, high], far below 2^22.
inline float whole(float x, float low, float high) {
  x = x > high ? high : x < low ? low : x;
  return (x + 12582912.0f) - 12582912.0f;
}

// Sum of G vectors by halves; overwrites them.
template <int G> HR_INLINE inline vf total(vf (&x)[G]) {
  for (int half = G / 2; half > 0; half /= 2) {
    for (int k = 0; k < half; ++k) x[k] = vadd(x[k], x[k + half]);
  }
  return x[0];
}

// Groups of G numbers that lie one after the other -> x[k], the k-th of each; missing groups are zeros.
template <int G> inline void side_by_side(const float* numbers, int64_t groups, vf (&x)[G]) {
  float lanes[G * W];
  for (int i = 0; i < W; ++i) {
    for (int k = 0; k < G; ++k) lanes[k * W + i] = i < groups ? numbers[i * G + k] : 0.0f;
  }
  for (int k = 0; k < G; ++k) x[k] = ld(lanes + k * W);
}

// The line of least squares through codes and numbers, whose minimum is not negative, and its squared error
// but for the sum of the numbers' squares.
inline vf fitted(vf sums, vf squares, vf products, vf all, float count, Fitted& line) {
  const vf n = vset(count), zero = vzero(), two = vset(2.0f);
  const vf spread = vsub(vmul(squares, n), vmul(sums, sums));
  const vf slope = vdiv(vsub(vmul(products, n), vmul(sums, all)), vmax(spread, vset(TINY)));
  const vf scale = vless(zero, spread, slope, zero);
  const vf minimum = vdiv(vsub(vmul(scale, sums), all), n);
  const vf alone = vmax(vdiv(products, vmax(squares, vset(TINY))), zero);
  line.scale = vless(zero, scale, vless(minimum, zero, alone, scale), alone);
  line.minimum = vmax(minimum, zero);
  const vf inner = vmul(vadd(products, vmul(line.minimum, sums)), two);
  const vf error = vmul(line.scale, vsub(vmul(line.scale, squares), inner));
  return vadd(error, vmul(line.minimum, vadd(vmul(line.minimum, n), vmul(all, two))));
}

// Codes within [0, high].
template <int G> inline Fitted asymmetric(const vf (&x)[G], int high) {
  vf least = vzero(), most = vzero(), codes[G], squares[G], products[G];
  for (int k = 0; k < G; ++k) {
    least = vmin(least, x[k]);
    most = vmax(most, x[k]);
    codes[k] = x[k];
  }
  const vf span = vsub(most, least), all = total(codes);
  Fitted best{vzero(), vzero()}, line;
  vf best_error = vset(__builtin_inff());
  for (const double shrink : SHRINKS) {
    const vf finer = inverse(vmul(span, vset(float(shrink / high))));
    const vf lowest = vmul(vmul(least, vset(float(shrink))), finer);
    for (int k = 0; k < G; ++k) {
      codes[k] = vround(clamped(vsub(vmul(x[k], finer), lowest), 0.0f, float(high)));
      squares[k] = vmul(codes[k], codes[k]);
      products[k] = vmul(codes[k], x[k]);
    }
    const vf error = fitted(total(codes), total(squares), total(products), all, float(G), line);
    best.scale = vless(error, best_error, line.scale, best.scale);
    best.minimum = vless(error, best_error, line.minimum, best.minimum);
    best_error = vless(error, best_error, error, best_error);
  }
  return best;
}

// Codes within [low, -low - 1], the number of largest magnitude takes `low`; larger numbers weigh more.
template <int G> inline vf symmetric(const vf (&x)[G], float low) {
  vf least = vzero(), most = vzero(), weights[G], norms[G], products[G];
  for (int k = 0; k < G; ++k) {
    least = vmin(least, x[k]);
    most = vmax(most, x[k]);
    weights[k] = norms[k] = vmul(x[k], x[k]);
  }
  const vf mean = vdiv(total(norms), vset(float(G)));
  const vf widest = vdiv(vless(vsub(vzero(), least), most, most, least), vset(low));
  const vf finer = inverse(widest);
  for (int k = 0; k < G; ++k) {
    const vf code = vround(clamped(vmul(x[k], finer), low, -low - 1.0f));
    const vf weighted = vmul(code, vadd(weights[k], mean));
    norms[k] = vmul(code, weighted);
    products[k] = vmul(weighted, x[k]);
  }
  return vdiv(total(products), vmax(total(norms), vset(TINY)));
}

// codes[k] = x[k] * finer + offset
inline void put_codes(const float* x, float finer, float offset, float low, float high, int64_t n, int8_t* codes) {
  for (int64_t k = 0; k < n; k += W) {
    split(clamped(vadd(vmul(ld(x + k), vset(finer)), vset(offset)), low, high), 1, codes + k, 0, W);
  }
}

// Where the numbers of a row go.
struct Row { int8_t* codes; float *scales, *minimums, *block_scales, *block_minimums; };

// Whole multiples within [0, 63] of a float16, which is returned, in place of eight numbers.
inline float six_bits(float* numbers) {
  float largest = 0.0f;
  for (int g = 0; g < 8; ++g) largest = numbers[g] > largest ? numbers[g] : largest;
  const float step = rounded<f16>(largest / 63.0f), finer = inverse(step);
  for (int g = 0; g < 8; ++g) numbers[g] = whole(numbers[g] * finer, 0.0f, 63.0f);
  return step;
}

// Q4_K, Q5_K: eight groups of 32, scales and minimums of 6 bits. False: a scale is infinite.
inline bool round_block(const float* x, int bits, const Row& to) {
  const float step = six_bits(to.scales), least = six_bits(to.minimums), middle = float(1 << (bits - 1));
  for (int g = 0; g < 8; ++g) {
    const float finer = inverse(step * to.scales[g]), offset = least * to.minimums[g] * finer - middle;
    put_codes(x + 32 * g, finer, offset, -middle, middle - 1.0f, 32, to.codes + 32 * g);
  }
  *to.block_scales = step;
  *to.block_minimums = least;
  return step - step == 0.0f && least - least == 0.0f;
}

// Q6_K: sixteen groups of 16, scales of 8 bits.
inline bool round_block_of_6(const float* x, const Row& to) {
  float most = 0.0f, least = 0.0f;
  for (int g = 0; g < 16; ++g) {
    most = to.scales[g] > most ? to.scales[g] : most;
    least = to.scales[g] < least ? to.scales[g] : least;
  }
  const float step = rounded<f16>((most > -least ? most : least) / -128.0f), finer = inverse(step);
  for (int g = 0; g < 16; ++g) {
    to.scales[g] = whole(to.scales[g] * finer, -128.0f, 127.0f);
    put_codes(x + 16 * g, inverse(step * to.scales[g]), 0.0f, -32.0f, 31.0f, 16, to.codes + 16 * g);
  }
  *to.block_scales = step;
  return step - step == 0.0f;
}

// One row, x [K] in float32.
inline bool round_row(const float* x, int64_t K, int bits, const Row& to) {
  const int size = bits == 6 ? 16 : 32;
  const int64_t groups = K / size;
  for (int64_t g = 0; g < groups; g += W) {
    if (bits == 6) {
      vf own[16];
      side_by_side(x + g * size, groups - g, own);
      st_upto(to.scales + g, symmetric(own, -32.0f), groups - g);
      continue;
    }
    vf own[32];
    side_by_side(x + g * size, groups - g, own);
    const Fitted line = asymmetric(own, (1 << bits) - 1);
    st_upto(to.scales + g, line.scale, groups - g);
    st_upto(to.minimums + g, line.minimum, groups - g);
  }
  bool finite = true;
  for (int64_t b = 0; b < K / BLOCK; ++b) {
    const int64_t g = b * BLOCK / size;
    const Row block{to.codes + b * BLOCK, to.scales + g, to.minimums + g, to.block_scales + b, to.block_minimums + b};
    finite &= bits == 6 ? round_block_of_6(x + b * BLOCK, block) : round_block(x + b * BLOCK, bits, block);
  }
  return finite;
}

}  // namespace k_quant

// weight [N, K] of a floating dtype, rows `stride` apart, K a multiple of 256, in 4, 5 or 6 bits -> values
// [N, K]; scales and minimums [N, groups], those of blocks [N, K / 256]; 6 bits have no minimums. BAD_VALUES: it
// holds NaN, infinity or what float16 scales cannot.
int32_t round_k_quant(int8_t* values, float* scales, float* minimums, float* block_scales, float* block_minimums,
                      const void* weight, int64_t stride, int64_t N, int64_t K, int32_t bits, int32_t dtype) {
  const int64_t groups = K / (bits == 6 ? 16 : 32), blocks = K / k_quant::BLOCK;
  int32_t status = OK;
  with_dtype(dtype, [&](auto* t) {
    using T = typename pointee<decltype(t)>::type;
    parallel_ranges(N, N * K, [&](int64_t begin, int64_t end) {
      float* wide = static_cast<float*>(scratch(SCRATCH_TASK, size_t(K) * sizeof(float)));
      bool finite = true;
      for (int64_t n = begin; n < end; ++n) {
        const T* row = static_cast<const T*>(weight) + n * stride;
        vf poison = vzero();
        for (int64_t k = 0; k < K; k += W) {
          const vf x = ld(row + k);
          poison = vfma(x, vzero(), poison);
          st(wide + k, x);
        }
        const k_quant::Row to{values + n * K, scales + n * groups, minimums + n * groups, block_scales + n * blocks,
                              block_minimums + n * blocks};
        finite &= k_quant::round_row(wide, K, bits, to) && hsum(poison) == 0.0f;
      }
      if (!finite) __atomic_store_n(&status, BAD_VALUES, __ATOMIC_RELAXED);
    });
  });
  return status;
}

}  // namespace
}  // namespace headrace::HR_ISA

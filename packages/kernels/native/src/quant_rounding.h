// From real weights to packed integers, while a checkpoint is loaded.
//
// The definition is headrace_reference/rounding.py, and results are bit-equal to it: every
// operation below is one float32 operation there, sums are in its order.

namespace headrace::HR_ISA {
namespace {
namespace quant {

constexpr int64_t LANES = 16;  // of the definition's sums
constexpr float SHRINKS[] = {1.0f, 0.95f, 0.9f, 0.85f, 0.8f, 0.75f};

// codes[k] = x[k] / scale to the nearest integer within [low, high]
inline void round_values(const float* x, float scale, float low, float high, int64_t n, int8_t* codes) {
  for (int64_t k = 0; k < n; k += W) {
    const vf q = vdiv(ld_upto(x + k, n - k), vset(scale));
    split(vmax(vmin(q, vset(high)), vset(low)), 1, codes + k, 0, n - k);
  }
}

// x [K] -> codes and the scale, which is not finite if x holds NaN or infinity.
inline float round_row(const float* x, int64_t K, int8_t* codes) {
  const Extent extent = extent_of(x, K);
  const float scale = extent.largest == 0.0f ? 1.0f : extent.largest / 127.0f;
  round_values(x, scale, -127.0f, 127.0f, K, codes);
  return scale + extent.poison;
}

// Sum of (code * scale - x)^2 over x [n], n a multiple of LANES.
inline float squared_error(const float* x, float scale, float low, float high, int64_t n) {
  constexpr int PARTS = int(LANES) / W;
  vf sums[PARTS];
  for (int p = 0; p < PARTS; ++p) sums[p] = vzero();
  for (int64_t k = 0; k < n; k += LANES) {
    for (int p = 0; p < PARTS; ++p) {
      const vf v = ld(x + k + p * W);
      const vf code = vround(vmax(vmin(vdiv(v, vset(scale)), vset(high)), vset(low)));
      const vf error = vsub(vmul(code, vset(scale)), v);
      sums[p] = vadd(sums[p], vmul(error, error));
    }
  }
  float lanes[LANES];
  for (int p = 0; p < PARTS; ++p) st(lanes + p * W, sums[p]);
  for (int64_t half = LANES / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

// One group: x [n], followed by zeros up to a multiple of LANES.
inline float round_group(const float* x, int64_t n, int bits, int8_t* codes) {
  const float low = float(-(1 << (bits - 1))), high = -low - 1.0f;
  vf most = vzero(), least = vzero(), poison = vzero();
  for (int64_t k = 0; k < n; k += W) {
    const vf v = ld(x + k);
    most = vmax(most, v);
    least = vmax(least, vsub(vzero(), v));
    poison = vfma(v, vzero(), poison);
  }
  const float up = hmax(most), down = hmax(least), widest = (up > down ? up : -down) / low;
  float best = __builtin_inff(), best_scale = 1.0f;
  for (const float shrink : SHRINKS) {
    float scale = rounded<bf16>(widest * shrink);
    scale = scale == 0.0f ? 1.0f : scale;
    const float error = squared_error(x, scale, low, high, round_up(n, LANES));
    if (error < best) {
      best = error;
      best_scale = scale;
    }
  }
  round_values(x, best_scale, low, high, n, codes);
  // Infinities leave the largest magnitude infinite, NaN leaves it as it was.
  return best_scale + (widest - widest) + hsum(poison);
}

template <class T>
inline int32_t round_panel(const Layout& l, uint8_t* to, const T* weight, int64_t stride, int64_t features) {
  const int64_t groups = l.groups(), inputs = min_of(4 * l.group_steps(), l.K), line = round_up(l.K, 64);
  const int64_t room = round_up(inputs, LANES) + LANES;
  float* wide = static_cast<float*>(
      scratch(SCRATCH_TASK, size_t(room + QPANEL * groups) * sizeof(float) + size_t(QPANEL * line)));
  float* scales = wide + room;
  int8_t* codes = reinterpret_cast<int8_t*>(scales + QPANEL * groups);
  bool finite = true;
  for (int64_t n = 0; n < features; ++n) {
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t at = g * inputs, many = min_of(inputs, l.K - at);
      for (int64_t k = 0; k < many; k += W) st(wide + k, ld_upto(weight + n * stride + at + k, many - k));
      for (int64_t k = many; k < round_up(many, LANES); ++k) wide[k] = 0.0f;
      int8_t* to_codes = codes + n * line + at;
      const float scale = l.kind == 8 ? round_row(wide, many, to_codes) : round_group(wide, many, l.kind, to_codes);
      finite = finite && scale - scale == 0.0f;
      scales[n * groups + g] = scale;
    }
  }
  pack_panel(l, to, Parts{codes, line, scales, nullptr, nullptr, nullptr, nullptr}, features);
  return finite ? OK : BAD_VALUES;
}

}  // namespace quant

// weight [N, K] of a floating dtype, rows `stride` apart: 8 bits with a scale per row (`group` at
// least K), or 4 bits with one per group. BAD_VALUES: it holds NaN or infinity.
int32_t quant_linear_round(void* out, const void* layout, const void* weight, int64_t stride, int32_t dtype) {
  const quant::Layout l = quant::layout_of(layout);
  put_layout(out, layout);
  int32_t status = OK;
  with_dtype(dtype, [&](auto* t) {
    using T = typename pointee<decltype(t)>::type;
    parallel(l.panels(), l.N * l.K, [&](int64_t p) {
      const int64_t at = p * quant::QPANEL;
      const int32_t found = quant::round_panel(l, const_cast<uint8_t*>(l.panel(out, p)),
                                               static_cast<const T*>(weight) + at * stride, stride,
                                               min_of(quant::QPANEL, l.N - at));
      if (found != OK) __atomic_store_n(&status, found, __ATOMIC_RELAXED);
    });
  });
  return status;
}

}  // namespace
}  // namespace headrace::HR_ISA

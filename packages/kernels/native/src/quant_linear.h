// Linear layers over packed weights: what surrounds the products of quant_tiles.h and float8_tiles.h.

namespace headrace::HR_ISA {
namespace {
namespace quant {

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
  const ShorterRuns shorter{panels, pool_size()};
  const int64_t runs = pieces == 1 ? shorter.count() : min_of(panels, max_of(1, ceil_div(RUNS * pool_size(), pieces)));
  const auto first = [&](int64_t run) { return pieces == 1 ? shorter.begin(run) : run * panels / runs; };
  parallel(runs * pieces, rows * limbs * l.N * l.K / 64, [&](int64_t task) {
    const int64_t piece = task / runs, run = task % runs;
    const int64_t begin = piece * rows / pieces, many = (piece + 1) * rows / pieces - begin;
    const Sums sums = task_sums(SUMS);
    for (int64_t p = first(run), end = first(run + 1); p < end; ++p) f(begin, many, p, sums);
  });
}

// f(activations), in the form that the weight wants: fixed point, or floats.
template <class T, class Row, class F>
inline void with_activations(const Row& row, int64_t rows, const Layout& l, int limbs, const F& f) {
  if (!is_float(l.kind)) return f(fix_rows(row, rows, l, limbs));
#if defined(HR_DOT_BF16)
  if (limbs == 1 || __is_same(T, bf16)) return f(float_rows<bf16>(row, rows, l, limbs == 1));
#endif
  f(float_rows<float>(row, rows, l, limbs == 1));
}

template <class T>
inline void run(T* out, const T* x, const void* packed, const T* bias, int64_t rows, int64_t stride,
                const Layout& l, int limbs) {
  if (rows == 0) return;
  const auto row = [=](int64_t i) { return x + i * stride; };
  const Panels panels(l, packed);
  with_activations<T>(row, rows, l, limbs, [&](const auto& f) {
    over_panels<1>(l, rows, l.panels(), limbs, [&](int64_t begin, int64_t many, int64_t p, Sums sums) {
      panel_rows_of(panels[p], panels.front(p + 1), f, begin, many, sums);
      const int64_t at = p * QPANEL, features = min_of(QPANEL, l.N - at);
      for (int64_t i = 0; i < many; ++i) {
        finish_row(out + (begin + i) * l.N + at, sums.real + i * QPANEL, f.scales[begin + i],
                   bias == nullptr ? nullptr : bias + at, features);
      }
    });
  });
}

// out [rows, N / 2] = act(gates) * ups, the first half of the outputs being the gates; the bits are
// those of run() and then activation_and_mul (see run_linear_gated). N / 2 is a multiple of QPANEL.
template <class T>
inline void run_gated(T* out, const T* x, const void* packed, const T* bias, int64_t rows, int64_t stride,
                      const Layout& l, int limbs, int32_t kind) {
  if (rows == 0) return;
  const int64_t I = l.N / 2, half = I / QPANEL;
  const Panels panels(l, packed);
  const auto row = [=](int64_t i) { return x + i * stride; };
  with_activations<T>(row, rows, l, limbs, [&](const auto& f) {
    over_panels<2>(l, rows, half, limbs, [&](int64_t begin, int64_t many, int64_t p, Sums gates) {
      Sums ups = gates;
      ups.real += many * QPANEL;
      panel_rows_of(panels[p], panels.front(half + p), f, begin, many, gates);
      panel_rows_of(panels[half + p], panels.front(p + 1), f, begin, many, ups);
      const int64_t at = p * QPANEL;
      for (int64_t i = 0; i < many; ++i) {
        T rounded_gates[QPANEL], rounded_ups[QPANEL];
        const float scale = f.scales[begin + i];
        finish_row(rounded_gates, gates.real + i * QPANEL, scale, bias == nullptr ? nullptr : bias + at, QPANEL);
        finish_row(rounded_ups, ups.real + i * QPANEL, scale, bias == nullptr ? nullptr : bias + I + at, QPANEL);
        act_mul_row(kind, out + (begin + i) * I + at, rounded_gates, rounded_ups, QPANEL);
      }
    });
  });
}

}  // namespace quant

// `layout`: a Layout.
int64_t quant_linear_packed_bytes(const void* layout) {
  const quant::Layout l = quant::layout_of(layout);
  return quant::HEADER + l.panels() * l.panel_bytes();
}

inline void put_layout(void* out, const void* layout) {
  __builtin_memset(out, 0, size_t(quant::HEADER));
  __builtin_memcpy(out, layout, sizeof(quant::Layout));
}

// values [N, K] int8 (rows `stride` apart), scales [N, groups] float32, zeros [N, groups] int8, minimums [N, groups],
// block_scales and block_minimums [N, blocks] float32: null where the layout has none.
void quant_linear_pack(void* out, const void* layout, const void* values, const void* scales, const void* zeros,
                       const void* minimums, const void* block_scales, const void* block_minimums, int64_t stride) {
  const quant::Layout l = quant::layout_of(layout);
  put_layout(out, layout);
  const auto floats = [](const void* p, int64_t at) { return p == nullptr ? nullptr : static_cast<const float*>(p) + at; };
  parallel(l.panels(), l.N * l.K, [&](int64_t p) {
    const int64_t at = p * quant::QPANEL, groups = at * l.groups(), blocks = at * l.blocks();
    const quant::Parts parts{static_cast<const int8_t*>(values) + at * stride, stride, floats(scales, groups),
                             zeros == nullptr ? nullptr : static_cast<const int8_t*>(zeros) + groups,
                             floats(minimums, groups), floats(block_scales, blocks), floats(block_minimums, blocks)};
    quant::pack_panel(l, const_cast<uint8_t*>(l.panel(out, p)), parts, min_of(quant::QPANEL, l.N - at));
  });
}

// limbs: bytes of a fixed-point activation, 1 to 3.
void quant_linear(void* out, const void* x, const void* packed, const void* bias, int64_t rows, int64_t stride,
                  int32_t limbs, int32_t dtype) {
  const quant::Layout l = quant::layout_of(packed);
  with_dtype(dtype, [&](auto* t) {
    using T = typename pointee<decltype(t)>::type;
    quant::run(static_cast<T*>(out), static_cast<const T*>(x), packed, static_cast<const T*>(bias), rows, stride, l, limbs);
  });
}

// The packed weight's first half of N outputs are gates, the second ups: out [rows, N / 2].
void quant_linear_gated(void* out, const void* x, const void* packed, const void* bias, int64_t rows, int64_t stride,
                        int32_t limbs, int32_t kind, int32_t dtype) {
  const quant::Layout l = quant::layout_of(packed);
  const int64_t I = l.N / 2;
  if (I % quant::QPANEL != 0) {  // ups begin inside a panel
    void* both = scratch(SCRATCH_C, size_t(rows * l.N) * sizeof(float));
    quant_linear(both, x, packed, bias, rows, stride, limbs, dtype);
    activation_and_mul(out, both, rows, I, l.N, kind, dtype);
    return;
  }
  with_dtype(dtype, [&](auto* t) {
    using T = typename pointee<decltype(t)>::type;
    quant::run_gated(static_cast<T*>(out), static_cast<const T*>(x), packed, static_cast<const T*>(bias), rows, stride, l,
                     limbs, kind);
  });
}

// Rows of the real weight: out [rows, K].
int32_t quant_linear_rows(void* out, const int64_t* ids, const void* packed, int64_t rows, int32_t dtype) {
  const quant::Layout l = quant::layout_of(packed);
  int32_t status = OK;
  with_dtype(dtype, [&](auto* t) {
    using T = typename pointee<decltype(t)>::type;
    parallel_ranges(rows, rows * l.K, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        if (ids[i] < 0 || ids[i] >= l.N) {
          __atomic_store_n(&status, int32_t(BAD_INDEX), __ATOMIC_RELAXED);
          continue;
        }
        const uint8_t* panel = l.panel(packed, ids[i] / quant::QPANEL);
        quant::unpack_row(l, panel, ids[i] % quant::QPANEL, static_cast<T*>(out) + i * l.K);
      }
    });
  });
  return status;
}

}  // namespace
}  // namespace headrace::HR_ISA

// Linear layers over packed weights: what surrounds the products of panel_product.h and linear_tiles.h.

namespace headrace::HR_ISA {
namespace {

// How rows are cut: into tiles of ROWS, for tasks of at most piece() rows, whose sums have room for whole tiles.
template <class WT> struct Tiling {
  static constexpr int64_t ROWS = MAX_ROWS;
  static int64_t piece(int64_t) { return ROWS_PIECE; }
  static int64_t room(int64_t rows) { return rows; }
};
#if defined(HR_AMX)
template <> struct Tiling<bf16> {
  static constexpr int64_t ROWS = 2 * TILE_ROWS;
  static int64_t piece(int64_t K) { return max_of(MIN_TASK_ROWS, min_of(MAX_TASK_ROWS, TASK_BYTES / (2 * K + 1) / ROWS * ROWS)); }
  static int64_t room(int64_t rows) { return round_up(rows, TILE_ROWS); }
};
#endif

// Which rows of x are meant, in order: all, or `count` of them.
struct Picked {
  const int32_t* index = nullptr;
  int64_t count = 0;
};

// Rows in the form that WT's product reads: as they are, widened, or in blocks; x has `rows` of them.
template <class WT, class T>
inline auto readable(const T* x, int64_t rows, int64_t K, int64_t stride, ScratchSlot slot, const Picked& picked = {}) {
  using A = typename ActivationTraits<WT>::A;
#if defined(HR_AMX)
  if constexpr (__is_same(WT, bf16)) {
    const auto pick = [&](int64_t i) { return picked.index == nullptr ? i : int64_t(picked.index[i]); };
    return tile_rows(reinterpret_cast<const bf16*>(x), picked.index == nullptr ? rows : picked.count, K, stride, slot, pick);
  } else
#endif
  if constexpr (sizeof(A) == sizeof(T)) {
    return Rows<A>{reinterpret_cast<const A*>(x), stride, picked.index};
  } else {
    float* wide = static_cast<float*>(scratch(slot, size_t(rows * K + 1) * sizeof(float)));
    parallel_ranges(rows, rows * K / 16, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        for (int64_t k = 0; k < K; k += W) st_upto(wide + i * K + k, ld_upto(x + i * stride + k, K - k), K - k);
      }
    });
    return Rows<A>{wide, K, picked.index};
  }
}

// out[n] = sums[n] + bias[n]
template <class T, class B>
inline void finish_row(T* out, const float* sums, const B* bias, int64_t n) {
  for (int64_t j = 0; j < n; j += W) {
    vf y = ld(sums + j);
    if (bias != nullptr) y = vadd(y, ld_upto(bias + j, n - j));
    st_upto(out + j, y, n - j);
  }
}

// f(begin, many, p, scratch) for every panel p < panels and piece of the rows, on all threads; scratch
// has SUMS floats for each of PANEL features of `many` rows. Pieces end with whole tiles, but for the last.
template <int SUMS, class WT, class F>
inline void over_panels(int64_t rows, int64_t K, int64_t panels, int64_t work, const F& f) {
  constexpr int64_t ROWS = Tiling<WT>::ROWS;
  const int64_t piece = Tiling<WT>::piece(K), tiles = ceil_div(rows, ROWS), pieces = ceil_div(rows, piece);
  const ShorterRuns shorter{panels, pool_size()};
  const int64_t runs = pieces == 1 ? shorter.count() : min_of(panels, max_of(1, ceil_div(RUNS * pool_size(), pieces)));
  const auto first = [&](int64_t run) { return pieces == 1 ? shorter.begin(run) : run * panels / runs; };
  parallel(runs * pieces, work, [&](int64_t task) {
    const int64_t i = task / runs, run = task % runs;
    const int64_t begin = i * tiles / pieces * ROWS;
    const int64_t many = min_of(rows, (i + 1) * tiles / pieces * ROWS) - begin;
    float* sums = static_cast<float*>(scratch(SCRATCH_TASK, size_t(SUMS * piece * PANEL) * sizeof(float)));
    for (int64_t p = first(run), end = first(run + 1); p < end; ++p) f(begin, many, p, sums);
  });
}

// How sums with their bias become outputs.
template <class T> struct AsTheyAre {
  static vf of(vf x) { return x; }
  static void row(T* out, const float* sums, const T* bias, int64_t n) { finish_row(out, sums, bias, n); }
};
// They are rounded to T before the activation: the bits are those of two steps.
template <class T, Activation kind> struct Activated {
  static vf of(vf x) { return act(kind, vrounded<T>(x)); }
  static void row(T* out, const float* sums, const T* bias, int64_t n) {
    finish_row(out, sums, bias, n);
    act_row<kind>(out, out, n);
  }
};

// Makes outputs of whole tiles, from their accumulators.
template <class Finish, class T> struct Outputs {
  T* out;
  int64_t stride;
  const T* bias;  // null = none
  int64_t features;  // of the panel: where there are fewer than PANEL, whole vectors reach beyond the row
  Outputs from(int64_t row) const { return {out + row * stride, stride, bias, features}; }
  template <int R, int V> HR_INLINE void operator()(int at, const vf (&acc)[R][V]) const {
    T* const to = out + at * W;
    vf b[V];
    // Plus -0 is what it was, 0 included.
    HR_UNROLL for (int v = 0; v < V; ++v) b[v] = bias == nullptr ? vset(-0.0f) : ld(bias + (at + v) * W);
    HR_UNROLL for (int r = 0; r < R; ++r)
      HR_UNROLL for (int v = 0; v < V; ++v) st(to + r * stride + v * W, Finish::of(vadd(acc[r][v], b[v])));
  }
};

template <class Finish, class T, class WT>
inline void run_linear(T* out, const T* x, const WT* weight, const T* bias, int64_t rows, int64_t N,
                       int64_t K, int64_t stride) {
  if (rows == 0) return;
  const Packed<WT> packed{weight, N, K};
  const auto a = readable<WT>(x, rows, K, stride, SCRATCH_A);
  over_panels<1, WT>(rows, K, packed.panels(), rows * N * K / 32, [&](int64_t begin, int64_t many, int64_t p, float* sums) {
    T* const to = out + begin * N + p * PANEL;
    const T* const b = bias == nullptr ? nullptr : bias + p * PANEL;
    const auto done = [&](int64_t first, int64_t count, const float* from) {
      for (int64_t r = first; r < first + count; ++r, from += PANEL) Finish::row(to + r * N, from, b, packed.features(p));
    };
    panel_product(a, begin, many, K, packed.panel(p), packed.vectors(p), sums, packed.panel(p + 1), done,
                  Outputs<Finish, T>{to, N, b, packed.features(p)});
  });
}

// out [rows, I] = act(x Wg + bg) * (x Wu + bu), the weight's first I outputs being Wg. A panel of gates
// and its panel of ups are multiplied one after the other; both are rounded to T before the
// activation, as they would be on their way through memory: the bits are those of two steps. I is a
// multiple of PANEL.
template <class T, class WT>
inline void run_linear_gated(T* out, const T* x, const WT* weight, const T* bias, int64_t rows, int64_t I,
                             int64_t K, int64_t stride, int32_t kind) {
  if (rows == 0) return;
  const Packed<WT> packed{weight, 2 * I, K};
  const auto a = readable<WT>(x, rows, K, stride, SCRATCH_A);
  const int64_t panels = I / PANEL;
  over_panels<2, WT>(rows, K, panels, rows * I * K / 16, [&](int64_t begin, int64_t many, int64_t p, float* sums) {
    const WT* gate = packed.panel(p);
    const WT* up = packed.panel(panels + p);
    T* gates = reinterpret_cast<T*>(sums + Tiling<WT>::room(many) * PANEL);  // rounded
    const int64_t at = p * PANEL;
    const auto keep = [&](int64_t first, int64_t count, const float* from) {
      for (int64_t r = 0; r < count; ++r) {
        finish_row(gates + (first + r) * PANEL, from + r * PANEL, bias == nullptr ? nullptr : bias + at, PANEL);
      }
    };
    const auto done = [&](int64_t first, int64_t count, const float* from) {
      for (int64_t r = 0; r < count; ++r) {
        T ups[PANEL];
        finish_row(ups, from + r * PANEL, bias == nullptr ? nullptr : bias + I + at, PANEL);
        act_mul_row(kind, out + (begin + first + r) * I + at, gates + (first + r) * PANEL, ups, PANEL);
      }
    };
    panel_product(a, begin, many, K, gate, MAX_VECTORS, sums, up, keep);
    panel_product(a, begin, many, K, up, MAX_VECTORS, sums, packed.panel(p + 1), done);
  });
}

int64_t linear_packed_bytes(int64_t N, int64_t K, int32_t dtype) {
  int64_t bytes = 0;
  with_dtype(dtype, [&](auto* t) {
    using T = typename pointee<decltype(t)>::type;
    bytes = Packed<T>::elements(N, K) * int64_t(sizeof(T));
  });
  return bytes;
}

void linear_pack(void* out, const void* weight, int64_t N, int64_t K, int64_t stride, int32_t dtype) {
  with_dtype(dtype, [&](auto* t) {
    using T = typename pointee<decltype(t)>::type;
    pack_weight(static_cast<T*>(out), static_cast<const T*>(weight), N, K, stride);
  });
}

void linear(void* out, const void* x, const void* packed, const void* bias, int64_t rows, int64_t N,
            int64_t K, int64_t stride, int32_t dtype) {
  with_dtype(dtype, [&](auto* t) {
    using T = typename pointee<decltype(t)>::type;
    run_linear<AsTheyAre<T>>(static_cast<T*>(out), static_cast<const T*>(x), static_cast<const T*>(packed),
                             static_cast<const T*>(bias), rows, N, K, stride);
  });
}

// out [rows, N] = act(x W + b), kind of enum Activation that is no gate only.
void linear_activated(void* out, const void* x, const void* packed, const void* bias, int64_t rows,
                      int64_t N, int64_t K, int64_t stride, int32_t kind, int32_t dtype) {
  with_dtype(dtype, [&](auto* t) {
    using T = typename pointee<decltype(t)>::type;
    const auto run = [&](auto activation) {
      run_linear<Activated<T, decltype(activation)::value>>(
          static_cast<T*>(out), static_cast<const T*>(x), static_cast<const T*>(packed),
          static_cast<const T*>(bias), rows, N, K, stride);
    };
    with_activation(kind, run);
  });
}

// kind: of enum Activation; the packed weight has 2 * I outputs, and so has the bias.
void linear_gated(void* out, const void* x, const void* packed, const void* bias, int64_t rows, int64_t I,
                  int64_t K, int64_t stride, int32_t kind, int32_t dtype) {
  if (I % PANEL != 0) {  // ups begin inside a panel
    void* both = scratch(SCRATCH_C, size_t(rows * 2 * I) * sizeof(float));
    linear(both, x, packed, bias, rows, 2 * I, K, stride, dtype);
    activation_and_mul(out, both, rows, I, 2 * I, kind, dtype);
    return;
  }
  with_dtype(dtype, [&](auto* t) {
    using T = typename pointee<decltype(t)>::type;
    run_linear_gated(static_cast<T*>(out), static_cast<const T*>(x), static_cast<const T*>(packed),
                     static_cast<const T*>(bias), rows, I, K, stride, kind);
  });
}

}  // namespace
}  // namespace headrace::HR_ISA

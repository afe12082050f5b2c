// Mixture of gated experts over packed weights, and linear layers of experts.
//
// Each (row, place) of topk_ids is one entry. Entries are sorted by expert, so that an expert's
// panels are read once for all its rows; results go back to the entry's own line, and a row sums
// its lines in the order of topk_ids.

namespace headrace::HR_ISA {
namespace {

// f(expert, begin, many, p, sums) for every panel p < panels of every used expert and piece of its
// sorted entries, on all threads; sums has SUMS floats for each of PANEL features of `many` rows.
template <int SUMS, class WT, class F>
inline void over_experts(const Sorted& sorted, int64_t K, int64_t panels, int64_t work, const F& f) {
  const int64_t piece = Tiling<WT>::piece(K);
  parallel(sorted.used * panels, work, [&](int64_t task) {
    const int64_t i = task / panels, p = task % panels;
    float* sums = static_cast<float*>(scratch(SCRATCH_TASK, size_t(SUMS * piece * PANEL) * sizeof(float)));
    for (int64_t begin = sorted.begin[i]; begin < sorted.begin[i + 1]; begin += piece) {
      f(int64_t(sorted.expert[i]), begin, min_of(piece, sorted.begin[i + 1] - begin), p, sums);
    }
  });
}

// Behind the sorted entries: rows of x, of which `share` entries each have one.
inline Picked rows_of(const Sorted& sorted, int64_t entries, int64_t share) {
  int32_t* index = sorted.order + entries;
  for (int64_t e = 0; e < sorted.entries(); ++e) index[e] = int32_t(sorted.order[e] / share);
  return {index, sorted.entries()};
}

// lines [entries][N]: line e = row index[e] of x times the weight of e's expert, plus its bias.
template <class WT, class X, class T, class L>
inline void experts_product(L* lines, const X& x, const WT* weights, const T* biases,
                            const Sorted& sorted, int64_t entries, int64_t N, int64_t K) {
  const int64_t size = Packed<WT>::elements(N, K);
  over_experts<1, WT>(sorted, K, ceil_div(N, PANEL), entries * N * K / 32,
                  [&](int64_t expert, int64_t begin, int64_t many, int64_t p, float* sums) {
    const Packed<WT> packed{weights + expert * size, N, K};
    const int64_t at = p * PANEL;
    const auto done = [&](int64_t first, int64_t count, const float* from) {
      for (int64_t r = 0; r < count; ++r) {
        finish_row(lines + int64_t(sorted.order[begin + first + r]) * N + at, from + r * PANEL,
                   biases == nullptr ? nullptr : biases + expert * N + at, packed.features(p));
      }
    };
    panel_product(x, begin, many, K, packed.panel(p), packed.vectors(p), sums, packed.panel(p + 1), done);
  });
}

// hidden [entries][I] = act(x Wg + bg) * (x Wu + bu) by each entry's expert. A panel of gates and its
// panel of ups are multiplied one after the other, so that neither goes through memory. I is a
// multiple of PANEL.
template <class WT, class A, class X, class T>
inline void experts_gated(A* hidden, const X& x, const WT* weights, const T* biases,
                          const Sorted& sorted, int64_t entries, int64_t I, int64_t K, int32_t kind) {
  const int64_t size = Packed<WT>::elements(2 * I, K), panels = I / PANEL;
  over_experts<2, WT>(sorted, K, panels, entries * I * K / 16,
                  [&](int64_t expert, int64_t begin, int64_t many, int64_t p, float* sums) {
    const Packed<WT> packed{weights + expert * size, 2 * I, K};
    const WT *gate = packed.panel(p), *up = packed.panel(panels + p);
    const int64_t at = p * PANEL;
    const T* bias = biases == nullptr ? nullptr : biases + expert * 2 * I + at;
    float* gates = sums + Tiling<WT>::room(many) * PANEL;
    const auto keep = [&](int64_t first, int64_t count, const float* from) {
      for (int64_t r = 0; r < count; ++r) finish_row(gates + (first + r) * PANEL, from + r * PANEL, bias, PANEL);
    };
    const auto done = [&](int64_t first, int64_t count, const float* from) {
      for (int64_t r = 0; r < count; ++r) {
        float ups[PANEL];
        finish_row(ups, from + r * PANEL, bias == nullptr ? nullptr : bias + I, PANEL);
        act_mul_row(kind, hidden + int64_t(sorted.order[begin + first + r]) * I + at, gates + (first + r) * PANEL,
                    ups, PANEL);
      }
    };
    panel_product(x, begin, many, K, gate, MAX_VECTORS, sums, up, keep);
    panel_product(x, begin, many, K, up, MAX_VECTORS, sums, packed.panel(p + 1), done);
  });
}

// out [rows][H] = sums by weight, in the order of a row's places, of line(e, j, left): the W values from j
// on of entry e. Without weights each counts 1.
template <class T, class Line>
inline void sum_places(T* out, const float* weights, int64_t rows, int64_t k, int64_t H, const Line& line) {
  parallel_ranges(rows, rows * k * H / 8, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t j = 0; j < H; j += W) {
        vf sum = vzero();
        for (int64_t e = r * k; e < (r + 1) * k; ++e) {
          const vf v = line(e, j, H - j);
          sum = vadd(sum, weights == nullptr ? v : vmul(vset(weights[e]), v));
        }
        st_upto(out + r * H + j, sum, H - j);
      }
    }
  });
}

// Tensors of an op's experts; biases may be null.
template <class T> struct ExpertWeights {
  const T *gate_up, *gate_up_bias, *down, *down_bias;
  int64_t experts, H, I;
};

// Ids from the last expert on that give back `scale` times what they get.
struct Identities {
  int64_t count;
  float scale;
};

template <class T>
inline int32_t run_moe(T* out, const T* x, const ExpertWeights<T>& w, const float* weights,
                       const int64_t* ids, const Identities& same, int64_t rows, int64_t k, int64_t stride,
                       int32_t kind) {
  using A = typename ActivationTraits<T>::A;
  const int64_t entries = rows * k, H = w.H, I = w.I;
  Sorted sorted;
  if (sort_entries(ids, entries, w.experts, same.count, sorted) != OK) return BAD_INDEX;

  // Lines of the intermediate results, float32 but for the hidden ones that the kernel reads as A.
  const bool fused = I % PANEL == 0;  // else ups begin inside a panel
  const int64_t wide = entries * (!fused && 2 * I > H ? 2 * I : H);
  float* lines = static_cast<float*>(scratch(SCRATCH_C, size_t(wide + entries * I + 16) * sizeof(float)));
  A* hidden = reinterpret_cast<A*>(lines + wide);

  const auto a = readable<T>(x, rows, H, stride, SCRATCH_A, rows_of(sorted, entries, k));
  if (fused) {
    experts_gated(hidden, a, w.gate_up, w.gate_up_bias, sorted, entries, I, H, kind);
  } else {
    experts_product(lines, a, w.gate_up, w.gate_up_bias, sorted, entries, 2 * I, H);
    parallel_ranges(entries, entries * I, [&](int64_t begin, int64_t end) {
      for (int64_t e = begin; e < end; ++e) {
        if (ids[e] >= w.experts) continue;  // nothing is in its line
        act_mul_row(kind, hidden + e * I, lines + e * 2 * I, lines + e * 2 * I + I, I);
      }
    });
  }
  const auto h = readable<T>(hidden, entries, I, I, SCRATCH_A, Picked{sorted.order, sorted.entries()});
  experts_product(lines, h, w.down, w.down_bias, sorted, entries, H, I);
  sum_places(out, weights, rows, k, H, [&](int64_t e, int64_t j, int64_t left) {
    if (ids[e] < w.experts) return ld_upto(lines + e * H + j, left);
    return vmul(vset(same.scale), ld_upto(x + e / k * stride + j, left));
  });
  return OK;
}

// gate_up and down are packed, expert after expert; the biases [experts, 2 I] and [experts, H] are not.
int32_t moe(void* out, const void* x, const void* gate_up, const void* gate_up_bias, const void* down,
            const void* down_bias, const float* weights, const int64_t* ids, int64_t rows, int64_t k,
            int64_t experts, int64_t H, int64_t I, int64_t stride, int64_t identities, float identity_scale,
            int32_t kind, int32_t dtype) {
  int32_t status = OK;
  with_dtype(dtype, [&](auto* t) {
    using T = typename pointee<decltype(t)>::type;
    const ExpertWeights<T> w{static_cast<const T*>(gate_up), static_cast<const T*>(gate_up_bias),
                             static_cast<const T*>(down), static_cast<const T*>(down_bias), experts, H, I};
    status = run_moe(static_cast<T*>(out), static_cast<const T*>(x), w, weights, ids,
                     Identities{identities, identity_scale}, rows, k, stride, kind);
  });
  return status;
}

template <class T>
inline int32_t run_expert_linear(T* out, const T* x, const T* weight, const float* weights, const int64_t* ids,
                                 int64_t rows, int64_t k, int64_t share, int64_t experts, int64_t N, int64_t K,
                                 int64_t stride) {
  const int64_t entries = rows * k;
  Sorted sorted;
  if (sort_entries(ids, entries, experts, 0, sorted) != OK) return BAD_INDEX;
  const auto a = readable<T>(x, entries / share, K, stride, SCRATCH_A, rows_of(sorted, entries, share));
  const T* no_bias = nullptr;
  if (weights == nullptr) {
    experts_product(out, a, weight, no_bias, sorted, entries, N, K);
    return OK;
  }
  float* lines = static_cast<float*>(scratch(SCRATCH_C, size_t(entries * N + W) * sizeof(float)));
  experts_product(lines, a, weight, no_bias, sorted, entries, N, K);
  sum_places(out, weights, rows, k, N, [&](int64_t e, int64_t j, int64_t left) {
    return ld_upto(lines + e * N + j, left);
  });
  return OK;
}

// weight is packed, expert after expert. x has a row for each `share` entries: k, or 1. out [rows, k, N], or
// with weights [rows, N].
int32_t expert_linear(void* out, const void* x, const void* weight, const float* weights, const int64_t* ids,
                      int64_t rows, int64_t k, int64_t share, int64_t experts, int64_t N, int64_t K,
                      int64_t stride, int32_t dtype) {
  int32_t status = OK;
  with_dtype(dtype, [&](auto* t) {
    using T = typename pointee<decltype(t)>::type;
    status = run_expert_linear(static_cast<T*>(out), static_cast<const T*>(x), static_cast<const T*>(weight),
                               weights, ids, rows, k, share, experts, N, K, stride);
  });
  return status;
}

}  // namespace
}  // namespace headrace::HR_ISA

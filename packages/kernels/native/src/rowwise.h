// Kernels that treat each row by itself: embedding, norms, activations.
//
// Rows of an input are at x + (i / inner) * outer_stride + (i % inner) * inner_stride, so a slice
// of a fused projection [T, heads, D] is read in place; outputs are contiguous. Strides are in
// elements. A row's sums run over its own elements in one order, so a row's bits depend on nothing
// else.

namespace headrace::HR_ISA {
namespace {

// Ids that are none get row `beyond`, or are reported if that is negative.
int32_t embedding(void* out, const int64_t* ids, const void* weight, int64_t row_bytes,
                  int64_t stride_bytes, int64_t rows, int64_t vocabulary, int64_t beyond) {
  int32_t status = OK;
  parallel_ranges(rows, rows * row_bytes / 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const bool known = ids[i] >= 0 && ids[i] < vocabulary;
      if (!known && beyond < 0) {
        __atomic_store_n(&status, int32_t(BAD_INDEX), __ATOMIC_RELAXED);
        continue;
      }
      __builtin_memcpy(static_cast<char*>(out) + i * row_bytes,
                       static_cast<const char*>(weight) + (known ? ids[i] : beyond) * stride_bytes, size_t(row_bytes));
    }
  });
  return status;
}

// A length that the compiler knows.
template <int64_t n> struct Known { constexpr operator int64_t() const { return n; } };

// The vector whose lanes add up to the sum of g(j, left) over a row, in float32: four running
// vectors, then a fixed tree. g gets the place of W values, or of the `left` < W last ones.
template <class N, class G> inline vf sum_lanes(N n, const G& g) {
  vf s[4] = {vzero(), vzero(), vzero(), vzero()};
  int64_t j = 0;
  for (; j + 4 * W <= n; j += 4 * W) {
    for (int u = 0; u < 4; ++u) s[u] = vadd(s[u], g(j + u * W, W));
  }
  for (; j + W <= n; j += W) s[0] = vadd(s[0], g(j, W));
  if (j < n) {
    // g of 0 need not be 0, so what lies past the end is cut off after g.
    float part[W] = {};
    stn(part, g(j, n - j), n - j);
    s[1] = vadd(s[1], ld(part));
  }
  return vadd(vadd(s[0], s[1]), vadd(s[2], s[3]));
}

// Sum of f(x[j]) in float32.
template <class T, class F> inline float sum_row(const T* x, int64_t n, const F& f) {
  return hsum(sum_lanes(n, [&](int64_t j, int64_t left) { return f(ld_upto(x + j, left)); }));
}

// Rows are worked on in groups: sums across lanes, divisions and square roots of one row each wait
// for the one before, those of four rows overlap. A row's operations are the same in every group.
constexpr int64_t GROUP = 4;
constexpr int64_t GROUP_BYTES = 24 << 10;  // of rows that are read a second time: half the first-level cache

template <class T> inline int64_t group_of(int64_t n, int64_t left) {
  return n * int64_t(sizeof(T)) * GROUP > GROUP_BYTES ? 1 : min_of(GROUP, left);
}

// sums[i] = sum of the lanes of lanes(i), for all i < rows <= GROUP; what follows is undefined.
template <class F> inline void row_sums(int64_t rows, const F& lanes, float* sums) {
  if (rows == GROUP) return hsum4(lanes(0), lanes(1), lanes(2), lanes(3), sums);
  vf v[GROUP] = {vzero(), vzero(), vzero(), vzero()};
  for (int64_t i = 0; i < rows; ++i) v[i] = lanes(i);
  hsum4(v[0], v[1], v[2], v[3], sums);
}

// 1 / sqrt(mean + eps) in place of each of GROUP sums of n squares.
inline void inverse_roots(float* sums, int64_t n, float eps) {
  for (int i = 0; i < GROUP; ++i) sums[i] = 1.0f / __builtin_sqrtf(sums[i] / float(n) + eps);
}

// out = x * scale * (weight + offset)
template <class T, class WT>
inline void scale_row(T* out, const T* x, const WT* weight, int64_t n, float scale, float offset) {
  const vf s = vset(scale), o = vset(offset);
  for (int64_t j = 0; j < n; j += W) {
    const vf w = vadd(ld_upto(weight + j, n - j), o);
    st_upto(out + j, vmul(vmul(ld_upto(x + j, n - j), s), w), n - j);
  }
}

// out = x / sqrt(mean x^2 + eps) * (weight + offset)
template <class T, class WT>
inline void rms_row(T* out, const T* x, const WT* weight, int64_t n, float eps, float offset) {
  float scales[GROUP];
  row_sums(1, [&](int64_t) {
    return sum_lanes(n, [&](int64_t j, int64_t left) {
      const vf v = ld_upto(x + j, left);
      return vmul(v, v);
    });
  }, scales);
  inverse_roots(scales, n, eps);
  scale_row(out, x, weight, n, scales[0], offset);
}

// Calls f with null pointers of the types of the rows and of the weight (the rows' or float32).
template <class F> inline void with_weight_dtype(int32_t dtype, int32_t weight_dtype, const F& f) {
  with_dtype(dtype, [&](auto* t) {
    if (weight_dtype == F32) f(t, (float*)nullptr); else f(t, t);
  });
}

// f(first, many) over groups of all rows of n values.
template <class T, class F>
inline void over_groups(int64_t rows, int64_t n, int64_t work, const F& f) {
  parallel_ranges(rows, work, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end;) {
      const int64_t many = group_of<T>(n, end - i);
      f(i, many);
      i += many;
    }
  });
}

void rms_norm(void* out, const void* x, const void* weight, int64_t rows, int64_t n, int64_t inner,
              int64_t outer_stride, int64_t inner_stride, float eps, float offset, int32_t dtype,
              int32_t weight_dtype) {
  with_weight_dtype(dtype, weight_dtype, [&](auto* t, auto* wt) {
    using T = typename pointee<decltype(t)>::type;
    using WT = typename pointee<decltype(wt)>::type;
    const auto row = [&](int64_t i) {
      return static_cast<const T*>(x) + i / inner * outer_stride + i % inner * inner_stride;
    };
    over_groups<T>(rows, n, rows * n / 16, [&](int64_t first, int64_t many) {
      float scales[GROUP];
      row_sums(many, [&](int64_t i) {
        const T* from = row(first + i);
        return sum_lanes(n, [from](int64_t j, int64_t left) {
          const vf v = ld_upto(from + j, left);
          return vmul(v, v);
        });
      }, scales);
      inverse_roots(scales, n, eps);
      for (int64_t i = 0; i < many; ++i) {
        scale_row(static_cast<T*>(out) + (first + i) * n, row(first + i),
                  static_cast<const WT*>(weight), n, scales[i], offset);
      }
    });
  });
}

// residual += x (rounded to its dtype); out = rms_norm(residual). out may be x.
void add_rms_norm(void* out, const void* x, void* residual, const void* weight, int64_t rows,
                  int64_t n, float eps, float offset, int32_t dtype, int32_t weight_dtype) {
  with_weight_dtype(dtype, weight_dtype, [&](auto* t, auto* wt) {
    using T = typename pointee<decltype(t)>::type;
    using WT = typename pointee<decltype(wt)>::type;
    over_groups<T>(rows, n, rows * n / 10, [&](int64_t first, int64_t many) {
      float scales[GROUP];
      row_sums(many, [&](int64_t i) {
        const T* from = static_cast<const T*>(x) + (first + i) * n;
        T* sum = static_cast<T*>(residual) + (first + i) * n;
        return sum_lanes(n, [from, sum](int64_t j, int64_t left) {
          const vf v = vrounded<T>(vadd(ld_upto(from + j, left), ld_upto(sum + j, left)));
          st_upto(sum + j, v, left);
          return vmul(v, v);
        });
      }, scales);
      inverse_roots(scales, n, eps);
      for (int64_t i = first; i < first + many; ++i) {
        scale_row(static_cast<T*>(out) + i * n, static_cast<const T*>(residual) + i * n,
                  static_cast<const WT*>(weight), n, scales[i - first], offset);
      }
    });
  });
}

// out = (x - mean) * scale * weight + bias
template <class T, class WT>
inline void centre_row(T* out, const T* x, const WT* weight, const WT* bias, int64_t n, float mean,
                       float scale) {
  const vf m = vset(mean), s = vset(scale);
  for (int64_t j = 0; j < n; j += W) {
    vf y = vmul(vmul(vsub(ld_upto(x + j, n - j), m), s), ld_upto(weight + j, n - j));
    if (bias != nullptr) y = vadd(y, ld_upto(bias + j, n - j));
    st_upto(out + j, y, n - j);
  }
}

// inverse_roots of the variances of `many` rows: row(i) is the i-th.
template <class Row> inline void spreads(int64_t many, int64_t n, float eps, const float* means, const Row& row, float* scales) {
  row_sums(many, [&](int64_t i) {
    const auto* from = row(i);
    const vf m = vset(means[i]);
    return sum_lanes(n, [from, m](int64_t j, int64_t left) {
      const vf v = vsub(ld_upto(from + j, left), m);
      return vmul(v, v);
    });
  }, scales);
  inverse_roots(scales, n, eps);
}

void layer_norm(void* out, const void* x, const void* weight, const void* bias, int64_t rows,
                int64_t n, int64_t inner, int64_t outer_stride, int64_t inner_stride, float eps,
                int32_t dtype, int32_t weight_dtype) {
  with_weight_dtype(dtype, weight_dtype, [&](auto* t, auto* wt) {
    using T = typename pointee<decltype(t)>::type;
    using WT = typename pointee<decltype(wt)>::type;
    over_groups<T>(rows, n, rows * n / 10, [&](int64_t first, int64_t many) {
      const auto row = [&](int64_t i) {
        return static_cast<const T*>(x) + (first + i) / inner * outer_stride + (first + i) % inner * inner_stride;
      };
      float means[GROUP], scales[GROUP];
      row_sums(many, [&](int64_t i) {
        const T* from = row(i);
        return sum_lanes(n, [from](int64_t j, int64_t left) { return ld_upto(from + j, left); });
      }, means);
      for (int i = 0; i < GROUP; ++i) means[i] /= float(n);
      spreads(many, n, eps, means, row, scales);
      for (int64_t i = 0; i < many; ++i) {
        centre_row(static_cast<T*>(out) + (first + i) * n, row(i), static_cast<const WT*>(weight),
                   static_cast<const WT*>(bias), n, means[i], scales[i]);
      }
    });
  });
}

// residual += x (rounded to its dtype); out = layer_norm(residual). out may be x.
void add_layer_norm(void* out, const void* x, void* residual, const void* weight, const void* bias,
                    int64_t rows, int64_t n, float eps, int32_t dtype, int32_t weight_dtype) {
  with_weight_dtype(dtype, weight_dtype, [&](auto* t, auto* wt) {
    using T = typename pointee<decltype(t)>::type;
    using WT = typename pointee<decltype(wt)>::type;
    over_groups<T>(rows, n, rows * n / 8, [&](int64_t first, int64_t many) {
      const auto row = [&](int64_t i) { return static_cast<T*>(residual) + (first + i) * n; };
      float means[GROUP], scales[GROUP];
      row_sums(many, [&](int64_t i) {
        const T* from = static_cast<const T*>(x) + (first + i) * n;
        T* sum = row(i);
        return sum_lanes(n, [from, sum](int64_t j, int64_t left) {
          const vf v = vrounded<T>(vadd(ld_upto(from + j, left), ld_upto(sum + j, left)));
          st_upto(sum + j, v, left);
          return v;
        });
      }, means);
      for (int i = 0; i < GROUP; ++i) means[i] /= float(n);
      spreads(many, n, eps, means, row, scales);
      for (int64_t i = 0; i < many; ++i) {
        centre_row(static_cast<T*>(out) + (first + i) * n, row(i), static_cast<const WT*>(weight),
                   static_cast<const WT*>(bias), n, means[i], scales[i]);
      }
    });
  });
}

// f(x, out) for all rows, out [rows, n] contiguous; `work` is that of a value.
template <class T, class F>
inline void over_rows(void* out, const void* x, int64_t rows, int64_t n, int64_t stride, int64_t work, const F& f) {
  parallel_ranges(rows, rows * n * work / 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) f(i, static_cast<const T*>(x) + i * stride, static_cast<T*>(out) + i * n);
  });
}

template <class T> inline float mean_square(const T* x, int64_t n) {
  return sum_row(x, n, [](vf v) { return vmul(v, v); }) / float(n);
}

// out = x * sqrt(mean like^2 / max(mean x^2, least))
void match_rms(void* out, const void* x, const void* like, int64_t rows, int64_t n, int64_t x_stride,
               int64_t like_stride, float least, int32_t dtype) {
  with_dtype(dtype, [&](auto* t) {
    using T = typename pointee<decltype(t)>::type;
    over_rows<T>(out, x, rows, n, x_stride, 3, [&](int64_t i, const T* from, T* to) {
      const float target = mean_square(static_cast<const T*>(like) + i * like_stride, n);
      const float own = mean_square(from, n), floored = own < least ? least : own;
      const vf factor = vset(__builtin_sqrtf(target / floored));
      for (int64_t j = 0; j < n; j += W) st_upto(to + j, vmul(ld_upto(from + j, n - j), factor), n - j);
    });
  });
}

// out = max(x - (mean + deviations * standard deviation), 0)
void gaussian_topk(void* out, const void* x, int64_t rows, int64_t n, int64_t stride, float deviations,
                   int32_t dtype) {
  with_dtype(dtype, [&](auto* t) {
    using T = typename pointee<decltype(t)>::type;
    over_rows<T>(out, x, rows, n, stride, 3, [&](int64_t, const T* from, T* to) {
      const float mean = sum_row(from, n, [](vf v) { return v; }) / float(n);
      const vf m = vset(mean);
      const float variance = sum_row(from, n, [m](vf v) { const vf d = vsub(v, m); return vmul(d, d); }) / float(n);
      const vf cutoff = vset(mean + __builtin_sqrtf(variance) * deviations);
      for (int64_t j = 0; j < n; j += W) {
        st_upto(to + j, vmax(vzero(), vsub(ld_upto(from + j, n - j), cutoff)), n - j);
      }
    });
  });
}

inline vf act(Activation kind, vf x) {
  const vf one = vset(1.0f), half = vset(0.5f);
  switch (kind) {
    case SILU: return vdiv(x, vadd(one, vexp(vsub(vzero(), x))));
    case GELU: return vmul(vmul(half, x), vadd(one, verf(vmul(x, vset(0.70710678118654752f)))));
    case GELU_TANH: {
      const vf cube = vmul(vmul(x, x), x);
      const vf inner = vmul(vset(0.79788456080286536f), vadd(x, vmul(vset(0.044715f), cube)));
      return vmul(vmul(half, x), vadd(one, vtanh(inner)));
    }
    case RELU: return vmax(vzero(), x);
    case RELU2: { const vf r = vmax(vzero(), x); return vmul(r, r); }
    case CLAMPED_SWIGLU: break;  // see gated
  }
  return x;
}

inline vf vsigmoid(vf x) { return vdiv(vset(1.0f), vadd(vset(1.0f), vexp(vsub(vzero(), x)))); }

// log(1 + t) for t in [0, 1]: 2 atanh(t / (2 + t)), whose series ends at 1e-9 of itself.
inline vf vlog1p_unit(vf t) {
  const vf z = vdiv(t, vadd(t, vset(2.0f))), q = vmul(z, z);
  vf p = vset(1.0f / 15.0f);
  p = vfma(p, q, vset(1.0f / 13.0f));
  p = vfma(p, q, vset(1.0f / 11.0f));
  p = vfma(p, q, vset(1.0f / 9.0f));
  p = vfma(p, q, vset(1.0f / 7.0f));
  p = vfma(p, q, vset(1.0f / 5.0f));
  p = vfma(p, q, vset(1.0f / 3.0f));
  const vf twice = vadd(z, z);
  return vfma(vmul(p, q), twice, twice);
}
inline vf vsoftplus(vf x) {
  return vadd(vmax(vzero(), x), vlog1p_unit(vexp(vsub(vzero(), vabs(x)))));
}

// What a gate lets through. The constants are headrace_core.ops.CLAMPED_SWIGLU_ALPHA and _LIMIT; of
// minimum and maximum the value is the second operand, which is the result if either is NaN.
inline vf gated(Activation kind, vf gate, vf up) {
  if (kind != CLAMPED_SWIGLU) return vmul(act(kind, gate), up);
  const vf limit = vset(7.0f), g = vmin(limit, gate);
  const vf u = vmax(vset(-7.0f), vmin(limit, up));
  return vmul(vmul(g, vsigmoid(vmul(vset(1.702f), g))), vadd(u, vset(1.0f)));
}

template <Activation kind, class T> inline void act_row(T* out, const T* x, int64_t n) {
  for (int64_t j = 0; j < n; j += W) st_upto(out + j, act(kind, ld_upto(x + j, n - j)), n - j);
}
template <Activation kind, class T, class U>
inline void act_mul_row(U* out, const T* gate, const T* up, int64_t n) {
  for (int64_t j = 0; j < n; j += W) {
    st_upto(out + j, gated(kind, ld_upto(gate + j, n - j), ld_upto(up + j, n - j)), n - j);
  }
}

// Calls f with an activation that the compiler knows, as its type's `value`.
template <Activation kind> struct KnownActivation { static constexpr Activation value = kind; };
template <class F> inline void with_activation(int32_t kind, const F& f) {
  switch (kind) {
    case SILU: return f(KnownActivation<SILU>{});
    case GELU: return f(KnownActivation<GELU>{});
    case GELU_TANH: return f(KnownActivation<GELU_TANH>{});
    case RELU: return f(KnownActivation<RELU>{});
    case RELU2: return f(KnownActivation<RELU2>{});
  }
}

template <class T> inline void act_row(int32_t kind, T* out, const T* x, int64_t n) {
  with_activation(kind, [&](auto known) { act_row<decltype(known)::value>(out, x, n); });
}
template <class T, class U>
inline void act_mul_row(int32_t kind, U* out, const T* gate, const T* up, int64_t n) {
  switch (kind) {
    case SILU: return act_mul_row<SILU>(out, gate, up, n);
    case GELU: return act_mul_row<GELU>(out, gate, up, n);
    case GELU_TANH: return act_mul_row<GELU_TANH>(out, gate, up, n);
    case RELU: return act_mul_row<RELU>(out, gate, up, n);
    case RELU2: return act_mul_row<RELU2>(out, gate, up, n);
    case CLAMPED_SWIGLU: return act_mul_row<CLAMPED_SWIGLU>(out, gate, up, n);
  }
}

void activation(void* out, const void* x, int64_t count, int32_t kind, int32_t dtype) {
  with_dtype(dtype, [&](auto* t) {
    using T = typename pointee<decltype(t)>::type;
    const int64_t grain = 4096;  // a multiple of W: only the last piece has a tail
    parallel(ceil_div(count, grain), count, [&](int64_t i) {
      const int64_t at = i * grain;
      act_row(kind, static_cast<T*>(out) + at, static_cast<const T*>(x) + at, min_of(grain, count - at));
    });
  });
}

// x [rows, 2n] with row stride -> out [rows, n]
void activation_and_mul(void* out, const void* x, int64_t rows, int64_t n, int64_t stride,
                        int32_t kind, int32_t dtype) {
  with_dtype(dtype, [&](auto* t) {
    using T = typename pointee<decltype(t)>::type;
    const int64_t grain = 4096, pieces = ceil_div(n, grain);
    parallel_ranges(rows * pieces, rows * n / 3, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = i / pieces, at = i % pieces * grain;
        const T* gate = static_cast<const T*>(x) + row * stride + at;
        act_mul_row(kind, static_cast<T*>(out) + row * n + at, gate, gate + n, min_of(grain, n - at));
      }
    });
  });
}

}  // namespace
}  // namespace headrace::HR_ISA

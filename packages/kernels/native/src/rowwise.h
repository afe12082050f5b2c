// Kernels that treat each row by itself: embedding, norms, activations.
//
// Rows of an input are at x + (i / inner) * outer_stride + (i % inner) * inner_stride, so a slice
// of a fused projection [T, heads, D] is read in place; outputs are contiguous. Strides are in
// elements. A row's sums run over its own elements in one order, so a row's bits depend on nothing
// else.

namespace headrace::HR_ISA {
namespace {

int32_t embedding(void* out, const int64_t* ids, const void* weight, int64_t row_bytes,
                  int64_t stride_bytes, int64_t rows, int64_t vocabulary) {
  int32_t status = OK;
  parallel_ranges(rows, rows * row_bytes / 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (ids[i] < 0 || ids[i] >= vocabulary) {
        __atomic_store_n(&status, int32_t(BAD_INDEX), __ATOMIC_RELAXED);
        continue;
      }
      __builtin_memcpy(static_cast<char*>(out) + i * row_bytes,
                       static_cast<const char*>(weight) + ids[i] * stride_bytes, size_t(row_bytes));
    }
  });
  return status;
}

// Sum of f(x[j]) in float32: four running vectors, then a fixed tree.
template <class T, class F> inline float sum_row(const T* x, int64_t n, const F& f) {
  vf s[4] = {vzero(), vzero(), vzero(), vzero()};
  int64_t j = 0;
  for (; j + 4 * W <= n; j += 4 * W) {
    for (int u = 0; u < 4; ++u) s[u] = vadd(s[u], f(ld(x + j + u * W)));
  }
  for (; j + W <= n; j += W) s[0] = vadd(s[0], f(ld(x + j)));
  if (j < n) {
    // f(0) need not be 0, so what lies past the end is cut off after f.
    float part[W] = {};
    stn(part, f(ldn(x + j, n - j)), n - j);
    s[1] = vadd(s[1], ld(part));
  }
  return hsum(vadd(vadd(s[0], s[1]), vadd(s[2], s[3])));
}

// out = x / sqrt(mean x^2 + eps) * (weight + offset)
template <class T, class WT>
inline void rms_row(T* out, const T* x, const WT* weight, int64_t n, float eps, float offset) {
  const float squares = sum_row(x, n, [](vf v) { return vmul(v, v); });
  const vf scale = vset(1.0f / __builtin_sqrtf(squares / float(n) + eps));
  for (int64_t j = 0; j < n; j += W) {
    const vf w = vadd(ld_upto(weight + j, n - j), vset(offset));
    st_upto(out + j, vmul(vmul(ld_upto(x + j, n - j), scale), w), n - j);
  }
}

template <class T, class WT>
inline void layer_norm_row(T* out, const T* x, const WT* weight, const WT* bias, int64_t n, float eps) {
  const float mean = sum_row(x, n, [](vf v) { return v; }) / float(n);
  const vf m = vset(mean);
  const float squares = sum_row(x, n, [m](vf v) { return vmul(vsub(v, m), vsub(v, m)); });
  const vf scale = vset(1.0f / __builtin_sqrtf(squares / float(n) + eps));
  for (int64_t j = 0; j < n; j += W) {
    vf y = vmul(vmul(vsub(ld_upto(x + j, n - j), m), scale), ld_upto(weight + j, n - j));
    if (bias != nullptr) y = vadd(y, ld_upto(bias + j, n - j));
    st_upto(out + j, y, n - j);
  }
}

// Calls f with null pointers of the types of the rows and of the weight (the rows' or float32).
template <class F> inline void with_weight_dtype(int32_t dtype, int32_t weight_dtype, const F& f) {
  with_dtype(dtype, [&](auto* t) {
    if (weight_dtype == F32) f(t, (float*)nullptr); else f(t, t);
  });
}

void rms_norm(void* out, const void* x, const void* weight, int64_t rows, int64_t n, int64_t inner,
              int64_t outer_stride, int64_t inner_stride, float eps, float offset, int32_t dtype,
              int32_t weight_dtype) {
  with_weight_dtype(dtype, weight_dtype, [&](auto* t, auto* wt) {
    using T = typename pointee<decltype(t)>::type;
    using WT = typename pointee<decltype(wt)>::type;
    parallel_ranges(rows, rows * n / 8, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const T* row = static_cast<const T*>(x) + i / inner * outer_stride + i % inner * inner_stride;
        rms_row(static_cast<T*>(out) + i * n, row, static_cast<const WT*>(weight), n, eps, offset);
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
    parallel_ranges(rows, rows * n / 6, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const T* from = static_cast<const T*>(x) + i * n;
        T* sum = static_cast<T*>(residual) + i * n;
        for (int64_t j = 0; j < n; j += W) {
          st_upto(sum + j, vadd(ld_upto(from + j, n - j), ld_upto(sum + j, n - j)), n - j);
        }
        rms_row(static_cast<T*>(out) + i * n, sum, static_cast<const WT*>(weight), n, eps, offset);
      }
    });
  });
}

void layer_norm(void* out, const void* x, const void* weight, const void* bias, int64_t rows,
                int64_t n, int64_t inner, int64_t outer_stride, int64_t inner_stride, float eps,
                int32_t dtype, int32_t weight_dtype) {
  with_weight_dtype(dtype, weight_dtype, [&](auto* t, auto* wt) {
    using T = typename pointee<decltype(t)>::type;
    using WT = typename pointee<decltype(wt)>::type;
    parallel_ranges(rows, rows * n / 6, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const T* row = static_cast<const T*>(x) + i / inner * outer_stride + i % inner * inner_stride;
        layer_norm_row(static_cast<T*>(out) + i * n, row, static_cast<const WT*>(weight),
                       static_cast<const WT*>(bias), n, eps);
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
  }
  return x;
}

template <Activation kind, class T> inline void act_row(T* out, const T* x, int64_t n) {
  for (int64_t j = 0; j < n; j += W) st_upto(out + j, act(kind, ld_upto(x + j, n - j)), n - j);
}
template <Activation kind, class T, class U>
inline void act_mul_row(U* out, const T* gate, const T* up, int64_t n) {
  for (int64_t j = 0; j < n; j += W) {
    st_upto(out + j, vmul(act(kind, ld_upto(gate + j, n - j)), ld_upto(up + j, n - j)), n - j);
  }
}

template <class T> inline void act_row(int32_t kind, T* out, const T* x, int64_t n) {
  switch (kind) {
    case SILU: return act_row<SILU>(out, x, n);
    case GELU: return act_row<GELU>(out, x, n);
    case GELU_TANH: return act_row<GELU_TANH>(out, x, n);
    case RELU: return act_row<RELU>(out, x, n);
    case RELU2: return act_row<RELU2>(out, x, n);
  }
}
template <class T, class U>
inline void act_mul_row(int32_t kind, U* out, const T* gate, const T* up, int64_t n) {
  switch (kind) {
    case SILU: return act_mul_row<SILU>(out, gate, up, n);
    case GELU: return act_mul_row<GELU>(out, gate, up, n);
    case GELU_TANH: return act_mul_row<GELU_TANH>(out, gate, up, n);
    case RELU: return act_mul_row<RELU>(out, gate, up, n);
    case RELU2: return act_mul_row<RELU2>(out, gate, up, n);
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
    parallel(rows * pieces, rows * n, [&](int64_t i) {
      const int64_t row = i / pieces, at = i % pieces * grain;
      const T* gate = static_cast<const T*>(x) + row * stride + at;
      act_mul_row(kind, static_cast<T*>(out) + row * n + at, gate, gate + n, min_of(grain, n - at));
    });
  });
}

}  // namespace
}  // namespace headrace::HR_ISA

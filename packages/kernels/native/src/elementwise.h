// Sums, multiples, copies and widening of rows, element by element. Strides are in elements.

namespace headrace::HR_ISA {
namespace {

// f(row, first, many) over pieces of all rows.
template <class F> inline void over_pieces(int64_t rows, int64_t n, const F& f) {
  const int64_t grain = 4096, pieces = ceil_div(n, grain);  // a multiple of W: one tail a row
  parallel_ranges(rows * pieces, rows * n / 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t at = i % pieces * grain;
      f(i / pieces, at, min_of(grain, n - at));
    }
  });
}

// out [rows, n] = x + y
void add(void* out, const void* x, const void* y, int64_t rows, int64_t n, int64_t x_stride,
         int64_t y_stride, int32_t dtype) {
  with_dtype(dtype, [&](auto* t) {
    using T = typename pointee<decltype(t)>::type;
    over_pieces(rows, n, [&](int64_t row, int64_t at, int64_t many) {
      const T* a = static_cast<const T*>(x) + row * x_stride + at;
      const T* b = static_cast<const T*>(y) + row * y_stride + at;
      T* to = static_cast<T*>(out) + row * n + at;
      for (int64_t j = 0; j < many; j += W) {
        st_upto(to + j, vadd(ld_upto(a + j, many - j), ld_upto(b + j, many - j)), many - j);
      }
    });
  });
}

// exp(x) - 1 - x for x <= 0, by the series where the difference would lose its digits
inline vf vexp_rest(vf x) {
  vf series = vset(1.0f / 5040);
  series = vfma(series, x, vset(1.0f / 720));
  series = vfma(series, x, vset(1.0f / 120));
  series = vfma(series, x, vset(1.0f / 24));
  series = vfma(series, x, vset(1.0f / 6));
  series = vfma(series, x, vset(0.5f));
  const vf near = vmul(vmul(series, x), x);
  const vf far = vsub(vsub(vexp(x), vset(1.0f)), x);
  return vless(x, vset(-0.4f), far, near);
}

// out [n] = x > 0 ? alpha_p x^2 + beta x : alpha_n (expm1(min(x, eps)) - x) + beta x
void xielu(void* out, const void* x, int64_t n, float alpha_p, float alpha_n, float beta, float eps,
           int32_t dtype) {
  with_dtype(dtype, [&](auto* t) {
    using T = typename pointee<decltype(t)>::type;
    over_pieces(1, n, [&](int64_t, int64_t at, int64_t many) {
      const T* from = static_cast<const T*>(x) + at;
      T* to = static_cast<T*>(out) + at;
      for (int64_t j = 0; j < many; j += W) {
        const vf v = ld_upto(from + j, many - j);
        const vf low = vmin(v, vset(eps));
        const vf below = vmul(vset(alpha_n), vadd(vexp_rest(low), vsub(low, v)));
        const vf above = vmul(vset(alpha_p), vmul(v, v));
        const vf bent = vless(vzero(), v, above, below);
        st_upto(to + j, vfma(vset(beta), v, bent), many - j);
      }
    });
  });
}

// out [rows, n] = x * factor
void scale(void* out, const void* x, int64_t rows, int64_t n, int64_t stride, float factor,
           int32_t dtype) {
  with_dtype(dtype, [&](auto* t) {
    using T = typename pointee<decltype(t)>::type;
    over_pieces(rows, n, [&](int64_t row, int64_t at, int64_t many) {
      const T* from = static_cast<const T*>(x) + row * stride + at;
      T* to = static_cast<T*>(out) + row * n + at;
      for (int64_t j = 0; j < many; j += W) {
        st_upto(to + j, vmul(ld_upto(from + j, many - j), vset(factor)), many - j);
      }
    });
  });
}

// How gate() opens; the order is that of headrace_core.ops.OPENINGS.
enum Opening : int32_t { AS_IT_IS = 0, BY_SILU = 1, BY_SIGMOID = 2, BY_SOFTPLUS = 3 };

inline vf opening(int32_t kind, vf x) {
  switch (kind) {
    case BY_SILU: return act(SILU, x);
    case BY_SIGMOID: return vsigmoid(x);
    case BY_SOFTPLUS: return vsoftplus(x);
  }
  return x;
}

// out [rows, n] = x * act(gate)
template <class T>
inline void gate_values(T* out, const T* x, const T* by, int64_t rows, int64_t n, int64_t x_stride,
                        int64_t by_stride, int32_t kind) {
  over_pieces(rows, n, [&](int64_t row, int64_t at, int64_t many) {
    const T *a = x + row * x_stride + at, *b = by + row * by_stride + at;
    T* to = out + row * n + at;
    for (int64_t j = 0; j < many; j += W) {
      const vf open = opening(kind, ld_upto(b + j, many - j));
      st_upto(to + j, vmul(ld_upto(a + j, many - j), open), many - j);
    }
  });
}

// The same where each of a row's gates opens n / gates neighbours.
template <class T>
inline void gate_runs(T* out, const T* x, const T* by, int64_t rows, int64_t n, int64_t gates, int64_t x_stride,
                      int64_t by_stride, int32_t kind) {
  const int64_t run = n / gates;
  parallel_ranges(rows * gates, rows * n / 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / gates, at = i % gates;
      const T* from = x + row * x_stride + at * run;
      const vf open = opening(kind, vset(to_float(by[row * by_stride + at])));
      T* to = out + row * n + at * run;
      for (int64_t j = 0; j < run; j += W) st_upto(to + j, vmul(ld_upto(from + j, run - j), open), run - j);
    }
  });
}

void gate(void* out, const void* x, const void* by, int64_t rows, int64_t n, int64_t gates, int64_t x_stride,
          int64_t by_stride, int32_t kind, int32_t dtype) {
  with_dtype(dtype, [&](auto* t) {
    using T = typename pointee<decltype(t)>::type;
    T* to = static_cast<T*>(out);
    const T *from = static_cast<const T*>(x), *open = static_cast<const T*>(by);
    if (gates == n) gate_values(to, from, open, rows, n, x_stride, by_stride, kind);
    else gate_runs(to, from, open, rows, n, gates, x_stride, by_stride, kind);
  });
}

// out [rows, n] = min(max(x, low), high)
void clamp(void* out, const void* x, int64_t rows, int64_t n, int64_t stride, float low, float high,
           int32_t dtype) {
  with_dtype(dtype, [&](auto* t) {
    using T = typename pointee<decltype(t)>::type;
    over_pieces(rows, n, [&](int64_t row, int64_t at, int64_t many) {
      const T* from = static_cast<const T*>(x) + row * stride + at;
      T* to = static_cast<T*>(out) + row * n + at;
      for (int64_t j = 0; j < many; j += W) {
        const vf v = ld_upto(from + j, many - j);
        st_upto(to + j, vmin(vset(high), vmax(vset(low), v)), many - j);
      }
    });
  });
}

// out [rows, inner, n] = x; of any type: n and strides are in bytes.
void copy_rows(void* out, const void* x, int64_t rows, int64_t inner, int64_t n, int64_t out_row,
               int64_t out_inner, int64_t x_row, int64_t x_inner) {
  parallel_ranges(rows * inner, rows * inner * n / 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / inner, at = i % inner;
      __builtin_memcpy(static_cast<char*>(out) + row * out_row + at * out_inner,
                       static_cast<const char*>(x) + row * x_row + at * x_inner, size_t(n));
    }
  });
}

// out [rows, M, n] = residual [rows, M, n], if there is one, + weights [rows, M, N] times x [rows, N, n]
void mix(void* out, const void* x, const float* weights, const void* residual, int64_t rows, int64_t M, int64_t N,
         int64_t n, int64_t x_row, int64_t x_inner, int64_t w_row, int64_t w_inner, int64_t r_row,
         int64_t r_inner, int32_t dtype) {
  with_dtype(dtype, [&](auto* t) {
    using T = typename pointee<decltype(t)>::type;
    parallel_ranges(rows * M, rows * M * (N + 1) * n / 12, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = i / M, m = i % M;
        const T* from = static_cast<const T*>(x) + row * x_row;
        const T* base = static_cast<const T*>(residual) + row * r_row + m * r_inner;
        const float* by = weights + row * w_row + m * w_inner;
        T* to = static_cast<T*>(out) + i * n;
        for (int64_t j = 0; j < n; j += W) {
          vf sum = residual == nullptr ? vzero() : ld_upto(base + j, n - j);
          for (int64_t k = 0; k < N; ++k) {
            sum = vadd(sum, vmul(vset(by[k]), ld_upto(from + k * x_inner + j, n - j)));
          }
          st_upto(to + j, sum, n - j);
        }
      }
    });
  });
}

// out [rows, n] = x, or soft_cap * tanh(x / soft_cap) if soft_cap > 0
void to_float32(float* out, const void* x, int64_t rows, int64_t n, int64_t stride, float soft_cap,
           int32_t dtype) {
  with_dtype(dtype, [&](auto* t) {
    using T = typename pointee<decltype(t)>::type;
    over_pieces(rows, n, [&](int64_t row, int64_t at, int64_t many) {
      const T* from = static_cast<const T*>(x) + row * stride + at;
      float* to = out + row * n + at;
      for (int64_t j = 0; j < many; j += W) {
        vf v = ld_upto(from + j, many - j);
        if (soft_cap > 0) v = vmul(vtanh(vdiv(v, vset(soft_cap))), vset(soft_cap));
        st_upto(to + j, v, many - j);
      }
    });
  });
}

}  // namespace
}  // namespace headrace::HR_ISA

// A small linear layer for each head, over weights packed head by head as in linear.h, multiplied by
// panel_product.h on every instruction set: out[t][h] = weight[h] x[t][h].

namespace headrace::HR_ISA {
namespace {

// x [rows][heads][K], rows and heads apart, in the type that panels meet.
template <class A> struct HeadRows {
  const A* data;
  int64_t row_stride, head_stride;
};

template <class A, class T>
inline HeadRows<A> readable_heads(const T* x, int64_t rows, int64_t heads, int64_t K, int64_t x_row, int64_t x_head) {
  if constexpr (sizeof(A) == sizeof(T)) {
    return {reinterpret_cast<const A*>(x), x_row, x_head};
  } else {
    float* wide = static_cast<float*>(scratch(SCRATCH_A, size_t(rows * heads * K + W) * sizeof(float)));
    parallel_ranges(rows * heads, rows * heads * K / 16, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const T* from = x + i / heads * x_row + i % heads * x_head;
        for (int64_t k = 0; k < K; k += W) st_upto(wide + i * K + k, ld_upto(from + k, K - k), K - k);
      }
    });
    return {wide, heads * K, K};
  }
}

template <class T>
inline void run_head_linear(T* out, const T* x, const T* weight, int64_t rows, int64_t heads, int64_t N,
                            int64_t K, int64_t x_row, int64_t x_head) {
  using A = typename ActivationTraits<T>::A;
  const HeadRows<A> a = readable_heads<A>(x, rows, heads, K, x_row, x_head);
  const int64_t size = Packed<T>::elements(N, K), panels = ceil_div(N, PANEL), pieces = ceil_div(rows, ROWS_PIECE);
  const int64_t runs = heads * pieces < RUNS * pool_size() ? panels : 1;  // tasks of a head's panels
  parallel(heads * pieces * runs, rows * heads * N * K / 32, [&](int64_t task) {
    const int64_t run = task % runs, i = task / runs % pieces, head = task / runs / pieces;
    const int64_t begin = i * rows / pieces, many = (i + 1) * rows / pieces - begin;
    const Packed<T> packed{weight + head * size, N, K};
    const Rows<A> own{a.data + head * a.head_stride, a.row_stride, nullptr};
    float* sums = static_cast<float*>(scratch(SCRATCH_TASK, size_t(ROWS_PIECE * PANEL) * sizeof(float)));
    for (int64_t p = run * panels / runs; p < (run + 1) * panels / runs; ++p) {
      const auto done = [&](int64_t first, int64_t count, const float* from) {
        for (int64_t r = 0; r < count; ++r) {
          finish_row(out + ((begin + first + r) * heads + head) * N + p * PANEL, from + r * PANEL,
                     static_cast<const T*>(nullptr), packed.features(p));
        }
      };
      panel_product(own, begin, many, K, packed.panel(p), packed.vectors(p), sums, packed.panel(p + 1), done);
    }
  });
}

// weight: of all heads, each as linear_pack leaves it. out is contiguous; K's stride in x is 1.
void head_linear(void* out, const void* x, const void* weight, int64_t rows, int64_t heads, int64_t N,
                 int64_t K, int64_t x_row, int64_t x_head, int32_t dtype) {
  if (rows * heads == 0) return;
  with_dtype(dtype, [&](auto* t) {
    using T = typename pointee<decltype(t)>::type;
    run_head_linear(static_cast<T*>(out), static_cast<const T*>(x), static_cast<const T*>(weight), rows, heads, N, K,
                    x_row, x_head);
  });
}

}  // namespace
}  // namespace headrace::HR_ISA

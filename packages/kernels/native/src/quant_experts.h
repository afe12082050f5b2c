// Linear layers of experts over integer weights: entries sorted by expert as in moe.h, products as in
// quant_linear.h. An entry's row is put in fixed point for itself, so its bits are those of its expert alone.

namespace headrace::HR_ISA {
namespace {
namespace quant {

// lines [entries][N]: line e = row(e) times the weight of e's expert, plus its bias [experts][N].
template <class T, class L, class Row>
inline void experts_product(L* lines, const Row& row, const void* const* weights, const T* biases,
                            const Sorted& sorted, int limbs) {
  Layout first = layout_of(weights[0]);
  first.has_zeros = 1;  // another expert may have some: rows are summed for them
  const int64_t entries = sorted.begin[sorted.used], panels = first.panels(), most = TASK_LINES / limbs;
  const auto sorted_row = [&](int64_t i) { return row(int64_t(sorted.order[i])); };
  with_activations<T>(sorted_row, entries, first, limbs, [&](const auto& f) {
    parallel(sorted.used * panels, entries * limbs * first.N * first.K / 64, [&](int64_t task) {
      const int64_t i = task / panels, p = task % panels, expert = sorted.expert[i], end = sorted.begin[i + 1];
      const Layout l = layout_of(weights[expert]);  // scales may be stored otherwise than the first's
      const int64_t at = p * QPANEL, features = min_of(QPANEL, l.N - at);
      const T* bias = biases == nullptr ? nullptr : biases + expert * l.N + at;
      const Panels own(l, weights[expert]);
      const Sums sums = task_sums(1);
      for (int64_t begin = sorted.begin[i]; begin < end; begin += most) {
        const int64_t many = min_of(most, end - begin);
        panel_rows_of(own[p], own.front(p + 1), f, begin, many, sums);
        for (int64_t r = begin; r < begin + many; ++r) {
          finish_row(lines + int64_t(sorted.order[r]) * l.N + at, sums.real + (r - begin) * QPANEL, f.scales[r], bias,
                     features);
        }
      }
    });
  });
}

}  // namespace quant

// weights: addresses of the experts' packed weights, of one shape and with equal groups, minimums in all or none.
// x has a row for each `share` entries: k, or 1. out [rows, k, N], or with `by` [rows, N].
int32_t quant_routed(void* out, const void* x, const void* weights, const void* biases, const float* by,
                     const int64_t* ids, int64_t rows, int64_t k, int64_t share, int64_t experts, int64_t stride,
                     int32_t limbs, int32_t dtype) {
  const int64_t entries = rows * k;
  Sorted sorted;
  if (sort_entries(ids, entries, experts, 0, sorted) != OK) return BAD_INDEX;
  if (entries == 0) return OK;
  const auto* packed = static_cast<const void* const*>(weights);
  const int64_t N = quant::layout_of(packed[0]).N;
  with_dtype(dtype, [&](auto* t) {
    using T = typename pointee<decltype(t)>::type;
    const auto row = [&](int64_t e) { return static_cast<const T*>(x) + e / share * stride; };
    if (by == nullptr) {
      quant::experts_product(static_cast<T*>(out), row, packed, static_cast<const T*>(biases), sorted, limbs);
      return;
    }
    float* lines = static_cast<float*>(scratch(SCRATCH_C, size_t(entries * N + W) * sizeof(float)));
    quant::experts_product(lines, row, packed, static_cast<const T*>(biases), sorted, limbs);
    sum_places(static_cast<T*>(out), by, rows, k, N, [&](int64_t e, int64_t j, int64_t left) {
      return ld_upto(lines + e * N + j, left);
    });
  });
  return OK;
}

}  // namespace
}  // namespace headrace::HR_ISA

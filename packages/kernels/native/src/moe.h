// Mixture of gated experts over packed weights.
//
// Each (row, place) of topk_ids is one entry. Entries are sorted by expert, so that an expert's
// panels are read once for all its rows; results go back to the entry's own line, and a row sums
// its lines in the order of topk_ids.

namespace headrace::HR_ISA {
namespace {

// Entries sorted by expert: those of the i-th used expert are order[begin[i]] .. order[begin[i+1]-1].
struct Sorted {
  int32_t* order;
  int32_t* begin;
  int32_t* expert;
  int64_t used;
};

inline int32_t sort_entries(const int64_t* ids, int64_t entries, int64_t experts, Sorted& sorted) {
  int32_t* memory = static_cast<int32_t*>(scratch(SCRATCH_B, size_t(2 * entries + 3 * experts + 2) * 4));
  int32_t* counts = memory;
  sorted = {counts + experts, counts + experts + 2 * entries, counts + experts + 2 * entries + experts + 1, 0};
  for (int64_t e = 0; e < experts; ++e) counts[e] = 0;
  for (int64_t i = 0; i < entries; ++i) {
    if (ids[i] < 0 || ids[i] >= experts) return BAD_INDEX;
    ++counts[ids[i]];
  }
  int32_t at = 0;
  for (int64_t e = 0; e < experts; ++e) {
    const int32_t many = counts[e];
    counts[e] = at;
    if (many > 0) {
      sorted.expert[sorted.used] = int32_t(e);
      sorted.begin[sorted.used++] = at;
    }
    at += many;
  }
  sorted.begin[sorted.used] = at;
  for (int64_t i = 0; i < entries; ++i) sorted.order[counts[ids[i]]++] = int32_t(i);
  return OK;
}

// out [entries][N]: line e = row index[e] of x times the weight of e's expert.
template <class WT, class A, class T>
inline void experts_product(T* out, const Rows<A>& x, const WT* weights, const Sorted& sorted,
                            int64_t entries, int64_t N, int64_t K) {
  const int64_t size = Packed<WT>::elements(N, K), panels = ceil_div(N, PANEL);
  parallel(sorted.used * panels, entries * N * K / 32, [&](int64_t task) {
    const int64_t i = task / panels, p = task % panels;
    const Packed<WT> packed{weights + sorted.expert[i] * size, N, K};
    float* sums = static_cast<float*>(scratch(SCRATCH_TASK, size_t(ROWS_PIECE * PANEL) * sizeof(float)));
    for (int64_t begin = sorted.begin[i]; begin < sorted.begin[i + 1]; begin += ROWS_PIECE) {
      const int64_t many = min_of(ROWS_PIECE, sorted.begin[i + 1] - begin);
      const auto done = [&](int64_t first, int64_t count, const float* from) {
        for (int64_t r = 0; r < count; ++r) {
          finish_row(out + int64_t(sorted.order[begin + first + r]) * N + p * PANEL, from + r * PANEL,
                     static_cast<const T*>(nullptr), packed.features(p));
        }
      };
      panel_product(x, begin, many, K, packed.panel(p), packed.vectors(p), sums, packed.panel(p + 1), done);
    }
  });
}

template <class T>
inline int32_t run_moe(T* out, const T* x, const T* gate_up, const T* down, const float* weights,
                       const int64_t* ids, int64_t rows, int64_t k, int64_t experts, int64_t H,
                       int64_t I, int64_t stride, int32_t kind) {
  using A = typename Meeting<T>::A;
  const int64_t entries = rows * k;
  Sorted sorted;
  if (sort_entries(ids, entries, experts, sorted) != OK) return BAD_INDEX;
  int32_t* index = sorted.order + entries;  // row of x behind each sorted entry
  for (int64_t e = 0; e < entries; ++e) index[e] = int32_t(sorted.order[e] / k);

  // Lines of the intermediate results, float32 but for the hidden ones that the kernel reads as A.
  const int64_t wide = entries * (2 * I > H ? 2 * I : H);
  float* lines = static_cast<float*>(scratch(SCRATCH_C, size_t(wide + entries * I + 16) * sizeof(float)));
  A* hidden = reinterpret_cast<A*>(lines + wide);

  Rows<A> a = readable<A>(x, rows, H, stride, SCRATCH_A);
  a.index = index;
  experts_product(lines, a, gate_up, sorted, entries, 2 * I, H);
  parallel_ranges(entries, entries * I, [&](int64_t begin, int64_t end) {
    for (int64_t e = begin; e < end; ++e) {
      act_mul_row(kind, hidden + e * I, lines + e * 2 * I, lines + e * 2 * I + I, I);
    }
  });
  experts_product(lines, Rows<A>{hidden, I, sorted.order}, down, sorted, entries, H, I);
  parallel_ranges(rows, entries * H / 8, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t j = 0; j < H; j += W) {
        vf sum = vzero();
        for (int64_t place = 0; place < k; ++place) {
          const int64_t e = r * k + place;
          sum = vadd(sum, vmul(vset(weights[e]), ld_upto(lines + e * H + j, H - j)));
        }
        st_upto(out + r * H + j, sum, H - j);
      }
    }
  });
  return OK;
}

int32_t moe(void* out, const void* x, const void* gate_up, const void* down, const float* weights,
            const int64_t* ids, int64_t rows, int64_t k, int64_t experts, int64_t H, int64_t I,
            int64_t stride, int32_t kind, int32_t dtype) {
  int32_t status = OK;
  with_dtype(dtype, [&](auto* t) {
    using T = typename pointee<decltype(t)>::type;
    status = run_moe(static_cast<T*>(out), static_cast<const T*>(x), static_cast<const T*>(gate_up),
                     static_cast<const T*>(down), weights, ids, rows, k, experts, H, I, stride, kind);
  });
  return status;
}

}  // namespace
}  // namespace headrace::HR_ISA

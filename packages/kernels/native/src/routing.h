// Which experts a row goes to: softmax over all of them, the k likeliest kept.

namespace headrace::HR_ISA {
namespace {

// Choosing by the scores themselves: rounding in the softmax makes no ties. The first wins a tie.
inline void choose_largest(int64_t* ids, const float* scores, int64_t experts, int64_t k, char* taken) {
  for (int64_t e = 0; e < experts; ++e) taken[e] = 0;
  for (int64_t place = 0; place < k; ++place) {
    int64_t best = -1;
    for (int64_t e = 0; e < experts; ++e) {
      if (!taken[e] && (best < 0 || scores[e] > scores[best])) best = e;
    }
    taken[best] = 1;
    ids[place] = best;
  }
}

template <class T>
inline void route_row(float* weights, int64_t* ids, const T* x, int64_t experts, int64_t k,
                      bool renormalise) {
  float* scores = static_cast<float*>(scratch(SCRATCH_TASK, size_t(experts + W) * 5));
  for (int64_t e = 0; e < experts; e += W) st_upto(scores + e, ld_upto(x + e, experts - e), experts - e);
  choose_largest(ids, scores, experts, k, reinterpret_cast<char*>(scores + experts));
  const vf largest = vset(scores[ids[0]]);
  for (int64_t e = 0; e < experts; e += W) {
    st_upto(scores + e, vexp(vsub(ld_upto(scores + e, experts - e), largest)), experts - e);
  }
  float sum = renormalise ? 0.0f : sum_row(scores, experts, [](vf v) { return v; });
  for (int64_t place = 0; place < k; ++place) {
    weights[place] = scores[ids[place]];
    if (renormalise) sum += weights[place];
  }
  for (int64_t place = 0; place < k; ++place) weights[place] /= sum;
}

// x [rows, experts] -> weights, ids [rows, k], best first
int32_t topk_softmax(float* weights, int64_t* ids, const void* x, int64_t rows, int64_t experts,
                     int64_t k, int64_t stride, int32_t renormalise, int32_t dtype) {
  if (k < 1 || k > experts) return BAD_LENGTHS;
  with_dtype(dtype, [&](auto* t) {
    using T = typename pointee<decltype(t)>::type;
    parallel_ranges(rows, rows * experts * (k + 2), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        route_row(weights + i * k, ids + i * k, static_cast<const T*>(x) + i * stride, experts, k,
                  renormalise != 0);
      }
    });
  });
  return OK;
}

}  // namespace
}  // namespace headrace::HR_ISA

// Which experts a row goes to, and how much each counts: headrace_core.ops.RouteExpertsOp.

namespace headrace::HR_ISA {
namespace {

struct Routing {
  int64_t experts, k, groups, top_groups;
  int32_t scoring, sum_of_two;
  float jitter;
};

// The k largest of ranked[count], largest first, of equals the first. values[k] is scratch.
inline void choose_largest(int64_t* ids, float* values, const float* ranked, int64_t count, int64_t k) {
  for (int64_t e = 0; e < count; ++e) {
    if (e >= k && !(ranked[e] > values[k - 1])) continue;
    int64_t place = e < k ? e : k - 1;
    for (; place > 0 && ranked[e] > values[place - 1]; --place) {
      values[place] = values[place - 1];
      ids[place] = ids[place - 1];
    }
    values[place] = ranked[e];
    ids[place] = e;
  }
}

// How much a group counts: its best of `ranked`, or its best two of `counted` together.
inline float group_value(const float* ranked, const float* counted, int64_t size, bool sum_of_two) {
  float values[2];
  int64_t ids[2];
  if (!sum_of_two || size < 2) {
    choose_largest(ids, values, sum_of_two ? counted : ranked, size, 1);
    return values[0];
  }
  choose_largest(ids, values, counted, size, 2);
  return values[0] + values[1];
}

// ranked = -infinity for the experts of all groups but the best. `spare` has 2 * groups floats and
// `chosen` top_groups places.
inline void keep_best_groups(float* ranked, const float* counted, const Routing& r, float* spare, int64_t* chosen) {
  const int64_t size = r.experts / r.groups;
  float* kept = spare + r.groups;
  for (int64_t g = 0; g < r.groups; ++g) {
    spare[g] = group_value(ranked + g * size, counted + g * size, size, r.sum_of_two != 0);
  }
  choose_largest(chosen, kept, spare, r.groups, r.top_groups);
  for (int64_t g = 0; g < r.groups; ++g) kept[g] = 0;
  for (int64_t i = 0; i < r.top_groups; ++i) kept[chosen[i]] = 1;
  for (int64_t e = 0; e < r.experts; ++e) {
    if (kept[e / size] == 0) ranked[e] = -__builtin_inff();
  }
}

// scores[e] of x[e]: shares of a softmax, or a sigmoid of each.
inline void score_row(float* scores, const float* x, int64_t experts, int32_t scoring) {
  if (scoring == SIGMOID) {
    for (int64_t e = 0; e < experts; e += W) st(scores + e, vsigmoid(ld(x + e)));
    return;
  }
  float largest = x[0];
  for (int64_t e = 1; e < experts; ++e) largest = x[e] > largest ? x[e] : largest;
  const vf top = vset(largest);
  for (int64_t e = 0; e < experts; e += W) st(scores + e, vexp(vsub(ld(x + e), top)));
  const vf sum = vset(sum_row(scores, experts, [](vf v) { return v; }));
  for (int64_t e = 0; e < experts; e += W) st(scores + e, vdiv(ld(scores + e), sum));
}

// Each expert in turn, weighed among those left that are near it. Taken ones become -infinity, of
// which the exponential is 0.
inline void choose_in_turn(float* weights, int64_t* ids, float* left, const Routing& r) {
  for (int64_t place = 0; place < r.k; ++place) {
    float own;
    choose_largest(ids + place, &own, left, r.experts, 1);
    const vf best = vset(own), reach = vset(2.0f * r.jitter);
    const float sum = hsum(sum_lanes(r.experts, [&](int64_t e, int64_t n) {
      const vf x = ld_upto(left + e, n);
      const vf limit = vmul(reach, vmax(best, vabs(x)));
      return vless(limit, vsub(best, x), vzero(), vexp(vsub(x, best)));
    }));
    weights[place] = 1.0f / sum;
    left[ids[place]] = -__builtin_inff();
  }
}

template <class T>
inline void route_row(float* weights, int64_t* ids, const T* x, const float* bias, const Routing& r) {
  const int64_t wide = round_up(r.experts, W);
  float* ranked = static_cast<float*>(
      scratch(SCRATCH_TASK, size_t(2 * wide + 2 * r.groups + r.k) * sizeof(float) + size_t(r.top_groups) * 8 + 8));
  float *scores = ranked + wide, *spare = scores + wide, *values = spare + 2 * r.groups;
  int64_t* chosen = reinterpret_cast<int64_t*>(round_up(int64_t(values + r.k), 8));
  for (int64_t e = 0; e < r.experts; e += W) st(ranked + e, ld_upto(x + e, r.experts - e));
  if (r.scoring == SPARSEMIXER) return choose_in_turn(weights, ids, ranked, r);
  score_row(scores, ranked, r.experts, r.scoring);
  // Without a bias the order is that of x itself: rounding in the scores makes no ties.
  if (bias != nullptr) {
    for (int64_t e = 0; e < r.experts; ++e) ranked[e] = scores[e] + bias[e];
  }
  if (r.groups > 1) keep_best_groups(ranked, bias != nullptr ? ranked : scores, r, spare, chosen);
  choose_largest(ids, values, ranked, r.experts, r.k);
  for (int64_t place = 0; place < r.k; ++place) weights[place] = scores[ids[place]];
}

inline void weigh(float* weights, int64_t k, bool renormalise, float scale) {
  float sum = 0.0f;
  for (int64_t place = 0; place < k; ++place) sum += weights[place];
  const float by = renormalise ? (sum > 1e-20f || sum != sum ? sum : 1e-20f) : 1.0f;
  for (int64_t place = 0; place < k; ++place) weights[place] = weights[place] / by * scale;
}

// x [rows, experts] -> weights, ids [rows, k], best first. bias may be null.
int32_t route_experts(float* weights, int64_t* ids, const void* x, const float* bias, int64_t rows,
                      int64_t experts, int64_t k, int64_t groups, int64_t top_groups, int64_t stride,
                      float scale, float jitter, int32_t scoring, int32_t sum_of_two,
                      int32_t renormalise, int32_t dtype) {
  if (k < 1 || groups < 1 || experts % groups != 0 || top_groups < 1 || top_groups > groups ||
      k > experts / groups * top_groups) {
    return BAD_LENGTHS;
  }
  const Routing routing{experts, k, groups, top_groups, scoring, sum_of_two, jitter};
  with_dtype(dtype, [&](auto* t) {
    using T = typename pointee<decltype(t)>::type;
    parallel_ranges(rows, rows * experts * 3, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        route_row(weights + i * k, ids + i * k, static_cast<const T*>(x) + i * stride, bias, routing);
        weigh(weights + i * k, k, renormalise != 0, scale);
      }
    });
  });
  return OK;
}

}  // namespace
}  // namespace headrace::HR_ISA

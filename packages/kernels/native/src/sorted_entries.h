// Entries sorted by the expert or the adapter that each goes to, so that its weights are read once for all.

namespace headrace::HR_ISA {
namespace {

// Those of the i-th used expert are order[begin[i]] .. order[begin[i+1]-1].
struct Sorted {
  int32_t* order;
  int32_t* begin;
  int32_t* expert;
  int64_t used;
  int64_t entries() const { return begin[used]; }
};

// expert(i) is that of entry i. Entries of the `others` from `experts` on are left out.
template <class Expert>
inline int32_t sort_by(int64_t entries, int64_t experts, int64_t others, Sorted& sorted, const Expert& expert) {
  int32_t* memory = static_cast<int32_t*>(scratch(SCRATCH_B, size_t(2 * entries + 3 * experts + 2) * 4));
  int32_t* counts = memory;
  sorted = {counts + experts, counts + experts + 2 * entries, counts + experts + 2 * entries + experts + 1, 0};
  for (int64_t e = 0; e < experts; ++e) counts[e] = 0;
  for (int64_t i = 0; i < entries; ++i) {
    const int64_t e = expert(i);
    if (e < 0 || e >= experts + others) return BAD_INDEX;
    if (e < experts) ++counts[e];
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
  for (int64_t i = 0; i < entries && at > 0; ++i) {
    const int64_t e = expert(i);
    if (e < experts) sorted.order[counts[e]++] = int32_t(i);
  }
  return OK;
}

inline int32_t sort_entries(const int64_t* ids, int64_t entries, int64_t experts, int64_t others, Sorted& sorted) {
  return sort_by(entries, experts, others, sorted, [ids](int64_t i) { return ids[i]; });
}

}  // namespace
}  // namespace headrace::HR_ISA

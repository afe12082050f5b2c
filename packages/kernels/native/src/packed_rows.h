// Rows of a packed weight: an embedding whose table is also the head is held once, packed.

namespace headrace::HR_ISA {
namespace {

int32_t linear_rows(void* out, const int64_t* ids, const void* packed, int64_t rows, int64_t N,
                    int64_t K, int32_t dtype) {
  int32_t status = OK;
  with_dtype(dtype, [&](auto* t) {
    using T = typename pointee<decltype(t)>::type;
    const Packed<T> weight{static_cast<const T*>(packed), N, K};
    // A row touches a cache line per unit, so a few rows are already worth a second thread.
    parallel_ranges(rows, rows * K * 4, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        if (ids[i] < 0 || ids[i] >= N) {
          __atomic_store_n(&status, int32_t(BAD_INDEX), __ATOMIC_RELAXED);
          continue;
        }
        const int64_t p = ids[i] / PANEL;
        unpack_feature<T, ActivationTraits<T>::STEP>(static_cast<T*>(out) + i * K, weight.panel(p),
                                            int64_t(weight.vectors(p)) * W, ids[i] % PANEL, K);
      }
    });
  });
  return status;
}

}  // namespace
}  // namespace headrace::HR_ISA

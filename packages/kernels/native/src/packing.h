// The copy at the heart of packing: rows of a weight become columns of a panel.
//
// A unit is what lies side by side for one feature: one element, or a pair of bfloat16. The copy
// goes in blocks of one cache line per row, so that a block's reads are whole lines and its writes
// stay in the first cache until they, too, are whole lines.

namespace headrace::HR_ISA {
namespace {

template <size_t BYTES> struct UnitOf;
template <> struct UnitOf<1> { using type = uint8_t; };
template <> struct UnitOf<2> { using type = uint16_t; };
template <> struct UnitOf<4> { using type = uint32_t; };

// to[k * width + n] = row n's unit k; rows from `features` on are zero. Rows are stride_bytes apart.
template <class U>
inline void rows_to_columns(U* to, int64_t width, const char* from, int64_t stride_bytes,
                            int64_t features, int64_t units) {
  constexpr int64_t LINE = 64 / int64_t(sizeof(U));
  for (int64_t k = 0; k < units; k += LINE) {
    const int64_t many = min_of(LINE, units - k);
    for (int64_t n = 0; n < width; ++n) {
      U line[LINE] = {};
      if (n < features) {
        const char* source = from + n * stride_bytes + k * int64_t(sizeof(U));
        if (many == LINE) {
          __builtin_memcpy(line, source, 64);
        } else {
          __builtin_memcpy(line, source, size_t(many) * sizeof(U));
        }
      }
      U* column = to + k * width + n;
      if (many == LINE) {
        for (int64_t j = 0; j < LINE; ++j) column[j * width] = line[j];
      } else {
        for (int64_t j = 0; j < many; ++j) column[j * width] = line[j];
      }
    }
  }
}

// out[k] = unit k of one column of a panel.
template <class U>
inline void column_to_row(char* out, const U* column, int64_t width, int64_t units) {
  for (int64_t k = 0; k < units; ++k) {
    __builtin_memcpy(out + k * int64_t(sizeof(U)), column + k * width, sizeof(U));
  }
}

// Packs one panel: k-major, STEP elements of a feature side by side, zeros at the ends.
template <class T, int STEP>
inline void pack_panel(T* to, int64_t width, const T* from, int64_t stride, int64_t features, int64_t K) {
  using U = typename UnitOf<sizeof(T) * STEP>::type;
  const int64_t whole = K / STEP, stride_bytes = stride * int64_t(sizeof(T));
  rows_to_columns(reinterpret_cast<U*>(to), width, reinterpret_cast<const char*>(from), stride_bytes,
                  features, whole);
  if (STEP > 1 && whole * STEP < K) {  // the last pair has one element
    T* last = to + whole * STEP * width;
    for (int64_t n = 0; n < width; ++n) {
      for (int64_t s = 0; s < STEP; ++s) {
        const int64_t k = whole * STEP + s;
        last[n * STEP + s] = n < features && k < K ? from[n * stride + k] : T{};
      }
    }
  }
}

// Reads feature n of a panel back into out[K].
template <class T, int STEP>
inline void unpack_feature(T* out, const T* panel, int64_t width, int64_t n, int64_t K) {
  using U = typename UnitOf<sizeof(T) * STEP>::type;
  const int64_t whole = K / STEP;
  column_to_row(reinterpret_cast<char*>(out), reinterpret_cast<const U*>(panel) + n, width, whole);
  for (int64_t k = whole * STEP; k < K; ++k) {
    out[k] = panel[whole * STEP * width + n * STEP + (k - whole * STEP)];
  }
}

}  // namespace
}  // namespace headrace::HR_ISA

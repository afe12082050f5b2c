// What torch computes element by element, with the bits that torch gives: operations whose result
// IEEE 754 fixes, each rounded once to the type of the output, and copies. Any strides, in elements.

namespace headrace::HR_ISA {
namespace {

// Codes of graph_torch.py.
enum Elementwise : int32_t { COPY, ADD, SUB, MUL, DIV, NEG, ABS };
enum Element : int32_t { INT64 = 3, INT32 = 4, BOOL = 5 };  // besides those of DType

// One loop: how often, and what a step of it is for the output and both operands.
struct Loop { int64_t size, out, a, b; };

// Where element [i][j][k][0] of four loops lies, for successive rows.
struct Walk {
  const Loop* loops;
  int64_t at[3];

  Walk(const Loop* over, int64_t row) : loops(over) {
    at[2] = row % over[2].size;
    at[1] = row / over[2].size % over[1].size;
    at[0] = row / over[2].size / over[1].size;
  }
  void next() {
    for (int d = 2; d > 0; --d) {
      if (++at[d] < loops[d].size) return;
      at[d] = 0;
    }
    ++at[0];
  }
  int64_t place(int64_t Loop::*step) const {
    return at[0] * (loops[0].*step) + at[1] * (loops[1].*step) + at[2] * (loops[2].*step);
  }
};

// Stores as IEEE 754 has it; st() of some levels makes subnormal bfloat16 numbers 0.
template <class T> inline void store_fully(T* to, vf x, int64_t left) { st_upto(to, x, left); }
#if defined(HR_DOT_BF16)
inline void store_fully(bf16* to, vf x, int64_t left) {
  const __m512i u = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_epi32(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  r = _mm512_mask_or_epi32(r, nan, _mm512_srli_epi32(u, 16), _mm512_set1_epi32(0x40));
  const __mmask16 which = left >= W ? __mmask16(-1) : __mmask16((1u << left) - 1);
  _mm256_mask_storeu_epi16(to, which, _mm512_cvtepi32_epi16(r));
}
#endif

// What two numbers give.
inline vf combined(int32_t operation, vf a, vf b) {
  switch (operation) {
    case ADD: return vadd(a, b);
    case SUB: return vsub(a, b);
    case MUL: return vmul(a, b);
    case DIV: return vdiv(a, b);
    case NEG: return vsub(vset(-0.0f), a);
    case ABS: return vabs(a);
    default: return a;
  }
}

// f(out, a, b, n) of places and length, for every row of the innermost loop, long ones in pieces.
template <class F> inline void over_places(const Loop* loops, const F& f) {
  const Loop& inner = loops[3];
  const int64_t rows = loops[0].size * loops[1].size * loops[2].size;
  const int64_t grain = 4096, pieces = ceil_div(inner.size, grain);
  parallel_ranges(rows * pieces, rows * inner.size / 8, [&](int64_t begin, int64_t end) {
    Walk walk(loops, begin / pieces);
    for (int64_t i = begin, piece = begin % pieces; i < end; ++i) {
      const int64_t at = piece * grain;
      f(walk.place(&Loop::out) + at * inner.out, walk.place(&Loop::a) + at * inner.a,
        walk.place(&Loop::b) + at * inner.b, min_of(grain, inner.size - at));
      if (++piece == pieces) {
        piece = 0;
        walk.next();
      }
    }
  });
}

// Rows of one type, the output and the first operand without gaps, the second too or one number.
template <class T, class F>
inline void plain_rows(const Loop* loops, void* out, const void* a, const void* b, const F& f) {
  const bool repeated = loops[3].b == 0;
  over_places(loops, [&](int64_t out_at, int64_t a_at, int64_t b_at, int64_t n) {
    T* to = static_cast<T*>(out) + out_at;
    const T* x = static_cast<const T*>(a) + a_at;
    const T* y = static_cast<const T*>(b) + b_at;
    if (repeated) {
      const vf one = vset(to_float(*y));
      for (int64_t j = 0; j < n; j += W) store_fully(to + j, f(ld_upto(x + j, n - j), one), n - j);
    } else {
      for (int64_t j = 0; j < n; j += W) {
        store_fully(to + j, f(ld_upto(x + j, n - j), ld_upto(y + j, n - j)), n - j);
      }
    }
  });
}

// Elements of one operand as floats.
constexpr int64_t PIECE = 512;
inline void read_piece(float* to, const void* from, int32_t kind, int64_t first, int64_t step, int64_t n) {
  with_dtype(kind, [&](auto* t) {
    using T = typename pointee<decltype(t)>::type;
    const T* p = static_cast<const T*>(from) + first;
    if (step == 1) {
      for (int64_t j = 0; j < n; j += W) st_upto(to + j, ld_upto(p + j, n - j), n - j);
    } else {
      for (int64_t j = 0; j < n; ++j) to[j] = to_float(p[j * step]);
    }
  });
  const auto whole = [&](const auto* p) {
    for (int64_t j = 0; j < n; ++j) to[j] = float(p[first + j * step]);
  };
  if (kind == INT64) whole(static_cast<const int64_t*>(from));
  if (kind == INT32) whole(static_cast<const int32_t*>(from));
  if (kind == BOOL) whole(static_cast<const uint8_t*>(from));
}

inline void write_piece(void* to, const float* from, int32_t kind, int64_t first, int64_t step, int64_t n) {
  with_dtype(kind, [&](auto* t) {
    using T = typename pointee<decltype(t)>::type;
    T* p = static_cast<T*>(to) + first;
    if (step == 1) {
      for (int64_t j = 0; j < n; j += W) store_fully(p + j, ld_upto(from + j, n - j), n - j);
    } else {
      for (int64_t j = 0; j < n; ++j) store_fully(p + j * step, vset(from[j]), 1);
    }
  });
}

inline int64_t whole_number(const void* from, int32_t kind, int64_t place) {
  if (kind == INT64) return static_cast<const int64_t*>(from)[place];
  if (kind == INT32) return static_cast<const int32_t*>(from)[place];
  return static_cast<const uint8_t*>(from)[place];
}

// Elements that stay as they are.
template <class T> inline void copied_row(T* to, const T* from, int64_t to_step, int64_t from_step, int64_t n) {
  if (to_step == 1 && from_step == 1) {
    __builtin_memcpy(to, from, size_t(n) * sizeof(T));
  } else {
    for (int64_t j = 0; j < n; ++j) to[j * to_step] = from[j * from_step];
  }
}

// Operands and output of elementwise(); an operand that is null is the number `by`.
struct Operands {
  void* out;
  const void* a;
  const void* b;
  int32_t operation, out_kind, a_kind, b_kind;
  double by;
};

inline void float_row(const Operands& o, int64_t out, int64_t a, int64_t b, const Loop& inner, int64_t n) {
  float x[PIECE], y[PIECE];
  const float by = float(o.by);
  for (int64_t j = 0; j < n; j += PIECE) {
    const int64_t many = min_of(PIECE, n - j);
    const auto operand = [&](float* to, const void* from, int32_t kind, int64_t first, int64_t step) {
      if (from) return read_piece(to, from, kind, first + j * step, step, many);
      for (int64_t i = 0; i < many; ++i) to[i] = by;
    };
    operand(x, o.a, o.a_kind, a, inner.a);
    if (o.operation != COPY) {
      operand(y, o.b, o.b_kind, b, inner.b);
      for (int64_t i = 0; i < many; i += W) {
        st_upto(x + i, combined(o.operation, ld_upto(x + i, many - i), ld_upto(y + i, many - i)), many - i);
      }
    }
    write_piece(o.out, x, o.out_kind, out + j * inner.out, inner.out, many);
  }
}

inline void whole_row(const Operands& o, int64_t out, int64_t a, int64_t b, const Loop& inner, int64_t n) {
  const auto by = uint64_t(int64_t(o.by));
  for (int64_t j = 0; j < n; ++j) {
    const uint64_t x = o.a ? uint64_t(whole_number(o.a, o.a_kind, a + j * inner.a)) : by;
    const uint64_t y = o.b ? uint64_t(whole_number(o.b, o.b_kind, b + j * inner.b)) : by;
    uint64_t z = x;
    if (o.operation == ADD) z = x + y;
    if (o.operation == SUB) z = x - y;
    if (o.operation == MUL) z = x * y;
    if (o.operation == NEG || (o.operation == ABS && int64_t(x) < 0)) z = 0 - x;
    static_cast<int64_t*>(o.out)[out + j * inner.out] = int64_t(z);
  }
}

template <class T> inline void copied_rows(const Loop* loops, void* out, const void* a) {
  over_places(loops, [&](int64_t out_at, int64_t a_at, int64_t, int64_t n) {
    copied_row(static_cast<T*>(out) + out_at, static_cast<const T*>(a) + a_at, loops[3].out, loops[3].a, n);
  });
}

inline void copied(int32_t kind, const Loop* loops, void* out, const void* a) {
  switch (kind) {
    case INT64: return copied_rows<uint64_t>(loops, out, a);
    case F32: case INT32: return copied_rows<uint32_t>(loops, out, a);
    case BOOL: return copied_rows<uint8_t>(loops, out, a);
    default: return copied_rows<uint16_t>(loops, out, a);
  }
}

template <class T> inline void computed(int32_t operation, const Loop* loops, void* out, const void* a, const void* b) {
  switch (operation) {
    case ADD: return plain_rows<T>(loops, out, a, b, [](vf x, vf y) { return vadd(x, y); });
    case SUB: return plain_rows<T>(loops, out, a, b, [](vf x, vf y) { return vsub(x, y); });
    case MUL: return plain_rows<T>(loops, out, a, b, [](vf x, vf y) { return vmul(x, y); });
    case NEG: return plain_rows<T>(loops, out, a, a, [](vf x, vf) { return vsub(vset(-0.0f), x); });
    default:
      return plain_rows<T>(loops, out, a, b, [=](vf x, vf y) { return combined(operation, x, y); });
  }
}

// out = operation(a, b) over four loops, the last the innermost. Of the two, b is read by operations
// of two operands only. Whole numbers give whole ones (INT64) or floats, floats give floats.
void elementwise(void* out, const void* a, const void* b, int64_t n0, int64_t out0, int64_t a0, int64_t b0,
                 int64_t n1, int64_t out1, int64_t a1, int64_t b1, int64_t n2, int64_t out2, int64_t a2,
                 int64_t b2, int64_t n3, int64_t out3, int64_t a3, int64_t b3, double by, int32_t operation,
                 int32_t out_kind, int32_t a_kind, int32_t b_kind) {
  const Loop loops[] = {{n0, out0, a0, b0}, {n1, out1, a1, b1}, {n2, out2, a2, b2}, {n3, out3, a3, b3}};
  const Loop& inner = loops[3];
  if (operation == COPY && a && a_kind == out_kind) return copied(out_kind, loops, out, a);
  const Operands operands{out, a, b, operation, out_kind, a_kind, b_kind, by};
  if (out_kind == INT64) {
    return over_places(loops, [&](int64_t out_at, int64_t a_at, int64_t b_at, int64_t n) {
      whole_row(operands, out_at, a_at, b_at, inner, n);
    });
  }
  const bool alone = operation == NEG;
  const bool one_type = a && a_kind == out_kind && (alone || (b && b_kind == out_kind));
  const bool plain = inner.out == 1 && inner.a == 1 && (alone || inner.b == 1 || inner.b == 0);
  if (one_type && plain && operation != COPY && operation < ABS) {
    return with_dtype(out_kind, [&](auto* t) {
      using T = typename pointee<decltype(t)>::type;
      computed<T>(operation, loops, out, a, b);
    });
  }
  over_places(loops, [&](int64_t out_at, int64_t a_at, int64_t b_at, int64_t n) {
    float_row(operands, out_at, a_at, b_at, inner, n);
  });
}

}  // namespace
}  // namespace headrace::HR_ISA

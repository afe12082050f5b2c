// Packed weights of a few bits: where codes, scales and minimums lie.
//
// W[n, k] = (T(code) - zero) * s * S - m * M, by groups and blocks of inputs: see
// headrace_core.ops.QuantizedWeight. A packed weight begins with its Layout, so that a kernel needs no
// other description. Then come panels of QPANEL output features; features past N hold anything.
//
// A panel is
//   block scales [blocks][QPANEL], block minimums [blocks][QPANEL], minimums [groups][QPANEL], where there are any
//   groups of inputs: scales [QPANEL], zero points [QPANEL] uint8 if they differ, then units of steps.
// A step is 4 inputs: QV vectors of W features x 4 codes. Codes of 8 bits are whole vectors; nibbles share a
// vector's bytes with those of the next one; pairs of bits share them among four. Codes of 6, 5 and 3 bits are
// nibbles or pairs, and a plane of the bits that are left: of two steps if it is one bit. Those two
// steps are a unit, else a step is.

namespace headrace::HR_ISA {
namespace {
namespace quant {

constexpr int QV = 4;                     // vectors of a panel
constexpr int QPANEL = QV * W;            // features of a panel
constexpr int VECTOR_BYTES = 4 * W;
constexpr int64_t HEADER = 256;           // bytes before the first panel
constexpr uint32_t EACH = 0x01010101u;    // times a byte: that byte four times

// Kinds of codes: numbers of bits, or
constexpr int32_t TABLE = 16;             // nibbles that choose from a table
constexpr int32_t TABLE_OF_8 = 15;        // three bits that do
constexpr int32_t E4M3 = 17, E5M2 = 18;   // floats of 8 bits
constexpr int32_t FLOAT6 = 19;            // 5 bits that choose a number of E4M3 from the table, below one that turns its sign

// How scales and minimums are stored: a DType, or whole numbers, an exponent of two, an 8-bit float.
constexpr int32_t ABSENT = -1, SIGNED_BYTE = 3, BYTE = 4, NIBBLE = 5, EXPONENT_BYTE = 6, E4M3_BYTE = 7;

constexpr bool is_float(int kind) { return kind >= E4M3; }
constexpr bool is_table(int kind) { return kind == TABLE || kind == TABLE_OF_8; }
constexpr int bits_of(int kind) {
  return kind == FLOAT6 ? 6 : is_float(kind) ? 8 : kind == TABLE ? 4 : kind == TABLE_OF_8 ? 3 : kind;
}
constexpr int unit_steps(int kind) { return bits_of(kind) == 3 || kind == 5 ? 2 : 1; }
// Vectors of a step but for the plane's.
constexpr int step_vectors(int kind) { return bits_of(kind) == 8 ? 4 : bits_of(kind) < 4 ? 1 : 2; }
constexpr int64_t unit_bytes(int kind) { return int64_t(VECTOR_BYTES) * unit_steps(kind) * bits_of(kind) * QV / 8; }
constexpr int64_t plane_at(int kind) { return int64_t(VECTOR_BYTES) * unit_steps(kind) * step_vectors(kind); }

// Where a code's bits are: code << shift = (vector & mask) | (plane rotated right by `rotate` & plane_mask),
// byte by byte, the rotation in units of 32 bits. A shifted code is multiplied as it is, its scale
// being as much smaller.
struct Field {
  int vector;
  uint8_t mask, plane_mask;
  int rotate, shift;
};

// Of vector v of the u-th step of a unit.
constexpr Field field(int kind, int v, int u) {
  const int half = v / 2, odd = v % 2;
  switch (kind) {
    case 2: return {0, uint8_t(3 << 2 * v), 0, 0, 2 * v};
    case 3: case TABLE_OF_8:
            return {0, uint8_t(3 << 2 * v), uint8_t(v == 0 ? 4 : v == 1 ? 2 : v == 2 ? 64 : 32), 2 * u,
                    v == 0 ? 0 : v == 1 ? 1 : v == 2 ? 4 : 5};
    case 5: return {half, uint8_t(odd ? 0xf0 : 0x0f), uint8_t(odd ? 8 : 16), 4 * u + 2 * half, odd ? 3 : 0};
    case 6: return {half, uint8_t(odd ? 0xf0 : 0x0f), uint8_t(odd ? 0x0c : 0x30), 4 * half, odd ? 2 : 0};
    case 8: return {v, 0xff, 0, 0, 0};
    default: return {half, uint8_t(odd ? 0xf0 : 0x0f), 0, 0, odd ? 4 : 0};
  }
}

// Fields of all vectors of a unit, by step: a table, as the compiler calls a function of so many cases out of line.
struct Fields {
  Field at[2][QV];
};
constexpr Fields fields_of(int kind) {
  Fields fields{};
  for (int u = 0; u < 2; ++u) {
    for (int v = 0; v < QV; ++v) fields.at[u][v] = field(kind, v, u);
  }
  return fields;
}
template <int KIND> constexpr Fields FIELDS = fields_of(KIND);

constexpr int64_t bytes_of_stored(int32_t stored) {
  return stored == ABSENT ? 0 : stored == F32 ? 4 : stored == BF16 || stored == F16 ? 2 : 1;
}

constexpr int64_t LARGEST_BLOCK = 256;    // inputs

// The order of fields is that of _Layout in quantized.py. `group` and `block` are multiples of 4, or at least K.
struct Layout {
  int64_t N, K, group, block;
  int32_t kind;
  int32_t zero;               // of all codes; unused with has_zeros
  int32_t has_zeros;
  int32_t scales, minimums, block_scales, block_minimums;  // how they are stored
  int32_t tables;             // each is added to 256 times the one before
  float factor;               // of all scales
  uint8_t table[3][16];       // what is multiplied in place of a code; of FLOAT6, the first half in E4M3
  float book[16];             // what it stands for, factor included

  int64_t panels() const { return ceil_div(N, QPANEL); }
  int64_t steps() const { return ceil_div(K, 4); }
  int64_t group_steps() const { return group >= K ? max_of(1, steps()) : group / 4; }
  int64_t groups() const { return max_of(1, ceil_div(steps(), group_steps())); }
  int64_t block_groups() const { return block >= K ? groups() : block / group; }
  int64_t blocks() const { return ceil_div(groups(), block_groups()); }
  // True if a block's sum is a whole number: below 2^31, for codes that stay shifted, too (see Field).
  bool sums_blocks() const {
    return scales == SIGNED_BYTE && block_scales != ABSENT && kind != 8 && !is_float(kind) && block <= LARGEST_BLOCK;
  }
  int64_t step_bytes() const { return unit_bytes(kind) / unit_steps(kind); }
  int64_t codes_bytes(int64_t some) const { return ceil_div(some, unit_steps(kind)) * unit_bytes(kind); }
  int64_t scale_bytes() const { return QPANEL * bytes_of_stored(scales); }
  int64_t header_bytes() const { return scale_bytes() + (has_zeros ? QPANEL : 0); }
  int64_t group_bytes() const { return header_bytes() + codes_bytes(group_steps()); }
  int64_t block_minimums_at() const { return blocks() * QPANEL * bytes_of_stored(block_scales); }
  int64_t minimums_at() const { return block_minimums_at() + blocks() * QPANEL * bytes_of_stored(block_minimums); }
  int64_t groups_at() const {
    const int64_t lines = minimums == NIBBLE ? ceil_div(groups(), 2) : groups();
    return round_up(minimums_at() + lines * QPANEL * bytes_of_stored(minimums), min_of(64, VECTOR_BYTES));
  }
  int64_t panel_bytes() const {
    const int64_t last = groups() - 1;
    const int64_t end = groups_at() + last * group_bytes() + header_bytes() + codes_bytes(steps() - last * group_steps());
    return round_up(end, 64);
  }
  const uint8_t* panel(const void* packed, int64_t p) const {
    return static_cast<const uint8_t*>(packed) + HEADER + p * panel_bytes();
  }
};
static_assert(sizeof(Layout) <= HEADER, "a packed weight begins with its layout");

inline Layout layout_of(const void* packed) {
  Layout l;
  __builtin_memcpy(&l, packed, sizeof(l));
  return l;
}

inline float stored_value(const uint8_t* at, int32_t stored, int64_t n) {
  switch (stored) {
    case F32: { float x; __builtin_memcpy(&x, at + 4 * n, 4); return x; }
    case BF16: { bf16 x; __builtin_memcpy(&x, at + 2 * n, 2); return to_float(x); }
    case F16: { f16 x; __builtin_memcpy(&x, at + 2 * n, 2); return to_float(x); }
    case SIGNED_BYTE: return float(int8_t(at[n]));
    case EXPONENT_BYTE: return bits_float(uint32_t(at[n]) << 23);
    case E4M3_BYTE: return to_float(e4m3{at[n]});
    default: return float(at[n]);
  }
}

// The minimum of group g; `at` is where the panel's minimums begin.
inline float stored_minimum(const uint8_t* at, int32_t stored, int64_t g, int64_t n) {
  if (stored == NIBBLE) return float(at[g / 2 * QPANEL + n] >> 4 * (g % 2) & 15);
  return stored_value(at + g * QPANEL * bytes_of_stored(stored), stored, n);
}

template <class T> inline void put_float(uint8_t* to, int64_t n, float x) {
  T stored;
  from_float(x, stored);
  __builtin_memcpy(to + n * int64_t(sizeof(T)), &stored, sizeof(T));
}

inline void put_value(uint8_t* to, int32_t stored, int64_t n, float x) {
  switch (stored) {
    case F32: return put_float<float>(to, n, x);
    case BF16: return put_float<bf16>(to, n, x);
    case F16: return put_float<f16>(to, n, x);
    case EXPONENT_BYTE: to[n] = uint8_t(float_bits(x) >> 23); return;
    case E4M3_BYTE: return put_float<e4m3>(to, n, x);
    default: to[n] = uint8_t(int32_t(x));
  }
}

// What a weight is packed from; null for what it does not have. Scales and minimums lie feature by feature.
struct Parts {
  const int8_t* values;
  int64_t stride;
  const float* scales;
  const int8_t* zeros;
  const float *minimums, *block_scales, *block_minimums;
};

inline uint32_t rotate_left(uint32_t x, int n) { return n == 0 ? x : x << n | x >> (32 - n); }

// One step: to [QPANEL words of 4 codes], `unit` cleared before its first step.
inline void pack_step(int kind, uint8_t* unit, int u, const uint32_t* codes) {
  uint32_t vectors[QPANEL] = {}, plane[W];
  __builtin_memcpy(plane, unit + plane_at(kind), kind == 8 || !field(kind, 0, 0).plane_mask ? 0 : sizeof(plane));
  for (int v = 0; v < QV; ++v) {
    const Field f = field(kind, v, u);
    for (int i = 0; i < W; ++i) {
      const uint32_t shifted = codes[v * W + i] << f.shift;
      vectors[f.vector * W + i] |= shifted & f.mask * EACH;
      if (f.plane_mask) plane[i] |= rotate_left(shifted & f.plane_mask * EACH, f.rotate);
    }
  }
  const int64_t many = int64_t(VECTOR_BYTES) * step_vectors(kind);
  __builtin_memcpy(unit + u * many, vectors, size_t(many));
  if (field(kind, 0, 0).plane_mask) __builtin_memcpy(unit + plane_at(kind), plane, sizeof(plane));
}

// Byte of input k (of 4) and lane i of vector v, in a step of 8-bit floats: see float8_tiles.h.
constexpr int64_t float8_at(int64_t k, int64_t v, int64_t i) {
  return k / 2 * 2 * QPANEL + v / 2 * VECTOR_BYTES + i / 4 * 16 + v % 2 * 8 + i % 4 * 2 + k % 2;
}

inline void pack_float_step(uint8_t* to, const uint32_t* codes) {
  for (int64_t v = 0; v < QV; ++v) {
    for (int64_t i = 0; i < W; ++i) {
      for (int64_t k = 0; k < 4; ++k) to[float8_at(k, v, i)] = uint8_t(codes[v * W + i] >> 8 * k);
    }
  }
}

// The same bytes, but six bits of each: vectors as kind 6 has them.
inline void pack_float6_step(uint8_t* to, const uint32_t* codes) {
  uint32_t octets[QPANEL];
  pack_float_step(reinterpret_cast<uint8_t*>(octets), codes);
  pack_step(6, to, 0, octets);
}

// Steps of one group, from rows of values: code = value + middle, in two's complement a flipped bit.
inline void pack_steps(const Layout& l, uint8_t* to, const int8_t* values, int64_t stride,
                       int64_t features, int64_t inputs) {
  constexpr int64_t BLOCK = 16;
  uint32_t columns[BLOCK * QPANEL];  // four values a unit
  const int bits = bits_of(l.kind), every = unit_steps(l.kind);
  const uint32_t flipped = (1u << (bits - 1)) * EACH, kept = ((1u << bits) - 1) * EACH;
  __builtin_memset(to, 0, size_t(l.codes_bytes(ceil_div(inputs, 4))));
  for (int64_t k = 0; k < inputs; k += 4 * BLOCK) {
    const int64_t left = inputs - k, whole = min_of(BLOCK, left / 4), many = min_of(BLOCK, ceil_div(left, 4));
    rows_to_columns(columns, QPANEL, reinterpret_cast<const char*>(values + k), stride, features, whole);
    for (int64_t n = 0; whole < many && n < QPANEL; ++n) {
      columns[whole * QPANEL + n] = 0;
      if (n < features) __builtin_memcpy(columns + whole * QPANEL + n, values + n * stride + k + 4 * whole, size_t(left % 4));
    }
    for (int64_t i = 0; i < many * QPANEL; ++i) columns[i] = (columns[i] & kept) ^ flipped;
    for (int64_t s = 0; s < many; ++s) {
      const int64_t step = k / 4 + s;
      uint8_t* unit = to + step / every * unit_bytes(l.kind);
      const uint32_t* codes = columns + s * QPANEL;
      switch (l.kind) {  // a kind that the compiler knows is packed several times faster
        case 2: pack_step(2, unit, 0, codes); break;
        case 3: case TABLE_OF_8: pack_step(3, unit, int(step % 2), codes); break;
        case 5: pack_step(5, unit, int(step % 2), codes); break;
        case 6: pack_step(6, unit, 0, codes); break;
        case 8: pack_step(8, unit, 0, codes); break;
        case E4M3: case E5M2: pack_float_step(unit, codes); break;
        case FLOAT6: pack_float6_step(unit, codes); break;
        default: pack_step(4, unit, 0, codes); break;
      }
    }
  }
}

// Scales of blocks, and all minimums: what a panel begins with.
inline void pack_front(const Layout& l, uint8_t* to, const Parts& from, int64_t features) {
  const int64_t groups = l.groups(), blocks = l.blocks();
  __builtin_memset(to, 0, size_t(l.groups_at()));
  const auto put_blocks = [&](uint8_t* at, int32_t stored, const float* values) {
    for (int64_t b = 0; stored != ABSENT && b < blocks; ++b) {
      uint8_t* line = at + b * QPANEL * bytes_of_stored(stored);
      for (int64_t n = 0; n < features; ++n) put_value(line, stored, n, values[n * blocks + b]);
    }
  };
  put_blocks(to, l.block_scales, from.block_scales);
  put_blocks(to + l.block_minimums_at(), l.block_minimums, from.block_minimums);
  uint8_t* minimums = to + l.minimums_at();
  for (int64_t g = 0; l.minimums != ABSENT && g < groups; ++g) {
    for (int64_t n = 0; n < features; ++n) {
      const float minimum = from.minimums[n * groups + g];
      if (l.minimums == NIBBLE) minimums[g / 2 * QPANEL + n] |= uint8_t(int32_t(minimum) << 4 * (g % 2));
      else put_value(minimums + g * QPANEL * bytes_of_stored(l.minimums), l.minimums, n, minimum);
    }
  }
}

inline void pack_panel(const Layout& l, uint8_t* to, const Parts& from, int64_t features) {
  const int64_t groups = l.groups(), group_inputs = 4 * l.group_steps(), middle = int64_t(1) << (bits_of(l.kind) - 1);
  pack_front(l, to, from, features);
  for (int64_t g = 0; g < groups; ++g) {
    uint8_t* header = to + l.groups_at() + g * l.group_bytes();
    __builtin_memset(header, 0, size_t(l.header_bytes()));
    for (int64_t n = 0; n < features; ++n) {
      put_value(header, l.scales, n, from.scales[n * groups + g]);
      if (l.has_zeros) header[l.scale_bytes() + n] = uint8_t(from.zeros[n * groups + g] + middle);
    }
    const int64_t first = g * group_inputs;
    pack_steps(l, header + l.header_bytes(), from.values + first, from.stride, features, min_of(group_inputs, l.K - first));
  }
}

// Word i of vector v in the u-th step of a unit: four codes.
inline uint32_t unpack_word(int kind, const uint8_t* unit, int64_t v, int64_t u, int64_t i) {
  uint32_t word = 0, plane = 0;
  const Field f = field(kind, int(v), int(u));
  __builtin_memcpy(&word, unit + (u * step_vectors(kind) + f.vector) * VECTOR_BYTES + 4 * i, 4);
  if (f.plane_mask) __builtin_memcpy(&plane, unit + plane_at(kind) + 4 * i, 4);
  plane = rotate_left(plane, (32 - f.rotate) % 32);
  return ((word & f.mask * EACH) | (plane & f.plane_mask * EACH)) >> f.shift;
}

// Four codes of a feature: of step s of a group, whose codes begin at `codes`.
inline uint32_t unpack_step(int kind, const uint8_t* codes, int64_t s, int64_t n) {
  const int64_t v = n / W, i = n % W, every = unit_steps(kind);
  const uint8_t* unit = codes + s / every * unit_bytes(kind);
  if (!is_float(kind)) return unpack_word(kind, unit, v, s % every, i);
  uint32_t word = 0;
  for (int64_t k = 0; k < 4; ++k) {
    const int64_t at = float8_at(k, v, i);
    const uint32_t four = unpack_word(bits_of(kind), unit, at / VECTOR_BYTES, 0, at % VECTOR_BYTES / 4);
    word |= (four >> 8 * (at % 4) & 255) << 8 * k;
  }
  return word;
}

inline float code_value(const Layout& l, uint32_t code, float zero) {
  switch (l.kind) {
    case TABLE: case TABLE_OF_8: return l.book[code];
    case E4M3: return to_float(e4m3{uint8_t(code)});
    case E5M2: return to_float(e5m2{uint8_t(code)});
    case FLOAT6: return to_float(e4m3{uint8_t((code & 32) << 2 ^ l.table[code >> 4 & 1][code & 15])});
    default: return float(code) - zero;
  }
}

// Feature n of a panel as real numbers, out [K].
template <class T>
inline void unpack_row(const Layout& l, const uint8_t* panel, int64_t n, T* out) {
  const int64_t inputs = 4 * l.group_steps(), block_groups = l.block_groups();
  const uint32_t bits = (1u << bits_of(l.kind)) - 1;
  const auto of_block = [&](const uint8_t* at, int32_t stored, int64_t b) {
    return stored == ABSENT ? 1.0f : stored_value(at + b * QPANEL * bytes_of_stored(stored), stored, n);
  };
  for (int64_t g = 0, groups = l.groups(); g < groups; ++g) {
    const uint8_t* header = panel + l.groups_at() + g * l.group_bytes();
    const float scale = stored_value(header, l.scales, n) * of_block(panel, l.block_scales, g / block_groups);
    const float zero = float(l.has_zeros ? header[l.scale_bytes() + n] : l.zero);
    float minimum = l.minimums == ABSENT ? 0.0f : stored_minimum(panel + l.minimums_at(), l.minimums, g, n);
    minimum *= of_block(panel + l.block_minimums_at(), l.block_minimums, g / block_groups);
    const int64_t first = g * inputs, last = min_of(l.K, first + inputs);
    for (int64_t k = first; k < last; k += 4) {
      const uint32_t codes = unpack_step(l.kind, header + l.header_bytes(), (k - first) / 4, n);
      for (int64_t i = 0; i < min_of(4, last - k); ++i) {
        from_float(code_value(l, codes >> 8 * i & bits, zero) * scale - minimum, out[k + i]);
      }
    }
  }
}

}  // namespace quant
}  // namespace
}  // namespace headrace::HR_ISA

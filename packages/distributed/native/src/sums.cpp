#include "sums.h"

#include <cstring>

// One copy of each loop for each instruction set, the best of which the loader chooses.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__has_attribute)
#if __has_attribute(target_clones)
#define HR_CLONES __attribute__((target_clones("default", "arch=haswell", "arch=skylake-avx512")))
#endif
#endif
#ifndef HR_CLONES
#define HR_CLONES
#endif
#define HR_INLINE inline __attribute__((always_inline))

namespace headrace {
namespace {

constexpr int64_t BLOCK = 1024;  // elements whose sums lie in the first cache

HR_INLINE float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

HR_INLINE uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

struct BFloat16 {
  static HR_INLINE float widen(uint16_t bits) { return from_bits(uint32_t(bits) << 16); }
  // To the nearest, ties to even; NaN stays NaN.
  static HR_INLINE uint16_t round(float value) {
    const uint32_t bits = to_bits(value);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
  }
};

// IEEE 754 binary16 by its bits: a compiler may lack the type, and a CPU the conversion.
struct Float16 {
  static HR_INLINE float widen(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000) << 16, magnitude = half & 0x7fff;
    const float normal = from_bits((magnitude << 13) + (112u << 23));
    const float special = from_bits((magnitude << 13) + (224u << 23));  // infinity, NaN
    const float small = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f;  // no exponent
    const float value = magnitude >= 0x7c00 ? special : magnitude >= 0x0400 ? normal : small;
    return from_bits(to_bits(value) | sign);
  }
  static HR_INLINE uint16_t round(float value) {
    const uint32_t bits = to_bits(value), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
    // Normal: rounded to the nearest, ties to even, in integers; may become infinity, as it should.
    const uint32_t normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    // Without exponent: an addition in float rounds at the right place.
    const uint32_t small = to_bits(from_bits(magnitude) + 0.5f) - to_bits(0.5f);
    const uint32_t half = magnitude > 0x7f800000    ? 0x7e00
                          : magnitude >= 0x477ff000 ? 0x7c00
                          : magnitude >= 0x38800000 ? normal
                                                    : small;
    return static_cast<uint16_t>(half | sign);
  }
};

template <class Format>
HR_INLINE void sum_narrow(uint16_t* out, const void* const* parts, int32_t num_parts,
                          int64_t count) {
  float total[BLOCK];
  for (int64_t start = 0; start < count; start += BLOCK) {
    const int64_t size = count - start < BLOCK ? count - start : BLOCK;
    const uint16_t* first = static_cast<const uint16_t*>(parts[0]) + start;
    for (int64_t i = 0; i < size; ++i) total[i] = Format::widen(first[i]);
    for (int32_t p = 1; p < num_parts; ++p) {
      const uint16_t* part = static_cast<const uint16_t*>(parts[p]) + start;
      for (int64_t i = 0; i < size; ++i) total[i] += Format::widen(part[i]);
    }
    for (int64_t i = 0; i < size; ++i) out[start + i] = Format::round(total[i]);
  }
}

template <class Number>
HR_INLINE void sum_wide(Number* out, const void* const* parts, int32_t num_parts, int64_t count) {
  Number total[BLOCK];
  for (int64_t start = 0; start < count; start += BLOCK) {
    const int64_t size = count - start < BLOCK ? count - start : BLOCK;
    std::memcpy(total, static_cast<const Number*>(parts[0]) + start, size * sizeof(Number));
    for (int32_t p = 1; p < num_parts; ++p) {
      const Number* part = static_cast<const Number*>(parts[p]) + start;
      for (int64_t i = 0; i < size; ++i) total[i] += part[i];
    }
    std::memcpy(out + start, total, size * sizeof(Number));
  }
}

HR_CLONES void sum_float32(void* out, const void* const* parts, int32_t n, int64_t count) {
  sum_wide(static_cast<float*>(out), parts, n, count);
}
HR_CLONES void sum_bfloat16(void* out, const void* const* parts, int32_t n, int64_t count) {
  sum_narrow<BFloat16>(static_cast<uint16_t*>(out), parts, n, count);
}
HR_CLONES void sum_float16(void* out, const void* const* parts, int32_t n, int64_t count) {
  sum_narrow<Float16>(static_cast<uint16_t*>(out), parts, n, count);
}

}  // namespace

int64_t size_of(int32_t dtype) {
  constexpr int64_t SIZES[] = {4, 2, 2, 8, 4, 8};
  return dtype >= FLOAT32 && dtype <= INT64 ? SIZES[dtype] : 0;
}

void sum(void* out, const void* const* parts, int32_t num_parts, int64_t count, int32_t dtype) {
  switch (dtype) {
    case FLOAT32: return sum_float32(out, parts, num_parts, count);
    case BFLOAT16: return sum_bfloat16(out, parts, num_parts, count);
    case FLOAT16: return sum_float16(out, parts, num_parts, count);
    case FLOAT64: return sum_wide(static_cast<double*>(out), parts, num_parts, count);
    // Unsigned, where overflow is defined; the bits are those of signed sums.
    case INT32: return sum_wide(static_cast<uint32_t*>(out), parts, num_parts, count);
    case INT64: return sum_wide(static_cast<uint64_t*>(out), parts, num_parts, count);
  }
}

}  // namespace headrace

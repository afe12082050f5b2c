// Sums over ranks: in the order of ranks, floats of 16 bits in float32 and rounded once.
#pragma once

#include <cstdint>

namespace headrace {

enum Dtype : int32_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, FLOAT64 = 3, INT32 = 4, INT64 = 5 };

int64_t size_of(int32_t dtype);  // bytes of an element; 0 for an unknown type

// out[i] = parts[0][i] + parts[1][i] + ...; `out` may be one of the parts.
void sum(void* out, const void* const* parts, int32_t num_parts, int64_t count, int32_t dtype);

}  // namespace headrace

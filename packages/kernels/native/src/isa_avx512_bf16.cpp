#define HR_ISA avx512_bf16
#define HR_AVX512
#define HR_DOT_BF16
#include "kernels.h"

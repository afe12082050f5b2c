#define HR_ISA avx512_amx
#define HR_AVX512
#define HR_DOT_BF16
#define HR_AMX
#include "kernels.h"

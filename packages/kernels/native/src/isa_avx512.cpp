#define HR_ISA avx512
#define HR_AVX512
#include "kernels.h"

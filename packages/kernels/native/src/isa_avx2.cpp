#define HR_ISA avx2
#define HR_AVX2
#include "kernels.h"

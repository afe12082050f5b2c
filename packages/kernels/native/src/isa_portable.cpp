#define HR_ISA portable
#include "kernels.h"

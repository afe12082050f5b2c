"""Compile the kernels of custom all-reduce for GPUs that need not be there.

Usage: ``python offline_compile.py CAPABILITY``; prints a JSON list of ``{name, dtype, ptx}``. Exit code 77 =
cannot be done here, with the reason on stdout.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

try:
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
except ImportError as error:
    print(f"this triton has no offline compilation: {error}")
    raise SystemExit(77) from None


class AbsentGPU:
    """As much of a driver as compiling asks for."""

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", int(sys.argv[1]), 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main() -> None:
    driver.set_active(AbsentGPU())
    from headrace_distributed.cuda.custom.kernels import one_shot_kernel, two_shot_kernel

    compiled = []
    for dtype in (torch.float32, torch.bfloat16):
        for world_size in (2, 6):
            x, bases = torch.zeros(64, dtype=dtype), torch.zeros(8, dtype=torch.int64)
            for kernel, parts in ((one_shot_kernel, ()), (two_shot_kernel, (64,))):
                made = kernel.warmup(
                    x, x, bases, 1, 64 * world_size, *parts, 8 << 20, WORLD=world_size, LANES=8, BLOCK=1024,
                    WIDEN=dtype != torch.float32, ROUND=False, SLOTS_AT=4352, OPERATION_AT=4096,
                    DONE_AT=4104, grid=(1,),
                )  # fmt: skip
                compiled.append(
                    {"name": kernel.__name__, "dtype": str(dtype), "ptx": made.asm["ptx"],
                     "code_bytes": len(made.asm["cubin"])}
                )  # fmt: skip
    print(json.dumps(compiled))


if __name__ == "__main__":
    main()

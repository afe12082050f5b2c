"""What the machine gives right now, through torch: memory reads and matrix products.

Plain loops reach less than the true memory limit (see docs/performance.md); the figure is a yardstick of
the hour, not of the hardware.
"""

from __future__ import annotations

import json
import time
from typing import NamedTuple

import torch


class Limits(NamedTuple):
    """Measured just now."""

    read_gb_s: float
    """Best of several sums over an array far larger than the caches."""
    bf16_gflop_s: float
    """Best large matrix product in bfloat16."""
    fp32_gflop_s: float


def measure() -> Limits:
    """A few seconds of work."""
    array = torch.ones(64 << 20, dtype=torch.float32)  # 256 MiB
    seconds = min(_timed(array.sum) for _ in range(7))
    return Limits(
        array.numel() * 4 / seconds / 1e9, _gemm(torch.bfloat16) / 1e9, _gemm(torch.float32) / 1e9
    )


def _gemm(dtype: torch.dtype, size: int = 2048) -> float:
    a, b = torch.randn(size, size, dtype=dtype), torch.randn(size, size, dtype=dtype)
    seconds = min(_timed(lambda: a @ b) for _ in range(5))
    return float(2 * size**3 / seconds)


def _timed(work: object) -> float:
    start = time.perf_counter()
    work()  # type: ignore[operator]
    return time.perf_counter() - start


if __name__ == "__main__":
    print(json.dumps(measure()._asdict()))

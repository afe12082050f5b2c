"""What the machine gives right now: ``python limits.py`` prints it as JSON.

Reads are the best of many methods (``limits.c``: pages, streams, prefetching), since no single loop is what
the memory can give; where there is no C compiler, torch's sum over a large array stands in, which is less.
Arithmetic is the best of large matrix products through oneDNN, as torch brings it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

SOURCE = Path(__file__).with_name("limits.c")
GEMMS = ((2048, 1024, 6144), (2048, 4096, 4096))
"""Rows, depth, columns."""


class Limits(NamedTuple):
    """Measured just now."""

    read_gb_s: float
    """Best read rate, all cores."""
    read_method: str
    """How it was reached."""
    bf16_gflop_s: float
    fp32_gflop_s: float
    int8_gop_s: float


def measure(*, quick: bool = False) -> Limits:
    """Some ten seconds of work, one with ``quick``."""
    # MiB a thread, far beyond the last-level cache.
    rate, method = _reads(256 if quick else 512)
    seconds = 0.1 if quick else 0.7
    gemms = GEMMS[:1] if quick else GEMMS
    return Limits(
        rate,
        method,
        max(_gemm(torch.bfloat16, shape, seconds) for shape in gemms) / 1e9,
        max(_gemm(torch.float32, shape, seconds) for shape in gemms) / 1e9,
        max(_int8(shape, seconds) for shape in gemms) / 1e9,
    )


def _reads(mib: int) -> tuple[float, str]:
    compiler = shutil.which("cc")
    if compiler is not None:
        with tempfile.TemporaryDirectory() as folder:
            program = str(Path(folder) / "limits")
            flags = ["-O3", "-march=native", "-fopenmp", str(SOURCE), "-o", program]
            with contextlib.suppress(subprocess.CalledProcessError):
                subprocess.run([compiler, *flags], check=True, capture_output=True)
                done = subprocess.run(
                    [program, str(mib)], check=True, capture_output=True, text=True
                )
                best = max(map(json.loads, done.stdout.splitlines()), key=lambda m: m["gb_s"])
                pages = "huge" if best["huge_pages"] else "small"
                method = f"{pages} pages, {best['streams']} streams, prefetch {best['prefetch']}"
                return best["gb_s"], method
    array = torch.ones(64 << 20)  # 256 MiB
    seconds = min(_timed(array.sum) for _ in range(7))
    return array.numel() * 4 / seconds / 1e9, "torch.sum"


def _gemm(dtype: torch.dtype, shape: tuple[int, int, int], seconds: float) -> float:
    """Operations a second, with the weight packed as a serving engine would have it."""
    m, k, n = shape
    inputs = torch.randn(m, k).to(dtype)
    weight = torch.randn(n, k).to(dtype)
    mkldnn: Any = torch.ops.mkldnn
    with torch.inference_mode():
        plain = _rate(lambda: torch.nn.functional.linear(inputs, weight), shape, seconds)
        try:
            packed = mkldnn._reorder_linear_weight(weight, m)
            return max(plain, _rate(
                lambda: mkldnn._linear_pointwise(inputs, packed, None, "none", [], ""), shape, seconds
            ))  # fmt: skip
        except (AttributeError, RuntimeError):  # a torch without oneDNN
            return plain


def _int8(shape: tuple[int, int, int], seconds: float) -> float:
    m, k, n = shape
    inputs = torch.randint(-100, 100, (m, k), dtype=torch.int8)
    columns = torch.randint(-100, 100, (n, k), dtype=torch.int8).t()
    rows = columns.contiguous()
    return max(
        _rate(lambda: torch._int_mm(inputs, columns), shape, seconds),
        _rate(lambda: torch._int_mm(inputs, rows), shape, seconds),
    )


def _rate(work: Callable[[], object], shape: tuple[int, int, int], seconds: float) -> float:
    work()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        best = min(best, _timed(work))
    m, k, n = shape
    return 2 * m * k * n / best


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    import sys

    print(json.dumps(measure(quick="--quick" in sys.argv)._asdict()))

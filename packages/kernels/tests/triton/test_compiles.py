"""Every kernel compiles to machine code for real GPUs, on a machine without one.

The interpreter does not check types as the compiler does, so a kernel can pass all other tests and
still not compile. Triton ships the assembler for NVIDIA's GPUs; all that is missing here is the
launch. A child process (in which nothing is interpreted) calls the host functions with tensors of
the real shapes, and ``offline_compile.py`` turns each launch into a compilation.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

LARGEST_SHARED = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024}
"""Bytes of shared memory that a program may use, by compute capability (CUDA C++ Programming
Guide, table of technical specifications)."""

KERNELS = {
    "_rms_norm_kernel",
    "_layer_norm_kernel",
    "_activation_kernel",
    "_activation_and_mul_kernel",
    "_xielu_kernel",
    "_match_rms_kernel",
    "_gaussian_topk_kernel",
    "_gate_kernel",
    "_mix_kernel",
    "_head_linear_kernel",
    "_linear_kernel",
    "_route_kernel",
    "_experts_kernel",
    "_sum_places_kernel",
    "_low_rank_down_kernel",
    "_low_rank_up_kernel",
    "_cache_write_kernel",
    "_causal_conv_kernel",
    "_selective_scan_kernel",
    "_state_space_kernel",
    "_delta_kernel",
    "_rg_lru_kernel",
    "_wkv_kernel",
    "_gated_norm_kernel",
    "_rotary_kernel",
    "_rotary_cache_write_kernel",
    "_attention_kernel",
    "_split_kernel",
    "_reduce_kernel",
    "_varlen_kernel",
    "_latent_kernel",
    "_latent_write_kernel",
    "_merge_kernel",
}


@pytest.mark.keep(1, every_value=False)  # every kernel each time, the GPUs by turns
@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim"),
    [
        (90, "bfloat16", "128"),
        *(pytest.param(86, "float16", dim, marks=pytest.mark.slow) for dim in ("64", "80", "256")),
        *(pytest.param(80, "float32", dim, marks=pytest.mark.slow) for dim in ("64", "128")),
    ],
)
def test_compiles_and_fits(tmp_path: Path, capability: int, dtype: str, head_dim: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)  # a hit would hide what this version does
    script = Path(__file__).with_name("offline_compile.py")
    done = subprocess.run(
        [sys.executable, str(script), str(capability), dtype, head_dim],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    if done.returncode == 77:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stderr[-4000:]
    compiled: list[Mapping[str, Any]] = json.loads(done.stdout)
    assert {kernel["name"] for kernel in compiled} == KERNELS
    too_large = [k for k in compiled if k["shared"] > LARGEST_SHARED[capability]]
    assert not too_large
    assert all(kernel["code_bytes"] > 0 for kernel in compiled)

"""Kernels of packed weights compile for real GPUs, on a machine without one; as test_compiles.py.

Run as a script, ``python test_quant_compiles.py CAPABILITY DTYPE``, this module is the child process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

LARGEST_SHARED = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}
"""Bytes of shared memory that a program may use, by compute capability (CUDA C++ Programming
Guide, table of technical specifications)."""

KERNELS = {
    "_quant_dot_kernel",
    "_quant_few_rows_kernel",
    "_quant_finish_kernel",
    "_quant_weight_rows_kernel",
    "_sum_places_kernel",
}
FLOAT8 = 89
"""Least capability that multiplies FP8; nothing else is compiled for it here."""
SAMPLE = (
    "int8", "int8-zeros", "int4-128-zeros", "int3-128-zeros", "q2_k", "q5_1", "q6_k", "iq4_xs", "nf4",
    "mxfp4", "fp8-128", "fp8-e5m2",
)  # fmt: skip
"""Kinds that together have every branch of the kernels, but groups of an odd size."""


@pytest.mark.keep(1, every_value=False)  # every kernel each time, the GPUs by turns
@pytest.mark.parametrize(
    ("capability", "dtype"),
    [
        pytest.param(90, "bfloat16", marks=pytest.mark.slow),
        pytest.param(89, "float16", marks=pytest.mark.slow),
        pytest.param(80, "float16", marks=pytest.mark.slow),
    ],
)
def test_compiles_and_fits(tmp_path: Path, capability: int, dtype: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)  # a hit would hide what this version does
    done = subprocess.run(
        [sys.executable, __file__, str(capability), dtype],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    if done.returncode == 77:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stderr[-4000:]
    compiled: list[Mapping[str, Any]] = json.loads(done.stdout)
    rounding = {
        name
        for name, has_it in (
            ("_quant_round_kernel", capability != FLOAT8),
            ("_quant_round_float8_kernel", capability >= FLOAT8),
        )
        if has_it
    }
    assert {kernel["name"] for kernel in compiled} == KERNELS | rounding
    assert not [k for k in compiled if k["shared"] > LARGEST_SHARED[capability]]
    assert all(kernel["code_bytes"] > 0 for kernel in compiled)
    assert any(k["multiplies_float8"] for k in compiled) == (capability >= FLOAT8)


def compile_all(capability: int, dtype: str) -> None:
    """Calls of one kind and activations each: few, some and many rows, rows of the weight, experts."""
    import torch

    from headrace_core.ops import QuantizedWeight
    from headrace_kernels.triton.quant_linear import QuantLinear
    from headrace_testing.ops.weights import KINDS

    op = QuantLinear()

    def all_calls(weight: QuantizedWeight, activations: str, counts: tuple[int, ...]) -> None:
        outputs, inputs = weight.values.shape
        packed = op.pack(weight, dtype, activations=activations)
        like = {"dtype": getattr(torch, dtype)}
        for rows in counts:
            op(torch.ones(rows, inputs, **like), packed, torch.ones(outputs, **like))
        op.gated(torch.ones(1, inputs, **like), packed, "silu")
        op.rows(torch.arange(2), packed)
        joined = op.join([packed, packed])
        assert joined is not None
        biases = torch.ones(2, outputs, **like)
        ids, weights = torch.zeros(5, 2, dtype=torch.int64), torch.ones(5, 2)
        op.routed(torch.ones(5, inputs, **like), joined, ids, weights, biases)

    for at, kind in enumerate(() if capability == FLOAT8 else SAMPLE):
        for activations in ("int8", "float"):
            counts = (1, 20, 70) if at % 4 == 2 else (4, 70)
            all_calls(KINDS[kind].draw(256, 1024), activations, counts)
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-8, 8, (256, 1008), generator=generator).to(torch.int8)
    odd = QuantizedWeight(codes, torch.ones(256, 28), bits=4, group_size=36)
    if capability != FLOAT8:
        all_calls(odd, "float", (1, 20))
    if capability >= FLOAT8:
        for kind in ("fp8", "fp8-128", "mxfp8"):
            all_calls(KINDS[kind].draw(256, 1024), "fp8", (1, 20, 70))
        all_calls(replace(KINDS["fp8"], group_size=16).draw(256, 1024), "fp8", (4, 70))


def main() -> None:
    from offline_compile import (  # type: ignore[import-not-found]  # beside this script
        COMPILED,
        AbsentGPU,
        JITFunction,
        compile_only,
        driver,
    )

    capability = int(sys.argv[1])
    driver.set_active(AbsentGPU(capability))
    JITFunction.__getitem__ = compile_only
    compile_all(capability, sys.argv[2])
    print(json.dumps(COMPILED))


if __name__ == "__main__":
    main()

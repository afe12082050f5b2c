"""Core's suite of op implementations, on a GPU or through the interpreter."""

from __future__ import annotations

import pytest
import torch

from headrace_core.testing.ops import OpConformance
from headrace_kernels.triton.provider import PROVIDER, TritonProvider

HAS_GPU = torch.cuda.is_available()


class TestTriton(OpConformance):
    device = "cuda" if HAS_GPU else "cpu"
    # Interpreted, the whole suite takes a minute a dtype; the tests beside this one cover the others.
    dtypes = ("float32", "float16", "bfloat16") if HAS_GPU else ("float32",)
    cache_dtypes = ()
    temperatures = False

    @pytest.fixture
    def provider(self, device: str) -> TritonProvider:
        return PROVIDER

"""Core's suite of op implementations, on a GPU or through the interpreter."""

from __future__ import annotations

import os

import pytest
import torch

from headrace_core.ops import QUANT_ACTIVATIONS
from headrace_kernels.triton.provider import PROVIDER, TritonProvider
from headrace_testing.ops import OpConformance
from headrace_testing.ops.last_keys import LastKeysConformance
from headrace_testing.ops.quantized import QuantizedConformance

HAS_GPU = torch.cuda.is_available()


# Interpreted, every tile of keys takes milliseconds.
SHORT = [(1, 70), (40, 130), (60, 60), (20, 200), (3, 35)]
SHORT_PARTS = [(1, 1), (1, 70), (9, 5), (12, 12), (6, 40), (3, 0), (1, 0)]
SHORT_SPANS = [(1, 95, 120), (2, 0, 5), (2, 5, 33), (2, 59, 60), (3, 185, 200)]


def multiplies_fp8() -> bool:
    """True of the interpreter, too."""
    return not HAS_GPU or torch.cuda.get_device_capability() >= (8, 9)


@pytest.mark.keep(1, every_value=False)  # interpreted, a case takes up to seconds
class TestTriton(OpConformance):
    device = "cuda" if HAS_GPU else "cpu"
    # Interpreted, the whole suite takes a minute a dtype; the tests beside this one cover the others.
    dtypes = ("float32", "float16", "bfloat16") if HAS_GPU else ("float32",)
    cache_dtypes = ()
    row_scaled_dtypes = ()
    logit_scale = False
    PARTIAL_LENGTHS = OpConformance.PARTIAL_LENGTHS if HAS_GPU else SHORT_PARTS
    SEEN_LENGTHS = LastKeysConformance.SEEN_LENGTHS if HAS_GPU else SHORT
    SEEN_SPANS = LastKeysConformance.SEEN_SPANS if HAS_GPU else SHORT_SPANS
    LONG_SEQUENCES = OpConformance.LONG_SEQUENCES if HAS_GPU else (330, 150)
    adapted_rows = OpConformance.adapted_rows if HAS_GPU else (0, 33)
    quant_activations = QUANT_ACTIVATIONS if multiplies_fp8() else ("int8", "float")

    @pytest.fixture
    def provider(self, device: str) -> TritonProvider:
        return PROVIDER

    @pytest.fixture(autouse=True)
    def fits_the_interpreter(self, request: pytest.FixtureRequest) -> None:
        whole = HAS_GPU or os.environ.get("HEADRACE_TESTS") == "full"
        if not whole and request.node.originalname in vars(QuantizedConformance):
            pytest.skip("test_quant_linear.py has a few kinds of these; HEADRACE_TESTS=full: all")

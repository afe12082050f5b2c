"""The native kernels pass core's suite on every instruction set of this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from headrace_core.ops import KernelNeed, KernelProvider
from headrace_kernels.cpu import library
from headrace_kernels.cpu.provider import CPUProvider
from headrace_testing.ops import OpConformance
from headrace_testing.ops.sampling import SamplingConformance

if library.path() is None:
    pytest.skip("the native library is not built", allow_module_level=True)


class AtLevel(CPUProvider):
    """The provider as it is on a machine whose best instruction set is ``level``."""

    def __init__(self, level: str) -> None:
        self.level = level

    def operations(self, need: KernelNeed) -> Mapping[str, Any]:
        from headrace_kernels.cpu.ops import native_ops

        kernels = library.load(self.level)
        kernels.set_num_threads(2)
        return native_ops(kernels)


class TestNative(OpConformance):
    quant_activations = ("int8", "float")
    providers = library.levels()  # see headrace_testing.sampling

    @pytest.fixture(params=library.ISA_LEVELS)
    def provider(self, request: pytest.FixtureRequest) -> KernelProvider:
        if request.param not in library.levels():
            pytest.skip(f"this machine has no {request.param}")
        torch.manual_seed(0)
        return AtLevel(request.param)


class TestNativeSampling(SamplingConformance):
    providers = library.levels()  # see headrace_testing.sampling

    @pytest.fixture(params=library.ISA_LEVELS)
    def provider(self, request: pytest.FixtureRequest) -> KernelProvider:
        if request.param not in library.levels():
            pytest.skip(f"this machine has no {request.param}")
        return AtLevel(request.param)

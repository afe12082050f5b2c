"""The reference passes the suite of the sampling ops."""

from __future__ import annotations

import pytest

from headrace_core.ops import KernelProvider
from headrace_reference.provider import PROVIDER
from headrace_testing.ops.sampling import SamplingConformance


class TestReference(SamplingConformance):
    @pytest.fixture
    def provider(self) -> KernelProvider:
        return PROVIDER

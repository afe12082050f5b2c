"""The reference passes the suite of the sampling ops."""

from __future__ import annotations

import pytest

from headrace_core.ops import KernelProvider
from headrace_core.reference.provider import PROVIDER
from headrace_core.testing.sampling import SamplingConformance


@pytest.mark.spec("ENGINE-SAMPLING")
class TestReference(SamplingConformance):
    @pytest.fixture
    def provider(self) -> KernelProvider:
        return PROVIDER

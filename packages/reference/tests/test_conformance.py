"""The reference passes its own suite: in each dtype it agrees with itself in float64."""

from __future__ import annotations

import pytest

from headrace_core.ops import KernelProvider
from headrace_reference.provider import PROVIDER
from headrace_testing.ops import OpConformance


class TestReference(OpConformance):
    @pytest.fixture
    def provider(self) -> KernelProvider:
        return PROVIDER

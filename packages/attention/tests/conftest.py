"""Fixtures of this package's tests."""

from __future__ import annotations

import pytest

from headrace_core.ops import KernelNeed, OpTable, bind_ops


@pytest.fixture
def reference_ops() -> OpTable:
    return bind_ops(KernelNeed("cpu", "float32"), choose={"*": "reference"})

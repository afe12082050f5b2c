"""``gaussian_topk``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace_reference.gaussian_topk import gaussian_topk
from headrace_testing.ops.inputs import call_wide
from headrace_testing.ops.suite import OpSuite


class GaussianTopKConformance(OpSuite):
    """Values above a quantile."""

    @pytest.mark.parametrize("deviations", [1.6448, -0.5])
    def test_gaussian_topk(self, op: Callable[[str], Any], dtype: str, deviations: float) -> None:
        for rows, width in [(0, 8), (1, 1), (3, 257), (33, 64)]:
            x = self.rand(rows, width + 3, dtype=dtype)[:, 3:] + 2
            out = op("gaussian_topk")(x, deviations)
            self.check(out, call_wide(gaussian_topk, x, deviations), dtype)

    def test_gaussian_topk_is_row_invariant(
        self, invariant_op: Callable[[str], Any], dtype: str
    ) -> None:
        run = invariant_op("gaussian_topk")
        x = self.rand(70, 100, dtype=dtype)
        self.check_rows(x, lambda rows: run(rows, 0.3))

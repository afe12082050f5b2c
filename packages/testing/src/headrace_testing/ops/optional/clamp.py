"""``clamp``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from headrace_testing.ops.suite import OpSuite


class ClampConformance(OpSuite):
    """Values within bounds, NaN as it is."""

    def test_clamp(self, op: Callable[[str], Any], dtype: str) -> None:
        for rows, width in [(0, 8), (1, 1), (3, 257), (2, 5000)]:
            x = self.rand(rows, 2 * width, dtype=dtype)[:, :width] * 3
            x[1:, -1] = torch.nan
            expected = x.clamp(-0.5, 1.5)
            torch.testing.assert_close(
                op("clamp")(x, -0.5, 1.5), expected, rtol=0, atol=0, equal_nan=True
            )

    def test_clamp_is_row_invariant(self, invariant_op: Callable[[str], Any], dtype: str) -> None:
        run = invariant_op("clamp")
        x = self.rand(70, 100, dtype=dtype)
        self.check_rows(x, lambda rows: run(rows, -0.4, 0.9))

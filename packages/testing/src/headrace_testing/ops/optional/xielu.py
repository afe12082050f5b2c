"""``xielu``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from headrace_reference.xielu import xielu
from headrace_testing.ops.inputs import call_wide
from headrace_testing.ops.suite import OpSuite


class XIELUConformance(OpSuite):
    """xIELU near 0 and over its whole range."""

    def test_xielu(self, op: Callable[[str], Any], dtype: str) -> None:
        for shape in [(0, 5), (1, 1), (3, 257), (2, 3, 7)]:
            x = self.rand(*shape, dtype=dtype) * 4
            out = op("xielu")(x, 0.8, 0.9)
            self.check(out, call_wide(xielu, x, 0.8, 0.9), dtype)

    def test_xielu_over_its_whole_range(self, op: Callable[[str], Any], dtype: str) -> None:
        """Near 0 too, where the difference of an exponential and 1 would lose its digits."""
        wide, near = torch.linspace(-60, 60, 4001), torch.logspace(-8, 0, 400)
        x = torch.cat((wide, near, -near)).to(getattr(torch, dtype)).to(self.device)
        out = op("xielu")(x, 0.8, 0.9, beta=0.0)
        self.check(out, call_wide(xielu, x, 0.8, 0.9, beta=0.0), dtype)

    def test_xielu_is_row_invariant(self, invariant_op: Callable[[str], Any], dtype: str) -> None:
        run = invariant_op("xielu")
        x = self.rand(70, 100, dtype=dtype)
        self.check_rows(x, lambda rows: run(rows, 0.8, 0.9))

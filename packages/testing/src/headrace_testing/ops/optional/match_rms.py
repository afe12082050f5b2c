"""``match_rms``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace_reference.match_rms import match_rms
from headrace_testing.ops.inputs import call_wide
from headrace_testing.ops.suite import OpSuite


class MatchRMSConformance(OpSuite):
    """Rows as large as others, and small rows."""

    def test_match_rms(self, op: Callable[[str], Any], dtype: str) -> None:
        for rows, width in [(0, 8), (1, 1), (3, 257), (33, 64)]:
            x, like = self.rand(rows, 2 * width, dtype=dtype).chunk(2, dim=1)
            out = op("match_rms")(x, like, 1e-5)
            self.check(out, call_wide(match_rms, x, like, 1e-5), dtype)

    def test_match_rms_leaves_small_rows_small(self, op: Callable[[str], Any], dtype: str) -> None:
        x, like = self.rand(2, 64, dtype=dtype) * 1e-3, self.rand(2, 64, dtype=dtype, seed=1)
        x[1] = 0
        out = op("match_rms")(x, like, 1e-2)
        self.check(out, call_wide(match_rms, x, like, 1e-2), dtype)

    def test_match_rms_is_row_invariant(
        self, invariant_op: Callable[[str], Any], dtype: str
    ) -> None:
        run = invariant_op("match_rms")
        x = self.rand(70, 100, dtype=dtype)
        self.check_rows(x, lambda rows: run(rows[:, :50], rows[:, 50:], 1e-5))

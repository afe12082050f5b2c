"""``mix``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from headrace_reference.mix import mix
from headrace_testing.ops.inputs import call_wide
from headrace_testing.ops.suite import OpSuite


class MixConformance(OpSuite):
    """Sums of a token's vectors."""

    @pytest.mark.parametrize(("sums", "terms"), [(1, 1), (4, 4), (3, 1), (1, 5)])
    def test_mix(self, op: Callable[[str], Any], dtype: str, sums: int, terms: int) -> None:
        mine = op("mix")
        for rows, width in [(0, 8), (1, 1), (3, 257), (33, 40)]:
            x, base = (self.rand(rows, n + 1, width, dtype=dtype)[:, 1:] for n in (terms, sums))
            weights = self.rand(rows, sums, terms + 2)[..., :terms]
            same = weights[:1].expand(rows, -1, -1)  # for all rows
            for by, residual in ((weights, None), (weights, base), (same, base)):
                out = mine(x, by, residual)
                assert out.is_contiguous()
                self.check(out, call_wide(mix, x, by, residual), dtype)

    def test_mix_is_row_invariant(self, invariant_op: Callable[[str], Any], dtype: str) -> None:
        run = invariant_op("mix")
        x = self.rand(70, 100, dtype=dtype)
        self.check_rows(
            x, lambda rows: run(rows[:, None], torch.exp(rows[:, :2].float())[..., None])
        )

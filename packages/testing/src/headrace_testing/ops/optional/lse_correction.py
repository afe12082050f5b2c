"""``lse_correction``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace_reference.lse_correction import lse_correction
from headrace_testing.ops.inputs import call_wide
from headrace_testing.ops.suite import OpSuite


class LSECorrectionConformance(OpSuite):
    """Shares of attention to some of the keys."""

    @pytest.mark.parametrize("ranks", [1, 2, 5])
    def test_lse_correction(self, op: Callable[[str], Any], dtype: str, ranks: int) -> None:
        mine = op("lse_correction")
        for rows, each, width in [(0, 2, 8), (1, 1, 1), (3, 2, 257), (33, 5, 40)]:
            heads = ranks * each
            out = self.rand(rows, heads, width, dtype=dtype)
            lses = 8 * self.rand(ranks, rows, heads, seed=1)
            for rank in {0, ranks - 1}:
                share = mine(out, lses, rank)
                assert share.shape == (ranks, rows, each, width)
                assert share.is_contiguous()
                self.check(share, call_wide(lse_correction, out, lses, rank), "float32")

    def test_lse_correction_adds_up(self, op: Callable[[str], Any], dtype: str) -> None:
        """Shares of what all ranks saw alike are the whole; far smaller sums weigh nothing."""
        mine = op("lse_correction")
        out, lses = self.rand(7, 3, 5, dtype=dtype), 5 * self.rand(3, 7, 3, seed=2)
        lses[1, :3] = -200.0
        shares = [_by_row(mine(out, lses, rank)) for rank in range(3)]
        assert shares[1][:3].abs().max() < 1e-30
        self.check(shares[0] + shares[1] + shares[2], out.cpu().double(), "float32")

    def test_lse_correction_of_no_keys(self, op: Callable[[str], Any], dtype: str) -> None:
        """What a rank without keys has is not looked at; where no rank has some there is 0."""
        mine = op("lse_correction")
        out, lses = self.rand(4, 6, 9, dtype=dtype), self.rand(3, 4, 6, seed=3)
        for strange in (-torch.inf, torch.inf, torch.nan):
            lses[1, 2], lses[:, 3] = strange, strange
            poisoned = out.clone()
            poisoned[2] = torch.nan
            share = _by_row(mine(poisoned, lses, 1))
            assert not share[2:].any()
            assert not torch.isnan(share).any()
            plain = lses.clone()
            plain[1, 2] = -torch.inf
            odd, known = (_by_row(mine(out, each, 0))[:3] for each in (lses, plain))
            assert torch.equal(odd, known)

    def test_lse_correction_is_row_invariant(
        self, invariant_op: Callable[[str], Any], dtype: str
    ) -> None:
        correct = invariant_op("lse_correction")

        def run(rows: Tensor) -> Tensor:
            lses = 9 * rows[:, :12].float().reshape(-1, 3, 4).transpose(0, 1)[:, :, :3]
            return _by_row(correct(rows.reshape(-1, 3, 34), lses.contiguous(), 1))

        self.check_rows(self.rand(70, 102, dtype=dtype), run)


def _by_row(shares: Tensor) -> Tensor:
    """[N, T, H, D] -> [T, N * H, D]."""
    return shares.transpose(0, 1).flatten(1, 2)

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace_reference import rounding
from headrace_reference.quantized import dequantized
from headrace_reference.rounding import round_groups, round_rows


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(st.integers(0, 2**31), st.floats(1e-6, 1e6))
def test_rows_are_off_by_half_a_step_at_most(seed: int, size: float) -> None:
    weight = normal(5, 17, seed=seed) * size
    rounded = round_rows(weight)
    step = weight.abs().amax(dim=1, keepdim=True) / 127
    assert bool(((dequantized(rounded) - weight).abs() <= step * 0.5001).all())
    assert int(rounded.values.abs().max()) <= 127


@given(st.integers(0, 2**31), st.floats(1e-6, 1e6))
def test_groups_are_no_worse_than_plain_rounding(seed: int, size: float) -> None:
    weight = normal(5, 70, seed=seed) * size
    rounded = round_groups(weight, 32)
    assert rounded.scales.shape == (5, 3)
    assert torch.equal(rounded.scales, rounded.scales.bfloat16().float())
    assert -8 <= int(rounded.values.min()) <= int(rounded.values.max()) <= 7
    for group in range(3):
        part = slice(32 * group, 32 * group + 32)
        own = weight[:, part]
        step = own.gather(1, own.abs().argmax(1, keepdim=True)) / -8
        step = step.bfloat16().float()
        plain = (own / step).round().clamp(-8, 7) * step
        error = (dequantized(rounded)[:, part] - own).square().sum(1)
        assert bool((error <= (plain - own).square().sum(1) * 1.0001).all())


def test_clipping_pays() -> None:
    """Of normal weights in groups of 128: a sixth less squared error than at full range."""
    weight = normal(64, 1024)
    error = (dequantized(round_groups(weight, 128)) - weight).square().mean()
    groups = weight.view(64, 8, 128)
    step = groups.abs().amax(2, keepdim=True) / 7.5
    plain = ((groups / step).round().clamp(-8, 7) * step - groups).square().mean()
    assert float(error) < 0.87 * float(plain)


def test_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = normal(23, 40)
    whole = round_rows(weight), round_groups(weight, 32)
    monkeypatch.setattr(rounding, "_WEIGHTS_AT_ONCE", 80)
    for before, after in zip(whole, (round_rows(weight), round_groups(weight, 32)), strict=True):
        assert torch.equal(before.values, after.values)
        assert torch.equal(before.scales, after.scales)

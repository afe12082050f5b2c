"""Cache writes, bit for bit."""

from __future__ import annotations

import pytest
import torch

import headrace_reference as reference
from headrace_kernels.triton.cache_write import cache_write

# Logical (2, N, S, Hk, D) by physical order.
ORDERS = [(0, 1, 2, 3, 4), (0, 1, 3, 2, 4), (1, 0, 3, 2, 4), (1, 0, 2, 4, 3)]
SLOTS = [5, -1, 15, 4, 0]


def new_cache(order: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    shape = (2, 4, 4, 3, 20)
    stored = torch.zeros([shape[i] for i in order], dtype=dtype, device=device)
    return stored.permute([order.index(i) for i in range(5)])


def key_and_value(
    num_tokens: int, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slices of one fused projection [T, (2 + 3 + 3) * 20]."""
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(num_tokens, 8, 20, generator=generator).to(dtype).to(device)
    return fused[:, 2:5], fused[:, 5:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_copies_bit_for_bit(device: str, order: tuple[int, ...], dtype: torch.dtype) -> None:
    key, value = key_and_value(len(SLOTS), dtype, device)
    slots = torch.tensor(SLOTS, device=device)
    actual, expected = new_cache(order, dtype, device), new_cache(order, dtype, device)
    cache_write(key, value, actual[0], actual[1], slots)
    reference.cache_write(key, value, expected[0], expected[1], slots)
    assert torch.equal(actual, expected)
    assert actual[0, 1, 1].equal(key[0])


@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_values_that_float8_holds_are_kept(
    device: str, dtype: torch.dtype, fp8: torch.dtype
) -> None:
    """Rounding to float8 is tested in test_gpu.py: triton 3.9's interpreter turns 1.98 into 1."""
    key, value = (x.to(fp8).to(dtype) for x in key_and_value(len(SLOTS), dtype, device))
    slots = torch.tensor(SLOTS, device=device)
    caches = new_cache(ORDERS[0], fp8, device)
    cache_write(key, value, caches[0], caches[1], slots)
    assert torch.equal(caches[0, 1, 1].to(dtype), key[0])
    assert torch.equal(caches[1, 3, 3].to(dtype), value[2])


def test_rows_past_the_slots_are_padding(device: str) -> None:
    key, value = key_and_value(len(SLOTS) + 3, torch.float32, device)
    slots = torch.tensor(SLOTS, device=device)
    caches = new_cache(ORDERS[0], torch.float32, device)
    cache_write(key, value, caches[0], caches[1], slots)
    assert caches[0].abs().sum(dim=(2, 3)).count_nonzero() == 4


def test_no_tokens(device: str) -> None:
    key, value = key_and_value(0, torch.float32, device)
    caches = new_cache(ORDERS[0], torch.float32, device)
    cache_write(key, value, caches[0], caches[1], torch.empty(0, dtype=torch.int64, device=device))
    assert caches.count_nonzero() == 0

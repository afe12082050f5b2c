"""Linear layers in a fixed order: products, and rows among any others; on a GPU core's suite."""

from __future__ import annotations

import pytest
import torch

from headrace_core.errors import ConfigError
from headrace_core.ops import KernelNeed
from headrace_kernels.triton.activations import activation, activation_and_mul
from headrace_kernels.triton.linear import FixedOrderLinear
from headrace_kernels.triton.provider import PROVIDER, TritonProvider
from headrace_testing.ops import bits_equal, rand
from headrace_testing.ops.linear import LinearConformance

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"


@pytest.mark.skipif(
    not HAS_GPU, reason="interpreted, it takes minutes; the tests below are for that"
)
class TestFixedOrder(LinearConformance):
    device = DEVICE

    @pytest.fixture
    def provider(self, device: str, monkeypatch: pytest.MonkeyPatch) -> TritonProvider:
        monkeypatch.setenv("HEADRACE_BATCH_INVARIANT", "1")
        return PROVIDER


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("outputs", "inputs"), [(70, 150), (5, 7), (64, 64)])
def test_products(dtype: str, outputs: int, inputs: int) -> None:
    """Against float64; of rows that lie apart, too."""
    op = FixedOrderLinear()
    weight = (rand(outputs, inputs, dtype=dtype) * inputs**-0.5).to(DEVICE)
    bias, packed = rand(outputs, dtype=dtype).to(DEVICE), op.pack(weight)
    assert op(weight[:0], packed).shape == (0, outputs)
    for rows in (1, 33):
        x = rand(2 * rows, inputs + 3, dtype=dtype).to(DEVICE)[::2, 3:]
        expected = x.double() @ weight.double().T
        bound = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 4e-2}[dtype]
        for found, wanted in (
            (op(x, packed), expected), (op(x, packed, bias), expected + bias.double())
        ):  # fmt: skip
            assert found.dtype == x.dtype
            assert (found.double() - wanted).abs().max() <= bound
    ids = torch.tensor([outputs - 1, 0], device=DEVICE)
    assert bits_equal(op.rows(ids, packed), weight[ids])
    with pytest.raises(ConfigError, match="linear: x is"):
        op(weight[:, :-1], packed)


def test_forms_with_an_activation() -> None:
    op = FixedOrderLinear()
    packed, x = op.pack(rand(6, 8).to(DEVICE)), rand(3, 8).to(DEVICE)
    assert bits_equal(op.activated(x, packed, "gelu"), activation(op(x, packed), "gelu"))
    assert bits_equal(op.gated(x, packed, "silu"), activation_and_mul(op(x, packed), "silu"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_among_any_others(dtype: str) -> None:
    """Whatever the number of rows, and what they hold. Interpreted, at the same place of a tile: numpy sums
    floats of a row by its place."""
    op = FixedOrderLinear()
    packed = op.pack(rand(70, 150, dtype=dtype).to(DEVICE))
    bias = rand(70, dtype=dtype).to(DEVICE)
    row = rand(1, 150, dtype=dtype).to(DEVICE)
    alone = op(row, packed, bias)
    for count in (2, 16, 31, 33, 65):
        rows = rand(count, 150, dtype=dtype).to(DEVICE) * 100
        places = {0, 32, *((count // 2, count - 1) if HAS_GPU else ())}
        for place in places & set(range(count)):
            rows[place] = row[0]
            assert bits_equal(op(rows, packed, bias)[place : place + 1], alone)


@pytest.mark.parametrize("value", ["0", "1"])
def test_it_serves_where_the_mode_is_on(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the mode the vendor's library is faster."""
    monkeypatch.setenv("HEADRACE_BATCH_INVARIANT", value)
    assert ("linear" in PROVIDER.operations(KernelNeed("cuda", "bfloat16"))) is (value == "1")

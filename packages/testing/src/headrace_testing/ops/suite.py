"""Shared parts of the op suites."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from headrace_core.ops import (
    ACTIVATIONS,
    ONE_BYTE_CACHES,
    KernelNeed,
    KernelProvider,
)
from headrace_testing.ops.inputs import bits_equal, rand

TOLERANCES: Mapping[str, float] = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.5e-2}
"""Absolute and relative, against float64 (ATTN-REF)."""

BATCHES = (2, 3, 5, 6, 7, 8, 13, 16, 17, 33, 70)
"""Numbers of rows among which a row must not change a bit."""

LINEAR_SHAPES = ((1, 1), (16, 16), (33, 17), (64, 100), (130, 64), (257, 1000), (96, 513))
"""(N, K)."""


def look_up(provider: KernelProvider, need: KernelNeed) -> Callable[[str], Any]:
    """A provider's op by name; asking for one that it lacks skips the test."""
    reasons = provider.refuse(need)
    if reasons:
        pytest.skip(f"{provider.name} refuses: {'; '.join(reasons)}")
    operations = provider.operations(need)

    def of(name: str) -> Any:
        if name not in operations:
            pytest.skip(f"{provider.name} has no {name}")
        return operations[name]

    return of


class OpSuite:
    """Base of op suites: provider, device and dtypes; finding ops; comparing. The tests are in the
    subclasses."""

    device: ClassVar[str] = "cpu"
    dtypes: ClassVar[Sequence[str]] = ("float32", "bfloat16", "float16")
    tolerances: ClassVar[Mapping[str, float]] = TOLERANCES
    cache_dtypes: ClassVar[Sequence[str]] = ONE_BYTE_CACHES
    """Caches of one byte a value that the provider serves."""
    row_scaled_dtypes: ClassVar[Sequence[str]] = ("int8", "uint8")
    """Caches with a scale for each row that the provider serves."""
    logit_scale: ClassVar[bool] = True
    """True if its paged attention takes ``logit_scale``."""

    @pytest.fixture
    def provider(self) -> KernelProvider:
        raise NotImplementedError("override `provider` with a fixture that returns yours")

    @pytest.fixture(params=["float32", "bfloat16", "float16"])
    def dtype(self, request: pytest.FixtureRequest) -> str:
        name: str = request.param
        if name not in self.dtypes:
            pytest.skip(f"{name} is not among this class's dtypes")
        return name

    @pytest.fixture(params=ONE_BYTE_CACHES)
    def cache_dtype(self, request: pytest.FixtureRequest) -> str:
        name: str = request.param
        if name not in self.cache_dtypes:
            pytest.skip(f"caches of {name} are not among this class's")
        return name

    @pytest.fixture
    def op(self, provider: KernelProvider, dtype: str) -> Callable[[str], Any]:
        """Looks up an op by name; skips the test if the provider lacks it."""
        return look_up(provider, KernelNeed(device=self.device, dtype=dtype))

    @pytest.fixture
    def invariant_op(
        self, provider: KernelProvider, dtype: str, op: Callable[[str], Any]
    ) -> Callable[[str], Any]:
        """As ``op``; skips the test if the provider does not claim row invariance."""
        if not provider.row_invariant(KernelNeed(device=self.device, dtype=dtype)):
            pytest.skip(f"{provider.name} does not claim row invariance")
        return op

    def rand(self, *shape: int, dtype: str = "float32", seed: int = 0) -> Tensor:
        return rand(*shape, dtype=dtype, device=self.device, seed=seed)

    def check(self, actual: Tensor, expected: Tensor, dtype: str) -> None:
        """actual has this dtype and device and is within tolerance of the float64 expectation."""
        assert str(actual.dtype) == f"torch.{dtype}"
        assert actual.device.type == self.device
        assert actual.shape == expected.shape
        tolerance = self.tolerances[dtype]
        torch.testing.assert_close(
            actual.cpu().double(), expected.double(), rtol=tolerance, atol=tolerance
        )

    def check_rows(self, x: Tensor, run: Callable[[Tensor], Tensor], what: str = "") -> None:
        """run(x)'s rows do not depend, in one bit, on their number or place."""
        alone = torch.cat([run(x[i : i + 1]) for i in range(x.shape[0])])
        for batch in BATCHES:
            assert bits_equal(run(x[:batch]), alone[:batch]), f"{what} differs among {batch} rows"
        backwards = torch.arange(x.shape[0] - 1, -1, -1, device=x.device)
        assert bits_equal(run(x[backwards]), alone[backwards]), f"{what} differs by place"

    def cache_scales(self, kv_heads: int) -> dict[str, Tensor]:
        """A scale for each head; not powers of two."""
        scale = (torch.arange(kv_heads) + 1) * 0.013
        return {"k_scale": scale.to(self.device), "v_scale": (scale * 1.7).to(self.device)}

    def check_gated(self, op: Callable[[str], Any], name: str, packed: Any, x: Tensor) -> None:
        """``gated`` is its two steps, bit for bit, with every activation, with and without bias."""
        linear, two_steps = op(name), op("activation_and_mul")
        bias = self.rand(packed.out_features, dtype=packed.dtype)
        for kind, added in [*((kind, None) for kind in ACTIVATIONS), ("silu", bias)]:
            expected = two_steps(linear(x, packed, added), kind)
            assert bits_equal(linear.gated(x, packed, kind, added), expected), (kind, x.shape)

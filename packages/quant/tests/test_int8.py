from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headrace_core.errors import ConfigError, WeightsError
from headrace_core.linear import LinearSpec
from headrace_core.testing.quant import QuantConformance
from headrace_quant.int8 import Int8, quantize_rows


def stored(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """An int8 checkpoint's tensors, made independently of the package, and what they mean."""
    scales = (weight.abs().max(dim=1, keepdim=True).values / 127).bfloat16().float()
    scales[scales == 0] = 1.0
    integers = torch.clamp(torch.round(weight / scales), -128, 127).to(torch.int8)
    return {"weight": integers, "weight_scale": scales}, integers.float() * scales


@pytest.mark.spec("QUANT-CORE")
class TestStoredInt8(QuantConformance):
    name = "int8"
    config: ClassVar = {"quant_method": "int8", "ignore": ["lm_head", "re:.*skipped.*"]}
    ignores = "lm_head"
    refused: ClassVar = {"quant_method": "int9", "ignore": "lm_head", "group_size": 128}

    def make_tensors(self, spec: LinearSpec, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        return stored(weight)

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
    def test_impossible_scale(self, bad: float) -> None:
        spec = self.spec()
        tensors, _ = self.make_tensors(spec, self.weight(spec))
        tensors["weight_scale"][3] = bad
        with pytest.raises(WeightsError, match=r"gate_up_proj.*weight_scale"):
            self.method().for_layer(spec).finish(spec, tensors)


@pytest.mark.spec("QUANT-CORE")
class TestOnlineInt8(QuantConformance):
    name = "int8"
    config = None
    ignores = "lm_head"

    def make_tensors(self, spec: LinearSpec, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        # A weight that int8 holds exactly, in bfloat16 too: rounding must find it again.
        generator = torch.Generator().manual_seed(3)
        integers = torch.randint(-127, 128, weight.shape, generator=generator).float()
        integers[:, 0] = 127
        scales = torch.exp2(torch.arange(weight.shape[0]) % 5 - 4.0)[:, None]
        integers[1] = 0
        return {"weight": integers * scales}, integers * scales

    def test_memory_is_a_quarter_of_float32(self) -> None:
        spec = self.spec()
        state = self.method().for_layer(spec).finish(spec, {"weight": self.weight(spec)})
        assert state.num_bytes < 0.4 * 4 * spec.out_features * spec.in_features


@given(st.integers(0, 2**31), st.floats(1e-6, 1e6))
def test_error_is_at_most_half_a_step(seed: int, size: float) -> None:
    weight = torch.randn(5, 17, generator=torch.Generator().manual_seed(seed)) * size
    integers, scales = quantize_rows(weight)
    step = weight.abs().amax(dim=1, keepdim=True) / 127
    assert bool(((integers * scales[:, None] - weight).abs() <= step * 0.5001).all())
    assert int(integers.abs().max()) <= 127


def layer(name: str, *parts: str) -> LinearSpec:
    return LinearSpec(name, 8, (8,) * max(1, len(parts)), "float32", part_names=parts)


def test_choice_is_by_the_unfused_names() -> None:
    method = Int8(TestOnlineInt8().ops("float32"), ignore=("m.q", "m.k", "m.v", "re:.*gate", "n"))
    assert method.for_layer(layer("m.qkv", "m.q", "m.k", "m.v")).is_plain
    assert method.for_layer(layer("x.gate")).is_plain
    assert method.for_layer(layer("n.deep.er")).is_plain
    assert not method.for_layer(layer("nn.deep")).is_plain
    assert not method.for_layer(layer("m.o")).is_plain


def test_parts_that_disagree_are_named() -> None:
    method = Int8(TestOnlineInt8().ops("float32"), ignore=("m.q",))
    with pytest.raises(ConfigError, match=r"m\.q but not m\.k, m\.v"):
        method.for_layer(layer("m.qkv", "m.q", "m.k", "m.v"))


def test_malformed_pattern_is_named() -> None:
    method = Int8(TestOnlineInt8().ops("float32"), ignore=("re:(",))
    with pytest.raises(ConfigError, match=r"re:\("):
        method.for_layer(layer("m.o"))

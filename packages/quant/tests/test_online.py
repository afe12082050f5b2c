from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import Tensor

from headrace_core.errors import ConfigError, WeightsError
from headrace_core.linear import LinearSpec
from headrace_quant.online import HEAD, Int4, Int4Group32, Int8, Int8WeightOnly, Online
from headrace_testing.model.quant_methods import QuantConformance


def stored(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """An int8 checkpoint's tensors, made independently of the package, and what they mean."""
    scales = weight.abs().max(dim=1, keepdim=True).values / 127
    scales[scales == 0] = 1.0
    integers = torch.clamp(torch.round(weight / scales), -128, 127).to(torch.int8)
    return {"weight": integers, "weight_scale": scales}, integers.float() * scales


class StoredConformance(QuantConformance):
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


class TestStoredInt8(StoredConformance):
    name = "int8"
    config: ClassVar = {"quant_method": "int8", "ignore": ["lm_head", "re:.*skipped.*"]}
    int8_activations = True


class TestStoredInt8WeightOnly(StoredConformance):
    name = "int8_weight_only"
    config: ClassVar = {"quant_method": "int8_weight_only"}


class OnlineConformance(QuantConformance):
    config = None
    share: ClassVar[float]
    """Most bytes per weight that may stay, header and all, of these small layers."""

    def exact(self, rows: int, inputs: int) -> Tensor:
        raise NotImplementedError

    def make_tensors(self, spec: LinearSpec, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        # A weight that the integers hold exactly, in bfloat16 too: rounding must find it again.
        weight = self.exact(*weight.shape)
        weight[1] = 0
        return {"weight": weight}, weight

    def test_memory(self) -> None:
        spec = self.spec()
        state = self.method().for_layer(spec).finish(spec, {"weight": self.weight(spec)})
        assert state.num_bytes < self.share * spec.out_features * spec.in_features

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_weights_that_are_no_numbers_are_refused(self, bad: float) -> None:
        spec = self.spec()
        weight = self.weight(spec)
        weight[3, 4] = bad
        with pytest.raises(WeightsError, match="gate_up_proj"):
            self.method().for_layer(spec).finish(spec, {"weight": weight})

    def test_head_is_int8_with_activations_as_they_are(self) -> None:
        spec = LinearSpec(f"model.{HEAD}", 64, (8,), "float32")
        head = self.method().for_layer(spec)
        weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
        x = torch.randn(3, 64, generator=torch.Generator().manual_seed(2))
        out = head.apply(head.finish(spec, {"weight": weight}), x)
        _, meant = stored(weight)
        torch.testing.assert_close(out, x @ meant.T, atol=1e-4, rtol=1e-4)


class RowsConformance(OnlineConformance):
    share = 1.4

    def exact(self, rows: int, inputs: int) -> Tensor:
        generator = torch.Generator().manual_seed(3)
        integers = torch.randint(-127, 128, (rows, inputs), generator=generator).float()
        integers[:, 0] = 127
        return integers * torch.exp2(torch.arange(rows) % 5 - 4.0)[:, None]


class TestOnlineInt8(RowsConformance):
    name = "int8"
    int8_activations = True


class TestOnlineInt8WeightOnly(RowsConformance):
    name = "int8_weight_only"


class GroupsConformance(OnlineConformance):
    share = 1.6  # the reference keeps a nibble in a byte
    group_size: ClassVar[int]

    def exact(self, rows: int, inputs: int) -> Tensor:
        generator = torch.Generator().manual_seed(3)
        integers = torch.randint(-7, 8, (rows, inputs), generator=generator).float()
        integers[:, :: self.group_size] = -8
        groups = torch.arange(inputs) // self.group_size
        return integers * torch.exp2((torch.arange(rows)[:, None] + groups) % 5 - 4.0)


class TestOnlineInt4(GroupsConformance):
    name = "int4"
    group_size = 128
    in_features = 200


class TestOnlineInt4Group32(GroupsConformance):
    name = "int4_g32"
    group_size = 32
    in_features = 72


@pytest.mark.parametrize("method", [Int4, Int4Group32])
def test_stored_int4_is_refused(method: type[Online]) -> None:
    with pytest.raises(ConfigError, match=f"quant_method = '{method.name}'.*no stored"):
        method.from_config({"quant_method": method.name}, TestOnlineInt4().ops("float32"))


def layer(name: str, *parts: str) -> LinearSpec:
    return LinearSpec(name, 8, (8,) * max(1, len(parts)), "float32", part_names=parts)


def test_choice_is_by_the_unfused_names() -> None:
    ops = TestOnlineInt8().ops("float32")
    method = Int8(ops, stored=("m.q", "m.k", "m.v", "re:.*gate", "n"))
    assert method.for_layer(layer("m.qkv", "m.q", "m.k", "m.v")).is_plain
    assert method.for_layer(layer("x.gate")).is_plain
    assert method.for_layer(layer("n.deep.er")).is_plain
    assert not method.for_layer(layer("nn.deep")).is_plain
    assert not method.for_layer(layer("m.o")).is_plain


def test_parts_that_disagree_are_kept_apart() -> None:
    method = Int8WeightOnly(TestOnlineInt8().ops("float32"), stored=("m.q",))
    spec = layer("m.qkv", "m.q", "m.k", "m.v")
    created = method.for_layer(spec).create(spec)
    assert created["weight@0"].dtype is None
    assert [created[f"weight@{part}"].dtype for part in (1, 2)] == ["int8"] * 2
    assert "weight_scale@0" not in created


def test_malformed_pattern_is_named() -> None:
    method = Int8(TestOnlineInt8().ops("float32"), stored=("re:(",))
    with pytest.raises(ConfigError, match=r"re:\("):
        method.for_layer(layer("m.o"))

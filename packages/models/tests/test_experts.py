"""Experts together and one by one give the same, however they are stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace_core.linear import LinearMethod, LinearSpec
from headrace_core.model import BuildContext, ModelInfo
from headrace_core.ops import KernelNeed, PackedLinear, Rounding, bind_ops
from headrace_models.families.moe.jetmoe_attention import ExpertLinear
from headrace_models.layers.base import Part
from headrace_models.layers.moe.experts import GATED_NAMES, Experts
from headrace_testing.model.decoders import PlainQuant, build_context

TOKENS, EXPERTS, HIDDEN, INNER = 9, 4, 24, 16
INFO = ModelInfo("some/model", Path(), "A", {}, {}, "float32", 8, 9, ())


class Integers(PlainQuant):
    """Weights in 8 bits, which can be joined; or not, with ``apart``."""

    is_plain = False

    def __init__(self, apart: bool) -> None:
        super().__init__(bind_ops(KernelNeed("cpu", "float32"), choose={"*": "reference"}))
        self.apart = apart

    def finish(self, spec: LinearSpec, tensors: Mapping[str, Tensor]) -> PackedLinear:
        round_ = self.ops.quant_linear.round
        return round_(tensors["weight"], spec.dtype, Rounding(8), activations="float")

    def apply(self, state: PackedLinear, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.ops.quant_linear(x, state, bias)

    def join(self, states: Sequence[PackedLinear]) -> PackedLinear | None:
        return None if self.apart else self.ops.quant_linear.join(states)

    def apply_routed(self, state: PackedLinear, x: Tensor, ids: Tensor, *rest: Any) -> Tensor:
        return self.ops.quant_linear.routed(x, state, ids, *rest)


class SomeOtherwise(Integers):
    """The first expert asks for a method of another class."""

    def for_layer(self, spec: LinearSpec) -> LinearMethod:
        return PlainQuant(self.ops) if ".0." in spec.name else self


def routing() -> tuple[Tensor, Tensor]:
    weights, ids = torch.rand(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(3)).topk(2)
    return weights, ids


def filled(layer: Any) -> Any:
    """The layer with weights of its own, the same for the same slots."""
    generator = torch.Generator().manual_seed(1)
    slots = layer.slots()
    layer.load({n: torch.randn(slot.shape, generator=generator) / 4 for n, slot in slots.items()})
    return layer


def experts(context: BuildContext, names: tuple[str, ...], **options: Any) -> Experts:
    modules = [f"mlp.experts.{index}" for index in range(EXPERTS)]
    return filled(
        Experts(context, modules, HIDDEN, INNER, "silu", module_names=names, **options)
    )  # fmt: skip


@pytest.mark.parametrize("names", [GATED_NAMES, ("up_proj", "down_proj")], ids=len)
@pytest.mark.parametrize("weighed", [True, False])
def test_integers_together_and_one_by_one(names: tuple[str, ...], weighed: bool) -> None:
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2))
    weights, ids = routing()
    by = weights if weighed else None
    for bias in (False, True):
        together, apart, mixed, plain = (
            experts(build_context(INFO, quant=quant), names, bias=bias and len(names) == 3)
            for quant in (Integers(False), Integers(True), SomeOtherwise(False), None)
        )
        assert together.routed is not None
        assert apart.routed is mixed.routed is None
        expected = apart(x, by, ids)
        torch.testing.assert_close(together(x, by, ids), expected, rtol=1e-5, atol=1e-5)
        for other in (mixed, plain):
            torch.testing.assert_close(
                other(x, weights, ids), apart(x, weights, ids), rtol=0.1, atol=0.1
            )


@pytest.mark.parametrize("quant", [None, Integers(False)], ids=["plain", "integers"])
def test_identities_give_back_what_they_get(quant: Integers | None) -> None:
    layer = experts(build_context(INFO, quant=quant), GATED_NAMES, identities=2)
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2))
    weights, ids = routing()
    none = torch.full((TOKENS, 1), EXPERTS + 1)
    both = torch.cat((ids, none), dim=1), torch.cat((weights, 0.5 * torch.ones(TOKENS, 1)), dim=1)
    expected = layer(x, weights, ids) + 0.5 * x
    torch.testing.assert_close(layer(x, both[1], both[0]), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("own", [True, False])
def test_linear_layers_of_experts(own: bool) -> None:
    """Of integers joined, of integers one by one, of floats."""
    weights, ids = routing()
    x = torch.randn(TOKENS, 2, HIDDEN, generator=torch.Generator().manual_seed(2))
    x = x if own else x[:, 0]
    together, apart, plain = (
        filled(ExpertLinear(build_context(INFO, quant=q), "heads", EXPERTS, HIDDEN, Part(INNER)))
        for q in (Integers(False), Integers(True), None)
    )
    assert together.joined is not None
    assert apart.joined is None
    for by in (None, weights):
        expected = apart(x, ids, by)
        assert expected.shape == ((TOKENS, INNER) if by is not None else (TOKENS, 2, INNER))
        torch.testing.assert_close(together(x, ids, by), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(plain(x, ids, by), expected, rtol=0.1, atol=0.1)

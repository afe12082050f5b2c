"""The tests that a quantization method inherits.

Inherit from :class:`QuantConformance`, build a checkpoint's tensors for a random weight and say what
real weight they stand for; the suite compares :meth:`LinearMethod.apply` with a plain product of
that weight in float64.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from headrace_core import plugins
from headrace_core.errors import ConfigError
from headrace_core.linear import LinearSpec, QuantMethod, QuantNeed
from headrace_core.ops import KernelNeed, OpTable, bind_ops
from headrace_reference.quantized import float8_rows, quantize_rows

TOLERANCES: Mapping[str, float] = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}
"""Error bounds of a product, relative to the largest entry of the exact one."""


class QuantConformance(ABC):
    """Fill in the members below, and keep the tests."""

    name: ClassVar[str]
    """Name of the entry point."""
    config: ClassVar[Mapping[str, Any] | None]
    """A checkpoint's ``quantization_config`` that the method serves; None = online."""
    refused: ClassVar[Mapping[str, Any]] = {}
    """Dotted key -> a value that the method must refuse there, by key and value."""
    ignores: ClassVar[str | None] = None
    """Name of a layer that :attr:`config` leaves plain."""
    int8_activations: ClassVar[bool] = False
    """Rows of activations are rounded to int8 by their largest magnitude."""
    fp8_activations: ClassVar[bool] = False
    """The same, to E4M3."""
    in_features: ClassVar[int] = 36
    out_parts: ClassVar[tuple[int, ...]] = (24, 12)

    @abstractmethod
    def make_tensors(self, spec: LinearSpec, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """A checkpoint's tensors for ``weight`` [N, K] float32, and the weight that they mean."""

    # ---- helpers

    def ops(self, dtype: str) -> OpTable:
        return bind_ops(KernelNeed(device="cpu", dtype=dtype), choose={"*": "reference"})

    def method(self, dtype: str = "float32", config: Any = ...) -> QuantMethod:
        method: type[QuantMethod] = plugins.load("headrace.quantization", self.name)
        return method.from_config(self.config if config is ... else config, self.ops(dtype))

    def spec(
        self, dtype: str = "float32", name: str = "model.layers.0.mlp.gate_up_proj"
    ) -> LinearSpec:
        return LinearSpec(name, self.in_features, self.out_parts, dtype)

    def weight(self, spec: LinearSpec) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        weight = torch.randn(spec.out_features, spec.in_features, generator=generator)
        weight[0] *= 100  # rows of very different size: one scale for all would show
        weight[1] = 0
        return weight

    # ---- tests

    def test_entry_point_carries_its_name(self) -> None:
        assert plugins.load("headrace.quantization", self.name).name == self.name

    def test_serves_every_dtype(self) -> None:
        method: type[QuantMethod] = plugins.load("headrace.quantization", self.name)
        for dtype in TOLERANCES:
            assert method.refuse(QuantNeed(dtype=dtype, device="cpu")) == []

    def test_created_tensors_fit_the_checkpoints(self) -> None:
        spec = self.spec()
        created = self.method().for_layer(spec).create(spec)
        tensors, _ = self.make_tensors(spec, self.weight(spec))
        assert set(created) == set(tensors)
        for suffix, wanted in created.items():
            assert wanted.shape == tuple(tensors[suffix].shape), suffix
            if wanted.dtype is not None and not wanted.any_float:
                assert wanted.dtype == str(tensors[suffix].dtype).removeprefix("torch.")
            for dim in (wanted.part_dim, wanted.in_dim):
                assert dim is None or 0 <= dim < len(wanted.shape)

    @pytest.mark.parametrize("dtype", TOLERANCES)
    @pytest.mark.parametrize("has_bias", [False, True])
    @pytest.mark.parametrize("rows", [1, 7])
    def test_product(self, dtype: str, has_bias: bool, rows: int) -> None:
        spec = self.spec(dtype)
        layer = self.method(dtype).for_layer(spec)
        tensors, meant = self.make_tensors(spec, self.weight(spec))
        arrived = {
            suffix: tensor.to(getattr(torch, wanted.dtype or dtype))
            for suffix, wanted in layer.create(spec).items()
            for tensor in (tensors[suffix],)
        }
        kind = getattr(torch, dtype)
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(rows, spec.in_features, generator=generator).to(kind)
        bias = torch.randn(spec.out_features, generator=generator).to(kind) if has_bias else None

        state = layer.finish(spec, arrived)
        out = layer.apply(state, x.clone(), bias)

        entered = x.double()
        if self.int8_activations or self.fp8_activations:
            codes, steps = (quantize_rows if self.int8_activations else float8_rows)(x)
            entered = codes.double() * steps.double()
            assert not torch.equal(entered, x.double())
        expected = entered @ meant.double().T
        if bias is not None:
            expected = expected + bias.double()
        assert out.dtype == kind
        assert out.shape == (rows, spec.out_features)
        # Where terms cancel, how a machine adds them up shows in more than the last digits.
        added = 4 * torch.finfo(torch.float32).eps * (entered.abs() @ meant.double().abs().T)
        for part in (slice(0, 1), slice(1, None)):  # the row of large weights apart
            error = (out.double() - expected)[:, part].abs().max()
            bound = TOLERANCES[dtype] * float(expected[:, part].abs().max())
            assert float(error) <= bound + float(added[:, part].max())

    def test_gated_product_is_its_two_steps(self) -> None:
        spec = self.spec()
        ops, layer = self.ops("float32"), self.method().for_layer(spec)
        state = layer.finish(spec, self.make_tensors(spec, self.weight(spec))[0])
        x, bias = torch.randn(5, spec.in_features), torch.randn(spec.out_features)
        expected = ops.activation_and_mul(layer.apply(state, x.clone(), bias), "silu")
        assert torch.equal(layer.apply_gated(ops, state, x, "silu", bias), expected)

    def test_activated_product_is_its_two_steps(self) -> None:
        spec = self.spec()
        ops, layer = self.ops("float32"), self.method().for_layer(spec)
        state = layer.finish(spec, self.make_tensors(spec, self.weight(spec))[0])
        x, bias = torch.randn(5, spec.in_features), torch.randn(spec.out_features)
        expected = ops.activation(layer.apply(state, x.clone(), bias), "gelu")
        assert torch.equal(layer.apply_activated(ops, state, x, "gelu", bias), expected)

    def test_joined_layers_are_each_as_by_itself(self) -> None:
        spec = self.spec()
        layer, weight = self.method().for_layer(spec), self.weight(spec)
        made = [self.make_tensors(spec, weight.roll(turns, 0)) for turns in range(3)]
        states = [layer.finish(spec, tensors) for tensors, _ in made]
        joined = layer.join(states)
        if joined is None:
            pytest.skip("it joins nothing")
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(5, spec.in_features, generator=generator)
        biases = torch.randn(3, spec.out_features, generator=generator)
        ids = torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [2, 0]])
        token = torch.arange(5)[:, None]
        each = torch.stack(
            [layer.apply(state, x.clone(), bias) for state, bias in zip(states, biases)]
        )
        expected = each[ids, token]
        # Of sums in another order: what is lost is a share of the terms, not of a sum that cancels them.
        sizes = [x.abs() @ meant.abs().T for _, meant in made]
        bounds = 1e-6 * torch.stack(sizes)[ids, token] + 1e-5
        out = layer.apply_routed(joined, x, ids, None, biases)
        assert ((out - expected).abs() <= bounds).all()
        weights = torch.rand(5, 2, generator=generator)
        total = layer.apply_routed(joined, x, ids, weights, biases)
        weighted = (expected * weights[..., None]).sum(1)
        assert ((total - weighted).abs() <= bounds.sum(1)).all()

    def test_refusals_name_key_and_value(self) -> None:
        for key, value in self.refused.items():
            with pytest.raises(ConfigError) as caught:
                self.method(config=_changed(self.config or {}, key.split("."), value))
            message = str(caught.value)
            assert key.rpartition(".")[2] in message, message
            assert repr(value) in message, message

    def test_ignored_layer_is_plain(self) -> None:
        if self.ignores is None:
            pytest.skip("the method leaves nothing out")
        spec = LinearSpec(self.ignores, self.in_features, (8,), "float32")
        layer = self.method().for_layer(spec)
        weight = torch.randn(8, self.in_features)
        (suffix,) = layer.create(spec)
        out = layer.apply(layer.finish(spec, {suffix: weight.clone()}), torch.eye(self.in_features))
        torch.testing.assert_close(out, weight.T, atol=1e-6, rtol=0)


def _changed(config: Mapping[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    """A copy with the entry at ``path`` replaced."""
    head, *rest = path
    return {**config, head: _changed(config.get(head) or {}, rest, value) if rest else value}

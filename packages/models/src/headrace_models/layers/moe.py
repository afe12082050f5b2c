"""Mixtures of experts: a router picks a few gated MLPs per token.

Letters: T tokens, H hidden size, I intermediate size, E experts, k experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.linear import LinearMethod, LinearSpec
from headrace_core.ops import PackedLinear
from headrace_models.layers.base import Part, Shard, Slot, WeightLayer, slot_of
from headrace_models.layers.linear import PlainLinear, shard_of
from headrace_models.layers.mlp import MLPLayer

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext


class SparseMoE(MLPLayer):
    """``sum over the k likeliest experts of p_e * expert_e(x)``, p from a softmax in float32.

    Args:
        renormalise: divide the k probabilities by their sum.
        expert_names: the checkpoint's names of an expert's gate, up and down.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        *,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        activation: str,
        renormalise: bool,
        expert_names: tuple[str, str, str],
    ) -> None:
        if top_k > num_experts:
            raise UnsupportedModel(
                f"config.json: num_experts_per_tok = {top_k}: must be at most {num_experts} experts"
            )
        self.ops = context.ops
        self.communicator = context.communicator
        self.top_k = top_k
        self.renormalise = renormalise
        self.router = PlainLinear(context, f"{name}.gate", hidden_size, num_experts)
        self.experts = Experts(
            context,
            f"{name}.experts",
            hidden_size,
            intermediate_size,
            num_experts,
            activation,
            expert_names,
        )

    def __call__(self, x: Tensor) -> Tensor:
        scores = self.router(x)  # [T, E]
        weights, ids = self.ops.topk_softmax(scores, self.top_k, renormalise=self.renormalise)
        out = self.experts(x, weights, ids)
        return self.communicator.all_reduce(out) if self.communicator.world_size > 1 else out


class Experts(WeightLayer):
    """The experts' weights: together in core's ``moe`` op if they are plain floats, else each
    through the methods that quantization chooses for it."""

    def __init__(
        self,
        context: BuildContext,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        activation: str,
        expert_names: tuple[str, str, str],
    ) -> None:
        self.name = name
        self.ops = context.ops
        self.num_experts = num_experts
        self.activation = activation
        self.inner = shard_of(intermediate_size, context.communicator, what=f"{name}, inner size")
        size = intermediate_size // self.inner.count
        gate, up, down = expert_names
        self.gate_up_parts = (Part(size, self.inner), Part(size, self.inner))
        self.down_parts = (Part(hidden_size),)
        self.gate_up = [
            LinearSpec(
                name=f"{name}.{index}.gate_up",
                in_features=hidden_size,
                out_parts=(size, size),
                dtype=context.dtype,
                part_names=(f"{name}.{index}.{gate}", f"{name}.{index}.{up}"),
            )
            for index in range(num_experts)
        ]
        self.down = [
            LinearSpec(
                name=f"{name}.{index}.{down}",
                in_features=size,
                out_parts=(hidden_size,),
                dtype=context.dtype,
            )
            for index in range(num_experts)
        ]
        self.gate_up_methods = [context.quant.for_layer(spec) for spec in self.gate_up]
        self.down_methods = [context.quant.for_layer(spec) for spec in self.down]
        self.is_plain = all(m.is_plain for m in (*self.gate_up_methods, *self.down_methods))
        self.packed: PackedLinear | None = None
        self.states: list[tuple[Any, Any]] = []

    def slots(self) -> Mapping[str, Slot]:
        wanted: dict[str, Slot] = {}
        for index in range(self.num_experts):
            for place, spec, method, parts, shard in self._halves(index):
                for suffix, tensor in method.create(spec).items():
                    wanted[f"{index}.{place}.{suffix}"] = slot_of(tensor, parts, shard)
        return wanted

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        if self.is_plain:
            each = range(self.num_experts)
            self.packed = self.ops.moe.pack(
                torch.stack([tensors[f"{index}.gate_up.weight"] for index in each]),
                torch.stack([tensors[f"{index}.down.weight"] for index in each]),
            )
            return
        for index in range(self.num_experts):
            states = []
            for place, spec, method, _, _ in self._halves(index):
                start = f"{index}.{place}."
                own = {k.removeprefix(start): t for k, t in tensors.items() if k.startswith(start)}
                states.append(method.finish(spec, own))
            self.states.append((states[0], states[1]))

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """x [T, H], weights [T, k] float32, ids [T, k] -> [T, H], this rank's share of the sum."""
        if self.packed is not None:
            return self.ops.moe(x, self.packed, weights, ids, self.activation)
        return self._one_by_one(x, weights, ids)

    def _one_by_one(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        chosen = torch.zeros((*ids.shape, x.shape[-1]), dtype=torch.float32, device=x.device)
        for expert in torch.unique(ids).tolist():
            rows, places = (ids == expert).nonzero(as_tuple=True)
            gate_up, down = self.states[expert]
            method = self.gate_up_methods[expert]
            inner = method.apply_gated(self.ops, gate_up, x[rows], self.activation)
            out = self.down_methods[expert].apply(down, inner)
            chosen[rows, places] = out.float()
        return (chosen * weights[..., None]).sum(dim=1).to(x.dtype)

    def _halves(
        self, index: int
    ) -> tuple[tuple[str, LinearSpec, LinearMethod, tuple[Part, ...], Shard], ...]:
        return (
            (
                "gate_up",
                self.gate_up[index],
                self.gate_up_methods[index],
                self.gate_up_parts,
                Shard(),
            ),
            ("down", self.down[index], self.down_methods[index], self.down_parts, self.inner),
        )

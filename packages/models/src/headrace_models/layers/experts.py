"""The weights of gated experts.

Letters: T tokens, H hidden size, I intermediate size, E experts, k experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from headrace_core.linear import LinearMethod, LinearSpec
from headrace_core.ops import PackedLinear
from headrace_models.layers.base import WHOLE, Part, Shard, Slot, WeightLayer, slot_of
from headrace_models.layers.linear import shard_of

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

GATED_NAMES = ("gate_proj", "up_proj", "down_proj")


class _Half(NamedTuple):
    """One of an expert's two products."""

    place: str
    """``gate_up`` or ``down``."""
    spec: LinearSpec
    method: LinearMethod
    parts: tuple[Part, ...]
    in_shard: Shard


class Experts(WeightLayer):
    """``down_e(act(gate_e(x)) * up_e(x))``: together in core's ``moe`` op if all come down to plain
    floats, else each through the methods that quantization chooses for it.

    Args:
        names: of the experts' modules, as the checkpoint spells them.
        module_names: of an expert's gate, up and down below that.
        bias: of all products.
    """

    def __init__(
        self,
        context: BuildContext,
        names: Sequence[str],
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        *,
        module_names: tuple[str, str, str] = GATED_NAMES,
        bias: bool = False,
    ) -> None:
        self.name = names[0] if len(names) == 1 else names[0].rpartition(".")[0]
        self.ops = context.ops
        self.activation = activation
        self.bias = bias
        self.is_first_rank = context.communicator.rank == 0
        inner = shard_of(intermediate_size, context.communicator, what=f"{self.name}, inner size")
        size = intermediate_size // inner.count
        gate, up, down = module_names

        def halves(name: str) -> tuple[_Half, _Half]:
            gate_up_spec = LinearSpec(
                name=f"{name}.gate_up",
                in_features=hidden_size,
                out_parts=(size, size),
                dtype=context.dtype,
                bias=bias,
                part_names=(f"{name}.{gate}", f"{name}.{up}"),
            )
            down_spec = LinearSpec(
                name=f"{name}.{down}",
                in_features=size,
                out_parts=(hidden_size,),
                dtype=context.dtype,
                bias=bias,
            )
            for_layer = context.quant.for_layer
            cut = (Part(size, inner), Part(size, inner))
            return (
                _Half("gate_up", gate_up_spec, for_layer(gate_up_spec), cut, WHOLE),
                _Half("down", down_spec, for_layer(down_spec), (Part(hidden_size),), inner),
            )

        self.halves = [halves(name) for name in names]
        self.is_plain = all(half.method.is_plain for pair in self.halves for half in pair)
        # What is packed together is stacked first, which copies.
        self.takes_views = self.is_plain
        self.packed: PackedLinear | None = None
        self.states: list[tuple[Any, Any]] = []
        self.biases: list[tuple[Tensor | None, Tensor | None]] = []

    def slots(self) -> Mapping[str, Slot]:
        wanted: dict[str, Slot] = {}
        for index, pair in enumerate(self.halves):
            for place, spec, method, parts, in_shard in pair:
                for suffix, tensor in method.create(spec).items():
                    wanted[f"{index}.{place}.{suffix}"] = slot_of(tensor, parts, in_shard)
                if self.bias:
                    wanted[f"{index}.{place}.bias"] = Slot((spec.out_features,), parts=parts)
        return wanted

    def replaced_slots(self) -> Mapping[str, int]:
        halves = ((i, half) for i, pair in enumerate(self.halves) for half in pair)
        kept = {f"{i}.{h.place}.weight": h.method.kept_bytes(h.spec) for i, h in halves}
        return {name: count for name, count in kept.items() if count is not None}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        if self.is_plain:
            self.packed = self.ops.moe.pack(
                *(self._stacked(tensors, at) for at in (0, 1)),
                *(self._stacked_bias(tensors, at) for at in (0, 1)),
            )
            return
        for index, pair in enumerate(self.halves):
            first, second = (
                half.method.finish(half.spec, _below(tensors, f"{index}.{half.place}."))
                for half in pair
            )
            self.states.append((first, second))
            gate_up = tensors.get(f"{index}.gate_up.bias")
            self.biases.append((gate_up, self._once(tensors.get(f"{index}.down.bias"))))

    def _stacked(self, tensors: Mapping[str, Tensor], at: int) -> Tensor:
        """All experts' weights of one product [E, out, in]."""
        return torch.stack(
            [
                pair[at].method.weight(pair[at].spec, _below(tensors, f"{index}.{pair[at].place}."))
                for index, pair in enumerate(self.halves)
            ]
        )

    def _stacked_bias(self, tensors: Mapping[str, Tensor], at: int) -> Tensor | None:
        if not self.bias:
            return None
        place = self.halves[0][at].place
        stacked = torch.stack([tensors[f"{i}.{place}.bias"] for i in range(len(self.halves))])
        return stacked if at == 0 else self._once(stacked)

    def _once(self, bias: Tensor | None) -> Tensor | None:
        """Every rank holds the whole bias of the second product; their sum may contain it once."""
        return bias if self.is_first_rank else None

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """x [T, H], weights [T, k] float32, ids [T, k] -> [T, H], this rank's share of the sum."""
        if self.packed is not None:
            return self.ops.moe(x, self.packed, weights, ids, self.activation)
        return self._one_by_one(x, weights, ids)

    def _one_by_one(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        chosen = torch.zeros((*ids.shape, x.shape[-1]), dtype=torch.float32, device=x.device)
        for expert in torch.unique(ids).tolist():
            rows, places = (ids == expert).nonzero(as_tuple=True)
            (first, second), (gate_up, down) = self.halves[expert], self.states[expert]
            bias, down_bias = self.biases[expert]
            inner = first.method.apply_gated(self.ops, gate_up, x[rows], self.activation, bias)
            chosen[rows, places] = second.method.apply(down, inner, down_bias).float()
        return (chosen * weights[..., None]).sum(dim=1).to(x.dtype)


def _below(tensors: Mapping[str, Tensor], start: str) -> dict[str, Tensor]:
    """Tensors of one product, without its bias."""
    return {
        name.removeprefix(start): tensor
        for name, tensor in tensors.items()
        if name.startswith(start) and name != f"{start}bias"
    }

"""The weights of experts, gated or not.

Letters: T tokens, H hidden size, I intermediate size, E experts, k experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from headrace_core.linear import LinearMethod, LinearSpec
from headrace_core.ops import PackedLinear
from headrace_models.layers.base import WHOLE, Part, Shard, Slot, WeightLayer, slot_of
from headrace_models.layers.linear import shard_of

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext
    from headrace_models.layers.moe.division import Placement
    from headrace_models.layers.moe.exchange import RowExchange
    from headrace_models.lora.places import ExpertsPlace

GATED_NAMES = ("gate_proj", "up_proj", "down_proj")


class _Half(NamedTuple):
    """One of an expert's two products."""

    place: str
    """``gate_up``, ``up`` or ``down``."""
    spec: LinearSpec
    method: LinearMethod
    parts: tuple[Part, ...]
    in_shard: Shard


class Experts(WeightLayer):
    """``down_e(act(gate_e(x)) * up_e(x))``, or ``down_e(act(up_e(x)))``: together in core's ``moe`` or
    ``expert_linear`` op if all come down to plain floats, together through their quantization method if
    that can join them, else each by itself.

    Args:
        names: of the experts' modules, as the checkpoint spells them.
        module_names: of an expert's gate, up and down below that; two names: there is no gate.
        bias: of all products, of gated experts.
        identities: numbers behind the experts' that stand for giving back x.
        top_k: experts that each token of a step goes to. Ranks may divide such experts whole; 0: they divide
            every expert by its inner columns.
    """

    placement: Placement | None = None
    """Where whole experts are; None: every rank has its columns of all."""

    exchange: RowExchange | None = None
    """Brings together the rows of several engines that share the experts; None: there is one engine."""

    low_rank: ExpertsPlace | None = None
    """The experts' adapters; None: they take none. With a place plain weights are packed for two products,
    between which it adds."""

    def __init__(
        self,
        context: BuildContext,
        names: Sequence[str],
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        *,
        module_names: tuple[str, ...] = GATED_NAMES,
        bias: bool = False,
        identities: int = 0,
        top_k: int = 0,
    ) -> None:
        self.name = names[0] if len(names) == 1 else names[0].rpartition(".")[0]
        self.ops = context.ops
        self.activation = activation
        self.bias, self.identities = bias, identities
        self.communicator = context.communicator
        self.is_first_rank = context.communicator.rank == 0
        inner = WHOLE
        if context.experts is not None and top_k:
            self.placement = context.experts.divide(self, context, len(names), identities, top_k)
            self.exchange = context.experts.exchange
            self.no_adapters = "ranks divide the experts whole (enable_expert_parallel)"
        else:
            what = f"{self.name}, inner size"
            inner = shard_of(intermediate_size, context.communicator, what=what)
        size = intermediate_size // inner.count
        *first, down = module_names
        self.gated = len(first) == 2
        place = "gate_up" if self.gated else "up"

        def halves(name: str) -> tuple[_Half, _Half]:
            part_names = tuple(f"{name}.{part}" for part in first)
            up_spec = LinearSpec(
                name=f"{name}.{place}" if self.gated else part_names[0],
                in_features=hidden_size,
                out_parts=(size,) * len(first),
                dtype=context.dtype,
                bias=bias,
                part_names=part_names if self.gated else (),
            )
            down_spec = LinearSpec(
                name=f"{name}.{down}",
                in_features=size,
                out_parts=(hidden_size,),
                dtype=context.dtype,
                bias=bias,
            )
            for_layer = context.quant.for_layer
            cut = (Part(size, inner),) * len(first)
            return (
                _Half(place, up_spec, for_layer(up_spec), cut, WHOLE),
                _Half("down", down_spec, for_layer(down_spec), (Part(hidden_size),), inner),
            )

        self.every = [halves(name) for name in names]
        """Of all experts, this rank's or not."""
        self.numbers = list(range(len(names))) if self.placement is None else self.placement.own
        """Experts whose weights this rank loads, in the order of :attr:`halves`."""
        self.halves = [self.every[number] for number in self.numbers]
        self.is_plain = all(half.method.is_plain for pair in self.every for half in pair)
        # What is packed together is stacked first, which copies.
        self.takes_views = self.is_plain
        self.packed: PackedLinear | None = None
        self.apart: tuple[PackedLinear, PackedLinear] | None = None
        self.routed: tuple[Any, Any] | None = None
        self.states: list[tuple[Any, Any]] = []
        self.biases: list[tuple[Tensor | None, Tensor | None]] = []
        self.stacked_biases: list[Tensor | None] = [None, None]

    def slots(self) -> Mapping[str, Slot]:
        wanted: dict[str, Slot] = {}
        for index, pair in enumerate(self.every):
            copies = self.numbers.count(index)
            for place, spec, method, parts, in_shard in pair:
                for suffix, tensor in method.create(spec).items():
                    slot = slot_of(tensor, parts, in_shard)
                    wanted[f"{index}.{place}.{suffix}"] = replace(slot, copies=copies)
                if self.bias:
                    slot = Slot((spec.out_features,), parts=parts, copies=copies)
                    wanted[f"{index}.{place}.bias"] = slot
        return wanted

    def replaced_slots(self) -> Mapping[str, int]:
        kept: dict[str, int] = {}
        for number, pair in zip(self.numbers, self.halves, strict=True):
            for half in pair:
                count, name = half.method.kept_bytes(half.spec), f"{number}.{half.place}.weight"
                if count is not None:
                    kept[name] = kept.get(name, 0) + count
        return kept

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        if self.is_plain:
            first, second = (self._stacked(tensors, at) for at in (0, 1))
            biases = [self._stacked_bias(tensors, at) for at in (0, 1)]
            if not self.gated or self.low_rank is not None:
                pack = self.ops.expert_linear.pack
                self.apart, self.stacked_biases = (pack(first), pack(second)), biases
                return
            self.packed = self.ops.moe.pack(first, second, *biases)
            return
        for at, (number, pair) in enumerate(zip(self.numbers, self.halves, strict=True)):
            own = tensors
            if number in self.numbers[:at]:  # a copy, which may become another expert
                own = {k: t.clone() for k, t in tensors.items() if k.startswith(f"{number}.")}
            states = [
                half.method.finish(half.spec, _below(own, f"{number}.{half.place}."))
                for half in pair
            ]
            self.states.append((states[0], states[1]))
            gate_up = own.get(f"{number}.gate_up.bias")
            self.biases.append((gate_up, self._once(own.get(f"{number}.down.bias"))))
        self._join(tensors)

    def _join(self, tensors: Mapping[str, Tensor]) -> None:
        """Let the method run all experts together, if it can."""
        methods = [{type(pair[at].method) for pair in self.halves} for at in (0, 1)]
        if self.identities or any(len(kinds) > 1 for kinds in methods):
            return
        first, second = (
            self.halves[0][at].method.join([pair[at] for pair in self.states]) for at in (0, 1)
        )
        if first is not None and second is not None:
            self.routed = first, second
            self.stacked_biases = [self._stacked_bias(tensors, at) for at in (0, 1)]

    def _stacked(self, tensors: Mapping[str, Tensor], at: int) -> Tensor:
        """All experts' weights of one product [E, out, in]."""
        return torch.stack(
            [
                pair[at].method.weight(
                    pair[at].spec, _below(tensors, f"{number}.{pair[at].place}.")
                )
                for number, pair in zip(self.numbers, self.halves, strict=True)
            ]
        )

    def _stacked_bias(self, tensors: Mapping[str, Tensor], at: int) -> Tensor | None:
        if not self.bias:
            return None
        place = self.halves[0][at].place
        stacked = torch.stack([tensors[f"{number}.{place}.bias"] for number in self.numbers])
        return stacked if at == 0 else self._once(stacked)

    def _once(self, bias: Tensor | None) -> Tensor | None:
        """Every rank holds the whole bias of the second product; their sum may contain it once."""
        return bias if self.is_first_rank or self.placement is not None else None

    def __call__(self, x: Tensor, weights: Tensor | None, ids: Tensor) -> Tensor:
        """x [T, H], weights [T, k] float32 (None: ones), ids [T, k] -> [T, H], this rank's share of the
        sum, which :meth:`summed` takes."""
        if self.placement is not None and self.exchange is not None:
            return self._of_engines(self.placement, self.exchange, x, weights, ids)
        if self.placement is not None:
            return self._divided(self.placement, x, weights, ids)
        out = self._base(x, weights, ids)
        if self.low_rank is None or not self.low_rank.is_chosen:
            return out
        rows = self.low_rank.adapted_rows(len(ids))
        if not len(rows):
            return out
        own = None if weights is None else weights[rows]
        return out.index_copy(0, rows, self._adapted(self.low_rank, x[rows], own, ids[rows], rows))

    def summed(self, shares: Tensor) -> Tensor:
        """Shares of the ranks, [T, H] each, summed; may reuse the input's memory. Rows of several engines are
        summed before they come back."""
        if self.communicator.world_size == 1 or self.exchange is not None:
            return shares
        return self.communicator.all_reduce(shares)

    def _of_engines(
        self,
        placement: Placement,
        exchange: RowExchange,
        x: Tensor,
        weights: Tensor | None,
        ids: Tensor,
    ) -> Tensor:
        """The whole sum of this engine's rows, while this rank computes its experts for those of all."""
        per_token = exchange.begin_call(self, x, weights, ids)
        shares = self._divided(placement, *exchange.gather(x, weights, ids, per_token))
        return exchange.scatter(shares, per_token)

    def _divided(
        self, placement: Placement, x: Tensor, weights: Tensor | None, ids: Tensor
    ) -> Tensor:
        """The share of the experts that this rank has."""
        slots, here = placement.find(x, ids)
        if self.packed is None:
            return self._of_rows(placement, x, weights, slots)
        if here is not None:  # else an absent expert gives back 0 times x
            weights = here if weights is None else self.ops.gate(weights, here)
        return self.ops.moe(
            x,
            self.packed,
            weights,
            slots,
            self.activation,
            identities=self.identities + 1,
            identity_scale=float(placement.gives_back),
        )

    def _of_rows(
        self, placement: Placement, x: Tensor, weights: Tensor | None, slots: Tensor
    ) -> Tensor:
        """The same of weights that no op passes over. Its rows depend on contents, so such steps are not
        captured; a token's experts are added in their order."""
        width = self.halves[0][1].spec.out_features
        out = torch.zeros(len(x), width, dtype=torch.float32, device=x.device)
        rows, at = (slots < placement.absent).nonzero(as_tuple=True)
        if len(rows):
            own = None if weights is None else weights[rows, at, None]
            share = self._base(x[rows], own, slots[rows, at, None])
            out.index_add_(0, rows, share.float())
        return out.to(x.dtype)

    def _base(self, x: Tensor, weights: Tensor | None, ids: Tensor) -> Tensor:
        """What the experts make of x without adapters."""
        if self.packed is not None:
            return self.ops.moe(
                x,
                self.packed,
                weights,
                ids,
                self.activation,
                identities=self.identities,
                identity_scale=float(self.is_first_rank),
            )
        if self.apart is not None or self.routed is not None:
            return self._in_two(x, weights, ids)
        return self._one_by_one(x, weights, ids)

    def _adapted(
        self, place: ExpertsPlace, x: Tensor, weights: Tensor | None, ids: Tensor, rows: Tensor
    ) -> Tensor:
        """The same for some rows [R], which have adapters: x [R, H] -> [R, H]."""
        own = self._with_weights(ids)
        both = place(self.halves[0][0].place, self._product(0, x, own), x, own, rows)
        inner = self._activated(both)
        return self._sum(
            x, place("down", self._product(1, inner, own), inner, own, rows), weights, ids
        )

    def _with_weights(self, ids: Tensor) -> Tensor:
        """ids, with some expert's in the place of those that have no weights."""
        return ids.where(ids < len(self.halves), 0) if self.identities else ids

    def _sum(self, x: Tensor, out: Tensor, weights: Tensor | None, ids: Tensor) -> Tensor:
        """Sum by weight of experts' results out [T, k, H]; of those that give back x [T, H], of that."""
        found = out.float()
        if self.identities:
            same = x[:, None].float() * float(self.is_first_rank)
            found = found.where(ids[..., None] < len(self.halves), same)
        weighed = found if weights is None else found * weights[..., None]
        return weighed.sum(dim=1).to(x.dtype)

    def _in_two(self, x: Tensor, weights: Tensor | None, ids: Tensor) -> Tensor:
        """All experts' first products, then all their second ones."""
        own = self._with_weights(ids)
        inner = self._activated(self._product(0, x, own))
        if self.identities:
            return self._sum(x, self._product(1, inner, own), weights, ids)
        if weights is not None:
            return self._product(1, inner, ids, weights)
        out = self._product(1, inner, ids)
        return out[:, 0] if ids.shape[1] == 1 else out.sum(1)

    def _activated(self, both: Tensor) -> Tensor:
        """[T, k, I or 2 I] of first products -> [T, k, I]."""
        activate = self.ops.activation_and_mul if self.gated else self.ops.activation
        return activate(both.flatten(0, 1), self.activation).view(*both.shape[:2], -1)

    def _product(self, at: int, x: Tensor, ids: Tensor, weights: Tensor | None = None) -> Tensor:
        """One product of each token's experts [T, k, N], or with weights their sum [T, N]."""
        half, bias = self.halves[0][at], self.stacked_biases[at]
        if self.apart is not None:
            made = self.ops.expert_linear(x, self.apart[at], ids, weights)
            return made if bias is None else self._biased(made, bias, ids, weights)
        if self.routed is not None:
            return half.method.apply_routed(self.routed[at], x, ids, weights, bias)
        out = x.new_empty((*ids.shape, half.spec.out_features))
        for expert in torch.unique(ids).tolist():
            rows, places = (ids == expert).nonzero(as_tuple=True)
            own = x[rows] if x.dim() == 2 else x[rows, places]
            apply, state = self.halves[expert][at].method.apply, self.states[expert][at]
            out[rows, places] = apply(state, own, self.biases[expert][at])
        return out

    def _biased(self, made: Tensor, bias: Tensor, ids: Tensor, weights: Tensor | None) -> Tensor:
        """A product [T, k, N] of experts, or their sum by weight [T, N], with their biases [E, N]; by
        operations that can be captured."""
        own = self.ops.embedding(ids.flatten(), bias).view(*ids.shape, -1)
        if weights is None:
            return made + own
        total = made.float()
        for place in range(ids.shape[1]):
            total = total + own[:, place].float() * weights[:, place, None]
        return total.to(made.dtype)

    def _one_by_one(self, x: Tensor, weights: Tensor | None, ids: Tensor) -> Tensor:
        """One expert after the other. The rows that an expert gets depend on contents, so such steps are not
        captured."""
        chosen = torch.zeros((*ids.shape, x.shape[-1]), dtype=torch.float32, device=x.device)
        for expert in torch.unique(ids).tolist():
            rows, places = (ids == expert).nonzero(as_tuple=True)
            chosen[rows, places] = self._one(expert, x[rows]).float()
        weighed = chosen if weights is None else chosen * weights[..., None]
        return weighed.sum(dim=1).to(x.dtype)

    def _one(self, expert: int, x: Tensor) -> Tensor:
        """x [T, H] by one expert's methods -> the same shape."""
        if expert >= len(self.halves):
            return x if self.is_first_rank else torch.zeros_like(x)
        (first, second), (up, down) = self.halves[expert], self.states[expert]
        bias, down_bias = self.biases[expert]
        apply = first.method.apply_gated if self.gated else first.method.apply_activated
        return second.method.apply(down, apply(self.ops, up, x, self.activation, bias), down_bias)


def _below(tensors: Mapping[str, Tensor], start: str) -> dict[str, Tensor]:
    """Tensors of one product, without its bias."""
    return {
        name.removeprefix(start): tensor
        for name, tensor in tensors.items()
        if name.startswith(start) and name != f"{start}bias"
    }

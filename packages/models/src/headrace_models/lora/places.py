"""Places for adapters in a model's layers, and what a layer adds with them.

Letters: T rows, S slots, E experts, k experts of a token, r largest rank, V rows of a table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headrace_models.layers.base import WHOLE, Part, Shard, Slot

if TYPE_CHECKING:
    from headrace_core.ops.optional.low_rank import LowRankOp
    from headrace_models.lora.files import Factors
    from headrace_models.lora.rows import RowSlots


@dataclass(frozen=True, slots=True)
class Memory:
    """What all places of a model share.

    Args:
        like: an empty tensor of the factors' dtype, on the model's device.
        fully_sharded: both factors of linear layers are cut over the ranks.
    """

    op: LowRankOp
    num_slots: int
    max_rank: int
    like: Tensor
    fully_sharded: bool = False

    def allocate(self, in_features: int, out_parts: Sequence[int], copies: int = 1) -> Any:
        """Memory of one product, for so many of them in each slot."""
        return self.op.allocate(
            self.num_slots * copies, self.max_rank, in_features, out_parts, self.like
        )


class Place(ABC):
    """The place of one layer; it stands for the layer where weight rules are followed.

    Args:
        name: of the layer, as the checkpoint spells it.
        rows: slots of the rows that the layer gets.
    """

    is_late = False
    """True if memory is taken once an adapter needs it. Steps that were recorded before do not know the
    place."""

    def __init__(self, memory: Memory, name: str, rows: RowSlots) -> None:
        self.memory, self.name, self.rows = memory, name, rows
        self.filled: set[tuple[int, str, int]] = set()
        """Slot, key and part of what is not empty."""

    @property
    def is_chosen(self) -> bool:
        """True if rows of the coming pass have adapters, and some adapter changes the layer."""
        return self.rows.count is not None and not (self.is_late and not self.filled)

    @abstractmethod
    def slots(self) -> Mapping[str, Slot]:
        """The layer's plain weights, by name below the layer."""

    @abstractmethod
    def modules(self) -> Mapping[str, tuple[str, int]]:
        """Modules of the layer, in the checkpoint's spelling -> name of the weight, and part."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes of the memory that is taken."""

    def place(self, slot: int, key: str, part: int, factors: Factors) -> None:
        """Make a slot hold factors for one part of a weight."""
        self.write(slot, key, part, factors.down, factors.up, factors.scale)
        self.filled.add((slot, key, part))

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        for entry in [entry for entry in self.filled if entry[0] == slot]:
            _, key, part = entry
            shape, like = self.slots()[key].part_shape(part), self.memory.like
            self.write(
                slot, key, part, like.new_empty(0, shape[1]), like.new_empty(shape[0], 0), 0.0
            )
            self.filled.remove(entry)

    @abstractmethod
    def write(self, slot: int, key: str, part: int, down: Tensor, up: Tensor, scale: float) -> None:
        """See :meth:`headrace_core.ops.optional.low_rank.LowRankOp.write`; as this rank keeps them."""


class LinearPlace(Place):
    """Of a linear layer.

    Args:
        parts, in_shard, part_names: see :class:`~headrace_models.layers.linear.Linear`.
        silent: outputs that nothing is added to.
    """

    def __init__(
        self,
        memory: Memory,
        name: str,
        rows: RowSlots,
        in_features: int,
        parts: tuple[Part, ...],
        *,
        in_shard: Shard = WHOLE,
        part_names: tuple[str, ...] = (),
        silent: Sequence[int] = (),
    ) -> None:
        super().__init__(memory, name, rows)
        self.part_names, self.silent = part_names, list(silent)
        sizes = [part.size for part in parts]
        shape = (sum(sizes), in_features)
        self.slot = Slot(shape, parts=parts, in_dim=1, in_shard=in_shard)
        self.allocate(in_features, sizes)

    def allocate(self, in_features: int, out_parts: list[int]) -> None:
        """Take the slots' memory."""
        self.factors = self.memory.allocate(in_features, out_parts)

    def slots(self) -> Mapping[str, Slot]:
        return {"weight": self.slot}

    def modules(self) -> Mapping[str, tuple[str, int]]:
        if self.part_names:
            return {name: ("weight", part) for part, name in enumerate(self.part_names)}
        return {self.name: ("weight", 0)} if self.slot.num_parts == 1 else {}

    @property
    def num_bytes(self) -> int:
        return int(self.factors.num_bytes)

    def write(self, slot: int, key: str, part: int, down: Tensor, up: Tensor, scale: float) -> None:
        if self.silent:
            up = up.index_fill(0, torch.tensor(self.silent, device=up.device), 0.0)
        self.memory.op.write(self.factors, slot, part, down, up, scale)

    def __call__(self, out: Tensor, x: Tensor) -> Tensor:
        """Add to out [T, N], of this layer's x [T, K], what its rows' adapters add; out itself."""
        return self.memory.op(out, x, self.factors, self.rows.of(x.shape[0], self.name))


class TowerPlace(LinearPlace):
    """The place of a linear layer of a tower for media, or of what follows it."""

    def __call__(self, out: Tensor, x: Tensor) -> Tensor:
        """out [..., N] of this layer's x [..., K], with what the adapter of the media adds."""
        rows, sizes = x.reshape(-1, x.shape[-1]), out.shape
        return super().__call__(out.reshape(-1, sizes[-1]), rows).view(sizes)


class TablePlace(Place):
    """Of a table of vectors [V, H]: a row of ``down.T`` for each of its rows."""

    is_late = True

    def __init__(
        self, memory: Memory, name: str, rows: RowSlots, shape: tuple[int, int], beyond: int | None
    ) -> None:
        super().__init__(memory, name, rows)
        self.num_rows, self.size = shape
        self.beyond = beyond
        self.rows_of_slots: Tensor | None = None
        """[S, V, r]: of each slot, ``down.T``."""
        self.factors: Any = None
        """Of ``up``; its ``down`` is the identity."""

    def slots(self) -> Mapping[str, Slot]:
        return {"weight": Slot((self.size, self.num_rows))}

    def modules(self) -> Mapping[str, tuple[str, int]]:
        return {self.name: ("weight", 0)}

    @property
    def num_bytes(self) -> int:
        held = self.rows_of_slots
        return 0 if held is None else held.nbytes + int(self.factors.num_bytes)

    def write(self, slot: int, key: str, part: int, down: Tensor, up: Tensor, scale: float) -> None:
        memory = self.memory
        if self.rows_of_slots is None:
            shape = (memory.num_slots, self.num_rows, memory.max_rank)
            self.rows_of_slots = memory.like.new_zeros(shape)
            self.factors = memory.allocate(memory.max_rank, (self.size,))
        self.rows_of_slots[slot].zero_()
        self.rows_of_slots[slot, :, : len(down)].copy_(down.T)
        same = torch.eye(len(down), memory.max_rank, dtype=down.dtype, device=down.device)
        memory.op.write(self.factors, slot, 0, same, up, scale)

    def __call__(self, out: Tensor, ids: Tensor) -> Tensor:
        """Add to the rows out [T, H] of ids [T] int64 what their adapters add; out itself."""
        assert self.rows_of_slots is not None, self.name
        slots = self.rows.of(ids.shape[0], self.name)
        if self.beyond is not None:
            ids = torch.where(ids < self.num_rows, ids, self.beyond)
        chosen = slots[: len(ids)].long().clamp(min=0)
        return self.memory.op(out, self.rows_of_slots[chosen, ids], self.factors, slots)


class ExpertsPlace(Place):
    """Of the experts of a mixture. A row of the products below is one expert of one token.

    Args:
        weights: of one expert, by the product's name.
        modules: names of all experts' modules, see :meth:`Place.modules`.
        num_without_weights: further experts that tokens go to, which have none.
    """

    is_late = True

    def __init__(
        self,
        memory: Memory,
        name: str,
        rows: RowSlots,
        num_experts: int,
        weights: Mapping[str, Slot],
        modules: Mapping[str, tuple[str, int]],
        num_without_weights: int = 0,
    ) -> None:
        super().__init__(memory, name, rows)
        self.num_experts, self.num_without_weights = num_experts, num_without_weights
        self.weights, self.of_modules = weights, modules
        self.factors: dict[str, Any] = {}

    def slots(self) -> Mapping[str, Slot]:
        every = range(self.num_experts)
        return {f"{i}.{half}.weight": slot for i in every for half, slot in self.weights.items()}

    def modules(self) -> Mapping[str, tuple[str, int]]:
        return self.of_modules

    @property
    def num_bytes(self) -> int:
        return sum(int(factors.num_bytes) for factors in self.factors.values())

    def write(self, slot: int, key: str, part: int, down: Tensor, up: Tensor, scale: float) -> None:
        for half, weight in {} if self.factors else self.weights.items():
            sizes = [weight.part_shape(i)[0] for i in range(weight.num_parts)]
            self.factors[half] = self.memory.allocate(weight.shape[1], sizes, self.num_experts)
        expert, half, _ = key.split(".")
        index = slot * self.num_experts + int(expert)
        self.memory.op.write(self.factors[half], index, part, down, up, scale)

    def adapted_rows(self, tokens: int) -> Tensor:
        """[R] int64: the rows, of so many tokens', whose adapters change experts here."""
        slots = self.rows.of(tokens, self.name)[:tokens]
        changing = sorted({slot for slot, _, _ in self.filled})
        return torch.isin(slots, slots.new_tensor(changing)).nonzero()[:, 0]

    def __call__(self, half: str, out: Tensor, x: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
        """Add to out [R, k, N], of one product of each token's experts, what its adapter adds; out itself.

        Args:
            x: [R, K] or [R, k, K].
            ids: [R, k] int64.
            rows: [R] int64; which of the pass's they are.
        """
        places = self.rows.memory[rows, None] * self.num_experts + ids
        x = x if x.dim() == 3 else x[:, None].expand(-1, ids.shape[1], -1)
        flat, inputs = places.flatten().to(torch.int32), x.reshape(-1, x.shape[-1])
        self.memory.op(out.view(-1, out.shape[-1]), inputs, self.factors[half], flat)
        return out

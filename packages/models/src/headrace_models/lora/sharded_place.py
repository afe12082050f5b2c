"""Places whose factors are both cut over the ranks of tensor parallelism (``fully_sharded_loras``).

A layer's own cut leaves one of the factors whole on every rank: ``down`` of layers whose outputs are cut,
``up`` of those whose inputs are. Here that one is cut along the adapter's rank: each rank of the group
computes its share of ``down @ x``, and gets what it needs of the others' by one exchange, of as many numbers
as the adapter's rank is. These have the activations' dtype, as they have between PEFT's two layers.

Adapters under tensor parallelism: Sheng et al. 2023, arXiv:2311.03285. A cut along the rank needs nothing to
divide: shares of a rank may be of different sizes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from headrace_models.lora.places import LinearPlace

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.parallel import Communicator
    from headrace_models.lora.places import Memory
    from headrace_models.lora.rows import RowSlots


class ShardedPlace(LinearPlace):
    """The place of a linear layer, with room for one rank's share of ``down @ x``.

    Args:
        communicator: of the ranks.
        settings: see :class:`~headrace_models.lora.places.LinearPlace`.
    """

    def __init__(
        self,
        memory: Memory,
        name: str,
        rows: RowSlots,
        in_features: int,
        parts: Any,
        communicator: Communicator,
        **settings: Any,
    ) -> None:
        self.communicator = communicator
        self.room = -(-memory.max_rank // communicator.world_size)
        super().__init__(memory, name, rows, in_features, parts, **settings)

    def allocate(self, in_features: int, out_parts: list[int]) -> None:
        """Memory of two products: what is exchanged lies between them."""
        ranks, room, op = self.communicator.world_size, self.room, self.memory.op
        self.cuts_inputs = self.slot.in_shard.count > 1
        if self.cuts_inputs:
            sizes, widths = (ranks * room, in_features, [ranks * room]), (room, room, out_parts)
        else:
            own = [room] * len(out_parts)
            sizes, widths = (room, in_features, own), (ranks * room, ranks * sum(own), out_parts)
        slots, like = self.memory.num_slots, self.memory.like
        self.first = op.allocate(slots, *sizes, like)
        self.second = op.allocate(slots, *widths, like)

    @property
    def num_bytes(self) -> int:
        return int(self.first.num_bytes) + int(self.second.num_bytes)

    def write(self, slot: int, key: str, part: int, down: Tensor, up: Tensor, scale: float) -> None:
        ranks, room, write = self.communicator.world_size, self.room, self.memory.op.write
        share = max(1, -(-len(down) // ranks))
        lines = torch.arange(len(down), device=down.device)
        owner, place = lines // share, lines % share
        mine = owner == self.communicator.rank
        if self.cuts_inputs:
            write(
                self.first, slot, 0, down, _placed(owner * room + place, ranks * room, down).T, 1.0
            )
            write(self.second, slot, 0, _placed(place[mine], room, up), up[:, mine], scale)
        else:
            parts = self.slot.num_parts
            write(self.first, slot, part, down[mine], _placed(place[mine], room, down).T, 1.0)
            seen = _placed((owner * parts + part) * room + place, ranks * parts * room, up)
            write(self.second, slot, part, seen, up, scale)

    def __call__(self, out: Tensor, x: Tensor) -> Tensor:
        """out [..., N] of this layer's x [..., K], with what its rows' adapters add to this rank's share."""
        rows, sizes = x.reshape(-1, x.shape[-1]), out.shape
        slots, op, room = self.rows.of(len(rows), self.name), self.memory.op, self.room
        group = self.communicator
        if self.cuts_inputs:
            made = op(x.new_zeros(len(rows), group.world_size * room), rows, self.first, slots)
            first = group.rank * room
            seen = group.all_reduce(made)[:, first : first + room].contiguous()
        else:
            width = self.slot.num_parts * room
            seen = group.all_gather(op(x.new_zeros(len(rows), width), rows, self.first, slots))
        return op(out.reshape(-1, sizes[-1]), seen, self.second, slots).view(sizes)


def _placed(columns: Tensor, width: int, like: Tensor) -> Tensor:
    """[lines, width]: a one in each line, at its column."""
    found = like.new_zeros(len(columns), width)
    return found.scatter_(1, columns[:, None], 1.0)

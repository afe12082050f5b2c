"""The place of latent attention's projections of heads, whose parts multiply queries, latents and results.

A request's tokens all have its adapter, so what its queries are multiplied by may hold the adapter's part
for keys that were cached as latents. Letters: those of :mod:`headrace_models.layers.attention.mla`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headrace_models.layers.base import Part, Slot
from headrace_models.lora.places import Memory, Place
from headrace_models.lora.rows import RowSlots

LATENT, VALUE, KEY = "latent", "value", "key"
"""Products: W_K^T with queries, W_V and W_K with latents."""


class HeadsPlace(Place):
    """Of W_K and W_V of each head. A row of the products is one head of one token.

    Args:
        part: rows of the weight [H * (K + V), R] that this rank keeps.
        sizes: K, V and R.
    """

    is_late = True

    def __init__(
        self, memory: Memory, name: str, rows: RowSlots, part: Part, sizes: tuple[int, int, int]
    ) -> None:
        super().__init__(memory, name, rows)
        self.key_size, self.value_size, self.latent_size = sizes
        self.part = part
        self.num_heads = part.size // (self.key_size + self.value_size)
        self.factors: dict[str, Any] = {}

    def slots(self) -> Mapping[str, Slot]:
        return {"weight": Slot((self.part.size, self.latent_size), parts=(self.part,))}

    def modules(self) -> Mapping[str, tuple[str, int]]:
        return {self.name: ("weight", 0)}

    @property
    def num_bytes(self) -> int:
        return sum(int(factors.num_bytes) for factors in self.factors.values())

    def write(self, slot: int, key: str, part: int, down: Tensor, up: Tensor, scale: float) -> None:
        if not self.factors:
            sizes = {
                LATENT: (self.key_size, self.latent_size),
                VALUE: (self.latent_size, self.value_size),
                KEY: (self.latent_size, self.key_size),
            }
            for product, (inputs, outputs) in sizes.items():
                self.factors[product] = self.memory.allocate(inputs, (outputs,), self.num_heads)
        of_heads = up.reshape(self.num_heads, -1, len(down))
        write = self.memory.op.write
        for head, rows in enumerate(of_heads):
            index, (keys, values) = (
                slot * self.num_heads + head,
                rows.split([self.key_size, self.value_size]),
            )
            write(self.factors[LATENT], index, 0, keys.T.contiguous(), down.T.contiguous(), scale)
            write(self.factors[VALUE], index, 0, down, values, scale)
            write(self.factors[KEY], index, 0, down, keys, scale)

    def __call__(self, product: str, out: Tensor, x: Tensor) -> Tensor:
        """Add to out [T, H, N], of one product of x [T, H, K], what each token's adapter adds."""
        tokens = x.shape[0]
        slots = self.rows.of(tokens, self.name)[:tokens, None]
        heads = torch.arange(self.num_heads, device=slots.device)
        places = torch.where(slots < 0, slots, slots * self.num_heads + heads).to(torch.int32)
        own = out.reshape(-1, out.shape[-1])
        added = self.memory.op(
            own, x.reshape(-1, x.shape[-1]), self.factors[product], places.flatten()
        )
        return added.view(out.shape)

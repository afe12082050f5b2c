"""xLSTM's layer with a matrix memory. Beck et al. 2024, arXiv:2405.04517; as of 7B: 2025, arXiv:2503.13427.

Letters: T tokens, H heads of this rank, N size of a head's key, P of its value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.kv import StateShape
from headrace_models.layers.base import Part, Slot
from headrace_models.layers.head_view import by_heads, in_rows
from headrace_models.layers.heads_norm import HeadLayerNorm
from headrace_models.layers.linear import column_parallel, dividing_shard, row_parallel
from headrace_models.layers.state_layer import RecurrentLayer
from headrace_models.settings import MAX_HEAD_DIM

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext


@dataclass(frozen=True, slots=True)
class MLSTMSizes:
    """What a config says of its layers.

    Raises:
        UnsupportedModel: channels that cannot be divided into heads of a sensible size.
    """

    hidden_size: int
    num_heads: int
    keys: int
    """Channels of all keys."""
    values: int

    def __post_init__(self) -> None:
        for size in (self.keys, self.values):
            if size % self.num_heads or not 1 <= size // self.num_heads <= MAX_HEAD_DIM:
                raise UnsupportedModel(
                    f"config.json: num_heads = {self.num_heads}: must divide {self.keys} channels of "
                    f"keys and {self.values} of values into heads of 1 to {MAX_HEAD_DIM}"
                )


class MLSTM(RecurrentLayer):
    """``out(norm(memory) * sigmoid(gate(x)))``. Heads are spread over the ranks.

    Args:
        gate_cap: what tanh keeps the memory's gates within.
        norm_eps: of the norm of each head.
        eps: of the memory, see :class:`headrace_core.ops.MLSTMOp`.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        sizes: MLSTMSizes,
        *,
        gate_cap: float,
        norm_eps: float,
        eps: float,
    ) -> None:
        heads, count = sizes.num_heads, context.communicator
        shard = dividing_shard(heads, count, what=f"{name}, heads")
        own = heads // shard.count
        self.key_dim, self.value_dim = sizes.keys // heads, sizes.values // heads
        held = self.key_dim * self.value_dim + self.key_dim + 1
        super().__init__(context, name, (StateShape((own, held), "float32"),))
        self.ops, self.gate_cap, self.eps = context.ops, gate_cap, eps
        self.parts = [own * size for size in (self.key_dim, self.key_dim, self.value_dim)]
        self.parts.append(self.parts[-1])
        self.inputs = column_parallel(
            context,
            f"{name}.qkv_opreact",
            sizes.hidden_size,
            (sizes.keys, sizes.keys, sizes.values, sizes.values),
            units=(heads,) * 4,
            part_names=tuple(f"{name}.{part}" for part in ("q", "k", "v", "ogate_preact")),
        )
        self.gates = column_parallel(
            context,
            f"{name}.ifgate_preact",
            sizes.hidden_size,
            (heads, heads),
            units=(heads, heads),
            bias=True,
            part_names=tuple(f"{name}.{part}gate_preact" for part in "if"),
        )
        self.norm = RowHeadLayerNorm(
            context, f"{name}.multihead_norm", heads, self.value_dim, norm_eps
        )
        self.out_proj = row_parallel(context, f"{name}.out_proj", sizes.values, sizes.hidden_size)

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size] -> the same shape."""
        query, key, value, gate = torch.split(self.inputs(x), self.parts, dim=-1)
        opens, keeps = self.ops.to_float32(self.gates(x), soft_cap=self.gate_cap).chunk(2, dim=-1)
        out = self.ops.mlstm(
            by_heads(query, self.key_dim),
            by_heads(key, self.key_dim),
            by_heads(value, self.value_dim),
            opens,
            keeps,
            *self.state(0, batch),
            scale=self.key_dim**-0.5,
            eps=self.eps,
        )
        return self.out_proj(self.ops.gate(in_rows(self.norm(out)), gate, activation="sigmoid"))


class RowHeadLayerNorm(HeadLayerNorm):
    """LayerNorm over each head, whose weights are stored as one row [heads * D]."""

    def slots(self) -> Mapping[str, Slot]:
        size = self.part.size * self.head_dim
        return {"weight": Slot((size,), parts=(Part(size, self.part.shard),))}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        super().load({"weight": tensors["weight"].view(-1, self.head_dim)})

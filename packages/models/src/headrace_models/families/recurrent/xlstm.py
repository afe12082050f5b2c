"""xLSTM: a stack of matrix memories (mLSTM) with exponential gates. Beck et al. 2024, arXiv:2405.04517; as
of 7B: 2025, arXiv:2503.13427.

Block: ``h = x + mlstm(norm(x)); h + mlp(norm(h))``.

Letters: T tokens, H heads of this rank, N size of a head's key, P of its value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.kv import StateShape
from headrace_core.model import WeightRule
from headrace_core.ops.optional.mlstm import MLSTM as MLSTM_OP
from headrace_models.config.settings import MAX_HEAD_DIM, Spelling
from headrace_models.layers.attention.heads_norm import HeadLayerNorm
from headrace_models.layers.base import Part, Slot
from headrace_models.layers.blocks import HybridBlock
from headrace_models.layers.decoder import Block, Decoder
from headrace_models.layers.head_view import by_heads, in_rows
from headrace_models.layers.linear import column_parallel, dividing_shard, row_parallel
from headrace_models.layers.mlp import GatedMLP
from headrace_models.layers.norm import RMSNorm
from headrace_models.layers.recurrent.state_layer import RecurrentLayer
from headrace_models.loading.mapping import ALL_PARTS

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext

_BLOCK = "backbone.blocks.{}"
_LAYER, _FFN = f"{_BLOCK}.mlstm_layer", f"{_BLOCK}.ffn"
_INPUTS, _GATES = "layers.{}.mixer.inputs", "layers.{}.mixer.gates"


@dataclass(frozen=True, slots=True)
class MLSTMSizes:
    """Sizes of the layers, of a config.

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
        eps: of the memory, see :class:`headrace_core.ops.optional.mlstm.MLSTMOp`.
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
        self.recur = context.ops.optional(MLSTM_OP)
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
        out = self.recur(
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


class XLSTMForCausalLM(Decoder):
    """xLSTM 7B; projections apart (``weight_mode`` single) or fused."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        WeightRule("backbone.embeddings", "embed"),
        WeightRule(f"{_BLOCK}.norm_mlstm", "layers.{}.input_norm"),
        *(
            WeightRule(f"{_LAYER}.{name}", _INPUTS, part=part)
            for part, name in enumerate(("q", "k", "v", "ogate_preact"))
        ),
        WeightRule(f"{_LAYER}.qkv_opreact", _INPUTS, split=ALL_PARTS),
        WeightRule(f"{_LAYER}.igate_preact", _GATES, part=0),
        WeightRule(f"{_LAYER}.fgate_preact", _GATES, part=1),
        WeightRule(f"{_LAYER}.ifgate_preact", _GATES, split=ALL_PARTS),
        WeightRule(f"{_LAYER}.multihead_norm", "layers.{}.mixer.norm"),
        WeightRule(f"{_LAYER}.out_proj", "layers.{}.mixer.out_proj"),
        WeightRule(f"{_BLOCK}.norm_ffn", "layers.{}.mlp_norm"),
        WeightRule(f"{_FFN}.proj_up_gate", "layers.{}.mlp.gate_up", part=0),
        WeightRule(f"{_FFN}.proj_up", "layers.{}.mlp.gate_up", part=1),
        WeightRule(f"{_FFN}.proj_up_gate_z", "layers.{}.mlp.gate_up", split=ALL_PARTS),
        WeightRule(f"{_FFN}.proj_down", "layers.{}.mlp.down"),
        WeightRule("backbone.out_norm", "final_norm"),
        WeightRule("lm_head", "head"),
    )
    embedding_name: ClassVar[str] = "backbone.embeddings"
    blocks_name: ClassVar[str] = "backbone.blocks"
    spelling: ClassVar[Spelling] = {
        "hidden_size": ("embedding_dim",),
        "num_hidden_layers": ("num_blocks",),
    }

    def prepare(self, context: BuildContext, prefix: str) -> None:
        self.settings.refuse("use_bias", False)
        self.settings.refuse("add_out_norm", True)
        self.fused = self.settings.choice("weight_mode", ("single", "fused"), "single") == "fused"

    def make_norm(self, context: BuildContext, name: str) -> RMSNorm:
        return RMSNorm(context, name, self.hidden_size(), self.settings.number("norm_eps", 1e-6))

    def make_final_norm(self, context: BuildContext, prefix: str) -> RMSNorm:
        return self.make_norm(context, f"{prefix}backbone.out_norm")

    def logits_soft_cap(self) -> float | None:
        return self.settings.positive("output_logit_soft_cap", 30.0)

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return HybridBlock(
            self.make_norm(context, f"{name}.norm_mlstm"),
            self.make_memory(context, f"{name}.mlstm_layer"),
            self.make_norm(context, f"{name}.norm_ffn"),
            GatedMLP(
                context,
                f"{name}.ffn",
                self.hidden_size(),
                self.intermediate_size(),
                "silu",
                stored_fused=self.fused,
                fused_name="proj_up_gate_z",
                part_names=("proj_up_gate", "proj_up"),
                down_name="proj_down",
            ),
        )

    def make_memory(self, context: BuildContext, name: str) -> MLSTM:
        hidden = self.hidden_size()
        sizes = MLSTMSizes(
            hidden_size=hidden,
            num_heads=self.settings.integer("num_heads", 8),
            keys=int(hidden * self.settings.positive("qk_dim_factor", 0.5)),
            values=int(hidden * self.settings.positive("v_dim_factor", 1.0)),
        )
        return MLSTM(
            context,
            name,
            sizes,
            gate_cap=self.settings.positive("gate_soft_cap", 15.0),
            norm_eps=self.settings.number("norm_eps", 1e-6),
            eps=self.settings.number("eps", 1e-6),
        )

    def intermediate_size(self) -> int:
        """Inner channels of the MLP, a multiple of a round number.

        Raises:
            UnsupportedModel: no sensible number.
        """
        size = self.hidden_size() * self.settings.positive("ffn_proj_factor", 2.667)
        multiple = self.settings.integer("ffn_round_up_to_multiple_of", 64)
        rounded = int((size + multiple - 1) // multiple * multiple)
        if not 1 <= rounded < 2**31:
            raise UnsupportedModel(f"config.json: ffn_proj_factor gives {rounded} inner channels")
        return rounded

"""xLSTM: a stack of matrix memories with exponential gates. Beck et al. 2025, arXiv:2503.13427."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.layers.decoder import Block, Decoder
from headrace_models.layers.hybrid_block import HybridBlock
from headrace_models.layers.mlp import GatedMLP
from headrace_models.layers.mlstm import MLSTM, MLSTMSizes
from headrace_models.layers.norm import RMSNorm
from headrace_models.mapping import ALL_PARTS
from headrace_models.settings import Spelling

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

_BLOCK = "backbone.blocks.{}"
_LAYER, _FFN = f"{_BLOCK}.mlstm_layer", f"{_BLOCK}.ffn"
_INPUTS, _GATES = "layers.{}.mixer.inputs", "layers.{}.mixer.gates"


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
        """A multiple of a round number. Raises: UnsupportedModel: no sensible one."""
        size = self.hidden_size() * self.settings.positive("ffn_proj_factor", 2.667)
        multiple = self.settings.integer("ffn_round_up_to_multiple_of", 64)
        rounded = int((size + multiple - 1) // multiple * multiple)
        if not 1 <= rounded < 2**31:
            raise UnsupportedModel(f"config.json: ffn_proj_factor gives {rounded} inner channels")
        return rounded

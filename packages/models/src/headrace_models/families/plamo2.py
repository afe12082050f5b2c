"""PLaMo 2: a state-space scan and attention in turns, norms before and after both halves, whose weights
are stored less different numbers.

Preferred Networks 2025, PLaMo 2 technical report, arXiv:2509.04897.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import EACH_KV_HEAD, WeightRule
from headrace_models.families.llama import LlamaForCausalLM
from headrace_models.families.plamo3 import AFTER_MIXER, AFTER_MLP
from headrace_models.layers.attention import SelfAttention
from headrace_models.layers.decoder import Block
from headrace_models.layers.heads_norm import HeadRMSNorm
from headrace_models.layers.hybrid_block import Mixer, SandwichHybridBlock
from headrace_models.layers.mamba2 import Mamba2Sizes
from headrace_models.layers.mlp import GatedMLP, MLPLayer
from headrace_models.layers.norm import NormLayer, RMSNorm
from headrace_models.layers.plamo_mamba import VECTOR_NORMS, PlamoMamba
from headrace_models.mapping import ALL_PARTS
from headrace_models.recurrent_settings import MAX_TAPS
from headrace_models.settings import MAX_HEAD_DIM, Spelling

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

_LAYER = "model.layers.layers.{}"
_MIXER = f"{_LAYER}.mixer"
_HEAD_EPS = 1e-6
"""Of the norms of queries and keys, whatever the config says."""
_LEAST_RANK = 64
"""Of the step."""


class Plamo2ForCausalLM(LlamaForCausalLM):
    """PLaMo 2 1B and 8B, 2.1 and 2.2."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        WeightRule("model.embed_tokens", "embed"),
        WeightRule(f"{_LAYER}.pre_mixer_norm", "layers.{}.input_norm"),
        WeightRule(f"{_MIXER}.qkv_proj", "layers.{}.mixer.qkv", split=ALL_PARTS),
        WeightRule(f"{_MIXER}.q_weight", "layers.{}.mixer.query_norm.weight"),
        WeightRule(f"{_MIXER}.k_weight", "layers.{}.mixer.key_norm.weight"),
        WeightRule(f"{_MIXER}.o_proj", "layers.{}.mixer.out"),
        WeightRule(
            f"{_MIXER}.in_proj", "layers.{}.mixer.in_proj", split=ALL_PARTS, groups=EACH_KV_HEAD
        ),
        WeightRule(f"{_MIXER}.conv1d", "layers.{}.mixer.conv"),
        WeightRule(f"{_MIXER}.bcdt_proj", "layers.{}.mixer.bcdt_proj"),
        *(
            WeightRule(f"{_MIXER}.{norm}_weight", f"layers.{{}}.mixer.norms.{index}.weight")
            for index, norm in enumerate(VECTOR_NORMS)
        ),
        WeightRule(f"{_MIXER}.dt_proj", "layers.{}.mixer.dt_proj"),
        *(
            WeightRule(f"{_MIXER}.{name}", f"layers.{{}}.mixer.scan.{name}")
            for name in ("A_log", "D", "dt_bias")
        ),
        WeightRule(f"{_MIXER}.out_proj", "layers.{}.mixer.out_proj"),
        WeightRule(f"{_LAYER}.post_mixer_norm", "layers.{}.mixer_out_norm"),
        WeightRule(f"{_LAYER}.pre_mlp_norm", "layers.{}.mlp_norm"),
        WeightRule(f"{_LAYER}.mlp.gate_up_proj", "layers.{}.mlp.gate_up", split=ALL_PARTS),
        WeightRule(f"{_LAYER}.mlp.down_proj", "layers.{}.mlp.down"),
        WeightRule(f"{_LAYER}.post_mlp_norm", "layers.{}.mlp_out_norm"),
        WeightRule("model.norm", "final_norm"),
        WeightRule("lm_head", "head"),
    )
    blocks_name: ClassVar[str] = "model.layers.layers"
    spelling: ClassVar[Spelling] = {"head_dim": ("hidden_size_per_head",)}
    ties_embeddings: ClassVar[bool] = True

    def prepare(self, context: BuildContext, prefix: str) -> None:
        self.settings.refuse("linear_type", "normal")
        self.settings.refuse("eval_attention_n_bit")
        self.settings.refuse("eval_mlp_n_bit")
        super().prepare(context, prefix)

    def head_dim(self) -> int:
        return self.settings.integer("head_dim", 128, maximum=MAX_HEAD_DIM)

    def attends(self, index: int) -> bool:
        """Whether the layer's mixer is attention: one of a period, the last one in short stacks."""
        if not self.settings.flag("mamba_enabled", True):
            return True
        step, count = self.settings.integer("mamba_step", 2), self.num_layers()
        if count <= step // 2:
            return index == count - 1
        return index % step == step // 2

    def make_norm(self, context: BuildContext, name: str, offset: float = 1.0) -> NormLayer:
        return RMSNorm(context, name, self.hidden_size(), self.norm_eps(), offset=offset)

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return SandwichHybridBlock(
            self.make_norm(context, f"{name}.pre_mixer_norm"),
            self.make_mixer(context, index, f"{name}.mixer"),
            self.make_norm(context, f"{name}.post_mixer_norm", AFTER_MIXER),
            self.make_norm(context, f"{name}.pre_mlp_norm"),
            self.make_mlp(context, index, f"{name}.mlp"),
            self.make_norm(context, f"{name}.post_mlp_norm", AFTER_MLP),
        )

    def make_mixer(self, context: BuildContext, index: int, name: str) -> Mixer:
        if self.attends(index):
            return self.make_attention(context, index, name)
        sizes = Mamba2Sizes(
            hidden_size=self.hidden_size(),
            num_heads=self.settings.integer("mamba_num_heads", 64),
            head_dim=self.head_dim(),
            num_groups=1,
            state_size=self.settings.integer("mamba_d_state", 64),
            taps=self.settings.integer("mamba_d_conv", 4, maximum=MAX_TAPS),
        )
        rank = max(_LEAST_RANK, self.hidden_size() // 16)
        return PlamoMamba(context, name, sizes, step_rank=rank, norm_eps=self.norm_eps())

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        """The published window does not count the token itself."""
        whole = index in self.settings.integers("full_attention_idx")
        size, heads = self.head_dim(), self.settings.integer("num_attention_heads")
        kv_heads = self.settings.num_kv_heads()
        return self.attention(
            context,
            name,
            sliding_window=None
            if whole
            else self.settings.integer("attention_window_size", 2048) + 1,
            query_norm=HeadRMSNorm(context, f"{name}.q_weight", heads, size, _HEAD_EPS),
            key_norm=HeadRMSNorm(context, f"{name}.k_weight", kv_heads, size, _HEAD_EPS),
            part_names=(),
        )

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        return GatedMLP(
            context,
            name,
            self.hidden_size(),
            self.settings.integer("intermediate_size"),
            self.settings.activation("hidden_act", default="silu"),
            stored_fused=True,
        )

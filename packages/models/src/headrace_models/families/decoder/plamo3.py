"""PLaMo 3: norms before and after both halves, whose weights are stored less different numbers; windows
with a rotary base of their own.

Preferred Networks 2025, plamo-3-nict.

Block: ``h = x + norm(attention(norm(x))); h + norm(mlp(norm(h)))``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.rope import rope_settings
from headrace_models.config.settings import Spelling
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.blocks import SandwichBlock
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.mlp import GatedMLP, MLPLayer
from headrace_models.layers.norm import NormLayer, RMSNorm
from headrace_models.layers.rotary import rotary_table
from headrace_models.loading.mapping import ALL_PARTS

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

AFTER_MIXER, AFTER_MLP = 1 / 5, 1 / 5**1.5
"""Numbers that the weights of the norms behind the halves lack; of all other norms it is 1."""
_LAYER = "model.layers.layers.{}"


class Plamo3ForCausalLM(LlamaDecoder):
    """PLaMo 3 2B, 8B and 31B."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        WeightRule("model.embed_tokens", "embed"),
        WeightRule(f"{_LAYER}.pre_mixer_norm", "layers.{}.input_norm"),
        WeightRule(f"{_LAYER}.mixer.qkv_proj", "layers.{}.attention.qkv", split=ALL_PARTS),
        WeightRule(f"{_LAYER}.mixer.q_norm", "layers.{}.attention.query_norm"),
        WeightRule(f"{_LAYER}.mixer.k_norm", "layers.{}.attention.key_norm"),
        WeightRule(f"{_LAYER}.mixer.o_proj", "layers.{}.attention.out"),
        WeightRule(f"{_LAYER}.post_mixer_norm", "layers.{}.attention_out_norm"),
        WeightRule(f"{_LAYER}.pre_mlp_norm", "layers.{}.mlp_norm"),
        WeightRule(f"{_LAYER}.mlp.gate_up_proj", "layers.{}.mlp.gate_up", split=ALL_PARTS),
        WeightRule(f"{_LAYER}.mlp.down_proj", "layers.{}.mlp.down"),
        WeightRule(f"{_LAYER}.post_mlp_norm", "layers.{}.mlp_out_norm"),
        WeightRule("model.norm", "final_norm"),
        WeightRule("lm_head", "head"),
    )
    blocks_name: ClassVar[str] = "model.layers.layers"
    spelling: ClassVar[Spelling] = {"sliding_window": ("interleaved_sliding_window", "window_size")}
    ties_embeddings: ClassVar[bool] = True

    def prepare(self, context: BuildContext, prefix: str) -> None:
        self.windows = self._windows()
        config = self.settings.config
        theta = self.settings.positive("rope_local_theta", 10_000.0)
        kinds = {
            "full_attention": rope_settings(config, "full_attention", theta=1_000_000.0),
            "sliding_attention": rope_settings(
                {**config, "rope_theta": theta}, "sliding_attention"
            ),
        }
        size = self.head_dim()
        self.tables = {kind: rotary_table(context, rope, size) for kind, rope in kinds.items()}
        self.rotary = self.tables["full_attention"]

    def _windows(self) -> list[int | None]:
        """The window of each layer, None if it sees everything; in each of the ways that configs say it."""
        layers, kinds = self.num_layers(), self.settings.layer_types()
        stated = self.settings.config.get("sliding_window")
        if isinstance(stated, list):
            if len(stated) != layers or not all(
                w is None or (type(w) is int and w > 0) for w in stated
            ):
                raise UnsupportedModel(
                    f"config.json: sliding_window = {stated!r:.200}: must be {layers} sizes of windows "
                    "or nulls, or one size"
                )
            return list(stated)
        window = self.settings.integer("sliding_window", 2048)
        every = self.settings.integer("sliding_window_pattern", 8)
        if kinds is None:
            names = ("sliding_attention", "full_attention")
            kinds = [names[(index + 1) % every == 0] for index in range(layers)]
        return [window if kind == "sliding_attention" else None for kind in kinds]

    def make_norm(self, context: BuildContext, name: str, offset: float = 1.0) -> NormLayer:
        return RMSNorm(context, name, self.hidden_size(), self.norm_eps(), offset=offset)

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return SandwichBlock(
            self.make_norm(context, f"{name}.pre_mixer_norm"),
            self.make_attention(context, index, f"{name}.mixer"),
            self.make_norm(context, f"{name}.post_mixer_norm", AFTER_MIXER),
            self.make_norm(context, f"{name}.pre_mlp_norm"),
            self.make_mlp(context, index, f"{name}.mlp"),
            self.make_norm(context, f"{name}.post_mlp_norm", AFTER_MLP),
        )

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        window = self.windows[index]
        return self.attention(
            context,
            name,
            rotary=self.tables["full_attention" if window is None else "sliding_attention"],
            sliding_window=window,
            head_norm_eps=self.norm_eps(),
            head_norm_offset=1.0,
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

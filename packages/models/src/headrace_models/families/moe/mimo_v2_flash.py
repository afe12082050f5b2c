"""MiMo-V2-Flash: windows with sinks on five of six layers, values narrower than keys, experts routed as
DeepSeek V3's.

Xiaomi 2026, MiMo-V2-Flash technical report. Checkpoints' configs are as published, or as transformers 5
writes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.rope import of_windows, rope_settings
from headrace_models.config.settings import MAX_HEAD_DIM, Spelling
from headrace_models.layers.attention.padded_values import PaddedValueAttention
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.moe import CORRECTED, MOE_RULES, MoEDecoder, is_dense_by_list
from headrace_models.layers.rotary import rotary_table

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


_ATTENTION = "model.layers.{}.self_attn"
_GLOBAL_THETA, _LOCAL_THETA, _TURNING = 5e6, 1e4, 0.334
_PERIOD = 6
"""Without a list, the first layer is full, and every sixth."""


class MiMoV2FlashForCausalLM(MoEDecoder):
    """MiMo-V2-Flash."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *MOE_RULES,
        WeightRule(f"{_ATTENTION}.attention_sink_bias", "layers.{}.attention.sinks.weight"),
        WeightRule(f"{_ATTENTION}.sinks", "layers.{}.attention.sinks.weight"),
    )
    ignored_weights: ClassVar[Mapping[str, str]] = {
        r"model\.mtp\..*": "predicts several tokens at once"
    }
    mixture: ClassVar[Mapping[str, Any]] = CORRECTED
    default_eps: ClassVar[float] = 1e-5
    spelling: ClassVar[Spelling] = {"rms_norm_eps": ("layernorm_epsilon",)}

    def prepare(self, context: BuildContext, prefix: str) -> None:
        size, config = self.head_dim(), self.settings.config
        limit = self.settings.integer("max_position_embeddings", 262144)
        full = rope_settings(config, "full_attention", theta=_GLOBAL_THETA, partial=_TURNING)
        local = rope_settings(
            of_windows(config, config.get("swa_rope_theta", _LOCAL_THETA)),
            "sliding_attention",
            theta=_LOCAL_THETA,
            partial=_TURNING,
        )
        self.rotary = rotary_table(context, full, size, max_positions=limit)
        self.local_rotary = rotary_table(context, local, size, max_positions=limit)

    def head_dim(self) -> int:
        return self.settings.head_dim(default=192)

    def is_sliding(self, index: int) -> bool:
        kinds = self.settings.layer_types()
        if kinds is not None:
            return kinds[index] == "sliding_attention"
        marks = self.settings.marks("hybrid_layer_pattern", self.num_layers())
        return index != 0 and (index + 1) % _PERIOD != 0 if marks is None else marks[index]

    def is_dense(self, index: int) -> bool:
        marks = self.settings.marks("moe_layer_freq", self.num_layers())
        return is_dense_by_list(self.settings, index, 1) if marks is None else not marks[index]

    def window(self) -> int:
        """``sliding_window_size`` does not count the token itself."""
        before = self.settings.optional_integer("sliding_window_size")
        return self.settings.integer("sliding_window", 129) if before is None else before + 1

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        sliding, kv_heads = self.is_sliding(index), self.settings.num_kv_heads()
        heads = self.settings.integer("num_attention_heads")
        value_dim = self.settings.integer("v_head_dim", 128, maximum=MAX_HEAD_DIM)
        for key, served in (
            ("add_full_attention_sink_bias", False),
            ("swa_num_attention_heads", heads),
            ("swa_head_dim", self.head_dim()),
            ("swa_v_head_dim", value_dim),
        ):
            self.settings.refuse(key, served)
        if sliding:
            kv_heads = self.settings.integer("swa_num_key_value_heads", 2 * kv_heads)
        if heads % kv_heads:
            raise UnsupportedModel(
                f"config.json: num_attention_heads = {heads}: must be a multiple of the "
                f"{kv_heads} key-value heads of layers with windows"
            )
        return PaddedValueAttention(
            context,
            name,
            hidden_size=self.hidden_size(),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=self.head_dim(),
            value_dim=value_dim,
            value_scale=self.settings.optional_positive("attention_value_scale") or 1.0,
            rotary=self.local_rotary if sliding else self.rotary,
            sliding_window=self.window() if sliding else None,
            sinks=sliding and self.settings.flag("add_swa_attention_sink_bias", True),
            qkv_bias=self.settings.flag("attention_bias", False),
        )

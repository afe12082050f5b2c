"""Weight-name rules of decoders in which attention and recurrences take turns."""

from __future__ import annotations

from headrace_core.model import WeightRule
from headrace_models.loading.mapping import ALL_PARTS

LAYER = "model.layers.{}"


ATTENTION_RULES = (
    WeightRule(f"{LAYER}.self_attn.q_proj", "layers.{}.mixer.qkv", part=0),
    WeightRule(f"{LAYER}.self_attn.k_proj", "layers.{}.mixer.qkv", part=1),
    WeightRule(f"{LAYER}.self_attn.v_proj", "layers.{}.mixer.qkv", part=2),
    WeightRule(f"{LAYER}.self_attn.o_proj", "layers.{}.mixer.out"),
)
"""Rules of attention that takes turns with recurrences."""


FEED_FORWARD_RULES = (
    WeightRule(f"{LAYER}.feed_forward.gate_proj", "layers.{}.mlp.gate_up", part=0),
    WeightRule(f"{LAYER}.feed_forward.up_proj", "layers.{}.mlp.gate_up", part=1),
    WeightRule(f"{LAYER}.feed_forward.down_proj", "layers.{}.mlp.down"),
)


LFM_RULES = (
    WeightRule("model.embed_tokens", "embed"),
    WeightRule(f"{LAYER}.operator_norm", "layers.{}.input_norm"),
    *(rule for rule in ATTENTION_RULES if not rule.source.endswith("o_proj")),
    WeightRule(f"{LAYER}.conv.in_proj", "layers.{}.mixer.in_proj", split=ALL_PARTS),
    WeightRule(f"{LAYER}.conv.conv", "layers.{}.mixer.conv"),
    WeightRule(f"{LAYER}.conv.out_proj", "layers.{}.mixer.out_proj"),
    WeightRule(f"{LAYER}.ffn_norm", "layers.{}.mlp_norm"),
    WeightRule(f"{LAYER}.feed_forward.w1", "layers.{}.mlp.gate_up", part=0),
    WeightRule(f"{LAYER}.feed_forward.w3", "layers.{}.mlp.gate_up", part=1),
    WeightRule(f"{LAYER}.feed_forward.w2", "layers.{}.mlp.down"),
    WeightRule("model.embedding_norm", "final_norm"),
    WeightRule("lm_head", "head"),
)
"""Rules of LFM2 and LFM3, without the output of attention and its norms, whose names differ."""

"""Weight-name rules of Llama's module tree and of its usual variants."""

from __future__ import annotations

from headrace_core.model import WeightRule
from headrace_models.loading.mapping import ALL_PARTS

RULES = (
    WeightRule("model.embed_tokens", "embed"),
    WeightRule("model.layers.{}.input_layernorm", "layers.{}.input_norm"),
    WeightRule("model.layers.{}.self_attn.q_proj", "layers.{}.attention.qkv", part=0),
    WeightRule("model.layers.{}.self_attn.k_proj", "layers.{}.attention.qkv", part=1),
    WeightRule("model.layers.{}.self_attn.v_proj", "layers.{}.attention.qkv", part=2),
    WeightRule("model.layers.{}.self_attn.o_proj", "layers.{}.attention.out"),
    WeightRule("model.layers.{}.post_attention_layernorm", "layers.{}.mlp_norm"),
    WeightRule("model.layers.{}.mlp.gate_proj", "layers.{}.mlp.gate_up", part=0),
    WeightRule("model.layers.{}.mlp.up_proj", "layers.{}.mlp.gate_up", part=1),
    WeightRule("model.layers.{}.mlp.down_proj", "layers.{}.mlp.down"),
    WeightRule("model.norm", "final_norm"),
    WeightRule("lm_head", "head"),
)


HEAD_NORM_RULES = (
    WeightRule("model.layers.{}.self_attn.q_norm", "layers.{}.attention.query_norm"),
    WeightRule("model.layers.{}.self_attn.k_norm", "layers.{}.attention.key_norm"),
)


POST_NORM_RULES = (
    *(rule for rule in RULES if not rule.target.endswith(("input_norm", "mlp_norm"))),
    WeightRule("model.layers.{}.post_attention_layernorm", "layers.{}.attention_out_norm"),
    WeightRule("model.layers.{}.post_feedforward_layernorm", "layers.{}.mlp_out_norm"),
    *HEAD_NORM_RULES,
)
"""Llama's, for blocks whose only norms stand behind both halves, and norms of queries and keys."""


NON_GATED_RULES = (
    *(rule for rule in RULES if not rule.target.endswith(".gate_up")),
    WeightRule("model.layers.{}.mlp.up_proj", "layers.{}.mlp.up"),
)
"""Llama's, for MLPs without a gate."""


PARALLEL_RULES = tuple(rule for rule in RULES if not rule.target.endswith("mlp_norm"))
"""Llama's, for blocks with one norm."""


GEMMA_RULES = (
    *(rule for rule in RULES if not rule.target.endswith("mlp_norm")),
    WeightRule("model.layers.{}.post_attention_layernorm", "layers.{}.attention_out_norm"),
    WeightRule("model.layers.{}.pre_feedforward_layernorm", "layers.{}.mlp_norm"),
    WeightRule("model.layers.{}.post_feedforward_layernorm", "layers.{}.mlp_out_norm"),
)
"""Llama's, but ``post_attention_layernorm`` really stands after the attention."""


FUSED_MLP_RULES = (
    *(rule for rule in RULES if not rule.target.endswith(".gate_up")),
    WeightRule("model.layers.{}.mlp.gate_up_proj", "layers.{}.mlp.gate_up", split=ALL_PARTS),
)
"""Llama's, with gate and up in one tensor."""

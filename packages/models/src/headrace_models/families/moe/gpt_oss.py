"""gpt-oss: sinks, windows on every second layer, biases everywhere, experts behind a clamped gate.

OpenAI 2025, arXiv:2508.10925. Experts come as floats, [E, in, out] with gates and ups alternating, or as
4-bit floats (the quantization ``mxfp4``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_core.ops import CLAMPED_SWIGLU_ALPHA, CLAMPED_SWIGLU_LIMIT
from headrace_models.config.rope import rope_settings
from headrace_models.config.settings import MAX_EXPERTS
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.moe import MoEDecoder
from headrace_models.layers.moe.router import Routing
from headrace_models.layers.rotary import rotary_table
from headrace_models.loading.mapping import ALL_PARTS
from headrace_models.loading.rules.llama import RULES
from headrace_models.loading.rules.moe import router_rules, stacked_rules

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


_EXPERTS, _OWN = "model.layers.{}.mlp.experts", "layers.{}.mlp.experts.{}"
_PACKED = tuple(
    rule
    for kind in ("blocks", "scales")
    for rule in (
        WeightRule(
            f"{_EXPERTS}.gate_up_proj_{kind}",
            f"{_OWN}.gate_up.weight_{kind}",
            split=ALL_PARTS,
            stacked=True,
            interleaved=True,
        ),
        WeightRule(f"{_EXPERTS}.down_proj_{kind}", f"{_OWN}.down.weight_{kind}", stacked=True),
    )
)
_YARN: Mapping[str, Any] = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
"""The rotation of a config that says nothing of positions."""


class GptOssForCausalLM(MoEDecoder):
    """gpt-oss-20b, gpt-oss-120b."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *(rule for rule in RULES if ".mlp." not in rule.target),
        WeightRule("model.layers.{}.self_attn.sinks", "layers.{}.attention.sinks.weight"),
        *router_rules("model.layers.{}.mlp.router"),
        *stacked_rules(
            f"{_EXPERTS}.gate_up_proj", f"{_EXPERTS}.down_proj", transposed=True, interleaved=True
        ),
        *_PACKED,
        WeightRule(
            f"{_EXPERTS}.gate_up_proj_bias",
            f"{_OWN}.gate_up.bias",
            split=ALL_PARTS,
            stacked=True,
            interleaved=True,
        ),
        WeightRule(f"{_EXPERTS}.down_proj_bias", f"{_OWN}.down.bias", stacked=True),
    )
    mixture: ClassVar[Mapping[str, Any]] = {
        "router_name": "router", "router_bias": True, "expert_bias": True,
        "activation": "clamped_swiglu",
    }  # fmt: skip
    default_theta: ClassVar[float] = 150_000.0
    default_eps: ClassVar[float] = 1e-5

    def prepare(self, context: BuildContext, prefix: str) -> None:
        config = dict(self.settings.config)
        if not (config.get("rope_parameters") or config.get("rope_scaling")):
            config["rope_parameters"] = _YARN
        rope = rope_settings(config, theta=self.default_theta)
        limit = self.settings.integer("max_position_embeddings", 131072)
        self.rotary = rotary_table(context, rope, self.head_dim(), max_positions=limit)

    def head_dim(self) -> int:
        return self.settings.head_dim(default=64)

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias = self.settings.flag("attention_bias", True)
        kinds = self.settings.layer_types()
        sliding = index % 2 == 0 if kinds is None else kinds[index] == "sliding_attention"
        return self.attention(
            context,
            name,
            sliding_window=self.settings.optional_integer("sliding_window") if sliding else None,
            sinks=True,
            qkv_bias=bias,
            out_bias=bias,
        )

    def is_dense(self, index: int) -> bool:
        return False

    def routing(self, index: int) -> Routing:
        for name, served in (
            ("swiglu_alpha", CLAMPED_SWIGLU_ALPHA),
            ("swiglu_limit", CLAMPED_SWIGLU_LIMIT),
        ):
            if self.settings.number(name, served) != served:
                value = self.settings.config[name]
                raise UnsupportedModel(f"config.json: {name} = {value!r}: must be {served}")
        return Routing(
            num_experts=self.settings.integer("num_local_experts", maximum=MAX_EXPERTS),
            top_k=self.settings.integer("num_experts_per_tok", 4),
            renormalise=True,
        )

    def expert_size(self, index: int) -> int:
        return self.settings.integer("intermediate_size")

"""TeleChat 1 and 2: Llama with key and value in one tensor, head by head, and biases behind both halves.

Wang et al. 2024, arXiv:2401.03804. Within ``training_seqlen``, beyond which the publisher's code changes
the rotary base and the scores with the length of each request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import EACH_KV_HEAD, WeightRule
from headrace_models.config.rope import rope_settings
from headrace_models.config.settings import Spelling
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.renamed_llama import Names, RenamedLlama
from headrace_models.layers.mlp import MLPLayer
from headrace_models.layers.rotary import rotary_table
from headrace_models.loading.mapping import ALL_PARTS

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

NAMES = Names(
    embedding="transformer.word_embeddings",
    blocks="transformer.h",
    final_norm="transformer.ln_f",
    attention="self_attention",
    qkv=("query", "key_value"),
    out="dense",
)
KEY_AND_VALUE = WeightRule(
    "transformer.h.{}.self_attention.key_value",
    "layers.{}.attention.qkv",
    split=ALL_PARTS,
    order=(1, 2),
    groups=EACH_KV_HEAD,
)


class TeleChat2ForCausalLM(RenamedLlama):
    """3B to 115B."""

    names: ClassVar[Names] = NAMES
    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *(rule for rule in NAMES.rules() if rule.source != KEY_AND_VALUE.source),
        KEY_AND_VALUE,
    )
    spelling: ClassVar[Spelling] = {
        "num_hidden_layers": ("n_layer",),
        "num_attention_heads": ("n_head",),
        "intermediate_size": ("ffn_hidden_size",),
        "rms_norm_eps": ("layer_norm_epsilon",),
        "max_position_embeddings": ("seq_length",),
    }

    def prepare(self, context: BuildContext, prefix: str) -> None:
        self.settings.refuse("embed_layernorm", False)
        self.settings.refuse("apply_residual_connection_post_layernorm", False)
        rope = rope_settings(self.settings.config)
        size = self.head_dim()
        theta = rope.theta * self.stretch() ** (size / (size - 2)) if size > 2 else rope.theta
        limit = self.settings.integer("max_position_embeddings", 2048)
        self.rotary = rotary_table(context, replace(rope, theta=theta), size, max_positions=limit)

    def stretch(self) -> int:
        """NTK's, of a model whose last training was on contexts longer than the first: a power of two
        less one, the same at every length."""
        first = self.settings.integer("base_seqlen", 4096)
        last = self.settings.integer("training_seqlen", first)
        doublings = math.ceil(math.log2(last / first)) + 1
        return (1 << max(1, doublings)) - 1

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        return self.attention(context, name, out_bias=True)

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        return self.mlp(context, name, down_bias=True)

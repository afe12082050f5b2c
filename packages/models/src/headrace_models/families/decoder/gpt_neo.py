"""GPT-Neo: GPT-2 with windows on every other layer and scores that are not scaled.

Black et al. 2021, "GPT-Neo: large scale autoregressive language modeling with Mesh-TensorFlow".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import MAX_LAYERS, Spelling
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.gpt import GPT2_NAMES, GPTDecoder, Names
from headrace_models.layers.positions import LearnedPositions

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

NAMES = replace(
    GPT2_NAMES, attention="attn.attention", qkv=("q_proj", "k_proj", "v_proj"), out="out_proj"
)


class GPTNeoForCausalLM(GPTDecoder):
    """GPT-Neo 125M to 2.7B."""

    names: ClassVar[Names] = NAMES
    weight_rules: ClassVar[Sequence[WeightRule]] = NAMES.rules()
    ignored_weights: ClassVar[Mapping[str, str]] = {
        r"transformer\.h\.\d+\.attn\.attention\.(masked_)?bias": "the causal mask"
    }
    spelling: ClassVar[Spelling] = {
        "num_hidden_layers": ("num_layers",),
        "num_attention_heads": ("num_heads",),
        "hidden_act": ("activation_function",),
        "layer_norm_eps": ("layer_norm_epsilon",),
    }
    ties_embeddings: ClassVar[bool] = True
    default_activation: ClassVar[str | None] = "gelu_new"

    def make_positions(self, context: BuildContext, prefix: str) -> LearnedPositions:
        return self.learned_positions(context, prefix, default=2048)

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        window = self.settings.integer("window_size", 256)
        local = self.attention_kinds()[index] == "local"
        sliding_window = window if local else None
        return self.attention(
            context, name, scale=1.0, sliding_window=sliding_window, out_bias=True
        )

    def attention_kinds(self) -> list[str]:
        """``global`` or ``local`` for each layer: a pattern and how often it comes.

        Raises:
            UnsupportedModel: ``attention_types`` says something else.
        """
        layers = self.num_layers()
        stated = self.settings.config.get("attention_types") or [[["global", "local"], layers // 2]]
        try:
            kinds = [kind for kinds, times in stated for kind in kinds * min(times, MAX_LAYERS)]
        except (TypeError, ValueError):
            kinds = []
        if len(kinds) != layers or not all(kind in ("global", "local") for kind in kinds):
            raise UnsupportedModel(
                f"config.json: attention_types = {stated!r:.200}: must give {layers} layers, as "
                "[[['global', 'local'], 12]] gives 24"
            )
        return kinds

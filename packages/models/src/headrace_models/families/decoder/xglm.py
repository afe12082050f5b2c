"""XGLM: BioGPT's shape with positions that are computed.

Lin et al. 2021, arXiv:2112.10668.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import Spelling
from headrace_models.layers.decoders.gpt import GPTDecoder, Names
from headrace_models.layers.positions import FAIRSEQ_FIRST_POSITION, FixedPositions

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

NAMES = Names(
    embedding="model.embed_tokens",
    blocks="model.layers",
    final_norm="model.layer_norm",
    head="lm_head",
    input_norm="self_attn_layer_norm",
    attention="self_attn",
    qkv=("q_proj", "k_proj", "v_proj"),
    out="out_proj",
    mlp_norm="final_layer_norm",
    up="fc1",
    down="fc2",
)


class XGLMForCausalLM(GPTDecoder):
    """XGLM 564M to 7.5B. Blocks are :class:`~headrace_models.layers.blocks.PreNormBlock`."""

    names: ClassVar[Names] = NAMES
    weight_rules: ClassVar[Sequence[WeightRule]] = NAMES.rules()
    ignored_weights: ClassVar[Mapping[str, str]] = {
        r"model\.embed_positions\.weights": "computed from the config"
    }
    spelling: ClassVar[Spelling] = {
        "hidden_size": ("d_model",),
        "num_hidden_layers": ("num_layers",),
        "num_attention_heads": ("attention_heads",),
        "intermediate_size": ("ffn_dim",),
        "hidden_act": ("activation_function",),
    }

    ties_embeddings: ClassVar[bool] = True

    def make_positions(self, context: BuildContext, prefix: str) -> FixedPositions:
        half, odd = divmod(self.hidden_size(), 2)
        if odd or half < 2:
            raise UnsupportedModel(
                f"config.json: d_model = {self.hidden_size()}: must be even and at least 4"
            )
        step = math.log(10_000) / (half - 1)
        frequencies = torch.exp(torch.arange(half, dtype=torch.float32) * -step)
        return FixedPositions(context, frequencies, first=FAIRSEQ_FIRST_POSITION)

    def token_vectors(self, ids: Tensor) -> Tensor:
        if not self.settings.flag("scale_embedding", True):
            return self.embed(ids)
        return self.context.ops.scale(self.embed(ids), self.hidden_size() ** 0.5)

    def norm_eps(self) -> float:
        """The config's ``layer_norm_eps`` is one that the model was not trained with."""
        return 1e-5

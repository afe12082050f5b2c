"""BioGPT: GPT-2 as fairseq has it, with scaled embeddings.

Luo et al. 2022, arXiv:2210.10341.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.layers.decoders.gpt import GPTDecoder, Names
from headrace_models.layers.positions import FAIRSEQ_FIRST_POSITION, LearnedPositions

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

NAMES = Names(
    embedding="biogpt.embed_tokens",
    blocks="biogpt.layers",
    final_norm="biogpt.layer_norm",
    head="output_projection",
    input_norm="self_attn_layer_norm",
    attention="self_attn",
    qkv=("q_proj", "k_proj", "v_proj"),
    out="out_proj",
    mlp_norm="final_layer_norm",
    up="fc1",
    down="fc2",
    positions="biogpt.embed_positions",
)


class BioGptForCausalLM(GPTDecoder):
    """BioGPT and BioGPT-Large. Blocks are :class:`~headrace_models.layers.blocks.PreNormBlock`."""

    names: ClassVar[Names] = NAMES
    weight_rules: ClassVar[Sequence[WeightRule]] = NAMES.rules()
    ties_embeddings: ClassVar[bool] = True

    def make_positions(self, context: BuildContext, prefix: str) -> LearnedPositions:
        return self.learned_positions(context, prefix, default=1024, skip=FAIRSEQ_FIRST_POSITION)

    def token_vectors(self, ids: Tensor) -> Tensor:
        if not self.settings.flag("scale_embedding", True):
            return self.embed(ids)
        return self.context.ops.scale(self.embed(ids), self.hidden_size() ** 0.5)

    def norm_eps(self) -> float:
        """The config's ``layer_norm_eps`` is one that the model was not trained with."""
        return 1e-5

"""MiniCPM 1, 2, 4 and 4.1: Granite's multipliers, given by the depth and by the width of the model that
they were found on.

Hu et al. 2024, arXiv:2404.06395; MiniCPM Team 2025, arXiv:2506.07900 (4 and 4.1). MiniCPM 4.1 attends
to chosen blocks where a sequence has ``dense_len`` tokens or more, and to everything before: it is
served up to there.

Block: ``h = x + s * attention(norm(x)); h + s * mlp(norm(h))``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from headrace_core.errors import UnsupportedModel
from headrace_models.config.settings import Settings
from headrace_models.layers.blocks import ScaledBlock
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.llama import LlamaDecoder

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_DENSE_LEN = 8192


class MiniCPMForCausalLM(LlamaDecoder):
    """The dense ones."""

    ties_embeddings: ClassVar[bool] = True

    def prepare(self, context: BuildContext, prefix: str) -> None:
        self.settings.refuse("num_experts", 0)
        self._check_length(context.max_model_len)
        super().prepare(context, prefix)

    def _check_length(self, max_model_len: int) -> None:
        """Raises: UnsupportedModel, where attention would be sparse."""
        sparse = self.settings.config.get("sparse_config")
        if not sparse:
            return
        if not isinstance(sparse, Mapping):
            raise UnsupportedModel(
                f"config.json: sparse_config = {sparse!r:.200}: must be an object"
            )
        # A sequence of max_model_len tokens is never read: its last token ends it.
        longest = Settings(sparse).integer("dense_len", _DENSE_LEN)
        if max_model_len > longest:
            raise UnsupportedModel(
                f"max_model_len = {max_model_len}: must be at most {longest}, sparse_config.dense_len: "
                "the model attends to chosen blocks of longer texts, which is not supported"
            )

    def token_vectors(self, ids: Tensor) -> Tensor:
        return self.context.ops.scale(self.embed(ids), self.settings.number("scale_emb", 1.0))

    def logits_multiplier(self) -> float:
        return self.settings.positive("dim_model_base", 1.0) / self.hidden_size()

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return ScaledBlock(
            context.ops,
            self.settings.number("scale_depth", 1.0) / self.num_layers() ** 0.5,
            self.make_norm(context, f"{name}.input_layernorm"),
            self.make_attention(context, index, f"{name}.self_attn"),
            self.make_norm(context, f"{name}.post_attention_layernorm"),
            self.make_mlp(context, index, f"{name}.mlp"),
        )

"""GritLM as an embedder: Mistral in both directions, whose instruction is read but not averaged.

Muennighoff et al. 2024, arXiv:2402.09906. Its config names ``MistralForCausalLM``, which generates; overrides
ask for this class: ``{"architectures": ["GritLM"]}``. Prompts are an instruction, ``<|embed|>`` on a line of
its own, and the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.model import PoolingBatch, WeightRule
from headrace_models.checkpoint.vocabulary import token_ids
from headrace_models.convert import PoolingDecoder, pooling_rules
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.base import Layer
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.pooling.pooler import make_pooler

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext, Rows
    from headrace_core.pooling import PoolingParams

MARKER = ("|", "embed", "|", ">", "<0x0A>")
"""Mistral's tokens of ``|embed|>`` and the line's end; what comes before depends on where it stands."""


class PoolerOfTexts(Layer):
    """Core's ``Pooler``, on the rows behind a marker.

    Args:
        marker: tokens that end an instruction. A prompt without is averaged but for its first token.
    """

    def __init__(self, context: BuildContext, marker: Sequence[int]) -> None:
        self.whole = make_pooler(context)
        self.tasks: Sequence[str] = self.whole.tasks
        self.marker = list(marker)

    def rows(self, params: PoolingParams) -> Rows:
        """See :class:`headrace_core.model.Pooler`."""
        return "all"

    def __call__(self, batch: PoolingBatch) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.Pooler`."""
        texts = torch.split(batch.hidden, batch.cu_rows.diff().tolist())
        starts = [self._start(ids) for ids in batch.token_ids]
        rows = [text[start:] for text, start in zip(texts, starts)]
        bounds = torch.tensor([0, *map(len, rows)]).cumsum(0)
        ids = [list(own[start:]) for own, start in zip(batch.token_ids, starts)]
        return self.whole(PoolingBatch(torch.cat(rows), bounds, batch.params, ids))

    def _start(self, ids: Sequence[int]) -> int:
        """Index of the text's first token; the last token if there is no text."""
        size = len(self.marker)
        for end in range(size, len(ids) + 1):
            if list(ids[end - size : end]) == self.marker:
                return min(end, len(ids) - 1)
        return min(1, len(ids) - 1)


class GritLM(PoolingDecoder, LlamaDecoder):
    """Embeds by the mean of the text's tokens. Its blocks are
    :class:`~headrace_models.layers.blocks.PreNormBlock`."""

    weight_rules: ClassVar[Sequence[WeightRule]] = pooling_rules(LlamaDecoder)

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        """Its authors' code has no window in both directions."""
        return self.attention(context, name)

    def make_head(self, context: BuildContext, prefix: str) -> None:
        if context.path is None:
            raise UnsupportedModel("GritLM: the checkpoint's folder is not known")
        marker = token_ids(context.path, MARKER, setting="GritLM's <|embed|>")
        self.pooler = PoolerOfTexts(context, marker)

"""SigLIP's text encoder: every text is filled up to one length, and its last state is read, filler or not.

Zhai et al. 2023, arXiv:2303.15343; Tschannen et al. 2025, arXiv:2502.14786 (SigLIP 2).
``families/vision_language/siglip.py`` adds the tower for images.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from headrace_core.model import WeightRule
from headrace_models.checkpoint.vocabulary import token_ids
from headrace_models.config.json_object import read_object
from headrace_models.config.settings import Settings
from headrace_models.layers.base import Part
from headrace_models.layers.embedding import Embedding
from headrace_models.layers.encoder import Embeddings, Encoder
from headrace_models.layers.linear import Linear
from headrace_models.layers.norm import LayerNorm
from headrace_models.layers.positions import LearnedPositions
from headrace_models.layers.vision.blocks import Segments, block_rules, pre_norm_block
from headrace_models.layers.vocabulary import vocab_shard

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext


def _rules(prefix: str) -> tuple[WeightRule, ...]:
    return (
        WeightRule(f"{prefix}embeddings.token_embedding", "embed.words"),
        WeightRule(f"{prefix}embeddings.position_embedding", "embed.positions"),
        *block_rules(f"{prefix}encoder.layers.{{}}", "layers.{}"),
        WeightRule(f"{prefix}final_layer_norm", "final_norm"),
        WeightRule(f"{prefix}head", "head"),
    )


class FilledTexts(Embeddings):
    """``word + position``, of texts that are filled up to ``length`` tokens.

    Args:
        length: all positions there are.
        filler: id of the token behind a text.
    """

    def __init__(
        self,
        context: BuildContext,
        prefix: str,
        sizes: tuple[int, int, int],
        filler: int,
    ) -> None:
        vocab, self.length, hidden = sizes
        self.ops, self.filler = context.ops, filler
        name = f"{prefix}embeddings.token_embedding"
        shard = vocab_shard(vocab, context.communicator)
        self.words = Embedding(context, name, vocab, hidden, shard=shard)
        name = f"{prefix}embeddings.position_embedding"
        self.positions = LearnedPositions(context, name, self.length, hidden)

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """[B * length, H], B texts."""
        places = owners(batch) * self.length + batch.positions
        ids = batch.input_ids.new_full((batch.num_seqs * self.length,), self.filler)
        words = self.words(ids.index_copy(0, places, batch.input_ids))
        return self.ops.add(words, self.positions.weight.repeat(batch.num_seqs, 1))


class SiglipTextModel(Encoder):
    """Attention in both directions; fillers are attended to as in training. ``forward`` gives each wanted row
    its text's vector, [R, P]."""

    no_adapters = "texts are filled up to their whole length"
    weight_rules: ClassVar[Sequence[WeightRule]] = (*_rules("text_model."), *_rules(""))
    embed: FilledTexts

    def __init__(self, context: BuildContext, prefix: str = "") -> None:
        super().__init__(context, prefix or "text_model.")

    def make_embeddings(self, context: BuildContext, prefix: str) -> FilledTexts:
        named = ("vocab_size", "max_position_embeddings", "hidden_size")
        vocab, length, hidden = (self.settings.integer(name) for name in named)
        return FilledTexts(context, prefix, (vocab, length, hidden), filler_id(context))

    def make_layers(self, context: BuildContext, prefix: str) -> None:
        assert context.pooling is not None
        eps, hidden = self.settings.number("layer_norm_eps", 1e-6), self.hidden_size()
        self.layers = [
            pre_norm_block(context, self.settings, f"{prefix}encoder.layers.{index}", eps)
            for index in range(self.num_layers())
        ]
        self.final_norm = LayerNorm(context, f"{prefix}final_layer_norm", hidden, eps)
        parts = [Part(context.pooling.embedding_size)]
        self.head = Linear(context, f"{prefix}head", hidden, parts, bias=True)

    def run_layers(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        count, length = batch.num_seqs, self.embed.length
        segments, residual = Segments.of([length] * count, x.device), None
        for layer in self.layers:
            x, residual = layer(x, residual, segments)
        last = torch.arange(1, count + 1, device=x.device) * length - 1
        select = self.context.ops.embedding
        rest = None if residual is None else select(last, residual)
        states, _ = self.final_norm.add(select(last, x), rest)
        return select(owners(batch, batch.logits_rows), self.head(states))


def owners(batch: ForwardBatch, rows: Tensor | None = None) -> Tensor:
    """[R] int64: the text that each of some rows of a step belongs to.

    Args:
        rows: [R]; None: all.
    """
    if rows is None:
        rows = torch.arange(batch.num_tokens, device=batch.input_ids.device)
    return torch.bucketize(rows, batch.cu_seqlens_q[1:].long(), right=True)


def filler_id(context: BuildContext) -> int:
    """The tokenizer's ``pad_token``; the config's, which published configs do not set, where it has none.

    Raises:
        ConfigError: it is not one token of the vocabulary.
    """
    stated: object = None
    if context.path is not None:
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            stated = read_object(context.path / name, required=False).get("pad_token") or stated
    text = stated.get("content") if isinstance(stated, dict) else stated
    if context.path is None or not isinstance(text, str):
        return Settings(context.config).integer("pad_token_id", 1)
    return token_ids(context.path, [text], setting="tokenizer_config.json: pad_token")[0]

"""RWKV 4: a recurrence that trains like attention. Peng et al. 2023, arXiv:2305.13048."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.layers.decoder import Block, Decoder
from headrace_models.layers.norm import LayerNorm, NormLayer
from headrace_models.layers.rwkv import ChannelMixing, TimeMixing

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext

_BLOCK = "rwkv.blocks.{}"
_FINAL_EPS = 1e-5
"""Of the last norm, whatever the config says."""


class RwkvBlock(Block):
    """``h = x + attention(norm(x)); h + feed_forward(norm(h))``; the first block norms x itself first."""

    def __init__(
        self,
        first_norm: NormLayer | None,
        attention_norm: NormLayer,
        attention: TimeMixing,
        mixing_norm: NormLayer,
        mixing: ChannelMixing,
    ) -> None:
        self.first_norm = first_norm
        self.attention_norm = attention_norm
        self.attention = attention
        self.mixing_norm = mixing_norm
        self.mixing = mixing

    def __call__(
        self, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        if self.first_norm is not None:
            x = self.first_norm(x)
        x, stream = self.attention_norm.add(x, residual)
        x, stream = self.mixing_norm.add(self.attention(x, batch), stream)
        return self.mixing(x, batch), stream


class RwkvForCausalLM(Decoder):
    """RWKV/rwkv-4-169m-pile to 14b. transformers halves the stream every few layers, against float16's
    range; what is left of that behind a norm is its eps."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        WeightRule("rwkv.embeddings", "embed"),
        WeightRule(f"{_BLOCK}.pre_ln", "layers.{}.first_norm"),
        WeightRule(f"{_BLOCK}.ln1", "layers.{}.attention_norm"),
        WeightRule(f"{_BLOCK}.attention", "layers.{}.attention"),
        *(
            WeightRule(
                f"{_BLOCK}.{half}.time_mix_{purpose}", f"layers.{{}}.{to}.mix.time_mix_{purpose}"
            )
            for half, to in (("attention", "attention"), ("feed_forward", "mixing"))
            for purpose in ("key", "value", "receptance")
        ),
        WeightRule(f"{_BLOCK}.attention.time_decay", "layers.{}.attention.average.time_decay"),
        WeightRule(f"{_BLOCK}.attention.time_first", "layers.{}.attention.average.time_first"),
        WeightRule(f"{_BLOCK}.ln2", "layers.{}.mixing_norm"),
        WeightRule(f"{_BLOCK}.feed_forward", "layers.{}.mixing"),
        WeightRule("rwkv.ln_out", "final_norm"),
        WeightRule("head", "head"),
    )
    embedding_name: ClassVar[str] = "rwkv.embeddings"
    blocks_name: ClassVar[str] = "rwkv.blocks"
    head_name: ClassVar[str] = "head"

    def make_norm(
        self, context: BuildContext, name: str, depth: int, eps: float | None = None
    ) -> NormLayer:
        """A norm of the stream behind so many layers; its eps is by default the config's."""
        every = self.settings.integer("rescale_every", 6, minimum=-1)
        if eps is None:
            eps = self.settings.number("layer_norm_epsilon", 1e-5)
        halvings = depth // every if every > 0 else 0
        return LayerNorm(context, name, self.hidden_size(), eps * 4.0**halvings)

    def make_final_norm(self, context: BuildContext, prefix: str) -> NormLayer:
        name = f"{prefix}rwkv.ln_out"
        return self.make_norm(context, name, self.num_layers(), _FINAL_EPS)

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        hidden = self.hidden_size()
        channels = self.settings.integer("attention_hidden_size", hidden)
        inner = self.settings.integer("intermediate_size", 4 * hidden)
        return RwkvBlock(
            None if index else self.make_norm(context, f"{name}.pre_ln", 0),
            self.make_norm(context, f"{name}.ln1", index),
            TimeMixing(context, f"{name}.attention", hidden, channels),
            self.make_norm(context, f"{name}.ln2", index),
            ChannelMixing(context, f"{name}.feed_forward", hidden, inner),
        )

"""Layers for predicting further tokens that a model's own checkpoint carries (MTP).

DeepSeek-AI 2024, arXiv:2412.19437, section 2.2. The normed embedding of token p + 1 and the normed state of
position p, side by side and brought to the model's width, go through one block as the model's are; its normed
output stands for the next state, and goes to the model's head. States are those behind the final norm.

ERNIE 4.5's and LongCat-Flash's blocks have an ordinary MLP where the model's have experts. The output of
ERNIE's is normed by the model's own final norm, as Baidu's FastDeploy does it.

One layer is used, however many there are: it goes on from its own states.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from headrace_core.errors import UnsupportedFeature
from headrace_core.model import WeightRule
from headrace_models.families.mla.longcat_flash import LongcatFlashForCausalLM
from headrace_models.families.moe.ernie4_5_moe import Ernie4_5_MoeForCausalLM
from headrace_models.families.recurrent.qwen3_next import Qwen3_5ForCausalLM
from headrace_models.layers.attention.mla import mla_rules
from headrace_models.layers.base import Part
from headrace_models.layers.blocks import PreNormBlock
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.linear import Linear, PlainLinear
from headrace_models.layers.mlp import GatedMLP
from headrace_models.layers.norm import NoNorm, NormLayer, RMSNorm
from headrace_models.loading.packed_tensors import is_packed
from headrace_models.loading.rules.llama import RULES
from headrace_models.loading.rules.moe import shared_rules
from headrace_models.speculators.base import Head

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext
    from headrace_models.layers.decoder import Decoder


class Layout(NamedTuple):
    """Where a family's checkpoints have the pieces. ``{n}``: the model's number of layers."""

    block: str
    token_norm: str
    state_norm: str
    join: str
    out_norm: str
    """Empty: it is the model's final norm."""


DEEPSEEK = Layout(
    "model.layers.{n}", "model.layers.{n}.enorm", "model.layers.{n}.hnorm",
    "model.layers.{n}.eh_proj", "model.layers.{n}.shared_head.norm",
)  # fmt: skip
MIMO = Layout(
    "model.mtp_layers.0", "model.mtp_layers.0.token_layernorm",
    "model.mtp_layers.0.hidden_layernorm", "model.mtp_layers.0.input_proj",
    "model.mtp_layers.0.final_layernorm",
)  # fmt: skip

QWEN = Layout(
    "mtp.layers.0", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"
)
ERNIE = Layout(
    "model.mtp_block.0", "model.mtp_emb_norm.0", "model.mtp_hidden_norm.0",
    "model.mtp_linear_proj.0", "",
)  # fmt: skip
LONGCAT = Layout(
    "model.mtp.layers.0", "model.mtp.layers.0.enorm.m", "model.mtp.layers.0.hnorm.m",
    "model.mtp.layers.0.eh_proj", "model.mtp.norm",
)  # fmt: skip


class MTPHead(Head):
    """See the module's docstring. The layer is made by the model's class, with the model's rotation."""

    layout: ClassVar[Layout] = DEEPSEEK
    prefix: ClassVar[str] = ""
    """Beginning of all names that are of such layers; empty: the block's."""
    state_first: ClassVar[bool] = False
    """The state stands before the embedding."""

    def __init__(self, context: BuildContext, target: Decoder, stored: Collection[str]) -> None:
        super().__init__(context, target, stored)
        number, size = target.num_layers(), target.hidden_size()
        layout = Layout(*(name.format(n=number) for name in self.layout))
        self.token_norm = self.make_norm(layout.token_norm)
        self.state_norm = self.make_norm(layout.state_norm)
        self.join: Linear | PlainLinear
        if any(is_packed(name) for name in stored if name.startswith(f"{layout.join}.")):
            self.join = Linear(context, layout.join, 2 * size, [Part(size)])
        else:
            self.join = PlainLinear(context, layout.join, 2 * size, size)
        self.block = self.make_block(layout.block)
        self.own_norm = self.make_norm(layout.out_norm) if layout.out_norm else None
        self.names, self.block_rules = layout, self.make_block_rules(layout.block)

    def make_norm(self, name: str) -> NormLayer:
        target = self.target
        eps = target.norm_eps() if isinstance(target, LlamaDecoder) else 1e-6
        return RMSNorm(self.context, name, target.hidden_size(), eps)

    def make_block(self, name: str) -> Block:
        return self.target.make_block(self.context, self.same_kind(), name)

    def make_block_rules(self, name: str) -> Sequence[WeightRule]:
        return _block_rules(self.target.weight_rules, name)

    @property
    def out_norm(self) -> NormLayer | NoNorm:
        return self.own_norm or self.target.final_norm

    def same_kind(self) -> int:
        """A layer of the model that is of the block's kind: the last, with which the config's lists end."""
        return self.target.num_layers() - 1

    def rules(self) -> Sequence[WeightRule]:
        names = self.names
        own = [WeightRule(names.out_norm, "own_norm")] if names.out_norm else []
        return (
            *self.block_rules,
            *own,
            WeightRule(names.token_norm, "token_norm"),
            WeightRule(names.state_norm, "state_norm"),
            WeightRule(names.join, "join"),
        )

    def passed_over(self) -> Mapping[str, str]:
        own, all_own = re.escape(self.names.block), re.escape(self.prefix or self.names.block)
        return {
            rf"(?!{all_own}\.).*": "is the model's, or of a further layer",
            rf"{own}\.(embed_tokens|shared_head\.head)\..*": "the model's own are shared",
        }

    def forward(
        self, batch: ForwardBatch, states: Tensor, depth: int, vectors: Tensor | None = None
    ) -> Tensor:
        if vectors is None:
            vectors = self.token_vectors(batch.input_ids)
        pair = [self.token_norm(vectors), self.state_norm(states)]
        x = self.join(torch.cat(pair[::-1] if self.state_first else pair, dim=-1))
        out, residual = self.block(x, None, batch)
        if residual is not None:
            residual = self.picked(batch, residual)
        hidden, _ = self.out_norm.add(self.picked(batch, out), residual)
        return hidden


class MiMoMTPHead(MTPHead):
    """MiMo's, Xiaomi 2025, arXiv:2505.07608."""

    layout: ClassVar[Layout] = MIMO
    state_first: ClassVar[bool] = True


class QwenMTPHead(MTPHead):
    """Qwen3-Next's and Qwen3.5's: the block attends, and norms are stored as the model's are."""

    layout: ClassVar[Layout] = QWEN
    prefix: ClassVar[str] = "mtp"

    def make_norm(self, name: str) -> NormLayer:
        return self._decoder.make_norm(self.context, name)

    def same_kind(self) -> int:
        """The last layer that attends.

        Raises:
            UnsupportedFeature: there is none.
        """
        attending = [i for i in range(self.target.num_layers()) if self._decoder.attends(i)]
        if not attending:
            raise UnsupportedFeature(
                "speculative_config.method: no layer of the model attends: there is none of the kind of its "
                "further layer's",
                param="speculative_config",
            )
        return attending[-1]

    def passed_over(self) -> Mapping[str, str]:
        return {**super().passed_over(), r"mtp\.layers\.(?!0\.).*": "is of a further layer"}

    @property
    def _decoder(self) -> Qwen3_5ForCausalLM:
        assert isinstance(self.target, Qwen3_5ForCausalLM)
        return self.target


class ErnieMTPHead(MTPHead):
    """ERNIE 4.5's with experts: a block without them."""

    layout: ClassVar[Layout] = ERNIE

    def make_block(self, name: str) -> Block:
        target, context = self.target, self.context
        assert isinstance(target, Ernie4_5_MoeForCausalLM)
        settings = target.settings
        size, kind = settings.integer("intermediate_size"), settings.activation("hidden_act")
        return PreNormBlock(
            self.make_norm(f"{name}.input_layernorm"),
            target.make_attention(context, 0, f"{name}.self_attn"),
            self.make_norm(f"{name}.post_attention_layernorm"),
            GatedMLP(context, f"{name}.mlp", target.hidden_size(), size, kind),
        )

    def make_block_rules(self, name: str) -> Sequence[WeightRule]:
        return _block_rules(RULES, name)

    def passed_over(self) -> Mapping[str, str]:
        return {
            r"(?!model\.mtp_).*": "is the model's",
            r"model\.mtp_[a-z_]+\.(?!0\.).*": "is of a further layer",
        }


class LongcatMTPHead(MTPHead):
    """LongCat-Flash's: one half of a block of the model's, without the experts."""

    layout: ClassVar[Layout] = LONGCAT

    def make_block(self, name: str) -> Block:
        target, context = self.target, self.context
        assert isinstance(target, LongcatFlashForCausalLM)
        return PreNormBlock(
            self.make_norm(f"{name}.input_layernorm"),
            target.make_attention(context, 0, f"{name}.self_attn"),
            self.make_norm(f"{name}.post_attention_layernorm"),
            target.make_mlp(context, 0, f"{name}.transformer_layer.mlp"),
        )

    def make_block_rules(self, name: str) -> Sequence[WeightRule]:
        return (
            *mla_rules(f"{name}.self_attn", "block.attention"),
            WeightRule(f"{name}.input_layernorm", "block.input_norm"),
            WeightRule(f"{name}.post_attention_layernorm", "block.mlp_norm"),
            *shared_rules(f"{name}.transformer_layer.mlp", "block.mlp"),
        )

    def passed_over(self) -> Mapping[str, str]:
        return {
            r"(?!model\.mtp\.).*": "is the model's",
            r"model\.mtp\.embed_tokens\..*": "the model's own are shared",
            r"model\.mtp\.layers\.(?!0\.).*": "is of a further layer",
        }


def _block_rules(rules: Sequence[WeightRule], block: str) -> list[WeightRule]:
    """The rules of a family's layers, for one layer of that name."""
    return [
        replace(
            rule,
            source=rule.source.replace("model.layers.{}", block, 1),
            target=rule.target.replace("layers.{}", "block", 1),
        )
        for rule in rules
        if rule.source.startswith("model.layers.{}.")
    ]

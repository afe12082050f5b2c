"""ModernBERT: a rotary encoder with gated MLPs, windows on two layers of three, and no biases.

Warner et al. 2024, arXiv:2412.13663. Windowed and full layers rotate by different bases; the first
layer has no norm before its attention, as the embeddings' norm stands there::

    x = norm(word)
    x = x + attention(norm(x))              per block
    x = x + down(gelu(gate(norm(x))) * up(norm(x)))
    hidden = norm(x)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.config.rope import rope_settings
from headrace_models.config.settings import Settings
from headrace_models.layers.attention.encoder_attention import EncoderAttention
from headrace_models.layers.blocks import PreNormBlock
from headrace_models.layers.embedding import Embedding
from headrace_models.layers.encoder import Embeddings, Encoder
from headrace_models.layers.mlp import GatedMLP
from headrace_models.layers.norm import LayerNorm, NoNorm
from headrace_models.layers.rotary import rotary_table
from headrace_models.layers.vocabulary import vocab_shard
from headrace_models.loading.mapping import ALL_PARTS
from headrace_models.pooling.activations import elementwise
from headrace_models.pooling.classifier import OUT_RULE, Classifier, HeadLinear
from headrace_models.pooling.head_norm import HeadNorm

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext

GLOBAL_THETA, LOCAL_THETA = 160_000.0, 10_000.0


def _rules(prefix: str) -> tuple[WeightRule, ...]:
    layer, ours = f"{prefix}layers.{{}}", "layers.{}"
    return (
        WeightRule(f"{prefix}embeddings.tok_embeddings", "embed.words"),
        WeightRule(f"{prefix}embeddings.norm", "embed.norm"),
        WeightRule(f"{layer}.attn_norm", f"{ours}.input_norm"),
        WeightRule(f"{layer}.attn.Wqkv", f"{ours}.attention.qkv", split=ALL_PARTS),
        WeightRule(f"{layer}.attn.Wo", f"{ours}.attention.out"),
        WeightRule(f"{layer}.mlp_norm", f"{ours}.mlp_norm"),
        WeightRule(f"{layer}.mlp.Wi", f"{ours}.mlp.gate_up", split=ALL_PARTS),
        WeightRule(f"{layer}.mlp.Wo", f"{ours}.mlp.down"),
        WeightRule(f"{prefix}final_norm", "final_norm"),
    )


_ENCODER = (*_rules("model."), *_rules(""))


class NormedEmbeddings(Embeddings):
    """``norm(word)``."""

    def __init__(
        self, context: BuildContext, name: str, vocab_size: int, size: int, norm: LayerNorm
    ) -> None:
        shard = vocab_shard(vocab_size, context.communicator)
        self.words = Embedding(context, name, vocab_size, size, shard=shard)
        self.norm = norm

    def __call__(self, batch: ForwardBatch) -> Tensor:
        return self.norm(self.words(batch.input_ids))


class ModernBertModel(Encoder):
    """Pre-norm blocks and a final norm; embeds."""

    weight_rules: ClassVar[Sequence[WeightRule]] = _ENCODER
    ignored_weights: ClassVar[Mapping[str, str]] = {
        r"(head|decoder)\..*": "the head of the pre-training",
        r"classifier\..*": "labels, of a checkpoint that is to embed",
    }

    def __init__(self, context: BuildContext, prefix: str = "") -> None:
        super().__init__(context, prefix or "model.")

    def make_embeddings(self, context: BuildContext, prefix: str) -> Embeddings:
        return NormedEmbeddings(
            context,
            f"{prefix}embeddings.tok_embeddings",
            self.settings.integer("vocab_size"),
            self.hidden_size(),
            self.make_norm(context, f"{prefix}embeddings.norm"),
        )

    def prepare(self, context: BuildContext, prefix: str) -> None:
        self.rotary, self.local_rotary = _rotary_tables(context, self.settings)

    def eps(self) -> float:
        return self.settings.number("norm_eps", 1e-5)

    def make_norm(self, context: BuildContext, name: str) -> LayerNorm:
        bias = self.settings.flag("norm_bias", False)
        return LayerNorm(context, name, self.hidden_size(), self.eps(), bias=bias)

    def make_layers(self, context: BuildContext, prefix: str) -> None:
        self.layers = [
            self.make_block(context, index, prefix) for index in range(self.num_layers())
        ]
        self.final_norm = self.make_norm(context, f"{prefix}final_norm")

    def run_layers(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        residual: Tensor | None = None
        for layer in self.layers:
            x, residual = layer(x, residual, batch)
        rest = None if residual is None else self.chosen(residual, batch)
        hidden, _ = self.final_norm.add(self.chosen(x, batch), rest)
        return hidden

    def make_block(self, context: BuildContext, index: int, prefix: str) -> PreNormBlock:
        name = f"{prefix}layers.{index}"
        return PreNormBlock(
            self.make_norm(context, f"{name}.attn_norm") if index else NoNorm(),
            self.make_attention(context, index, f"{name}.attn"),
            self.make_norm(context, f"{name}.mlp_norm"),
            GatedMLP(
                context,
                f"{name}.mlp",
                self.hidden_size(),
                self.settings.integer("intermediate_size"),
                self.settings.activation("hidden_activation"),
                bias=self.settings.flag("mlp_bias", False),
                stored_fused=True,
                fused_name="Wi",
                down_name="Wo",
            ),
        )

    def make_attention(self, context: BuildContext, index: int, name: str) -> EncoderAttention:
        heads = self.settings.integer("num_attention_heads")
        bias = self.settings.flag("attention_bias", False)
        # The config's number is the whole width: half of it to either side, and the token itself.
        window = self.settings.integer("local_attention", 128) // 2 + 1
        sliding = self.is_sliding(index)
        return EncoderAttention(
            context,
            name,
            hidden_size=self.hidden_size(),
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=self.settings.head_dim(),
            rotary=self.local_rotary if sliding else self.rotary,
            sliding_window=window if sliding else None,
            qkv_bias=bias,
            out_bias=bias,
            qkv_name="Wqkv",
            out_name="Wo",
            part_names=(),
        )

    def is_sliding(self, index: int) -> bool:
        kinds = self.settings.layer_types()
        if kinds is not None:
            return kinds[index] == "sliding_attention"
        return index % self.settings.integer("global_attn_every_n_layers", 3) != 0


_HEAD = (
    WeightRule("head.dense", "pooler.head.classifier.dense"),
    WeightRule("head.norm", "pooler.head.classifier.norm"),
    OUT_RULE,
)


class ModernBertForSequenceClassification(ModernBertModel):
    """Labels of the first token or of the mean, through the pre-training's dense layer and norm."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (*_ENCODER, *_HEAD)

    def make_classifier(self, context: BuildContext, prefix: str) -> Classifier | None:
        return _classifier(context, self)


class ModernBertForTokenClassification(ModernBertModel):
    """Labels of each token, through the same layers."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (*_ENCODER, *_HEAD)

    def make_classifier(self, context: BuildContext, prefix: str) -> Classifier | None:
        return _classifier(context, self)


def _classifier(context: BuildContext, model: ModernBertModel) -> Classifier:
    """``classifier(norm(act(dense(x))))``."""
    assert context.pooling is not None
    settings, size, labels = model.settings, model.hidden_size(), context.pooling.num_labels
    return Classifier(
        HeadLinear(context, "classifier", size, labels),
        HeadLinear(context, "head.dense", size, size, bias=settings.flag("classifier_bias", False)),
        elementwise(settings.activation("classifier_activation")),
        HeadNorm(context, "head.norm", size, model.eps(), bias=settings.flag("norm_bias", False)),
    )


def _rotary_tables(context: BuildContext, settings: Settings) -> tuple[Tensor, Tensor]:
    """Rotary tables of the full layers and of the windowed ones. Old configs have a key for each base."""
    size, limit = settings.head_dim(), settings.integer("max_position_embeddings", 8192)
    far = settings.positive("global_rope_theta", GLOBAL_THETA)
    near = settings.positive("local_rope_theta", LOCAL_THETA)
    full = rope_settings(context.config, "full_attention", theta=far)
    local = rope_settings(context.config, "sliding_attention", theta=near)
    return (
        rotary_table(context, full, size, max_positions=limit),
        rotary_table(context, local, size, max_positions=limit),
    )

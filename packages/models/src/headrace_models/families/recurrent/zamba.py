"""Zamba 1 and 2: Mamba, with a transformer before some layers whose weights they share. Glorioso et al.
2024, arXiv:2405.16712 and arXiv:2411.15242.

Block: ``x + mamba(norm(x + linear(transformer(x, embeddings))))``, or ``x + mamba(norm(x))``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.recurrent_settings import MAX_TAPS, layer_kinds
from headrace_models.families.recurrent.zamba_mamba import HeadedMambaMixer
from headrace_models.families.recurrent.zamba_transformer import (
    CacheOnlyAttention,
    SharedTransformer,
    TransformerSizes,
)
from headrace_models.layers.base import Part
from headrace_models.layers.blocks import Mixer
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.linear import Linear
from headrace_models.layers.norm import NormLayer
from headrace_models.layers.recurrent.mamba import MambaSizes
from headrace_models.layers.recurrent.mamba2 import Mamba2Mixer, Mamba2Sizes
from headrace_models.loading.mapping import ALL_PARTS
from headrace_models.loading.rules.mamba2 import scan_rules

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext
    from headrace_core.ops import OpTable

BOTH = "zamba.stream_and_embeddings"
"""Where a batch has, while its layers run, [T, 2 H]: room for the stream, and the model's first vectors."""
_KINDS = ("linear_attention", "mamba", "hybrid")


class SharedUse:
    """A layer's use of a transformer that belongs to the first layer that uses it; no layer itself, so
    that weights are found once."""

    def __init__(self, transformer: SharedTransformer, use: int) -> None:
        self.transformer, self.use = transformer, use


class ZambaBlock(Block):
    """``x + mamba(norm(x + linear(transformer(x, embeddings))))``, or without the transformer."""

    def __init__(
        self,
        ops: OpTable,
        norm: NormLayer,
        mixer: Mixer,
        shared: SharedUse | None,
        transformer: SharedTransformer | None,
        attention: CacheOnlyAttention | None,
        linear: Linear | None,
    ) -> None:
        self.ops = ops
        self.norm = norm
        self.mixer = mixer
        self.shared = shared
        self.transformer = transformer
        self.attention = attention
        self.linear = linear

    def __call__(
        self, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        stream = x if residual is None else self.ops.add(x, residual)
        x = stream
        if self.shared is not None and self.attention is not None and self.linear is not None:
            both, shared = batch.extra[BOTH], self.shared
            self.ops.copy_rows(stream, both[:, : stream.shape[1]])
            out = shared.transformer(both, self.attention, shared.use, batch)
            x = self.ops.add(stream, self.linear(out))
        return self.mixer(self.norm(x), batch), stream


def _layer_rules(transformer: str) -> tuple[WeightRule, ...]:
    """Weight rules of both generations: a layer's modules lie deeper where a transformer stands before it."""
    shared, own = f"model.layers.{{}}.{transformer}", "layers.{}.transformer"
    adapters = f"{shared}.self_attn.linear_"
    return (
        WeightRule("model.embed_tokens", "embed"),
        WeightRule("model.layers.{}.input_layernorm", "layers.{}.norm"),
        WeightRule("model.layers.{}.mamba_decoder.input_layernorm", "layers.{}.norm"),
        WeightRule("model.layers.{}.linear", "layers.{}.linear"),
        WeightRule(f"{shared}.input_layernorm", f"{own}.input_norm"),
        *(
            WeightRule(f"{shared}.self_attn.{name}_proj", f"{own}.qkv", part=part)
            for part, name in enumerate("qkv")
        ),
        *(
            WeightRule(
                f"{adapters}{name}_adapter_list.{{}}.0",
                f"{own}.attention_adapters.{{}}.down",
                part=part,
            )
            for part, name in enumerate("qkv")
        ),
        *(
            WeightRule(
                f"{adapters}{name}_adapter_list.{{}}.1", f"{own}.attention_adapters.{{}}.up.{part}"
            )
            for part, name in enumerate("qkv")
        ),
        WeightRule(f"{shared}.self_attn.o_proj", f"{own}.out"),
        WeightRule(f"{shared}.pre_ff_layernorm", f"{own}.mlp_norm"),
        WeightRule(f"{shared}.feed_forward.gate_up_proj", f"{own}.gate_up", split=ALL_PARTS),
        WeightRule(f"{shared}.feed_forward.gate_proj", f"{own}.gate_up", part=0),
        WeightRule(f"{shared}.feed_forward.up_proj", f"{own}.gate_up", part=1),
        WeightRule(
            f"{shared}.feed_forward.gate_up_proj_adapter_list.{{}}.0",
            f"{own}.mlp_adapters.{{}}.down",
        ),
        WeightRule(
            f"{shared}.feed_forward.gate_up_proj_adapter_list.{{}}.1",
            f"{own}.mlp_adapters.{{}}.up.0",
            split=ALL_PARTS,
        ),
        WeightRule(f"{shared}.feed_forward.down_proj", f"{own}.down"),
        WeightRule("model.final_layernorm", "final_norm"),
        WeightRule("lm_head", "head"),
    )


def _headed_rules(mixer: str) -> tuple[WeightRule, ...]:
    to = "layers.{}.mixer"
    names = ("x_proj_weight", "dt_proj_weight", "dt_proj_bias", "A_log", "D")
    return (
        WeightRule(f"{mixer}.in_proj", f"{to}.in_proj", split=ALL_PARTS, interleaved=True),
        WeightRule(f"{mixer}.conv1d", f"{to}.conv"),
        WeightRule(f"{mixer}.out_proj", f"{to}.out_proj"),
        *(WeightRule(f"{mixer}.{name}", f"{to}.scan.{name}") for name in names),
    )


class Zamba2ForCausalLM(LlamaDecoder):
    """Zamba2 1.2B to 7B: Mamba 2, one or two transformers in turns, and adapters for each use."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *_layer_rules("shared_transformer"),
        *scan_rules("model.layers.{}.mamba"),
        *scan_rules("model.layers.{}.mamba_decoder.mamba"),
    )
    ignored_weights: ClassVar[Mapping[str, str]] = {
        r"model\.layers\.\d+\.shared_transf(ormer)?\..*": "repeats those of an earlier layer"
    }
    ties_embeddings: ClassVar[bool] = True
    default_eps: ClassVar[float] = 1e-5
    transformer_name: ClassVar[str] = "shared_transformer"

    def prepare(self, context: BuildContext, prefix: str) -> None:
        self.settings.refuse("use_long_context", False)
        self.rotary = None
        if self.settings.flag("use_mem_rope", False):
            super().prepare(context, prefix)
        self.uses = [i for i, kind in enumerate(self.kinds()) if kind == "hybrid"]
        self.transformers: tuple[SharedTransformer, ...] = ()

    def kinds(self) -> list[str]:
        """The kind of each layer; ``hybrid`` ones have a transformer before them."""
        kinds = layer_kinds(
            self.settings, "layers_block_type", known=_KINDS, count=self.num_layers()
        )
        if kinds is None:
            raise UnsupportedModel("config.json has no 'layers_block_type', which the model needs")
        return kinds

    def num_transformers(self) -> int:
        return self.settings.integer("num_mem_blocks", 1)

    def head_dim(self) -> int:
        return 2 * self.hidden_size() // self.settings.integer("num_attention_heads")

    def make_final_norm(self, context: BuildContext, prefix: str) -> NormLayer:
        return self.make_norm(context, f"{prefix}model.final_layernorm")

    def run_blocks(self, x: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        tokens, size = x.shape
        both = x.new_empty((tokens, 2 * size))
        self.context.ops.copy_rows(x, both[:, size:])
        extra = {**batch.extra, BOTH: both}
        return super().run_blocks(x, dataclasses.replace(batch, extra=extra))

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        if index not in self.uses:
            norm = self.make_norm(context, f"{name}.input_layernorm")
            mixer = self.make_mixer(context, f"{name}.mamba")
            return ZambaBlock(context.ops, norm, mixer, None, None, None, None)
        use, sizes = self.uses.index(index), self.sizes()
        created = None
        if use < self.num_transformers():
            created = self.make_transformer(context, f"{name}.{self.transformer_name}", use, sizes)
            self.transformers = (*self.transformers, created)
        shared = SharedUse(self.transformers[use % len(self.transformers)], use)
        hidden, size = self.hidden_size(), sizes.head_dim
        attention = CacheOnlyAttention(
            context,
            f"{name}.{self.transformer_name}.self_attn",
            hidden_size=2 * hidden,
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=size,
            rotary=self.rotary,
            scale=(size / 2) ** -0.5,
        )
        return ZambaBlock(
            context.ops,
            self.make_norm(context, f"{name}.mamba_decoder.input_layernorm"),
            self.make_mixer(context, f"{name}.mamba_decoder.mamba"),
            shared,
            created,
            attention,
            Linear(context, f"{name}.linear", hidden, [Part(hidden)]),
        )

    def sizes(self) -> TransformerSizes:
        """Sizes of the shared transformers."""
        hidden = self.hidden_size()
        return TransformerSizes(
            hidden_size=hidden,
            num_heads=self.settings.integer("num_attention_heads"),
            num_kv_heads=self.settings.num_kv_heads(),
            head_dim=self.head_dim(),
            intermediate_size=self.settings.integer("intermediate_size", 4 * hidden),
            adapter_rank=self.settings.integer("adapter_rank", 128),
            attention_adapters=self.settings.flag("use_shared_attention_adapter", False),
            mlp_adapters=self.has_mlp_adapters(),
        )

    def has_mlp_adapters(self) -> bool:
        return True

    def make_transformer(
        self, context: BuildContext, name: str, first_use: int, sizes: TransformerSizes
    ) -> SharedTransformer:
        return SharedTransformer(
            context,
            name,
            sizes,
            activation=self.settings.activation("hidden_act", default="gelu"),
            eps=self.norm_eps(),
            bias=self.settings.flag("add_bias_linear", False),
            uses=range(first_use, len(self.uses), self.num_transformers()),
            num_uses=len(self.uses),
        )

    def make_mixer(self, context: BuildContext, name: str) -> Mixer:
        hidden, heads = self.hidden_size(), self.settings.integer("n_mamba_heads", 8)
        channels = self.settings.integer("mamba_expand", 2) * hidden
        sizes = Mamba2Sizes(
            hidden_size=hidden,
            num_heads=heads,
            head_dim=channels // heads,
            num_groups=self.settings.integer("mamba_ngroups", 1),
            state_size=self.settings.integer("mamba_d_state", 64),
            taps=self.settings.integer("mamba_d_conv", 4, maximum=MAX_TAPS),
        )
        least = self.settings.number("time_step_min", 0.001)
        return Mamba2Mixer(
            context,
            name,
            sizes,
            activation="silu",
            bias=self.settings.flag("add_bias_linear", False),
            conv_bias=True,
            norm_eps=1e-5,
            dt_limits=(least, float("inf")),  # transformers' bounds, not the config's
        )


class ZambaForCausalLM(Zamba2ForCausalLM):
    """Zamba 7B: Mamba with two heads, one transformer, no adapters."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *_layer_rules("shared_transf"),
        *_headed_rules("model.layers.{}.mamba"),
        *_headed_rules("model.layers.{}.mamba_decoder.mamba"),
    )
    transformer_name: ClassVar[str] = "shared_transf"

    def kinds(self) -> list[str]:
        count = self.num_layers()
        kinds = layer_kinds(self.settings, "layers_block_type", known=_KINDS, count=count)
        if kinds is not None:
            return kinds
        period = self.settings.integer("attn_layer_period", 6)
        offset = self.settings.integer("attn_layer_offset", 4, minimum=0)
        turns = ["hybrid" if i % period == offset else "mamba" for i in range(max(0, count - 3))]
        return ["mamba", "mamba", "hybrid", *turns][:count]

    def num_transformers(self) -> int:
        return 1

    def head_dim(self) -> int:
        return self.settings.integer("attention_head_dim", super().head_dim())

    def has_mlp_adapters(self) -> bool:
        return False

    def make_mixer(self, context: BuildContext, name: str) -> Mixer:
        hidden = self.hidden_size()
        rank = self.context.config.get("mamba_dt_rank", "auto")
        sizes = MambaSizes(
            hidden_size=hidden,
            channels=self.settings.integer("mamba_expand", 2) * hidden,
            state_size=self.settings.integer("mamba_d_state", 16),
            step_rank=-(-hidden // 16)
            if rank == "auto"
            else self.settings.integer("mamba_dt_rank"),
            taps=self.settings.integer("mamba_d_conv", 4, maximum=MAX_TAPS),
        )
        return HeadedMambaMixer(
            context,
            name,
            sizes,
            self.settings.integer("n_mamba_heads", 2),
            activation=self.settings.activation("hidden_mamba_act", default="silu"),
            bias=self.settings.flag("mamba_proj_bias", False),
            conv_bias=self.settings.flag("mamba_conv_bias", True),
        )

"""Gemma 3n, text: four streams of which each block works on one, a second table of embeddings for every
layer, upper layers that read a lower layer's cache, and gates that let few values through.

Google 2025, Gemma 3n; Baykal et al. 2023, arXiv:2301.13310.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.families.gemma2 import GEMMA_RULES
from headrace_models.families.gemma3 import Gemma3ForCausalLM
from headrace_models.families.qwen3 import HEAD_NORM_RULES
from headrace_models.layers.altup import AltUp, Streams
from headrace_models.layers.attention import SelfAttention
from headrace_models.layers.base import Layer, Part
from headrace_models.layers.blocks import SandwichBlock
from headrace_models.layers.decoder import Block
from headrace_models.layers.linear import Linear
from headrace_models.layers.mlp import GatedMLP, MLPLayer
from headrace_models.layers.norm import RMSNorm
from headrace_models.layers.per_layer_inputs import PerLayerGate, PerLayerInputs
from headrace_models.layers.sparse_mlp import SparseGatedMLP

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext

PER_LAYER_RULES = (
    WeightRule("model.embed_tokens_per_layer", "per_layer.table"),
    WeightRule("model.per_layer_model_projection", "per_layer.projection"),
    WeightRule("model.per_layer_projection_norm", "per_layer.norm"),
    WeightRule("model.layers.{}.per_layer_input_gate", "layers.{}.per_layer.gate"),
    WeightRule("model.layers.{}.per_layer_projection", "layers.{}.per_layer.projection"),
    WeightRule("model.layers.{}.post_per_layer_input_norm", "layers.{}.per_layer.norm"),
)
UNUSED_KEYS = {
    r"model\.layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm)\.weight": (
        "the layer reads another one's cache"
    )
}
"""Checkpoints hold projections to keys and values that no layer uses."""
FULL_EVERY = 5
"""Without ``layer_types``, the last of every five layers has no window."""
SPARSE_LAYERS, SPARSITY = 10, 0.95
"""Of a config with more layers that has no ``activation_sparsity_pattern``."""


class Gemma3nForCausalLM(Gemma3ForCausalLM):
    """Gemma 3n E2B and E4B, text."""

    reads_ids: bool = False
    """Whether layers have inputs of their own by token id, so that ids cannot be left out."""
    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *GEMMA_RULES,
        *HEAD_NORM_RULES,
        *PER_LAYER_RULES,
        WeightRule("model.altup_projections.{}", "streams.spread.{}"),
        WeightRule("model.altup_unembed_projections.{}", "streams.gather.{}"),
        WeightRule("model.layers.{}.altup.router_norm", "layers.{}.altup.router_norm"),
        WeightRule("model.layers.{}.altup.modality_router", "layers.{}.altup.router"),
        WeightRule("model.layers.{}.altup.prediction_coefs", "layers.{}.altup.prediction"),
        WeightRule("model.layers.{}.altup.correction_coefs", "layers.{}.altup.correction"),
        WeightRule(
            "model.layers.{}.altup.correct_output_scale", "layers.{}.altup.output_scale.weight"
        ),
        WeightRule("model.layers.{}.laurel.linear_left", "layers.{}.laurel.left"),
        WeightRule("model.layers.{}.laurel.linear_right", "layers.{}.laurel.right"),
        WeightRule("model.layers.{}.laurel.post_laurel_norm", "layers.{}.laurel.norm"),
    )
    ignored_weights: ClassVar[Mapping[str, str]] = UNUSED_KEYS
    default_shared_layers: ClassVar[int] = 15
    """``num_kv_shared_layers`` of a config that does not name it."""

    def prepare(self, context: BuildContext, prefix: str) -> None:
        super().prepare(context, prefix)
        self.prepare_per_layer(context, prefix)
        self.streams = Streams(context, f"{prefix}model.", self.hidden_size(), self._num_streams())

    def embed_tokens(self, batch: ForwardBatch) -> Tensor:
        return (
            self.token_vectors(batch.input_ids) if self.reads_ids else super().embed_tokens(batch)
        )

    def prepare_per_layer(self, context: BuildContext, prefix: str) -> None:
        """Every layer's own input is looked up by token id: prompts that come as vectors have none."""
        self.reads_ids = True
        vocab = self.settings.integer("vocab_size")
        self.per_layer = PerLayerInputs(
            context,
            f"{prefix}model.",
            vocab_size=vocab,
            num_rows=self.settings.integer("vocab_size_per_layer_input", vocab),
            hidden_size=self.hidden_size(),
            num_layers=self.num_layers(),
            size=self.settings.integer("hidden_size_per_layer_input", 256),
            eps=self.norm_eps(),
        )

    def make_norm(self, context: BuildContext, name: str) -> RMSNorm:
        """Stored as used, unlike the Gemmas before."""
        return RMSNorm(context, name, self.hidden_size(), self.norm_eps())

    def is_sliding(self, index: int) -> bool:
        kinds = self.settings.layer_types()
        if kinds is None:
            return (index + 1) % FULL_EVERY != 0
        return kinds[index] == "sliding_attention"

    def cache_source(self, index: int) -> int | None:
        """The layer whose cache layer ``index`` reads: the last of its kind that has one of its own."""
        shared = self.settings.integer(
            "num_kv_shared_layers", self.default_shared_layers, minimum=0
        )
        own = self.num_layers() - shared
        if index < own:
            return None
        kind = self.is_sliding(index)
        source = next((i for i in reversed(range(own)) if self.is_sliding(i) == kind), None)
        if source is None:
            raise UnsupportedModel(
                f"config.json: num_kv_shared_layers = {shared}: no layer below has a cache that layer "
                f"{index} could read"
            )
        return source

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        rotary = self.local_rotary if self.is_sliding(index) else self.rotary
        return self.shared_attention(context, index, name, rotary=rotary)

    def shared_attention(
        self, context: BuildContext, index: int, name: str, **differences: Any
    ) -> SelfAttention:
        """With norms of queries, keys and values, and perhaps with another layer's cache."""
        bias, eps = self.settings.flag("attention_bias", False), self.norm_eps()
        size = differences.get("head_dim", self.head_dim())
        source, value_norm, target = self.cache_source(index), None, None
        if source is None:
            value_norm = RMSNorm(context, f"{name}.v_norm", size, eps, weight=False)
        else:
            target = f"{name.removesuffix(f'{index}.self_attn')}{source}.self_attn"
        return self.attention(
            context,
            name,
            scale=1.0,
            sliding_window=self.window() if self.is_sliding(index) else None,
            qkv_bias=bias,
            out_bias=bias,
            head_norm_eps=eps,
            value_norm=value_norm,
            kv_sharing_target=target,
            **differences,
        )

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        activation = self.settings.activation("hidden_activation", "hidden_act")
        arguments = (context, name, self.hidden_size(), self._intermediate_size(index), activation)
        sparsity = self._sparsity(index)
        return SparseGatedMLP(*arguments, sparsity=sparsity) if sparsity else GatedMLP(*arguments)

    def make_per_layer_gate(self, context: BuildContext, name: str) -> PerLayerGate:
        return PerLayerGate(
            context,
            name,
            hidden_size=self.hidden_size(),
            size=self.per_layer.size,
            activation=self.settings.activation("hidden_activation", "hidden_act"),
            eps=self.norm_eps(),
        )

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        count, active = self._num_streams(), self.settings.integer("altup_active_idx", 0, minimum=0)
        if active >= count:
            raise UnsupportedModel(
                f"config.json: altup_active_idx = {active}: must be below altup_num_inputs = {count}"
            )
        return Gemma3nBlock(
            SandwichBlock(
                self.make_norm(context, f"{name}.input_layernorm"),
                self.make_attention(context, index, f"{name}.self_attn"),
                self.make_norm(context, f"{name}.post_attention_layernorm"),
                self.make_norm(context, f"{name}.pre_feedforward_layernorm"),
                self.make_mlp(context, index, f"{name}.mlp"),
                self.make_norm(context, f"{name}.post_feedforward_layernorm"),
            ),
            AltUp(
                context,
                f"{name}.altup",
                hidden_size=self.hidden_size(),
                num_streams=count,
                active=active,
                eps=self.norm_eps(),
                scales=self.settings.flag("altup_correct_scale", True),
            ),
            Laurel(
                context,
                f"{name}.laurel",
                self.hidden_size(),
                self.settings.integer("laurel_rank", 64),
                self.norm_eps(),
            ),
            self.make_per_layer_gate(context, name),
        )

    def run_blocks(self, x: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        inputs = self.per_layer(batch.input_ids, x)
        streams = self.streams.expand(x)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Gemma3nBlock)
            streams = layer.update(streams, self.per_layer.of(index, inputs), batch)
        return self.streams.mean(streams), None

    def _num_streams(self) -> int:
        return self.settings.integer("altup_num_inputs", 4, maximum=64)

    def _intermediate_size(self, index: int) -> int:
        """One for all layers, or a list."""
        if not isinstance(self.context.config.get("intermediate_size"), list):
            return self.settings.integer("intermediate_size")
        sizes = self.settings.integers("intermediate_size")
        if len(sizes) != self.num_layers() or min(sizes) < 1:
            raise UnsupportedModel(
                f"config.json: intermediate_size = {sizes!r:.200}: must be a number above 0 for each of "
                f"{self.num_layers()} layers"
            )
        return sizes[index]

    def _sparsity(self, index: int) -> float:
        """Share of the gate's values that are cut off."""
        pattern = self.settings.numbers("activation_sparsity_pattern", self.num_layers())
        if pattern is None:
            sparse = index < SPARSE_LAYERS < self.num_layers()
            return SPARSITY if sparse else 0.0
        if not 0 <= pattern[index] < 1:
            raise UnsupportedModel(
                f"config.json: activation_sparsity_pattern = {pattern!r:.200}: must be numbers from 0 "
                "to below 1"
            )
        return pattern[index]


class Laurel(Layer):
    """``x + norm(right(left(x)))``: a residual of low rank. Menghani et al. 2024, arXiv:2411.07501."""

    def __init__(
        self, context: BuildContext, name: str, hidden_size: int, rank: int, eps: float
    ) -> None:
        self.ops = context.ops
        self.left = Linear(context, f"{name}.linear_left", hidden_size, [Part(rank)])
        self.right = Linear(context, f"{name}.linear_right", rank, [Part(hidden_size)])
        self.norm = RMSNorm(context, f"{name}.post_laurel_norm", hidden_size, eps)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> the same shape."""
        return self.ops.add(x, self.norm(self.right(self.left(x))))


class Gemma3nBlock(SandwichBlock):
    """A sandwich of one of the streams, beside a residual of low rank.

    Args:
        block: whose pieces this one takes over.
    """

    def __init__(
        self, block: SandwichBlock, altup: AltUp, laurel: Laurel, per_layer: PerLayerGate
    ) -> None:
        vars(self).update(vars(block))
        self.ops = laurel.ops
        self.altup, self.laurel, self.per_layer = altup, laurel, per_layer

    def update(self, streams: Tensor, inputs: Tensor, batch: ForwardBatch) -> Tensor:
        """streams [T, N, H], the layer's inputs [T, P] -> [T, N, H]."""
        add, scale = self.ops.add, self.ops.scale
        predictions = self.altup.predict(streams)
        active = self.altup.of(predictions)
        x = self.input_norm(active)
        beside = self.laurel(x)
        attended = add(active, self.attention_out_norm(self.attention(x, batch)))
        stream = scale(add(attended, beside), 2**-0.5)
        made = add(stream, self.mlp_out_norm(self.mlp(self.mlp_norm(stream))))
        corrected = self.altup.correct(predictions, made)
        return self.altup.add(corrected, self.per_layer(self.altup.output(corrected), inputs))

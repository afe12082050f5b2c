"""Gemma 3n, text: four streams of which each block works on one, a second table of embeddings for every
layer, upper layers that read a lower layer's cache, and gates that let few values through.

Google 2025, Gemma 3n. The streams: Baykal et al. 2023, arXiv:2301.13310; the gates: You et al. 2025,
arXiv:2506.06644; the residual of low rank (LAuReL): Menghani et al. 2024, arXiv:2411.07501.

Block: of the active stream x ``h = (x + norm(attention(norm(x))) + laurel(norm(x))) / sqrt(2)``, then
``h + norm(mlp(norm(h)))``, by which all streams are corrected; all but the first get the layer's own input.

Letters: T tokens, N streams, H hidden size, I intermediate size, P size of a layer's own input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_core.ops.optional.gaussian_topk import GAUSSIAN_TOPK
from headrace_models.families.decoder.gemma3n_altup import AltUp, Streams
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.base import Layer, Part
from headrace_models.layers.blocks import SandwichBlock
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.gemma import (
    UNUSED_KEYS,
    cache_sharing_attention,
    cache_source,
    embedding_scale,
    gemma3_rotary_tables,
    per_layer_gate,
    per_layer_inputs,
)
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.linear import Linear
from headrace_models.layers.mlp import GatedMLP, MLPLayer
from headrace_models.layers.norm import RMSNorm
from headrace_models.layers.per_layer_inputs import PER_LAYER_RULES, PerLayerGate
from headrace_models.loading.rules.llama import GEMMA_RULES, HEAD_NORM_RULES

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext


FULL_EVERY = 5
"""Without ``layer_types``, the last of every five layers has no window."""
SPARSE_LAYERS, SPARSITY = 10, 0.95
"""First layers whose gates let few values through, and the share that they hold back: of a config with more
layers that has no ``activation_sparsity_pattern``."""


class SparseGatedMLP(GatedMLP):
    """``down(act(relu(gate - cutoff)) * up)``; the cutoff is where a normal distribution with the row's
    mean and deviation has that share of values below.

    Args:
        arguments: of :class:`GatedMLP`.
        sparsity: the share, above 0 and below 1.
    """

    def __init__(self, context: BuildContext, name: str, *arguments: Any, sparsity: float) -> None:
        super().__init__(context, name, *arguments)
        self.ops, self.communicator = context.ops, context.communicator
        self.deviations = NormalDist().inv_cdf(sparsity)
        self.gaussian_topk = context.ops.optional(GAUSSIAN_TOPK)

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=1)
        kept = self._kept(gate)
        return self.down(self.ops.gate(up, self.ops.activation(kept, self.activation)))

    def _kept(self, gate: Tensor) -> Tensor:
        """gate [T, I], as this rank has it: what is above the whole row's cutoff, and by how much."""
        ranks = self.communicator.world_size
        if ranks == 1:
            return self.gaussian_topk(gate, self.deviations)
        whole = self.gaussian_topk(self.communicator.all_gather(gate), self.deviations)
        return whole.chunk(ranks, dim=1)[self.communicator.rank]


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
        arguments: of :class:`SandwichBlock`.
    """

    def __init__(
        self, *arguments: Any, altup: AltUp, laurel: Laurel, per_layer: PerLayerGate
    ) -> None:
        super().__init__(*arguments)
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


class Gemma3nForCausalLM(LlamaDecoder):
    """Gemma 3n E2B and E4B, text."""

    reads_ids: ClassVar[bool] = True
    """Every layer's own input is looked up by token id: prompts that come as vectors have none."""
    ties_embeddings: ClassVar[bool] = True
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

    def __init__(self, context: BuildContext, prefix: str = "") -> None:
        super().__init__(context, prefix)
        self.embed_scale = embedding_scale(context, self.hidden_size())

    def head_dim(self) -> int:
        return self.settings.head_dim(default=256)

    def prepare(self, context: BuildContext, prefix: str) -> None:
        self.rotary, self.local_rotary = gemma3_rotary_tables(
            context, self.settings, self.head_dim()
        )
        self.per_layer = per_layer_inputs(self, context, prefix)
        self.streams = Streams(context, f"{prefix}model.", self.hidden_size(), self._num_streams())

    def token_vectors(self, ids: Tensor) -> Tensor:
        return self.context.ops.scale(self.embed(ids), self.embed_scale)

    def embed_tokens(self, batch: ForwardBatch) -> Tensor:
        return self.token_vectors(batch.input_ids)

    def make_norm(self, context: BuildContext, name: str) -> RMSNorm:
        """Stored as used, unlike the Gemmas before."""
        return RMSNorm(context, name, self.hidden_size(), self.norm_eps())

    def is_sliding(self, index: int) -> bool:
        kinds = self.settings.layer_types()
        if kinds is None:
            return (index + 1) % FULL_EVERY != 0
        return kinds[index] == "sliding_attention"

    def window(self) -> int:
        """In both directions the config's number is the whole width, half of it to either side."""
        window = self.settings.integer("sliding_window", 4096)
        bidirectional = self.settings.flag("use_bidirectional_attention", False)
        return window // 2 if bidirectional else window

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        shared = self.settings.integer("num_kv_shared_layers", 15, minimum=0)
        sliding = self.is_sliding(index)
        return cache_sharing_attention(
            self,
            context,
            name,
            index=index,
            source=cache_source(index, self.num_layers(), shared, self.is_sliding),
            rotary=self.local_rotary if sliding else self.rotary,
            sliding_window=self.window() if sliding else None,
        )

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        activation = self.settings.activation("hidden_activation", "hidden_act")
        arguments = (context, name, self.hidden_size(), self._intermediate_size(index), activation)
        sparsity = self._sparsity(index)
        return SparseGatedMLP(*arguments, sparsity=sparsity) if sparsity else GatedMLP(*arguments)

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        count, active = self._num_streams(), self.settings.integer("altup_active_idx", 0, minimum=0)
        if active >= count:
            raise UnsupportedModel(
                f"config.json: altup_active_idx = {active}: must be below altup_num_inputs = {count}"
            )
        return Gemma3nBlock(
            self.make_norm(context, f"{name}.input_layernorm"),
            self.make_attention(context, index, f"{name}.self_attn"),
            self.make_norm(context, f"{name}.post_attention_layernorm"),
            self.make_norm(context, f"{name}.pre_feedforward_layernorm"),
            self.make_mlp(context, index, f"{name}.mlp"),
            self.make_norm(context, f"{name}.post_feedforward_layernorm"),
            altup=AltUp(
                context,
                f"{name}.altup",
                hidden_size=self.hidden_size(),
                num_streams=count,
                active=active,
                eps=self.norm_eps(),
                scales=self.settings.flag("altup_correct_scale", True),
            ),
            laurel=Laurel(
                context,
                f"{name}.laurel",
                self.hidden_size(),
                self.settings.integer("laurel_rank", 64),
                self.norm_eps(),
            ),
            per_layer=per_layer_gate(self, context, name, self.per_layer.size),
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

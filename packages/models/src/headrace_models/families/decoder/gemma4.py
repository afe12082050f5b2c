"""Gemma 4, text: Gemma 3's windows, heads twice as wide on layers without one, inputs for every layer,
and each block's result times a number.

Google 2026, Gemma 4.

Block: ``h = x + norm(attention(norm(x))); h = h + norm(mlp(norm(h)))``, in 26B-A4B with experts beside the
MLP; then the layer's own input in E2B and E4B; then the whole times a number.

Letters: T tokens, H hidden size, P size of a layer's own input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.rope import rope_settings
from headrace_models.config.settings import MAX_EXPERTS, MAX_HEAD_DIM, Settings
from headrace_models.families.decoder.gemma4_experts import EXPERT_RULES, ExpertsBeside
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.base import Slot, WeightLayer
from headrace_models.layers.blocks import SandwichBlock
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.gemma import (
    GLOBAL_THETA,
    LOCAL_THETA,
    UNUSED_KEYS,
    cache_sharing_attention,
    cache_source,
    embedding_scale,
    per_layer_gate,
    per_layer_inputs,
)
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.mlp import GatedMLP, MLPLayer
from headrace_models.layers.norm import RMSNorm
from headrace_models.layers.per_layer_inputs import PER_LAYER_RULES, PerLayerGate
from headrace_models.layers.rotary import rotary_table
from headrace_models.loading.rules.llama import GEMMA_RULES, HEAD_NORM_RULES

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext
    from headrace_core.ops import OpTable

FULL_EVERY = 6
"""Without ``layer_types``, the last of every six layers has no window."""
_FULL_ROPE = {
    "rope_type": "proportional",
    "partial_rotary_factor": 0.25,
    "rope_theta": GLOBAL_THETA,
}
_LOCAL_ROPE = {"rope_type": "default", "rope_theta": LOCAL_THETA}


class Scalar(WeightLayer):
    """One number, [1] in the checkpoint."""

    def __init__(self, name: str) -> None:
        self.name = name

    def slots(self) -> Mapping[str, Slot]:
        return {"value": Slot((1,), "float32", any_float=True)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.value = float(tensors["value"])


class Gemma4Block(SandwichBlock):
    """A sandwich, with experts beside the MLP if there are any, then the layer's inputs if there are
    any, then the whole times a number.

    Args:
        arguments: of :class:`SandwichBlock`.
    """

    def __init__(
        self,
        ops: OpTable,
        *arguments: Any,
        beside: ExpertsBeside | None,
        per_layer: PerLayerGate | None,
        scalar: Scalar,
    ) -> None:
        super().__init__(*arguments)
        self.ops, self.beside, self.per_layer, self.scalar = ops, beside, per_layer, scalar

    def update(self, x: Tensor, inputs: Tensor | None, batch: ForwardBatch) -> Tensor:
        """x [T, H], the layer's inputs [T, P] -> [T, H]."""
        x, stream = self.input_norm.add(x, None)
        x = self.attention_out_norm(self.attention(x, batch))
        x, stream = self.mlp_norm.add(x, stream)
        x = self.mlp(x)
        if self.beside is not None:
            x = self.beside(x, stream)
        stream = self.ops.add(self.mlp_out_norm(x), stream)
        if self.per_layer is not None and inputs is not None:
            stream = self.ops.add(self.per_layer(stream, inputs), stream)
        return self.ops.scale(stream, self.scalar.value)


class Gemma4ForCausalLM(LlamaDecoder):
    """Gemma 4 E2B, E4B, 26B-A4B and 31B, text."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *GEMMA_RULES,
        *HEAD_NORM_RULES,
        *PER_LAYER_RULES,
        *EXPERT_RULES,
        WeightRule("model.layers.{}.layer_scalar", "layers.{}.scalar.value"),
    )
    ignored_weights: ClassVar[Mapping[str, str]] = UNUSED_KEYS
    ties_embeddings: ClassVar[bool] = True
    reads_ids: bool = False
    """True if layers have inputs of their own by token id, so that ids cannot be left out."""
    default_inputs: ClassVar[int] = 256
    """``hidden_size_per_layer_input`` of a config that does not name it."""

    def __init__(self, context: BuildContext, prefix: str = "") -> None:
        super().__init__(context, prefix)
        self.embed_scale = embedding_scale(context, self.hidden_size())

    def head_dim(self) -> int:
        return self.settings.head_dim(default=256)

    def prepare(self, context: BuildContext, prefix: str) -> None:
        ropes = {"full_attention": _FULL_ROPE, "sliding_attention": _LOCAL_ROPE}
        config = {"rope_parameters": ropes, **_without_nulls(context.config)}
        limit = self.settings.integer("max_position_embeddings", 131_072)
        tables = (
            rotary_table(context, rope_settings(config, kind), size, max_positions=limit)
            for kind, size in (
                ("full_attention", self.full_head_dim()),
                ("sliding_attention", self.head_dim()),
            )
        )
        self.rotary, self.local_rotary = tables
        size = self.settings.integer("hidden_size_per_layer_input", self.default_inputs, minimum=0)
        self.reads_ids = size > 0
        if self.reads_ids:
            self.per_layer = per_layer_inputs(self, context, prefix)

    def token_vectors(self, ids: Tensor) -> Tensor:
        return self.context.ops.scale(self.embed(ids), self.embed_scale)

    def embed_tokens(self, batch: ForwardBatch) -> Tensor:
        """With inputs for each layer, prompts that come as vectors have no meaning."""
        if self.reads_ids:
            return self.token_vectors(batch.input_ids)
        return super().embed_tokens(batch)

    def make_norm(self, context: BuildContext, name: str) -> RMSNorm:
        """Stored as used, unlike the Gemmas before 3n."""
        return RMSNorm(context, name, self.hidden_size(), self.norm_eps())

    def is_sliding(self, index: int) -> bool:
        """The last layer never has a window."""
        kinds = self.settings.layer_types()
        if index == self.num_layers() - 1:
            return False
        if kinds is None:
            return (index + 1) % FULL_EVERY != 0
        return kinds[index] == "sliding_attention"

    def window(self) -> int:
        """In both directions the config's number is the whole width. Media see each other in both with
        ``vision``; text does not."""
        self.settings.refuse("use_bidirectional_attention", False, "all", "vision")
        window = self.settings.integer("sliding_window", 512)
        both = self.context.config.get("use_bidirectional_attention") == "all"
        return window // 2 if both else window

    def full_head_dim(self) -> int:
        """Head size of layers without a window."""
        return self._of_full_layers("head_dim", "global_head_dim", 512, MAX_HEAD_DIM)

    def full_kv_heads(self) -> int:
        """Key-value heads of layers without a window."""
        default = self.settings.num_kv_heads()
        if not self.settings.flag("attention_k_eq_v", False):
            return default
        heads = self.settings.integer("num_attention_heads")
        found = self._of_full_layers(
            "num_key_value_heads", "num_global_key_value_heads", default, heads
        )
        if heads % found:
            raise UnsupportedModel(
                f"config.json: num_global_key_value_heads = {found}: must be a divisor of "
                f"num_attention_heads = {heads}"
            )
        return found

    def _of_full_layers(self, name: str, published: str, default: int, maximum: int) -> int:
        """A number that layers without a window have of their own: published under a name of its own;
        transformers 5 writes what differs for each layer."""
        layers = self.context.config.get("per_layer_config")
        if isinstance(layers, Mapping):
            found = {
                Settings(own).integer(name, maximum=maximum)
                for index, own in layers.items()
                if isinstance(own, Mapping) and own.get(name) is not None
            }
            if len(found) > 1:
                raise UnsupportedModel(
                    f"config.json: per_layer_config has layers with {name} = {sorted(found)}: all "
                    "without a window must have the same"
                )
            if found:
                return found.pop()
        return self.settings.integer(published, default, maximum=maximum)

    def cache_source(self, index: int) -> int | None:
        """See :func:`~headrace_models.layers.decoders.gemma.cache_source`."""
        shared = self.settings.integer("num_kv_shared_layers", 0, minimum=0)
        return cache_source(index, self.num_layers(), shared, self.is_sliding)

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        source = self.cache_source(index)
        if self.is_sliding(index):
            return cache_sharing_attention(
                self,
                context,
                name,
                index=index,
                source=source,
                rotary=self.local_rotary,
                sliding_window=self.window(),
            )
        alike = self.settings.flag("attention_k_eq_v", False)
        return cache_sharing_attention(
            self,
            context,
            name,
            index=index,
            source=source,
            rotary=self.rotary,
            head_dim=self.full_head_dim(),
            num_kv_heads=self.full_kv_heads(),
            values_are_keys=alike and source is None,
        )

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        wide = self.settings.flag("use_double_wide_mlp", False)
        size = self.settings.integer("intermediate_size")
        return GatedMLP(
            context,
            name,
            self.hidden_size(),
            2 * size if wide and self.cache_source(index) is not None else size,
            self.settings.activation("hidden_activation", "hidden_act"),
        )

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return Gemma4Block(
            context.ops,
            self.make_norm(context, f"{name}.input_layernorm"),
            self.make_attention(context, index, f"{name}.self_attn"),
            self.make_norm(context, f"{name}.post_attention_layernorm"),
            self.make_norm(context, f"{name}.pre_feedforward_layernorm"),
            self.make_mlp(context, index, f"{name}.mlp"),
            self.make_norm(context, f"{name}.post_feedforward_layernorm"),
            beside=self.make_experts(context, name),
            per_layer=per_layer_gate(self, context, name, self.per_layer.size)
            if self.reads_ids
            else None,
            scalar=Scalar(f"{name}.layer_scalar"),
        )

    def make_experts(self, context: BuildContext, name: str) -> ExpertsBeside | None:
        if not self.settings.flag("enable_moe_block", False):
            return None
        return ExpertsBeside(
            context,
            name,
            hidden_size=self.hidden_size(),
            intermediate_size=self.settings.integer("moe_intermediate_size"),
            num_experts=self.settings.integer("num_experts", maximum=MAX_EXPERTS),
            top_k=self.settings.integer("top_k_experts"),
            activation=self.settings.activation("hidden_activation", "hidden_act"),
            eps=self.norm_eps(),
        )

    def run_blocks(self, x: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        inputs = self.per_layer(batch.input_ids, x) if self.reads_ids else None
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Gemma4Block)
            own = None if inputs is None else self.per_layer.of(index, inputs)
            x = layer.update(x, own, batch)
        return x, None


class Gemma4UnifiedForCausalLM(Gemma4ForCausalLM):
    """Gemma 4 12B, text: no inputs but the stream."""

    default_inputs: ClassVar[int] = 0


def _without_nulls(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if value is not None}

"""IQuest-Coder V1 Loop: Llama's stack, passed several times; from the second pass on a token attends to the
first pass's keys everywhere and to its own pass's within a window, and a gate weighs both.

IQuest Research 2026, IQuest-Coder-V1-Loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, ClassVar

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.layers.attention.self_attention import Attention, SelfAttention
from headrace_models.layers.base import Part, Slot, WeightLayer
from headrace_models.layers.blocks import PreNormBlock
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.head_view import in_every_row, in_rows
from headrace_models.layers.linear import shard_of
from headrace_models.loading.rules.llama import RULES

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import AttentionLayer, BuildContext
    from headrace_core.ops import PackedLinear

MAX_PASSES = 64


class GatedAttention(SelfAttention):
    """``g far + (1 - g) near``, g by the rotated query.

    Args:
        first: the first pass's layer, whose weights these are and whose cache is read.
        near: has this pass's cache; its own weights are not used.
    """

    def __init__(self, first: Attention, near: Attention, gate: HeadGate) -> None:
        self.first, self.near, self.gate = first, near, gate
        self.ops = first.ops

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        first = self.first
        query, key, value = first.project(x)
        near = self.near.attend(query, key, value, batch)  # query is turned in place
        if first.views is None or not batch.groups:  # memory is being profiled
            return first.out(near.flatten(1))
        metadata = batch.attention[first.group]
        far = first.backend.forward(first.spec, query, None, None, first.kv_cache, metadata)
        logits = self.gate(query)
        shares = self.ops.gate(far.flatten(1), logits, activation="sigmoid")
        others = self.ops.scale(logits, -1.0)  # sigmoid(-x) is 1 - sigmoid(x)
        return first.out(
            self.ops.add(shares, self.ops.gate(near.flatten(1), others, activation="sigmoid"))
        )


class HeadGate(WeightLayer):
    """One logit for each head, of that head's query."""

    packed: PackedLinear
    bias: Tensor

    def __init__(self, context: BuildContext, name: str, num_heads: int, head_dim: int) -> None:
        self.name, self.ops, self.head_dim = name, context.ops, head_dim
        shard = shard_of(num_heads, context.communicator, what=f"{name}, heads")
        self.part = Part(num_heads // shard.count, shard)

    def slots(self) -> Mapping[str, Slot]:
        heads = self.part.size
        return {
            "weight": Slot((heads, self.head_dim), parts=(self.part,)),
            "bias": Slot((heads,), parts=(self.part,)),
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.packed = self.ops.head_linear.pack(tensors["weight"][:, None])
        self.bias = tensors["bias"]

    def __call__(self, query: Tensor) -> Tensor:
        """query [T, Hq, D] -> [T, Hq]."""
        logits = in_rows(self.ops.head_linear(query, self.packed))
        return self.ops.add(logits, in_every_row(self.bias, query.shape[0]))


class IQuestLoopCoderForCausalLM(LlamaDecoder):
    """40B Loop. Every pass has a cache, that of the first as long as the context."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *RULES,
        WeightRule("model.gate_projections.{}", "gates.{}"),
    )

    def __init__(self, context: BuildContext, prefix: str = "") -> None:
        super().__init__(context, prefix)
        heads = self.settings.integer("num_attention_heads")
        name = f"{prefix}model.gate_projections"
        self.gates = [
            HeadGate(context, f"{name}.{index}", heads, self.head_dim())
            for index in range(self.num_layers())
        ]
        passes = self.settings.integer("loop_num", 2, maximum=MAX_PASSES)
        # In a tuple: their layers are those of the first pass, and loaded there.
        self.later = tuple(
            [self._again(context, index, number) for index in range(self.num_layers())]
            for number in range(1, passes)
        )

    def _again(self, context: BuildContext, index: int, number: int) -> PreNormBlock:
        """A block of a later pass: the weights of the first one's, and a cache of its own."""
        block = self.layers[index]
        assert isinstance(block, PreNormBlock)
        first = block.attention
        if not isinstance(first, Attention):
            raise UnsupportedModel("IQuest-Coder Loop pools with causal attention only")
        window = self.settings.integer("loop_window_size", 64)
        name = f"{first.spec.name}.pass_{number}"
        near = self.attention(context, name, sliding_window=window)
        assert isinstance(near, Attention)
        repeated = copy(block)
        repeated.attention = GatedAttention(first, near, self.gates[index])
        return repeated

    def attention_layers(self) -> Mapping[str, AttentionLayer]:
        found = [block.attention for stack in self.later for block in stack]
        near = [layer.near for layer in found if isinstance(layer, GatedAttention)]
        return {**super().attention_layers(), **{layer.spec.name: layer for layer in near}}

    def run_blocks(self, x: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        x, residual = super().run_blocks(x, batch)
        for stack in self.later:
            for block in stack:
                x, residual = block(x, residual, batch)
        return x, residual

"""RecurrentGemma: two linear recurrences to one layer of attention within a window. Botev et al. 2024,
arXiv:2404.07839.

The recurrent half is Griffin's: a convolution, then a linear recurrence with gates (RG-LRU), let through by
a branch beside it. De et al. 2024, arXiv:2402.19427.

Block: ``h = x + mixer(norm(x)); h + mlp(norm(h))``, the mixer being Griffin's or attention.

Letters: T tokens, C channels of this rank in B blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.kv import StateShape
from headrace_core.model import WeightRule
from headrace_core.ops import PackedLinear
from headrace_core.ops.optional.rg_lru import RG_LRU
from headrace_models.config.recurrent_settings import MAX_TAPS, repeated_kinds
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.base import Part, Slot, WeightLayer
from headrace_models.layers.blocks import HybridBlock, Mixer
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.head_view import by_heads
from headrace_models.layers.linear import column_parallel, dividing_shard, row_parallel
from headrace_models.layers.mlp import GatedMLP, MLPLayer
from headrace_models.layers.norm import NormLayer, RMSNorm
from headrace_models.layers.recurrent.causal_conv import CausalConv
from headrace_models.layers.recurrent.state_layer import RecurrentLayer
from headrace_models.loading.rules.hybrid import LAYER

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext
    from headrace_models.layers.recurrent.state_layer import StateArguments

_MIXER, _MLP = f"{LAYER}.temporal_block", f"{LAYER}.mlp_block"
_PATTERN = ("recurrent", "recurrent", "attention")


class GriffinMixer(RecurrentLayer):
    """``out(act(y(x)) * recurrence(conv(x(x))))``. Blocks are spread over the ranks.

    Args:
        num_blocks: of the gates' weights, which mix channels of a block only.

    Raises:
        UnsupportedModel: blocks that cannot be spread, or channels that cannot be divided into them.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        *,
        hidden_size: int,
        channels: int,
        num_blocks: int,
        taps: int,
        activation: str,
    ) -> None:
        if channels % num_blocks:
            raise UnsupportedModel(
                f"{name}: {channels} channels cannot be divided into {num_blocks} equal blocks"
            )
        shard = dividing_shard(num_blocks, context.communicator, what=f"{name}, blocks")
        own = Part(channels // shard.count, shard)
        conv = CausalConv(context, f"{name}.conv_1d", (own,), taps, bias=True, activation=None)
        super().__init__(context, name, (conv.state_shape(), StateShape((own.size,), "float32")))
        self.ops, self.activation = context.ops, activation
        self.branch = column_parallel(
            context, f"{name}.linear_y", hidden_size, (channels,), bias=True
        )
        self.inputs = column_parallel(
            context, f"{name}.linear_x", hidden_size, (channels,), bias=True
        )
        self.conv = conv
        blocks = Part(num_blocks // shard.count, shard)
        self.recurrence = RGLRU(context, f"{name}.rg_lru", own, blocks)
        self.out = row_parallel(context, f"{name}.linear_out", channels, hidden_size, bias=True)

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size] -> the same shape."""
        branch = self.branch.activated(x, self.activation)
        inner = self.conv(self.inputs(x), self.state(0, batch))
        return self.out(self.ops.gate(self.recurrence(inner, self.state(1, batch)), branch))


class RGLRU(WeightLayer):
    """See :class:`headrace_core.ops.optional.rg_lru.RGLRUOp`, with the projections to its gates.

    Args:
        channels, blocks: what this rank keeps of them.
    """

    def __init__(self, context: BuildContext, name: str, channels: Part, blocks: Part) -> None:
        self.name = name
        self.ops, self.recur = context.ops, context.ops.optional(RG_LRU)
        self.channels, self.blocks = channels, blocks
        self.block_size = channels.size // blocks.size
        self.packed: list[PackedLinear] = []
        self.biases: list[Tensor] = []

    def slots(self) -> Mapping[str, Slot]:
        size, count, parts = self.block_size, self.blocks.size, (self.blocks,)
        weight = Slot((count, size, size), parts=parts)
        bias = Slot((count, size), "float32", parts=parts, any_float=True)
        own = (self.channels,)
        return {
            "recurrent_param": Slot((own[0].size,), "float32", parts=own, any_float=True),
            "input_gate_weight": weight,
            "input_gate_bias": bias,
            "recurrent_gate_weight": weight,
            "recurrent_gate_bias": bias,
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        gates = ("input_gate", "recurrent_gate")
        pack = self.ops.head_linear.pack
        # The checkpoint's are [in, out] of each block.
        self.packed = [pack(tensors[f"{g}_weight"].transpose(1, 2).contiguous()) for g in gates]
        self.biases = [tensors[f"{gate}_bias"].flatten() for gate in gates]
        self.decay = tensors["recurrent_param"]

    def __call__(self, x: Tensor, state: StateArguments) -> Tensor:
        """x [T, C] -> the same shape."""
        blocks = by_heads(x, self.block_size)
        opens, decays = (self.ops.head_linear(blocks, packed).flatten(1) for packed in self.packed)
        return self.recur(
            x,
            opens,
            decays,
            self.decay,
            *state,
            input_bias=self.biases[0],
            decay_bias=self.biases[1],
        )


class RecurrentGemmaForCausalLM(LlamaDecoder):
    """RecurrentGemma 2B and 9B."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        WeightRule("model.embed_tokens", "embed"),
        WeightRule(f"{LAYER}.temporal_pre_norm", "layers.{}.input_norm"),
        WeightRule(f"{_MIXER}.q_proj", "layers.{}.mixer.qkv", part=0),
        WeightRule(f"{_MIXER}.k_proj", "layers.{}.mixer.qkv", part=1),
        WeightRule(f"{_MIXER}.v_proj", "layers.{}.mixer.qkv", part=2),
        WeightRule(f"{_MIXER}.o_proj", "layers.{}.mixer.out"),
        WeightRule(f"{_MIXER}.linear_y", "layers.{}.mixer.branch"),
        WeightRule(f"{_MIXER}.linear_x", "layers.{}.mixer.inputs"),
        WeightRule(f"{_MIXER}.conv_1d", "layers.{}.mixer.conv"),
        WeightRule(f"{_MIXER}.rg_lru", "layers.{}.mixer.recurrence"),
        WeightRule(f"{_MIXER}.linear_out", "layers.{}.mixer.out"),
        WeightRule(f"{LAYER}.channel_pre_norm", "layers.{}.mlp_norm"),
        WeightRule(f"{_MLP}.gate_proj", "layers.{}.mlp.gate_up", part=0),
        WeightRule(f"{_MLP}.up_proj", "layers.{}.mlp.gate_up", part=1),
        WeightRule(f"{_MLP}.down_proj", "layers.{}.mlp.down"),
        WeightRule("model.final_norm", "final_norm"),
        WeightRule("lm_head", "head"),
    )
    ties_embeddings: ClassVar[bool] = True
    default_partial_rotary: ClassVar[float] = 0.5

    def prepare(self, context: BuildContext, prefix: str) -> None:
        super().prepare(context, prefix)
        # The factor was bfloat16 in training.
        self.embedding_scale = float(torch.tensor(self.hidden_size() ** 0.5).bfloat16())

    def token_vectors(self, ids: Tensor) -> Tensor:
        return self.context.ops.scale(self.embed(ids), self.embedding_scale)

    def logits_soft_cap(self) -> float | None:
        return self.settings.positive("logits_soft_cap", 30.0)

    def make_norm(self, context: BuildContext, name: str) -> NormLayer:
        return RMSNorm(context, name, self.hidden_size(), self.norm_eps(), offset=1.0)

    def make_final_norm(self, context: BuildContext, prefix: str) -> NormLayer:
        return self.make_norm(context, f"{prefix}model.final_norm")

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return HybridBlock(
            self.make_norm(context, f"{name}.temporal_pre_norm"),
            self.make_mixer(context, index, f"{name}.temporal_block"),
            self.make_norm(context, f"{name}.channel_pre_norm"),
            self.make_mlp(context, index, f"{name}.mlp_block"),
        )

    def make_mixer(self, context: BuildContext, index: int, name: str) -> Mixer:
        pattern = repeated_kinds(self.settings, "block_types", _PATTERN)
        if pattern[index % len(pattern)] == "attention":
            return self.make_attention(context, index, name)
        hidden = self.hidden_size()
        return GriffinMixer(
            context,
            name,
            hidden_size=hidden,
            channels=self.settings.integer("lru_width", hidden),
            num_blocks=self.settings.integer("num_attention_heads"),
            taps=self.settings.integer("conv1d_width", 4, minimum=2, maximum=MAX_TAPS),
            activation=self.activation(),
        )

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        return self.attention(
            context,
            name,
            sliding_window=self.settings.integer("attention_window_size", 2048),
            qkv_bias=self.settings.flag("attention_bias", False),
            out_bias=True,
        )

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        """The config's size is that of gate and up together."""
        inner = self.settings.integer("intermediate_size", minimum=2) // 2
        return GatedMLP(context, name, self.hidden_size(), inner, self.activation(), bias=True)

    def activation(self) -> str:
        return self.settings.activation("hidden_activation", default="gelu_pytorch_tanh")

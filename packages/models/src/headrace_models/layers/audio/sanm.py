"""SenseVoice's encoder: attention with a memory, which is a convolution of its values over time.

Gao et al. 2020, arXiv:2006.01713; An et al. 2024, arXiv:2407.04051. Letters: L states, I size of what comes,
H hidden size.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import MAX_LAYERS, Settings
from headrace_models.layers.audio.conformer import Depthwise
from headrace_models.layers.audio.whisper import sines
from headrace_models.layers.base import Layer, Part
from headrace_models.layers.linear import Linear
from headrace_models.layers.mlp import MLP
from headrace_models.layers.norm import LayerNorm

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_LONGEST = 1 << 16
_PARTS = ("q_proj", "k_proj", "v_proj")


def block_rules(source: str, target: str) -> tuple[WeightRule, ...]:
    """Rules of a :class:`MemoryBlock`."""
    attention = f"{source}.self_attn"
    return (
        WeightRule(f"{source}.input_layernorm", f"{target}.norm"),
        *(
            WeightRule(f"{attention}.{name}", f"{target}.attention.qkv", part=index)
            for index, name in enumerate(_PARTS)
        ),
        WeightRule(f"{attention}.o_proj", f"{target}.attention.out"),
        WeightRule(f"{attention}.fsmn.conv", f"{target}.attention.memory"),
        WeightRule(f"{source}.post_attention_layernorm", f"{target}.mlp_norm"),
        WeightRule(f"{source}.mlp.fc1", f"{target}.mlp.up"),
        WeightRule(f"{source}.mlp.fc2", f"{target}.mlp.down"),
        WeightRule(f"{source}.final_layernorm", f"{target}.last_norm"),
    )


class MemoryEncoder(Layer):
    """Stacked frames of a spectrogram -> as many states.

    Args:
        settings: the encoder's part of the config.
        name: as the checkpoint spells it.
    """

    def __init__(self, context: BuildContext, settings: Settings, name: str) -> None:
        self.dtype: torch.dtype = getattr(torch, context.dtype)
        self.hidden = settings.integer("hidden_size")
        size = settings.integer("num_mel_bins") * settings.integer("num_stacked_frames")
        if size % 2:
            raise UnsupportedModel(
                f"config.json: audio_config: num_mel_bins * num_stacked_frames = {size}: must be even"
            )
        number = settings.integer("num_hidden_layers", maximum=MAX_LAYERS)
        last = number - settings.integer("num_timestamp_prediction_layers", minimum=0) - 1
        self.sines = sines(settings.integer("max_position_embeddings", maximum=_LONGEST), size).to(
            context.device, self.dtype
        )
        self.layers = [
            MemoryBlock(
                context,
                settings,
                f"{name}.layers.{index}",
                self.hidden if index else size,
                width=settings.integer("fsmn_kernel_size"),
                normed=index in (last, number - 1),
            )
            for index in range(number)
        ]

    def __call__(self, frames: Tensor) -> Tensor:
        """frames [L, I] of one recording -> [L, H]; places count from 1."""
        x = frames.to(self.dtype) * math.sqrt(self.hidden) + self.sines[1 : len(frames) + 1]
        for layer in self.layers:
            x = layer(x)
        return x


class MemoryBlock(Layer):
    """Norm, attention, residual; norm, MLP, residual; perhaps a norm. What comes in another size than the
    block's is in no residual.

    Args:
        size: of what comes.
        width: of the memory; 0: there is none.
        normed: the block ends in a norm.
    """

    def __init__(
        self,
        context: BuildContext,
        settings: Settings,
        name: str,
        size: int,
        *,
        width: int = 0,
        normed: bool = False,
    ) -> None:
        hidden, eps = settings.integer("hidden_size"), settings.number("layer_norm_eps")
        self.keeps = size == hidden
        self.norm = LayerNorm(context, f"{name}.input_layernorm", size, eps)
        self.attention = MemoryAttention(context, settings, f"{name}.self_attn", size, width)
        self.mlp_norm = LayerNorm(context, f"{name}.post_attention_layernorm", hidden, eps)
        self.mlp = MLP(
            context,
            f"{name}.mlp.fc1",
            f"{name}.mlp.fc2",
            hidden,
            settings.integer("intermediate_size"),
            settings.activation("hidden_act"),
        )
        self.last_norm: LayerNorm | None = None
        if normed:
            self.last_norm = LayerNorm(context, f"{name}.final_layernorm", hidden, eps)

    def __call__(self, x: Tensor) -> Tensor:
        """x [L, I] -> [L, H]."""
        made = self.attention(self.norm(x))
        x = x + made if self.keeps else made
        x = x + self.mlp(self.mlp_norm(x))
        return x if self.last_norm is None else self.last_norm(x)


class MemoryAttention(Layer):
    """All states see each other; beside that each value is added with those around it, by channel."""

    def __init__(
        self, context: BuildContext, settings: Settings, name: str, size: int, width: int
    ) -> None:
        hidden, self.num_heads = (
            settings.integer("hidden_size"),
            settings.integer("num_attention_heads"),
        )
        if hidden % self.num_heads:
            raise UnsupportedModel(
                f"config.json: hidden_size = {hidden}: must be a multiple of num_attention_heads = "
                f"{self.num_heads}"
            )
        self.qkv = Linear(
            context,
            f"{name}.qkv_proj",
            size,
            [Part(hidden)] * 3,
            bias=True,
            part_names=tuple(f"{name}.{part}" for part in _PARTS),
        )
        self.out = Linear(context, f"{name}.o_proj", hidden, [Part(hidden)], bias=True)
        self.memory: Depthwise | None = None
        if width:
            self.memory = Depthwise(f"{name}.fsmn.conv", hidden, width, before=(width - 1) // 2)

    def __call__(self, x: Tensor) -> Tensor:
        """x [L, I] -> [L, H]."""
        parts = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (part.reshape(len(x), self.num_heads, -1).transpose(0, 1) for part in parts)
        seen = functional.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)
        out = self.out(seen)
        return out if self.memory is None else out + parts[2] + self.memory(parts[2])

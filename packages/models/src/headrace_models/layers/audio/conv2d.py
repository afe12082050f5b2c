"""An audio encoder behind convolutions over time and pitch: that of Qwen3-Omni and Qwen3-ASR.

Xu et al. 2025, arXiv:2509.17765. Letters: F frames, M mel bins, C channels, T states of a piece, H hidden
size.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import MAX_LAYERS, Settings
from headrace_models.layers.audio.whisper import (
    MAX_SIZE,
    NORM_EPS,
    EncoderBlock,
    block_rules,
    sines,
)
from headrace_models.layers.base import Layer, Part, Slot, WeightLayer
from headrace_models.layers.linear import Linear
from headrace_models.layers.norm import LayerNorm

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext
    from headrace_core.ops import PackedLinear

_SIDE = 3
_CONVOLUTIONS = 3
_AT_ONCE = 16
"""Pieces that are convolved together: their channels take much memory."""


def encoder_rules(source: str, target: str, norm_name: str) -> tuple[WeightRule, ...]:
    """Rules of a :class:`Conv2dEncoder`: its names in the checkpoint and in the model."""
    layer, own = f"{source}.layers.{{}}", f"{target}.layers.{{}}"
    names = ("q_proj", "k_proj", "v_proj")
    return (
        *(
            WeightRule(f"{source}.conv2d{index + 1}", f"{target}.convolutions.{index}")
            for index in range(_CONVOLUTIONS)
        ),
        WeightRule(f"{source}.conv_out", f"{target}.joined"),
        WeightRule(f"{source}.{norm_name}", f"{target}.final_norm"),
        *(
            WeightRule(f"{layer}.self_attn.{name}", f"{own}.attention.qkv", part=part)
            for part, name in enumerate(names)
        ),
        WeightRule(f"{layer}.self_attn.out_proj", f"{own}.attention.out"),
        *block_rules(layer, own),
    )


class Conv2d(WeightLayer):
    """Squares of three by three numbers, of which every second is taken in both directions; the edges are
    padded with zeros."""

    def __init__(self, context: BuildContext, name: str, in_size: int, out_size: int) -> None:
        self.name, self.ops = name, context.ops
        self.in_size, self.out_size = in_size, out_size
        self.packed: PackedLinear | None = None
        self.bias: Tensor | None = None

    def slots(self) -> Mapping[str, Slot]:
        shape = (self.out_size, self.in_size, _SIDE, _SIDE)
        return {"weight": Slot(shape), "bias": Slot((self.out_size,))}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.packed = self.ops.linear.pack(tensors["weight"].flatten(1).contiguous())
        self.bias = tensors["bias"]

    def activated(self, x: Tensor) -> Tensor:
        """Its result after GELU: x [N, in_size, M, F] -> [N, out_size, ceil(M / 2), ceil(F / 2)]."""
        assert self.packed is not None, self.name
        squares = functional.unfold(x, _SIDE, padding=1, stride=2).transpose(1, 2)
        flat = squares.reshape(-1, squares.shape[2])
        made = self.ops.linear.activated(flat, self.packed, "gelu", self.bias)
        height, width = _half(x.shape[2]), _half(x.shape[3])
        return made.view(len(x), height, width, -1).permute(0, 3, 1, 2)


class Conv2dEncoder(Layer):
    """Pieces of a clip through three convolutions, positions that begin anew in each, blocks in which
    states of some pieces see each other, a norm.

    Args:
        settings: the encoder's part of the config.
        name: as the checkpoint spells it.
        norm_name: of the last norm.
        fills: clips of less than a piece are filled up, too.
    """

    def __init__(
        self,
        context: BuildContext,
        settings: Settings,
        name: str,
        norm_name: str,
        *,
        fills: bool = False,
    ) -> None:
        self.fills = fills
        self.ops = context.ops
        self.dtype: torch.dtype = getattr(torch, context.dtype)
        hidden = settings.integer("d_model", maximum=MAX_SIZE)
        bins = settings.integer("num_mel_bins")
        channels = settings.integer("downsample_hidden_size")
        self.piece = 2 * settings.integer("n_window", maximum=1 << 16)
        self.window = _window(settings, self.piece)
        self.sines = sines(num_states(self.piece), hidden).to(context.device, self.dtype)
        self.convolutions = [
            Conv2d(context, f"{name}.conv2d{index + 1}", 1 if index == 0 else channels, channels)
            for index in range(_CONVOLUTIONS)
        ]
        joined = channels * num_states(bins)
        self.joined = Linear(context, f"{name}.conv_out", joined, [Part(hidden)])
        self.layers = [
            EncoderBlock(context, settings, f"{name}.layers.{index}", key_bias=True)
            for index in range(settings.integer("encoder_layers", maximum=MAX_LAYERS))
        ]
        self.final_norm = LayerNorm(context, f"{name}.{norm_name}", hidden, NORM_EPS)

    def __call__(self, clips: Sequence[Tensor]) -> list[Tensor]:
        """Encode clips of any lengths at once; they do not hear each other.

        Args:
            clips: [F, M] each.

        Returns:
            [states, H] each; as many as :meth:`length` says.
        """
        begun = [self._begin(clip) for clip in clips]
        sizes = [len(part) for states in begun for part in torch.split(states, self.window)]
        bounds = list(itertools.accumulate(sizes, initial=0))
        x, residual = torch.cat(begun), None
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=x.device)
        for layer in self.layers:
            x, residual = layer(x, residual, cu_seqlens, max(sizes))
        hidden, _ = self.final_norm.add(x, residual)
        return list(torch.split(hidden, [len(states) for states in begun]))

    def _begin(self, clip: Tensor) -> Tensor:
        """[F, M] -> [states, H]: what the first block gets. The last of several pieces is filled up with
        zeros, which its last states see; so is a clip of one piece where :attr:`fills`."""
        frames = len(clip)
        if self.fills or frames > self.piece:
            clip = functional.pad(clip, (0, 0, 0, -frames % self.piece))
        length = min(len(clip), self.piece)
        pieces = clip.view(-1, length, clip.shape[1]).to(self.dtype)
        states = torch.cat([self._convolved(part) for part in torch.split(pieces, _AT_ONCE)])
        return states.flatten(0, 1)[: self.length(frames)]

    def _convolved(self, pieces: Tensor) -> Tensor:
        """[N, F, M] -> [N, T, H]."""
        x = pieces.transpose(1, 2)[:, None]
        for convolution in self.convolutions:
            x = convolution.activated(x)
        flat = x.permute(0, 3, 1, 2).flatten(2)  # [N, T, C * M]
        states = self.joined(flat.flatten(0, 1)).view(*flat.shape[:2], -1)
        return states + self.sines[: flat.shape[1]]

    def length(self, frames: int) -> int:
        """States of a clip."""
        whole, rest = divmod(frames, self.piece)
        return whole * num_states(self.piece) + num_states(rest)


def num_states(size: int) -> int:
    """Numbers that are left of so many in a row behind the convolutions."""
    for _ in range(_CONVOLUTIONS):
        size = _half(size)
    return size


def _half(size: int) -> int:
    return (size + 1) // 2


def _window(settings: Settings, piece: int) -> int:
    """States that see each other.

    Raises: UnsupportedModel: they are less than a piece's.
    """
    frames = settings.integer("n_window_infer", maximum=1 << 20)
    if frames < piece:
        raise UnsupportedModel(
            f"config.json: audio_config.n_window_infer = {frames}: must be at least 2 * n_window = {piece}"
        )
    return frames // piece * num_states(piece)

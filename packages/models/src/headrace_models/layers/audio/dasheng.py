"""Dasheng, an encoder of sounds: columns of a spectrogram, positions that begin anew every ten seconds, and
blocks in which the states of ten seconds see each other.

Dinkel et al. 2024, arXiv:2406.06992. Letters: F frames, M mel bins, T states, H hidden size, N heads, D head
size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import MAX_LAYERS, Settings
from headrace_models.layers.base import Layer, Slot, WeightLayer
from headrace_models.layers.mlp import MLP
from headrace_models.layers.norm import LayerNorm
from headrace_models.layers.vision.blocks import Segments, VisionAttention
from headrace_models.layers.vision.patches import PatchEmbedding
from headrace_models.layers.vision.towers.clip import Vector

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_EPS, _BATCH_EPS = 1e-6, 1e-5
_FUSED = (("qkv",), "proj")
_DEFAULTS: Mapping[str, Any] = {
    "embed_dim": 768, "patch_size": 16, "patch_stride": 16, "target_length": 1012, "depth": 12,
    "num_heads": 12, "mlp_ratio": 4.0, "n_mels": 64,
}  # fmt: skip
"""Values that configs may leave out."""


def encoder_rules(source: str, target: str) -> tuple[WeightRule, ...]:
    """Rules of a :class:`Dasheng`: its names in the checkpoint and in the model."""
    block, own = f"{source}.blocks.{{}}", f"{target}.layers.{{}}"
    return (
        WeightRule(f"{source}.init_bn", f"{target}.first_norm"),
        WeightRule(f"{source}.patch_embed.proj", f"{target}.patches"),
        WeightRule(f"{source}.time_pos_embed", f"{target}.times.vector"),
        WeightRule(f"{source}.freq_pos_embed", f"{target}.pitch.vector"),
        WeightRule(f"{block}.norm1", f"{own}.attention_norm"),
        WeightRule(f"{block}.attn.qkv", f"{own}.attention.qkv", split=()),
        WeightRule(f"{block}.attn.proj", f"{own}.attention.out"),
        WeightRule(f"{block}.ls1.gamma", f"{own}.attention_scale.vector"),
        WeightRule(f"{block}.norm2", f"{own}.mlp_norm"),
        WeightRule(f"{block}.mlp.fc1", f"{own}.mlp.up"),
        WeightRule(f"{block}.mlp.fc2", f"{own}.mlp.down"),
        WeightRule(f"{block}.ls2.gamma", f"{own}.mlp_scale.vector"),
        WeightRule(f"{source}.norm", f"{target}.final_norm"),
    )


class BatchNorm(WeightLayer):
    """Each number by the mean and the variance that it had in training."""

    weight: Tensor
    bias: Tensor

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size

    def slots(self) -> Mapping[str, Slot]:
        names = ("weight", "bias", "running_mean", "running_var")
        return {name: Slot((self.size,)) for name in names}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        mean, variance = (tensors[name].float() for name in ("running_mean", "running_var"))
        self.weight = tensors["weight"].float() * torch.rsqrt(variance + _BATCH_EPS)
        self.bias = tensors["bias"].float() - mean * self.weight

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape, in float32."""
        return x.float() * self.weight + self.bias


class DashengAttention(VisionAttention):
    """The last state may be one that no state hears, and that hears the others all the same: so is a column
    whose sound ends within it."""

    def hear(self, x: Tensor, heard: Segments, unheard: int) -> Tensor:
        """x [T, H] -> [T, H].

        Args:
            heard: runs of states that hear each other, without the last one if that is unheard.
            unheard: states that the last one hears, if none hears it; 0: all are heard.
        """
        if not unheard:
            return self(x, heard)
        query, key, value = self.project(x)
        query, key = self.normed(query, key)
        found = self.backend.attend(
            self.spec, query[:-1], key[:-1], value[:-1], heard.cu_seqlens, heard.longest
        )
        mine, others = query[-1:].transpose(0, 1), slice(-1 - unheard, -1)
        last = torch.nn.functional.scaled_dot_product_attention(
            mine, key[others].transpose(0, 1), value[others].transpose(0, 1)
        )
        whole = torch.cat((found.view(-1, *last.transpose(0, 1).shape[1:]), last.transpose(0, 1)))
        return self.out(whole.flatten(1))


class DashengBlock(Layer):
    """Norm, attention, scale, residual; norm, MLP, scale, residual.

    Args:
        scaled: results are scaled before they are added.
    """

    def __init__(
        self, context: BuildContext, settings: Settings, name: str, *, scaled: bool
    ) -> None:
        hidden = settings.integer("embed_dim")
        inner = int(hidden * settings.positive("mlp_ratio"))
        self.attention_norm = LayerNorm(context, f"{name}.norm1", hidden, _EPS)
        self.attention = DashengAttention(
            context,
            f"{name}.attn",
            hidden_size=hidden,
            num_heads=settings.integer("num_heads"),
            bias=settings.flag("qkv_bias", True),
            names=_FUSED,
            out_bias=True,
        )
        self.mlp_norm = LayerNorm(context, f"{name}.norm2", hidden, _EPS)
        self.mlp = MLP(context, f"{name}.mlp.fc1", f"{name}.mlp.fc2", hidden, inner, "gelu")
        self.attention_scale = Vector(f"{name}.ls1.gamma", hidden) if scaled else None
        self.mlp_scale = Vector(f"{name}.ls2.gamma", hidden) if scaled else None

    def __call__(
        self, x: Tensor, residual: Tensor | None, heard: Segments, unheard: int
    ) -> tuple[Tensor, Tensor]:
        """x [T, H] is what the block before added to the residual; both are handed on."""
        x, stream = self.attention_norm.add(x, residual)
        x = _scaled(self.attention.hear(x, heard, unheard), self.attention_scale)
        x, stream = self.mlp_norm.add(x, stream)
        return _scaled(self.mlp(x), self.mlp_scale), stream


def _scaled(x: Tensor, scale: Vector | None) -> Tensor:
    return x if scale is None else x * scale.vector


class Dasheng(Layer):
    """Spectrograms -> a state for every few frames.

    Args:
        stated: the encoder's part of the config.
        name: as the checkpoint spells it.
    """

    def __init__(self, context: BuildContext, stated: Mapping[str, Any], name: str) -> None:
        settings = Settings({**_DEFAULTS, **stated})
        self.dtype: torch.dtype = getattr(torch, context.dtype)
        self.bins, self.step = settings.integer("n_mels"), column(settings)
        hidden = self.hidden_size = settings.integer("embed_dim")
        self.longest = settings.integer("target_length") // self.step
        if self.longest < 1:
            raise UnsupportedModel(
                f"config.json: audio_encoder_config.target_length = {self.longest}: must be a column's at "
                f"least, {self.step}"
            )
        self.first_norm = BatchNorm(f"{name}.init_bn", self.bins)
        kernel = (1, self.bins, self.step)
        self.patches = PatchEmbedding(
            context, f"{name}.patch_embed.proj", kernel, hidden, bias=True
        )
        self.times = Vector(f"{name}.time_pos_embed", 1, hidden, 1, self.longest)
        self.pitch = Vector(f"{name}.freq_pos_embed", 1, hidden, 1, 1)
        self.layers = [
            DashengBlock(
                context,
                settings,
                f"{name}.blocks.{index}",
                scaled=bool(settings.config.get("init_values")),
            )
            for index in range(settings.integer("depth", maximum=MAX_LAYERS))
        ]
        self.final_norm = LayerNorm(context, f"{name}.norm", hidden, _EPS)

    def __call__(self, frames: Tensor, num_heard: int) -> Tensor:
        """frames [F, M] -> [F // step, H].

        Args:
            num_heard: states that are heard, all but at most the last.
        """
        number = len(frames) // self.step
        normed = self.first_norm(frames[: number * self.step]).to(self.dtype)
        columns = normed.view(number, self.step, self.bins).transpose(1, 2).flatten(1)
        places = (self.times.vector + self.pitch.vector)[0, :, 0].T
        x = self.patches(columns) + places.repeat(-(-number // self.longest), 1)[:number]
        heard, unheard = self._runs(number, num_heard, x.device)
        residual = None
        for layer in self.layers:
            x, residual = layer(x, residual, heard, unheard)
        made, _ = self.final_norm.add(x, residual)
        return made

    def _runs(self, number: int, num_heard: int, device: torch.device) -> tuple[Segments, int]:
        """See :meth:`DashengAttention.hear`. A state that would hear nothing hears itself."""
        unheard = (number - 1) % self.longest if num_heard < number else 0
        whole, rest = divmod(number - 1 if unheard else number, self.longest)
        sizes = [self.longest] * whole + ([rest] if rest else [])
        return Segments.of(sizes, device), unheard


def column(settings: Settings) -> int:
    """Frames of a state.

    Raises: UnsupportedModel: patches are not columns of all bins, side by side.
    """
    bins = settings.integer("n_mels")
    found = {key: _pair(settings.config[key]) for key in ("patch_size", "patch_stride")}
    height, width = found["patch_size"]
    if found["patch_stride"] != (height, width) or height != bins or width < 1:
        raise UnsupportedModel(
            f"config.json: audio_encoder_config.patch_size = {settings.config['patch_size']!r}, "
            f"patch_stride = {settings.config['patch_stride']!r}: must both be [{bins}, frames], as there "
            f"are n_mels = {bins}"
        )
    return width


def _pair(stated: object) -> tuple[int, int]:
    if type(stated) is int:
        return stated, stated
    if isinstance(stated, list | tuple) and [type(x) for x in stated] == [int, int]:
        return stated[0], stated[1]
    return 0, 0

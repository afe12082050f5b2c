"""Gemma 3n's audio encoder: two convolutions that halve time and pitch, and a Conformer whose states see a
few before them, at sines of the distance; every fourth state is kept.

Zhang et al. 2023, arXiv:2303.01037; distances: Dai et al. 2019, arXiv:1901.02860, appendix B. Letters: F
frames, M mel bins, T states, C channels, H hidden size, N heads, D head size; U blocks of W queries, which
see K keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import MAX_LAYERS, Settings
from headrace_models.layers.base import Layer, Part
from headrace_models.layers.clipped_linear import ClippedLinear
from headrace_models.layers.linear import Linear
from headrace_models.layers.mlp import MLP
from headrace_models.layers.norm import RMSNorm
from headrace_models.layers.vision.towers.clip import Vector

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_EPS = 1e-6
_LONGEST_WAVE = 1e4
_SIDE, _STRIDE = 3, 2
_WIDEST = 1 << 12
ENCODER: Mapping[str, Any] = {
    "input_feat_size": 128, "hidden_size": 1536, "rms_norm_eps": 1e-6, "gradient_clipping": 1e10,
    "conf_attention_chunk_size": 12, "conf_attention_context_left": 13, "conf_attention_context_right": 0,
    "conf_attention_logit_cap": 50.0, "conf_num_attention_heads": 8, "conf_num_hidden_layers": 12,
    "conf_conv_kernel_size": 5, "conf_reduction_factor": 4, "conf_residual_weight": 0.5,
    "sscp_conv_channel_size": [128, 32], "sscp_conv_group_norm_eps": 1e-3,
}  # fmt: skip
"""Values that configs may leave out."""


def usm_rules(source: str, target: str) -> tuple[WeightRule, ...]:
    """Rules of a :class:`SpeechEncoder`: its names in the checkpoint and in the model."""
    stem, layer, own = (
        f"{source}.subsample_conv_projection", f"{source}.conformer.{{}}", f"{target}.layers.{{}}",
    )  # fmt: skip
    attention, convolution = f"{layer}.attention", f"{layer}.lconv1d"
    ends = (("start", "first"), ("end", "second"))
    return (
        WeightRule(f"{stem}.conv_0.conv.weight", f"{target}.stem.0.kernel.vector"),
        WeightRule(f"{stem}.conv_0.norm.weight", f"{target}.stem.0.scale.vector"),
        WeightRule(f"{stem}.conv_1.conv.weight", f"{target}.stem.1.kernel.vector"),
        WeightRule(f"{stem}.conv_1.norm.weight", f"{target}.stem.1.scale.vector"),
        WeightRule(f"{stem}.input_proj_linear", f"{target}.joined"),
        *(
            rule
            for end, name in ends
            for rule in (
                WeightRule(f"{layer}.ffw_layer_{end}.pre_layer_norm", f"{own}.{name}.norm"),
                WeightRule(f"{layer}.ffw_layer_{end}.ffw_layer_1", f"{own}.{name}.mlp.up"),
                WeightRule(f"{layer}.ffw_layer_{end}.ffw_layer_2", f"{own}.{name}.mlp.down"),
                WeightRule(f"{layer}.ffw_layer_{end}.post_layer_norm", f"{own}.{name}.last_norm"),
            )
        ),
        WeightRule(f"{attention}.pre_attn_norm", f"{own}.attention.norm"),
        *(
            WeightRule(f"{attention}.attn.{part}_proj", f"{own}.attention.qkv", part=index)
            for index, part in enumerate("qkv")
        ),
        WeightRule(f"{attention}.attn.per_dim_scale", f"{own}.attention.scales.vector"),
        WeightRule(
            f"{attention}.attn.relative_position_embedding.pos_proj", f"{own}.attention.distances"
        ),
        WeightRule(f"{attention}.post", f"{own}.attention.out"),
        WeightRule(f"{attention}.post_norm", f"{own}.attention.last_norm"),
        WeightRule(f"{convolution}.pre_layer_norm", f"{own}.convolution.norm"),
        WeightRule(f"{convolution}.linear_start", f"{own}.convolution.up"),
        WeightRule(f"{convolution}.depthwise_conv1d.weight", f"{own}.convolution.kernel.vector"),
        WeightRule(f"{convolution}.conv_norm", f"{own}.convolution.inner_norm"),
        WeightRule(f"{convolution}.linear_end", f"{own}.convolution.down"),
        WeightRule(f"{layer}.norm", f"{own}.last_norm"),
    )


class SpeechEncoder(Layer):
    """Spectrogram frames -> states.

    Args:
        stated: the encoder's part of the config.
        name: as the checkpoint spells it.

    Raises:
        UnsupportedModel: convolutions of other sizes.
    """

    def __init__(self, context: BuildContext, stated: Mapping[str, Any], name: str) -> None:
        settings = Settings({**ENCODER, **stated})
        for key, value in (("kernel", _SIDE), ("stride", _STRIDE)):
            settings.refuse(f"sscp_conv_{key}_size", [[value, value], [value, value]])
        self.dtype: torch.dtype = getattr(torch, context.dtype)
        self.size, bins = settings.integer("hidden_size"), settings.integer("input_feat_size")
        channels = settings.integers("sscp_conv_channel_size", 2)
        eps, stem = settings.number("sscp_conv_group_norm_eps"), f"{name}.subsample_conv_projection"
        self.stem = [
            HalvingConvolution(f"{stem}.conv_{index}", before, after, eps)
            for index, (before, after) in enumerate(zip((1, channels[0]), channels, strict=True))
        ]
        left = channels[1] * halved(halved(bins))
        self.joined = Linear(context, f"{stem}.input_proj_linear", left, [Part(self.size)])
        self.layers = [
            SpeechBlock(context, settings, f"{name}.conformer.{index}")
            for index in range(settings.integer("conf_num_hidden_layers", maximum=MAX_LAYERS))
        ]
        self.every = settings.integer("conf_reduction_factor")

    def __call__(self, frames: Tensor) -> Tensor:
        """frames [F, M] of one recording -> [T, H]; T is F halved twice, and of these every fourth."""
        x = frames.to(self.dtype)[..., None]
        for convolution in self.stem:
            x = convolution(x)
        x = self.joined(x.flatten(1))
        for layer in self.layers:
            x = layer(x)
        return x[:: self.every]


def halved(size: int) -> int:
    """Numbers in a row that a convolution leaves of so many."""
    return (size + 1) // _STRIDE


class HalvingConvolution(Layer):
    """Every second square of three by three numbers in time and pitch, a norm of all that has come so far,
    ReLU. Zeros are beside the pitches, and behind the last frame."""

    def __init__(self, name: str, in_size: int, out_size: int, eps: float) -> None:
        self.eps = eps
        self.kernel = Vector(f"{name}.conv.weight", out_size, in_size, _SIDE, _SIDE)
        self.scale = Vector(f"{name}.norm.weight", out_size)

    def __call__(self, x: Tensor) -> Tensor:
        """x [F, M, in_size] -> [F / 2, M / 2, out_size], rounded up."""
        padded = functional.pad(x.permute(2, 0, 1)[None], (1, 1, 0, _SIDE - 1))
        made = functional.conv2d(padded, self.kernel.vector, stride=_STRIDE)[0].permute(1, 2, 0)
        return functional.relu(self._normed(made.float()).to(x.dtype)).contiguous()

    def _normed(self, x: Tensor) -> Tensor:
        """x [F, M, C] float32: each frame by mean and spread of the frames up to it."""
        places = x[0].numel() * torch.arange(1, len(x) + 1, device=x.device)[:, None, None]
        mean = x.sum((1, 2), keepdim=True).cumsum(0) / places
        apart = x - mean
        spread = apart.square().sum((1, 2), keepdim=True).cumsum(0) / places
        return apart * torch.rsqrt(spread + self.eps) * self.scale.vector.float()


class SpeechBlock(Layer):
    """Half a feed-forward layer, attention, a convolution, half a feed-forward layer, a norm."""

    def __init__(self, context: BuildContext, settings: Settings, name: str) -> None:
        self.limit = settings.positive("gradient_clipping")
        self.first = HalfFeedForward(context, settings, f"{name}.ffw_layer_start")
        self.attention = NearAttention(context, settings, f"{name}.attention")
        self.convolution = CausalConvolution(context, settings, f"{name}.lconv1d")
        self.second = HalfFeedForward(context, settings, f"{name}.ffw_layer_end")
        self.last_norm = _norm(context, settings, f"{name}.norm")

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        x = self.second(self.convolution(self.attention(self.first(x))))
        return self.last_norm(x.clamp(-self.limit, self.limit))


class HalfFeedForward(Layer):
    """``x + share * norm(mlp(norm(x)))``."""

    def __init__(self, context: BuildContext, settings: Settings, name: str) -> None:
        size = settings.integer("hidden_size")
        self.limit = settings.positive("gradient_clipping")
        self.share = settings.number("conf_residual_weight")
        self.norm = _norm(context, settings, f"{name}.pre_layer_norm")
        up, down = f"{name}.ffw_layer_1", f"{name}.ffw_layer_2"
        self.mlp = MLP(context, up, down, size, 4 * size, "silu", bias=False)
        self.last_norm = _norm(context, settings, f"{name}.post_layer_norm")

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        made = self.mlp(self.norm(x.clamp(-self.limit, self.limit)))
        return x + self.share * self.last_norm(made.clamp(-self.limit, self.limit))


class NearAttention(Layer):
    """``x + norm(out(attention(norm(x))))``. A state sees some before it, itself, and perhaps some behind."""

    out: Linear | ClippedLinear

    def __init__(self, context: BuildContext, settings: Settings, name: str) -> None:
        size, self.num_heads = (
            settings.integer("hidden_size"),
            settings.integer("conf_num_attention_heads"),
        )
        if size % (2 * self.num_heads):
            raise UnsupportedModel(
                f"config.json: audio_config.hidden_size = {size}: must be a multiple of twice "
                f"conf_num_attention_heads = {self.num_heads}"
            )
        self.limit = settings.positive("gradient_clipping")
        self.cap = settings.positive("conf_attention_logit_cap")
        self.block = settings.integer("conf_attention_chunk_size", maximum=_WIDEST)
        self.before = max(0, settings.integer("conf_attention_context_left", maximum=_WIDEST) - 1)
        self.after = settings.integer("conf_attention_context_right", minimum=0, maximum=_WIDEST)
        self.farthest = self.before
        head_dim = size // self.num_heads
        inner = f"{name}.attn"
        self.norm = _norm(context, settings, f"{name}.pre_attn_norm")
        self.qkv = Linear(
            context,
            f"{inner}.qkv",
            size,
            [Part(size)] * 3,
            part_names=tuple(f"{inner}.{part}_proj" for part in "qkv"),
        )
        self.scales = Vector(f"{inner}.per_dim_scale", head_dim)
        places = f"{inner}.relative_position_embedding.pos_proj"
        self.distances = Linear(context, places, size, [Part(size)])
        self.sines = sines(self.before, self.after, size).to(
            context.device, getattr(torch, context.dtype)
        )
        self.out = Linear(context, f"{name}.post", size, [Part(size)])
        self.last_norm = _norm(context, settings, f"{name}.post_norm")

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        seen = self._attend(self.norm(x.clamp(-self.limit, self.limit)))
        return x + self.last_norm(self.out(seen).clamp(-self.limit, self.limit))

    def _attend(self, x: Tensor) -> Tensor:
        length, size = x.shape
        query, key, value = self.projected(x)
        scale = query.shape[2] ** -0.5 / math.log(2.0)
        query = query * scale * functional.softplus(self.scales.vector)
        more = -length % self.block
        q = functional.pad(query, (0, 0, 0, 0, 0, more)).view(-1, self.block, *query.shape[1:])
        k, v = (self._around(states, more) for states in (key, value))  # [U, K, N, D]
        scores = torch.einsum("uwnd,uknd->unwk", q, k) + self._by_distance(q)
        scores = (scores / self.cap).tanh() * self.cap
        hidden = ~self._visible(length, len(q), x.device)
        weights = scores.float().masked_fill(hidden, -math.inf).softmax(-1).to(v.dtype)
        seen = torch.einsum("unwk,uknd->uwnd", weights, v).reshape(-1, size)[:length]
        return seen.to(x.dtype)

    def projected(self, x: Tensor) -> Sequence[Tensor]:
        """x [T, H] -> queries, keys and values [T, N, D]."""
        parts = self.qkv(x).chunk(3, dim=-1)
        return [part.reshape(len(x), self.num_heads, -1) for part in parts]

    def _around(self, states: Tensor, more: int) -> Tensor:
        """[T, N, D] -> [U, K, N, D]: the states that a block's queries may see."""
        padded = functional.pad(states, (0, 0, 0, 0, self.before, more + self.after))
        width = self.before + self.block + self.after
        return padded.unfold(0, width, self.block).permute(0, 3, 1, 2)

    def _by_distance(self, q: Tensor) -> Tensor:
        """[U, N, W, K]: what queries say to the distance of each key, which a query's row is shifted for."""
        table = self.distances(self.sines).view(len(self.sines), self.num_heads, -1)
        scores = torch.einsum("uwnd,fnd->unwf", q, table.to(q.dtype))
        width = self.before + self.block + self.after
        rows = functional.pad(scores, (0, width + 1 - len(table))).flatten(2)
        return rows[..., : self.block * width].view(*rows.shape[:2], self.block, width)

    def _visible(self, length: int, blocks: int, device: torch.device) -> Tensor:
        """[U, 1, W, K]: which keys are there, and near enough; of queries that are not there, all."""
        begins = torch.arange(blocks, device=device)[:, None] * self.block
        queries = begins + torch.arange(self.block, device=device)
        width = self.before + self.block + self.after
        keys = begins - self.before + torch.arange(width, device=device)
        apart = queries[:, :, None] - keys[:, None]
        near = (apart <= self.farthest) & (apart >= -self.after)
        there = ((keys >= 0) & (keys < length))[:, None]
        return ((near & there) | (queries >= length)[:, :, None])[:, None]


class CausalConvolution(Layer):
    """``x + down(act(norm(convolution(gated(up(norm(x)))))))``; a state hears those before it only."""

    def __init__(self, context: BuildContext, settings: Settings, name: str) -> None:
        size, eps = settings.integer("hidden_size"), settings.number("rms_norm_eps")
        self.limit = settings.positive("gradient_clipping")
        self.width = settings.integer("conf_conv_kernel_size", maximum=_WIDEST)
        self.norm = RMSNorm(context, f"{name}.pre_layer_norm", size, eps)
        self.up = Linear(context, f"{name}.linear_start", size, [Part(2 * size)])
        self.kernel = Vector(f"{name}.depthwise_conv1d.weight", size, 1, self.width)
        self.inner_norm = RMSNorm(context, f"{name}.conv_norm", size, eps)
        self.down = Linear(context, f"{name}.linear_end", size, [Part(size)])

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        gated = functional.glu(self.up(self.norm(x)), dim=-1)
        padded = functional.pad(gated.t()[None], (self.width - 1, 0))
        made = functional.conv1d(padded, self.kernel.vector, groups=x.shape[1])[0].t()
        made = self.inner_norm(made.clamp(-self.limit, self.limit).contiguous())
        return x + self.down(functional.silu(made))


def _norm(context: BuildContext, settings: Settings, name: str) -> RMSNorm:
    return RMSNorm(context, name, settings.integer("hidden_size"), _EPS)


def sines(before: int, after: int, size: int) -> Tensor:
    """[before + after + 1, size] float32: sines, then cosines, of distances, the farthest before first."""
    places = torch.arange(before, -after - 1, -1).float()
    step = math.log(_LONGEST_WAVE) / max(size // 2 - 1, 1)
    turns = places[:, None] * torch.exp(torch.arange(size // 2) * -step)
    return torch.cat((turns.sin(), turns.cos()), dim=1)


def kept_states(frames: int, every: int) -> int:
    """States that a :class:`SpeechEncoder` makes of so many frames."""
    return -(-halved(halved(frames)) // every)

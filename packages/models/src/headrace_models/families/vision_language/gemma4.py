"""Gemma 4 with images, videos and recordings: a tower of patches of any grid, a mean of each square of them,
and an encoder of speech.

Google 2026, Gemma 4. Letters: T patches of all pictures, H size of the tower's states, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.nn import functional

from headrace_core.attention import LAST_KEYS
from headrace_core.errors import UnsupportedModel
from headrace_core.model import INPUT_EMBEDS, WeightRule
from headrace_models.config.settings import MAX_LAYERS, Settings
from headrace_models.layers.audio.gemma4 import Gemma4Encoder, encoder_rules
from headrace_models.layers.base import Layer, Part
from headrace_models.layers.clipped_linear import ClippedLinear, clipped_rules
from headrace_models.layers.linear import Linear
from headrace_models.layers.norm import RMSNorm
from headrace_models.layers.vision.axes import frequencies, places
from headrace_models.layers.vision.media_decoder import MediaDecoder, part_of
from headrace_models.layers.vision.towers.clip import Vector

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext
    from headrace_models.layers.attention.self_attention import SelfAttention

_TOWER, _PROJECTION = "vision_tower", "embed_vision.embedding_projection"
_AUDIO, _AUDIO_PROJECTION = "audio_tower", "embed_audio.embedding_projection"
_LAYER = f"{_TOWER}.encoder.layers"
_VISION: Mapping[str, Any] = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16, "num_attention_heads": 12,
    "head_dim": 64, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6,
    "pooling_kernel_size": 3, "patch_size": 16, "position_embedding_size": 10 * 1024,
    "use_clipped_linears": False, "standardize": False, "attention_bias": False,
}  # fmt: skip
"""Values that configs may leave out."""
_THETA = 100.0
_PIXELS: Mapping[str, str] = {"image": "pixel_values", "video": "pixel_values_videos"}
"""Modality -> name of the model's input."""
_NORMS = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)  # fmt: skip
_LINEARS: Mapping[str, tuple[str, ...]] = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj"),
}  # fmt: skip


def _layer_rules() -> list[WeightRule]:
    source, target = f"{_LAYER}.{{}}", "tower.layers.{}"
    rules = [WeightRule(f"{source}.{name}", f"{target}.{name}") for name in _NORMS]
    rules += [
        WeightRule(f"{source}.self_attn.{name}_norm", f"{target}.{name}_norm") for name in "qk"
    ]
    for module, names in _LINEARS.items():
        for name in names:
            rules += clipped_rules(f"{source}.{module}.{name}", f"{target}.{name}")
    return rules


class Gemma4(MediaDecoder):
    """A picture is as many vectors as it has squares of patches; a video is frames behind their times; a
    recording is a vector for every four frames of its spectrogram."""

    media_rules: ClassVar[Sequence[WeightRule]] = (
        WeightRule(f"{_TOWER}.patch_embedder.input_proj", "tower.patches"),
        WeightRule(f"{_TOWER}.patch_embedder.position_embedding_table", "tower.places.vector"),
        *_layer_rules(),
        WeightRule(f"{_TOWER}.std_bias", "tower.mean.vector"),
        WeightRule(f"{_TOWER}.std_scale", "tower.scale.vector"),
        WeightRule(_PROJECTION, "projection"),
        *encoder_rules(_AUDIO, "hearing.encoder"),
        WeightRule(_AUDIO_PROJECTION, "hearing.projection"),
    )

    def place_media(self, whole: Mapping[str, Any]) -> None:
        """A tower whose part of the config is left out, as when its modalities are limited to 0, is neither
        made nor loaded."""
        self.parts = {
            modality: whole.get(part) is not None
            for part, modalities in (("vision_config", _PIXELS), ("audio_config", ("audio",)))
            for modality in modalities
        }

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        if self.parts["image"]:
            settings = Settings({**_VISION, **part_of(whole, "vision_config")})
            self.tower = _Tower(context, settings)
            size, eps = settings.integer("hidden_size"), settings.number("rms_norm_eps")
            self.vectors_norm = RMSNorm(context, _PROJECTION, size, eps, weight=False)
            self.projection = Linear(context, _PROJECTION, size, [Part(self.hidden_size())])
        if self.parts["audio"]:
            self.hearing = _Hearing(context, part_of(whole, "audio_config"), self.hidden_size())

    @property
    def modalities(self) -> Sequence[str]:  # type: ignore[override]
        """Modalities of the towers that the config has."""
        return tuple(modality for modality, is_there in self.parts.items() if is_there)

    def unread_weights(self) -> Mapping[str, str]:
        """Tensors of a tower that was not made."""
        names = (("image", "vision"), ("audio", "audio"))
        return {
            rf"({name}_tower|embed_{name})\..*": f"{name} is left out of the config, or limited to 0"
            for modality, name in names
            if not self.parts[modality]
        }

    def attention(self, context: BuildContext, name: str, **differences: Any) -> SelfAttention:
        """In the large models a picture's tokens see each other in layers with a window, and only there."""
        if self.settings.config.get("use_bidirectional_attention") == "vision":
            if "sliding_window" in differences:
                differences["features"] = {*differences.pop("features", ()), LAST_KEYS}
            else:
                differences["extras"] = {**differences.pop("extras", {}), LAST_KEYS: None}
        made: SelfAttention = super().attention(context, name, **differences)  # type: ignore[misc]
        return made

    def embed_tokens(self, batch: ForwardBatch) -> Tensor:
        """Places of media have vectors."""
        return self.input_vectors(batch)

    def run_blocks(self, x: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        """In the layers' own inputs media are padding."""
        given = batch.extra.get(INPUT_EMBEDS)
        if given is not None and getattr(self, "reads_ids", False):
            padding = self.settings.integer("pad_token_id", 0, minimum=0)
            batch = replace(batch, input_ids=batch.input_ids.index_fill(0, given.rows, padding))
        return super().run_blocks(x, batch)

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``pixel_values`` [patches, patch * patch * 3] of an image, of videos
                ``pixel_values_videos`` of the frames; ``grids`` [pictures, 2]: rows and columns of patches.
                Of recordings ``input_features`` [frames, bins].
        """
        if modality == "audio":
            return [self.hearing(item["input_features"]) for item in inputs]
        grids = [(rows, columns) for own in inputs for rows, columns in own["grids"].tolist()]
        states = self.tower(torch.cat([own[_PIXELS[modality]] for own in inputs]), grids)
        vectors = self.projection(self.vectors_norm(states))
        counts = [int(own["grids"].prod(1).sum()) // self.tower.square for own in inputs]
        return torch.split(vectors, counts)


class _Hearing(Layer):
    """A recording by itself.

    Args:
        stated: the encoder's part of the config.
        hidden: size of a vector.
    """

    def __init__(self, context: BuildContext, stated: Mapping[str, Any], hidden: int) -> None:
        self.encoder = Gemma4Encoder(context, stated, _AUDIO)
        size, eps = self.encoder.size, Settings(stated).number("rms_norm_eps", 1e-6)
        self.norm = RMSNorm(context, _AUDIO_PROJECTION, size, eps, weight=False)
        self.projection = Linear(context, _AUDIO_PROJECTION, size, [Part(hidden)])

    def __call__(self, frames: Tensor) -> Tensor:
        """frames [F, M] -> [vectors, hidden]."""
        return self.projection(self.norm(self.encoder(frames)))


class _Tower(Layer):
    """Pictures of any grid of patches, which do not see each other."""

    def __init__(self, context: BuildContext, settings: Settings) -> None:
        size, self.factor = settings.integer("hidden_size"), settings.integer("pooling_kernel_size")
        self.size, self.dtype = size, getattr(torch, context.dtype)
        rope = settings.config.get("rope_parameters")
        self.theta = Settings(rope if isinstance(rope, Mapping) else {}).positive(
            "rope_theta", _THETA
        )
        settings.refuse("attention_bias", False)
        patch = settings.integer("patch_size")
        name = f"{_TOWER}.patch_embedder"
        self.patches = Linear(context, f"{name}.input_proj", 3 * patch**2, [Part(size)])
        number = settings.integer("position_embedding_size")
        self.places = Vector(f"{name}.position_embedding_table", 2, number, size)
        self.head_dim = settings.integer("head_dim")
        if self.head_dim % 4:
            raise UnsupportedModel(
                f"config.json: vision_config: heads of {self.head_dim} numbers do not turn by two axes"
            )
        layers = settings.integer("num_hidden_layers", maximum=MAX_LAYERS)
        self.layers = [_Block(context, settings, f"{_LAYER}.{index}") for index in range(layers)]
        self.mean: Vector | None = None
        self.scale: Vector | None = None
        if settings.flag("standardize", False):
            self.mean = Vector(f"{_TOWER}.std_bias", size)
            self.scale = Vector(f"{_TOWER}.std_scale", size)

    @property
    def square(self) -> int:
        """Patches of a vector."""
        return self.factor**2

    def __call__(self, patches: Tensor, grids: Sequence[tuple[int, int]]) -> Tensor:
        """patches [T, patch * patch * 3], from 0 to 1 -> [T / square, H]."""
        at = torch.cat([places(*grid) for grid in grids]).to(patches.device)
        x = self.patches((2 * (patches - 0.5)).to(self.dtype))
        across, down = self.places.vector[0], self.places.vector[1]
        x = x + across[at[:, 1]] + down[at[:, 0]]
        each = frequencies(self.theta, self.head_dim // 2, 0, 2)
        angles = at.flip(-1).float()[..., None] * each.to(at.device)
        turns = torch.cat((angles, angles), dim=-1).flatten(1)
        rotary = turns.cos().to(x), turns.sin().to(x)
        lengths = [rows * columns for rows, columns in grids]
        for layer in self.layers:
            x = layer(x, rotary, lengths)
        pictures = zip(torch.split(x, list(lengths)), grids, strict=True)
        return torch.cat([self._means(own, *grid) for own, grid in pictures])

    def _means(self, states: Tensor, rows: int, columns: int) -> Tensor:
        """states of a picture -> of each square of patches their mean, in single precision until it is
        standardised, as it may be beyond float16."""
        k = self.factor
        blocks = states.view(rows // k, k, columns // k, k, -1).float()
        means: Tensor = (
            blocks.mean(dim=(1, 3)).flatten(0, 1).to(states.dtype).float() * self.size**0.5
        )
        if self.mean is not None and self.scale is not None:
            means = (means - self.mean.vector.float()) * self.scale.vector.float()
        return means.to(states.dtype)


class _Block(Layer):
    """``h = x + norm(attention(norm(x))); h + norm(mlp(norm(h)))``."""

    def __init__(self, context: BuildContext, settings: Settings, name: str) -> None:
        size, eps = settings.integer("hidden_size"), settings.number("rms_norm_eps")
        num_heads = settings.integer("num_attention_heads")
        self.head_dim = settings.integer("head_dim")
        kv_heads = settings.integer("num_key_value_heads", num_heads)
        inner, self.ops = settings.integer("intermediate_size"), context.ops
        self.activation = settings.activation("hidden_activation")
        for norm in _NORMS:
            setattr(self, norm, RMSNorm(context, f"{name}.{norm}", size, eps))
        clips, attention = settings.flag("use_clipped_linears", False), f"{name}.self_attn"
        heads, kv_size = num_heads * self.head_dim, kv_heads * self.head_dim
        sizes = {
            "q_proj": (size, heads), "k_proj": (size, kv_size), "v_proj": (size, kv_size),
            "o_proj": (heads, size),
            "gate_proj": (size, inner), "up_proj": (size, inner), "down_proj": (inner, size),
        }  # fmt: skip
        for module, names in _LINEARS.items():
            for own in names:
                made = ClippedLinear(context, f"{name}.{module}.{own}", *sizes[own], clips=clips)
                setattr(self, own, made)
        self.q_norm = RMSNorm(context, f"{attention}.q_norm", self.head_dim, eps)
        self.k_norm = RMSNorm(context, f"{attention}.k_norm", self.head_dim, eps)
        self.v_norm = RMSNorm(context, f"{attention}.v_norm", self.head_dim, eps, weight=False)

    input_layernorm: RMSNorm
    post_attention_layernorm: RMSNorm
    pre_feedforward_layernorm: RMSNorm
    post_feedforward_layernorm: RMSNorm
    q_proj: ClippedLinear
    k_proj: ClippedLinear
    v_proj: ClippedLinear
    o_proj: ClippedLinear
    gate_proj: ClippedLinear
    up_proj: ClippedLinear
    down_proj: ClippedLinear

    def __call__(self, x: Tensor, rotary: tuple[Tensor, Tensor], lengths: Sequence[int]) -> Tensor:
        """x [T, H] -> the same shape.

        Args:
            rotary: cosines and sines [T, D].
            lengths: patches of each picture.
        """
        made = self._attended(self.input_layernorm(x), rotary, lengths)
        x = x + self.post_attention_layernorm(made)
        y = self.pre_feedforward_layernorm(x)
        gate = self.ops.activation(self.gate_proj(y), self.activation)
        return x + self.post_feedforward_layernorm(self.down_proj(gate * self.up_proj(y)))

    def _attended(self, x: Tensor, rotary: tuple[Tensor, Tensor], lengths: Sequence[int]) -> Tensor:
        q, k, v = (
            part(x).view(len(x), -1, self.head_dim)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k, v = turned(self.q_norm(q), *rotary), turned(self.k_norm(k), *rotary), self.v_norm(v)
        pictures = (torch.split(t.transpose(0, 1), list(lengths), dim=1) for t in (q, k, v))
        seen = [
            functional.scaled_dot_product_attention(query, key, value, scale=1.0, enable_gqa=True)
            for query, key, value in zip(*pictures, strict=True)
        ]
        return self.o_proj(torch.cat(seen, dim=1).transpose(0, 1).flatten(1))


def turned(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """x [T, heads, D]: its first half turns by the patch's column, its second by the row."""
    count, heads, size = x.shape
    halves = x.view(count, heads, 2, 2, size // 4)
    away = torch.stack((-halves[..., 1, :], halves[..., 0, :]), dim=-2).view(x.shape)
    return x * cosines[:, None] + away * sines[:, None]

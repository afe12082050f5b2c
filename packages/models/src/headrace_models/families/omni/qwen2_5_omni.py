"""The thinker of Qwen2.5-Omni: Whisper's encoder on pieces of two seconds and Qwen2.5-VL's tower, in front
of a Qwen2 decoder whose images and videos stand in time, height and width.

Xu et al. 2025, arXiv:2503.20215. The talker, which makes speech of what the thinker writes, is not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.rope import rope_settings
from headrace_models.config.settings import Settings
from headrace_models.layers.audio.whisper import AudioEncoder, encoder_rules
from headrace_models.layers.base import Layer, Part
from headrace_models.layers.linear import Linear
from headrace_models.layers.omni import Thinker
from headrace_models.layers.towers import Tower, rules_of
from headrace_models.layers.vision.grid_decoder import THETA, embed_grids
from headrace_models.layers.vision.towers.qwen_vl import QwenVLTower, tower_rules

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_AUDIO, _VISION = "audio_tower", "visual"
_LAST_NORM = "ln_post"
_ENCODER = {
    "d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120,
    "num_mel_bins": 128, "max_source_positions": 1500, "activation_function": "gelu", "n_window": 100,
    "output_dim": 3584,
}  # fmt: skip
"""Values that configs may leave out."""
_MAX_WINDOW = 1 << 14


class OmniAudio(Layer):
    """A vector for every 40 ms; the states of a piece see each other."""

    def __init__(
        self, context: BuildContext, stated: Mapping[str, Any], name: str, out_size: int
    ) -> None:
        settings = Settings({**_ENCODER, **stated})
        size = settings.integer("output_dim")
        if size != out_size:
            raise UnsupportedModel(
                f"config.json: audio_config.output_dim = {size}: must be the language model's hidden_size = "
                f"{out_size}"
            )
        most = min(settings.integer("max_source_positions"), _MAX_WINDOW)
        chunk = 2 * settings.integer("n_window", maximum=most)
        self.encoder = AudioEncoder(
            context, settings, name, pools=True, chunk=chunk, norm_name=_LAST_NORM
        )
        hidden = settings.integer("d_model")
        self.projection = Linear(context, f"{name}.proj", hidden, [Part(out_size)], bias=True)

    def embed(self, modality: str, inputs: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """See :class:`headrace_models.layers.towers.MediaEncoder`.

        Args:
            inputs: ``input_features`` [frames, bins] each.
        """
        clips = [item["input_features"] for item in inputs]
        lengths = [(len(clip) + 1) // 2 // 2 for clip in clips]
        return torch.split(self.projection(self.encoder(clips)), lengths)


class OmniVision(Layer):
    """Four patches of an image, or of two frames of a video, are a vector."""

    def __init__(
        self, context: BuildContext, stated: Mapping[str, Any], name: str, out_size: int
    ) -> None:
        self.tower = QwenVLTower(context, stated, name, out_size, second=True, fused=False)

    def embed(self, modality: str, inputs: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """See :func:`headrace_models.layers.vision.grid_decoder.embed_grids`."""
        return embed_grids(self.tower, modality, inputs)


_TOWERS = (
    Tower(
        "audio_config",
        ("audio",),
        _AUDIO,
        (
            *encoder_rules(_AUDIO, f"{_AUDIO}.encoder", _LAST_NORM),
            WeightRule(f"{_AUDIO}.proj", f"{_AUDIO}.projection"),
        ),
        OmniAudio,
    ),
    Tower(
        "vision_config",
        ("image", "video"),
        _VISION,
        tower_rules(_VISION, f"{_VISION}.tower"),
        OmniVision,
    ),
)


class Qwen2_5Omni(Thinker):
    """See the module."""

    towers: ClassVar[Sequence[Tower]] = _TOWERS
    media_rules: ClassVar[Sequence[WeightRule]] = rules_of(_TOWERS)

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        super().make_towers(context, whole)
        vision: OmniVision | None = getattr(self, _VISION, None)
        self.merge = 1 if vision is None else vision.tower.merge
        self.rope = rope_settings(self.settings.config, theta=THETA, partial=1.0)

    def unread_weights(self) -> Mapping[str, str]:
        """Tensors of the tower that no text comes from, too."""
        more = {
            rf"{_AUDIO}\.audio_bos_eos_token\.weight": "for the talker",
            rf"{_AUDIO}\.positional_embedding\..*": "computed",
        }
        return {**super().unread_weights(), **more}

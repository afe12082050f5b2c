"""The thinker of Qwen3-Omni: an audio encoder of its own and Qwen3-VL's tower, in front of a mixture of
experts whose first layers get vectors of the tower, too.

Xu et al. 2025, arXiv:2509.17765. What makes speech of the thinker's text is not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.nn import functional

from headrace_core.errors import UnsupportedModel
from headrace_core.model import ModelInfo, WeightRule
from headrace_core.speech.model import (
    SpeechTask,
    SpeechToTextConfig,
    SupportsTranscription,
)
from headrace_models.clip_questions import AnswersAboutClips, ClipQuestion
from headrace_models.config.settings import Settings
from headrace_models.layers.audio.conv2d import Conv2dEncoder, encoder_rules, num_states
from headrace_models.layers.base import Layer
from headrace_models.layers.omni import Thinker
from headrace_models.layers.towers import Tower, rules_of
from headrace_models.layers.vision.deepstack import DeepstackDecoder, interleaved_rope
from headrace_models.layers.vision.grid_decoder import embed_grids
from headrace_models.layers.vision.media_decoder import part_of
from headrace_models.layers.vision.mlp import Projector
from headrace_models.layers.vision.towers.qwen3_vl import MergerNames, Qwen3VLTower, tower_rules

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_AUDIO, _VISION = "audio_tower", "visual"
_LAST_NORM = "ln_post"
_NAMES = MergerNames("merger_list", "ln_q", "mlp.0", "mlp.2")
_ENCODER = {
    "d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120,
    "num_mel_bins": 128, "activation_function": "gelu", "n_window": 50, "n_window_infer": 800,
    "downsample_hidden_size": 480, "output_dim": 3584,
}  # fmt: skip
"""Values that configs may leave out."""


class OmniAudio(Layer):
    """A vector for every 80 ms, about; the states of some seconds see each other."""

    def __init__(
        self, context: BuildContext, stated: Mapping[str, Any], name: str, out_size: int
    ) -> None:
        settings = Settings({**_ENCODER, **stated})
        size, hidden = settings.integer("output_dim"), settings.integer("d_model")
        if size != out_size:
            raise UnsupportedModel(
                f"config.json: audio_config.output_dim = {size}: must be the language model's hidden_size = "
                f"{out_size}"
            )
        self.encoder = Conv2dEncoder(context, settings, name, _LAST_NORM)
        self.projector = Projector(
            context,
            f"{name}.proj1",
            f"{name}.proj2",
            (hidden, hidden, out_size),
            settings.activation("activation_function"),
        )

    def embed(self, modality: str, inputs: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """See :class:`headrace_models.layers.towers.MediaEncoder`.

        Args:
            inputs: ``input_features`` [frames, bins] each.
        """
        states = self.encoder([item["input_features"] for item in inputs])
        vectors = self.projector(torch.cat(states))
        return torch.split(vectors, [len(own) for own in states])


class OmniVision(Layer):
    """Four patches of an image, or of two frames of a video, are a vector, and one for each of the
    decoder's first layers."""

    def __init__(
        self, context: BuildContext, stated: Mapping[str, Any], name: str, out_size: int
    ) -> None:
        self.tower = Qwen3VLTower(context, stated, name, out_size, _NAMES)

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
            WeightRule(f"{_AUDIO}.proj1", f"{_AUDIO}.projector.up"),
            WeightRule(f"{_AUDIO}.proj2", f"{_AUDIO}.projector.down"),
        ),
        OmniAudio,
    ),
    Tower(
        "vision_config",
        ("image", "video"),
        _VISION,
        tower_rules(_VISION, f"{_VISION}.tower", _NAMES),
        OmniVision,
    ),
)


class Qwen3Omni(Thinker, DeepstackDecoder, AnswersAboutClips, SupportsTranscription):
    """See the module."""

    supported_languages: ClassVar[Mapping[str, str]] = {
        "ar": "Arabic", "de": "German", "en": "English", "es": "Spanish", "fr": "French",
        "id": "Indonesian", "it": "Italian", "ja": "Japanese", "ko": "Korean", "ms": "Malay", "nl": "Dutch",
        "pt": "Portuguese", "ru": "Russian", "tr": "Turkish", "ur": "Urdu", "vi": "Vietnamese",
        "yue": "Cantonese", "zh": "Chinese",
    }  # fmt: skip
    clip_question: ClassVar = ClipQuestion(
        "Transcribe the {spoken}audio into text.",
        "Listen to the provided {spoken}speech and produce a translation in {target} text.",
    )
    conversation: ClassVar[str] = (
        "<|im_start|>user\n<|audio_start|><|audio_pad|><|audio_end|>{}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )

    towers: ClassVar[Sequence[Tower]] = _TOWERS
    media_rules: ClassVar[Sequence[WeightRule]] = rules_of(_TOWERS)

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        super().make_towers(context, whole)
        vision: OmniVision | None = getattr(self, _VISION, None)
        self.merge = 1 if vision is None else vision.tower.merge
        self.num_levels = 0 if vision is None else len(vision.tower.inner)
        self.rope = interleaved_rope(self.settings.config)

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`. Vectors of audio give the first layers
        nothing, in as many numbers as those of images do."""
        found = super().embed_media(modality, inputs)
        if modality != "audio":
            return found
        more = self.num_levels * self.hidden_size()
        return [functional.pad(vectors, (0, more)) for vectors in found]

    def unread_weights(self) -> Mapping[str, str]:
        """Positions that are computed, too."""
        more = {rf"{_AUDIO}\.positional_embedding\..*": "computed"}
        return {**super().unread_weights(), **more}

    # ---- what it says of itself

    @classmethod
    def get_speech_to_text_config(
        cls, model_config: ModelInfo, task_type: SpeechTask
    ) -> SpeechToTextConfig:
        """Clips that take half of the context, and five minutes at most."""
        tokens = _num_tokens(_LONGEST_SECONDS, model_config)
        share = model_config.max_model_len / 2 / tokens
        longest = max(1.0, _LONGEST_SECONDS * min(1.0, share))
        return SpeechToTextConfig(max_audio_clip_s=longest, overlap_chunk_second=0.5)

    @classmethod
    def get_num_audio_tokens(
        cls, audio_duration_s: float, stt_config: SpeechToTextConfig, model_config: ModelInfo
    ) -> int | None:
        return _num_tokens(audio_duration_s, model_config)


_LONGEST_SECONDS = 300.0
_FRAMES_PER_SECOND = 100


def _num_tokens(seconds: float, info: ModelInfo) -> int:
    whole = info.whole_config
    stated = part_of(whole.get("thinker_config", whole), "audio_config")
    piece = 2 * Settings({**_ENCODER, **stated}).integer("n_window")
    pieces, rest = divmod(int(seconds * _FRAMES_PER_SECOND), piece)
    return pieces * num_states(piece) + num_states(rest)

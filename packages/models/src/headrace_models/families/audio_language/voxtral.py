"""Voxtral: Whisper's encoder on pieces of 30 s, four states to a vector, in front of a Llama decoder.

Liu et al. 2025, arXiv:2507.13264.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.model import ModelInfo, WeightRule
from headrace_core.request import TextPrompt
from headrace_core.speech.model import (
    AudioClip,
    SpeechTask,
    SpeechToTextConfig,
    SupportsTranscription,
)
from headrace_models.config.settings import Settings
from headrace_models.layers.audio.whisper import AudioEncoder, encoder_rules
from headrace_models.layers.vision.media_decoder import MediaDecoder, part_of
from headrace_models.layers.vision.mlp import Projector

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_TOWER, _PROJECTOR = "audio_tower", "multi_modal_projector"
_WHISPERS_NAMES = {
    "hidden_size": "d_model",
    "num_hidden_layers": "encoder_layers",
    "num_attention_heads": "encoder_attention_heads",
    "intermediate_size": "encoder_ffn_dim",
}
_ENCODER = {
    "d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120,
    "num_mel_bins": 128, "max_source_positions": 1500, "activation_function": "gelu",
}  # fmt: skip
"""Values that a config may leave to be known."""


class Voxtral(MediaDecoder, SupportsTranscription):
    """A recording takes a placeholder for every 80 ms, silence up to the next 30 s included."""

    supported_languages: ClassVar[Mapping[str, str]] = {
        "ar": "Arabic", "de": "German", "en": "English", "es": "Spanish", "fr": "French", "hi": "Hindi",
        "it": "Italian", "nl": "Dutch", "pt": "Portuguese",
    }  # fmt: skip
    modalities: ClassVar[Sequence[str]] = ("audio",)
    media_rules: ClassVar[Sequence[WeightRule]] = (
        *encoder_rules(_TOWER, "encoder"),
        WeightRule(f"{_PROJECTOR}.linear_1", "projector.up"),
        WeightRule(f"{_PROJECTOR}.linear_2", "projector.down"),
    )

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        settings = _encoder_settings(part_of(whole, "audio_config"))
        self.group_size = settings.integer("encoder_ffn_dim")
        self.piece = 2 * settings.integer("max_source_positions")
        _check_groups(settings)
        self.encoder = AudioEncoder(context, settings, _TOWER)
        self.projector = Projector(
            context,
            f"{_PROJECTOR}.linear_1",
            f"{_PROJECTOR}.linear_2",
            (self.group_size, self.hidden_size(), self.hidden_size()),
            Settings(whole).activation("projector_hidden_act", default="gelu"),
            bias=False,
        )

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``input_features`` [frames, bins] each; a multiple of a piece's frames.
        """
        return [self._recording(item["input_features"]) for item in inputs]

    def _recording(self, frames: Tensor) -> Tensor:
        """A piece at a time: memory is that of one, however long the recording."""
        return torch.cat([self._piece(piece) for piece in torch.split(frames, self.piece)])

    def _piece(self, frames: Tensor) -> Tensor:
        return self.projector(self.encoder([frames]).reshape(-1, self.group_size))

    # ---- what it says of itself

    @classmethod
    def get_speech_to_text_config(
        cls, model_config: ModelInfo, task_type: SpeechTask
    ) -> SpeechToTextConfig:
        """Clips of as many pieces as half of the context holds, and of half an hour at most."""
        seconds, tokens = _piece_of(model_config)
        pieces = max(1, model_config.max_model_len // 2 // tokens)
        longest = max(seconds, min(pieces * seconds, _LONGEST_SECONDS))
        return SpeechToTextConfig(
            max_audio_clip_s=longest, overlap_chunk_second=min(1.0, seconds / 2)
        )

    @classmethod
    def get_generation_prompt(  # type: ignore[override]
        cls, audio: AudioClip, language: str | None, task_type: SpeechTask
    ) -> TextPrompt:
        """A request to write down what is said, which has no place for other text.

        Raises: RequestError: a translation, which the model has no such request for.
        """
        if task_type == "translate":
            raise RequestError(
                "/v1/audio/translations: the model only writes down what is said; ask for a translation in a "
                "chat that brings the recording",
                param="file",
            )
        spoken = "" if language is None else f"lang:{language}"
        media: dict[str, Any] = {"audio": (audio.samples, audio.sample_rate)}
        return TextPrompt(prompt=_REQUEST.format(spoken), multi_modal_data=media)

    @classmethod
    def get_num_audio_tokens(
        cls, audio_duration_s: float, stt_config: SpeechToTextConfig, model_config: ModelInfo
    ) -> int | None:
        seconds, tokens = _piece_of(model_config)
        return math.ceil(audio_duration_s / seconds) * tokens


_REQUEST = "[INST][BEGIN_AUDIO][AUDIO][/INST]{}[TRANSCRIBE]"
_LONGEST_SECONDS = 1800.0
_FRAMES_PER_SECOND = 100


def _piece_of(info: ModelInfo) -> tuple[float, int]:
    """Seconds and tokens of a piece."""
    settings = _encoder_settings(part_of(info.whole_config, "audio_config"))
    states = settings.integer("max_source_positions")
    grouped = settings.integer("encoder_ffn_dim") // settings.integer("d_model")
    return 2 * states / _FRAMES_PER_SECOND, max(1, states // max(1, grouped))


def _encoder_settings(stated: Mapping[str, Any]) -> Settings:
    """The encoder's settings under Whisper's names."""
    named = {_WHISPERS_NAMES.get(key, key): value for key, value in stated.items()}
    return Settings({**_ENCODER, **named})


def _check_groups(settings: Settings) -> None:
    """Raises: UnsupportedModel: a piece's states do not make whole groups."""
    hidden, grouped = settings.integer("d_model"), settings.integer("encoder_ffn_dim")
    positions = settings.integer("max_source_positions")
    if grouped % hidden or positions % (grouped // hidden):
        raise UnsupportedModel(
            f"config.json: audio_config: {positions} states of {hidden} numbers (max_source_positions, "
            f"hidden_size) do not make whole groups of {grouped} (intermediate_size)"
        )

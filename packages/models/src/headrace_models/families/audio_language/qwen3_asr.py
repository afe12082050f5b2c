"""Qwen3-ASR: Qwen3-Omni's audio encoder in front of a Qwen3 decoder, which writes down what is said.

Qwen Team 2026, "Qwen3-ASR Technical Report".
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.model import ModelInfo, WeightRule
from headrace_core.request import TextPrompt
from headrace_core.speech.model import (
    AudioClip,
    LanguageProbe,
    SpeechTask,
    SpeechToTextConfig,
    SupportsTranscription,
)
from headrace_models.config.settings import Settings
from headrace_models.config.special_tokens import refuse_special_tokens, text_ids
from headrace_models.layers.audio.conv2d import Conv2dEncoder, encoder_rules, num_states
from headrace_models.layers.vision.media_decoder import MediaDecoder, part_of
from headrace_models.layers.vision.mlp import Projector

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

logger = logging.getLogger(__name__)

_TOWER, _LAST_NORM = "audio_tower", "ln_post"
_UP, _DOWN = f"{_TOWER}.proj1", f"{_TOWER}.proj2"
_ENCODER = {
    "d_model": 1024, "encoder_layers": 24, "encoder_attention_heads": 16, "encoder_ffn_dim": 4096,
    "num_mel_bins": 128, "activation_function": "gelu", "n_window": 50, "n_window_infer": 800,
    "downsample_hidden_size": 480, "output_dim": 3584,
}  # fmt: skip
"""Values that configs may leave out."""


class Qwen3ASR(MediaDecoder, SupportsTranscription):
    """A recording takes 13 placeholders for every second."""

    modalities: ClassVar[Sequence[str]] = ("audio",)
    media_rules: ClassVar[Sequence[WeightRule]] = (
        *encoder_rules(_TOWER, "encoder", _LAST_NORM),
        WeightRule(_UP, "projector.up"),
        WeightRule(_DOWN, "projector.down"),
    )
    media_names: ClassVar[Sequence[tuple[str, str]]] = (
        ("multi_modal_projector.linear_1", _UP),
        ("multi_modal_projector.linear_2", _DOWN),
    )
    """The spelling of transformers."""
    supported_languages: ClassVar[Mapping[str, str]] = {
        "ar": "Arabic", "cs": "Czech", "da": "Danish", "de": "German", "el": "Greek", "en": "English",
        "es": "Spanish", "fa": "Persian", "fi": "Finnish", "fil": "Filipino", "fr": "French", "hi": "Hindi",
        "hu": "Hungarian", "id": "Indonesian", "it": "Italian", "ja": "Japanese", "ko": "Korean",
        "mk": "Macedonian", "ms": "Malay", "nl": "Dutch", "pl": "Polish", "pt": "Portuguese",
        "ro": "Romanian", "ru": "Russian", "sv": "Swedish", "th": "Thai", "tr": "Turkish",
        "vi": "Vietnamese", "yue": "Cantonese", "zh": "Chinese",
    }  # fmt: skip

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        thinker = whole.get("thinker_config", whole)
        if "classify_num" in thinker:
            raise UnsupportedModel(
                f"config.json: thinker_config.classify_num = {thinker['classify_num']!r:.50}: must be "
                "absent; forced aligners, which only tell times, are not served"
            )
        settings = Settings({**_ENCODER, **part_of(thinker, "audio_config")})
        size, hidden = settings.integer("output_dim"), settings.integer("d_model")
        if size != self.hidden_size():
            raise UnsupportedModel(
                f"config.json: audio_config.output_dim = {size}: must be the language model's hidden_size = "
                f"{self.hidden_size()}"
            )
        self.encoder = Conv2dEncoder(context, settings, _TOWER, _LAST_NORM, fills=True)
        act = settings.activation("activation_function")
        self.projector = Projector(context, _UP, _DOWN, (hidden, hidden, size), act)

    def unread_weights(self) -> Mapping[str, str]:
        """Positions that are computed."""
        return {rf"{_TOWER}\.positional_embedding\..*": "computed"}

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``input_features`` [frames, bins] each.
        """
        states = self.encoder([item["input_features"] for item in inputs])
        vectors = self.projector(torch.cat(states))
        return torch.split(vectors, [len(own) for own in states])

    # ---- what it says of itself

    @classmethod
    def get_speech_to_text_config(
        cls, model_config: ModelInfo, task_type: SpeechTask
    ) -> SpeechToTextConfig:
        """Clips that take half of the context, and 20 minutes at most."""
        tokens = _num_tokens(_LONGEST_SECONDS, model_config)
        share = model_config.max_model_len / 2 / tokens
        longest = max(1.0, _LONGEST_SECONDS * min(1.0, share))
        return SpeechToTextConfig(max_audio_clip_s=longest, overlap_chunk_second=0.5)

    @classmethod
    def get_generation_prompt(  # type: ignore[override]
        cls,
        audio: AudioClip,
        model_config: ModelInfo,
        language: str | None,
        task_type: SpeechTask,
        request_prompt: str,
        to_language: str | None,
    ) -> TextPrompt:
        """A recording, and an answer that begins with its language; a client's text is the system's.

        Raises:
            RequestError: a translation, or a text in another language than that which is spoken; special
                tokens in the request's prompt.
        """
        if task_type == "translate" or to_language not in (None, language):
            raise RequestError(
                "/v1/audio/translations: the model only writes down what is said", param="file"
            )
        if language is None:
            logger.warning("no language was given, and none was detected: en is assumed")
        refuse_special_tokens(model_config.path, request_prompt)
        begun = f" {cls.supported_languages[language or 'en']}{_MARK}"
        return _asked(audio, begun, request_prompt.strip())

    @classmethod
    def get_language_probe(
        cls, audio: AudioClip, model_config: ModelInfo, stt_config: SpeechToTextConfig
    ) -> LanguageProbe | None:
        """The word behind "language", by its first token; None where no ``tokenizer.json`` tells it."""
        if not (model_config.path / "tokenizer.json").is_file():
            return None
        codes: dict[int, str] = {}
        for code, name in cls.supported_languages.items():
            codes.setdefault(text_ids(model_config.path, name)[0], code)
        return LanguageProbe(_asked(audio, "", ""), codes)

    @classmethod
    def get_num_audio_tokens(
        cls, audio_duration_s: float, stt_config: SpeechToTextConfig, model_config: ModelInfo
    ) -> int | None:
        return _num_tokens(audio_duration_s, model_config)


_MARK = "<asr_text>"
_SYSTEM = "<|im_start|>system\n"
_USER = (
    "<|im_end|>\n<|im_start|>user\n<|audio_start|><|audio_pad|><|audio_end|><|im_end|>\n"
    "<|im_start|>assistant\nlanguage"
)
_LONGEST_SECONDS = 1200.0
_FRAMES_PER_SECOND = 100


def _asked(audio: AudioClip, begun: str, context: str) -> TextPrompt:
    media: dict[str, Any] = {"audio": (audio.samples, audio.sample_rate)}
    return TextPrompt(prompt=f"{_SYSTEM}{context}{_USER}{begun}", multi_modal_data=media)


def _num_tokens(seconds: float, info: ModelInfo) -> int:
    whole = info.whole_config
    stated = part_of(whole.get("thinker_config", whole), "audio_config")
    piece = 2 * Settings({**_ENCODER, **stated}).integer("n_window")
    pieces, rest = divmod(int(seconds * _FRAMES_PER_SECOND), piece)
    return pieces * num_states(piece) + num_states(rest)

"""Gemma 3n with recordings: an encoder of speech, whose vectors stand in a clip's 188 places, in front of a
decoder whose last tokens have tables of their own.

Google 2025, "Gemma 3n".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.model import ModelInfo, WeightRule
from headrace_core.request import TextPrompt
from headrace_core.speech.model import (
    AudioClip,
    SpeechTask,
    SpeechToTextConfig,
    SupportsTranscription,
)
from headrace_models.clip_questions import ClipQuestion, prompt_about
from headrace_models.config.settings import Settings
from headrace_models.layers.audio.usm import ENCODER, SpeechEncoder, usm_rules
from headrace_models.layers.base import Layer, Part
from headrace_models.layers.linear import Linear
from headrace_models.layers.norm import RMSNorm
from headrace_models.layers.vision.clip import Vector
from headrace_models.layers.vision.media_decoder import MediaDecoder, part_of

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext

_TOWER, _AUDIO, _VISION = "audio_tower", "embed_audio", "embed_vision"
_TOKENS, _FIRST_IMAGE, _FIRST_SOUND = 188, 262_144, 262_272
_IMAGE_SIZE, _VOCABULARY = 2048, 128
"""Values that configs may leave out."""


def _embedder_rules(name: str) -> tuple[WeightRule, ...]:
    return (
        WeightRule(f"{name}.embedding.weight", f"{name}.table.vector"),
        WeightRule(f"{name}.hard_embedding_norm", f"{name}.token_norm"),
        WeightRule(f"{name}.embedding_projection", f"{name}.projection"),
    )


class MediaTokens(Layer):
    """Vectors of the tokens that belong to a modality, from a table of the tower's size.

    Args:
        stated: the tower's part of the config.
        name: as the checkpoint spells it.
        sizes: of the table's rows, and of the result.
        first: the first such token, where the config says none.
    """

    def __init__(
        self,
        context: BuildContext,
        stated: Mapping[str, Any],
        name: str,
        sizes: tuple[int, int],
        first: int,
    ) -> None:
        settings, (size, out_size) = Settings(stated), sizes
        self.first = settings.integer("vocab_offset", first)
        self.number = settings.integer("vocab_size", _VOCABULARY)
        eps = settings.number("rms_norm_eps", 1e-6)
        self.table = Vector(f"{name}.embedding.weight", self.number, size)
        self.token_norm = RMSNorm(context, f"{name}.hard_embedding_norm", size, eps)
        self.projection = Linear(context, f"{name}.embedding_projection", size, [Part(out_size)])
        self.last_norm = RMSNorm(context, f"{name}.last_norm", out_size, eps, weight=False)
        self.made: Tensor | None = None

    def rows(self) -> Tensor:
        """[number, out_size]: vectors of all tokens, computed when they are first asked for."""
        if self.made is None:
            self.made = self.projected(self.token_norm(self.table.vector))
        return self.made

    def projected(self, x: Tensor) -> Tensor:
        """x [T, size], behind a norm -> [T, out_size]."""
        return self.last_norm(self.projection(x))


class Gemma3nAudio(MediaDecoder, SupportsTranscription):
    """A clip of up to 30 s is so many vectors, whatever its length: behind those of the encoder stand those
    of a token. Images are not taken, but tokens that belong to them are known."""

    modalities: ClassVar[Sequence[str]] = ("audio",)
    media_rules: ClassVar[Sequence[WeightRule]] = (
        *usm_rules(_TOWER, "encoder"),
        *_embedder_rules(_AUDIO),
        *_embedder_rules(_VISION),
        WeightRule(f"{_AUDIO}.soft_embedding_norm", "state_norm"),
    )
    supported_languages: ClassVar[Mapping[str, str]] = {
        "ar": "Arabic", "de": "German", "en": "English", "es": "Spanish", "fr": "French", "hi": "Hindi",
        "it": "Italian", "ja": "Japanese", "ko": "Korean", "nl": "Dutch", "pt": "Portuguese",
        "ru": "Russian", "zh": "Chinese",
    }  # fmt: skip

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        stated, images = part_of(whole, "audio_config"), whole.get("vision_config") or {}
        self.encoder = SpeechEncoder(context, stated, _TOWER)
        size, hidden = self.encoder.size, self.hidden_size()
        self.embed_audio = MediaTokens(context, stated, _AUDIO, (size, hidden), _FIRST_SOUND)
        eps = Settings(stated).number("rms_norm_eps", 1e-6)
        self.state_norm = RMSNorm(context, f"{_AUDIO}.soft_embedding_norm", size, eps)
        seen = Settings(images).integer("hidden_size", _IMAGE_SIZE)
        self.embed_vision = MediaTokens(context, images, _VISION, (seen, hidden), _FIRST_IMAGE)
        self.number = Settings(whole).integer("audio_soft_tokens_per_image", _TOKENS)
        self.filler = self.settings.integer("vocab_size") - 1 - self.embed_audio.first
        if not 0 <= self.filler < self.embed_audio.number:
            raise UnsupportedModel(
                f"config.json: audio_config.vocab_offset = {self.embed_audio.first}, vocab_size = "
                f"{self.embed_audio.number}: must hold the last token of text_config.vocab_size"
            )

    def unread_weights(self) -> Mapping[str, str]:
        """The tower of images."""
        why = "images are not taken"
        return {r"vision_tower\..*": why, rf"{_VISION}\.soft_embedding_norm\..*": why}

    def token_vectors(self, ids: Tensor) -> Tensor:
        """ids [T] int64 -> [T, H]: tokens of images and recordings have tables of their own."""
        vectors = super().token_vectors(ids)
        for own in (self.embed_vision, self.embed_audio):
            place = ids - own.first
            mine = (place >= 0) & (place < own.number)
            rows = own.rows()[place.clamp(0, own.number - 1)]
            vectors = torch.where(mine[:, None], rows.to(vectors.dtype), vectors)
        return vectors

    def embed_tokens(self, batch: ForwardBatch) -> Tensor:
        """[T, H]: what the first block gets."""
        return self.input_vectors(batch)

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``input_features`` [frames, bins] each.
        """
        return [self._clip(item["input_features"]) for item in inputs]

    def _clip(self, frames: Tensor) -> Tensor:
        heard = self.embed_audio.projected(self.state_norm(self.encoder(frames)))
        filler = self.embed_audio.rows()[self.filler]
        return torch.cat((heard, filler.expand(self.number - len(heard), -1)))

    # ---- what it says of itself

    @classmethod
    def get_speech_to_text_config(
        cls, model_config: ModelInfo, task_type: SpeechTask
    ) -> SpeechToTextConfig:
        """Clips of as many places as there are."""
        every = Settings({**ENCODER, **part_of(model_config.whole_config, "audio_config")})
        states = Settings(model_config.whole_config).integer("audio_soft_tokens_per_image", _TOKENS)
        seconds = min(_LONGEST_SECONDS, states * every.integer("conf_reduction_factor") * _STATE)
        return SpeechToTextConfig(
            max_audio_clip_s=seconds, overlap_chunk_second=min(1.0, seconds / 2)
        )

    @classmethod
    def get_generation_prompt(
        cls,
        audio: AudioClip,
        model_config: ModelInfo,
        stt_config: SpeechToTextConfig,
        language: str | None,
        task_type: SpeechTask,
        request_prompt: str,
        to_language: str | None,
        timestamps: bool = False,
    ) -> TextPrompt:
        """A question about the clip.

        Raises:
            RequestError: a target language that it does not know, or one for a transcript; special
                tokens in the request's prompt.
        """
        question = _QUESTION.text(cls.supported_languages, language, task_type, to_language)
        return prompt_about(audio, _CONVERSATION, question, request_prompt, model_config.path)

    @classmethod
    def get_num_audio_tokens(
        cls, audio_duration_s: float, stt_config: SpeechToTextConfig, model_config: ModelInfo
    ) -> int | None:
        whole = Settings(model_config.whole_config)
        return whole.integer("audio_soft_tokens_per_image", _TOKENS)


_QUESTION = ClipQuestion(
    "Transcribe this audio into {spoken}text", "Translate this audio into {target} text"
)
_CONVERSATION = "<start_of_turn>user\n{}: <audio_soft_token><end_of_turn>\n<start_of_turn>model\n"
_LONGEST_SECONDS, _STATE = 30.0, 0.04

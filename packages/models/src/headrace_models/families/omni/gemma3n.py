"""Gemma 3n with images and recordings: MobileNetV5, and an encoder of speech whose vectors stand in a clip's
188 places, in front of a decoder whose last tokens have tables of their own.

Google 2025, "Gemma 3n".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.model import ModelInfo, WeightRule
from headrace_core.speech.model import (
    SpeechTask,
    SpeechToTextConfig,
    SupportsTranscription,
)
from headrace_models.clip_questions import AnswersAboutClips, ClipQuestion
from headrace_models.config.settings import Settings
from headrace_models.layers.audio.usm import ENCODER, SpeechEncoder, usm_rules
from headrace_models.layers.base import Layer, Part
from headrace_models.layers.convolutional.mobilenet_v5 import TABLES, MobileNetV5, tower_rules
from headrace_models.layers.linear import Linear
from headrace_models.layers.norm import RMSNorm
from headrace_models.layers.vision.media_decoder import MediaDecoder, part_of
from headrace_models.layers.vision.towers.clip import Vector

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext

_TOWER, _AUDIO, _VISION = "audio_tower", "embed_audio", "embed_vision"
_VISION_TOWER = "vision_tower.timm_model"
_IMAGE_PLACES = "vision_soft_tokens_per_image"
_PLACES, _FIRST_IMAGE, _FIRST_SOUND = 188, 262_144, 262_272
_VOCABULARY, _ARCHITECTURE = 128, "mobilenetv5_300m_enc"
"""Values that configs may leave out."""


def _embedder_rules(name: str, target: str) -> tuple[WeightRule, ...]:
    return (
        WeightRule(f"{name}.embedding.weight", f"{target}.tokens.table.vector"),
        WeightRule(f"{name}.hard_embedding_norm", f"{target}.tokens.token_norm"),
        WeightRule(f"{name}.embedding_projection", f"{target}.tokens.projection"),
        WeightRule(f"{name}.soft_embedding_norm", f"{target}.norm"),
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
        self.projection.no_adapters = (
            "the vectors that it makes of a table are kept for all requests"
        )
        self.last_norm = RMSNorm(context, f"{name}.last_norm", out_size, eps, weight=False)
        self.ops = context.ops
        self.made: tuple[Tensor, Tensor] | None = None

    def rows(self) -> Tensor:
        """[number + 1, out_size]: vectors of all tokens, and zeros."""
        return self._tables()[0]

    def put_into(self, vectors: Tensor, ids: Tensor) -> Tensor:
        """vectors [T, out_size] of tokens [T], with those of this modality's tokens in place of theirs.

        By operations that can be captured: other tokens keep all of a vector and get zeros.
        """
        place, (own, keeps) = ids - self.first, self._tables()
        kept = vectors * self.ops.embedding(place, keeps, beyond=self.number)
        return kept + self.ops.embedding(place, own, beyond=self.number)

    def _tables(self) -> tuple[Tensor, Tensor]:
        """:meth:`rows`, and [number + 1, 1], 1 for other tokens; computed in the first step."""
        if self.made is None:
            rows = self.projected(self.token_norm(self.table.vector))
            keeps = torch.zeros_like(rows[:1, :1]).repeat(self.number + 1, 1)
            keeps[-1] = 1
            self.made = torch.cat((rows, torch.zeros_like(rows[:1]))), keeps
        return self.made

    def projected(self, x: Tensor) -> Tensor:
        """x [T, size], behind a norm -> [T, out_size]."""
        return self.last_norm(self.projection(x))


class Gemma3nHearing(Layer):
    """A clip of up to 30 s is so many vectors, whatever its length: behind those of the encoder stand those
    of a token.

    Args:
        whole: ``config.json``.
        sizes: vectors' size, and tokens of the language model.
    """

    def __init__(
        self, context: BuildContext, whole: Mapping[str, Any], sizes: tuple[int, int]
    ) -> None:
        stated, (hidden, vocabulary) = part_of(whole, "audio_config"), sizes
        self.encoder = SpeechEncoder(context, stated, _TOWER)
        size, eps = self.encoder.size, Settings(stated).number("rms_norm_eps", 1e-6)
        self.tokens = MediaTokens(context, stated, _AUDIO, (size, hidden), _FIRST_SOUND)
        self.norm = RMSNorm(context, f"{_AUDIO}.soft_embedding_norm", size, eps)
        self.number = Settings(whole).integer("audio_soft_tokens_per_image", _PLACES)
        self.filler = vocabulary - 1 - self.tokens.first
        if not 0 <= self.filler < self.tokens.number:
            raise UnsupportedModel(
                f"config.json: audio_config.vocab_offset = {self.tokens.first}, vocab_size = "
                f"{self.tokens.number}: must hold the last token of text_config.vocab_size"
            )

    def embed(self, inputs: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """
        Args:
            inputs: ``input_features`` [frames, bins] each.
        """
        return [self._clip(item["input_features"]) for item in inputs]

    def _clip(self, frames: Tensor) -> Tensor:
        heard = self.tokens.projected(self.norm(self.encoder(frames)))
        filler = self.tokens.rows()[self.filler]
        return torch.cat((heard, filler.expand(self.number - len(heard), -1)))


class Gemma3nSeeing(Layer):
    """An image is so many vectors, whatever its size."""

    def __init__(self, context: BuildContext, whole: Mapping[str, Any], hidden: int) -> None:
        stated = part_of(whole, "vision_config")
        settings, number = Settings(stated), Settings(whole).integer(_IMAGE_PLACES, 256)
        size, eps = settings.integer("hidden_size", 2048), settings.number("rms_norm_eps", 1e-6)
        kind, side = stated.get("architecture", _ARCHITECTURE), math.isqrt(number)
        if kind not in TABLES or side**2 != number:
            raise UnsupportedModel(
                f"config.json: vision_config.architecture = {kind!r:.100}, {_IMAGE_PLACES} = {number}: must "
                f"be {' or '.join(TABLES)}, and a square"
            )
        self.tower = MobileNetV5(context, TABLES[kind], _VISION_TOWER, size, side)
        self.tokens = MediaTokens(context, stated, _VISION, (size, hidden), _FIRST_IMAGE)
        self.norm = RMSNorm(context, f"{_VISION}.soft_embedding_norm", size, eps)
        self.scale = math.sqrt(size)

    def embed(self, inputs: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """
        Args:
            inputs: ``pixel_values`` [3, height, width] each.
        """
        return [
            self.tokens.projected(self.norm(self.scale * self.tower(item["pixel_values"])))
            for item in inputs
        ]


class Gemma3n(MediaDecoder, AnswersAboutClips, SupportsTranscription):
    """See the module."""

    media_rules: ClassVar[Sequence[WeightRule]] = (
        *usm_rules(_TOWER, "hearing.encoder"),
        *_embedder_rules(_AUDIO, "hearing"),
        *tower_rules(_VISION_TOWER, "seeing.tower"),
        *_embedder_rules(_VISION, "seeing"),
    )
    supported_languages: ClassVar[Mapping[str, str]] = {
        "ar": "Arabic", "de": "German", "en": "English", "es": "Spanish", "fr": "French", "hi": "Hindi",
        "it": "Italian", "ja": "Japanese", "ko": "Korean", "nl": "Dutch", "pt": "Portuguese",
        "ru": "Russian", "zh": "Chinese",
    }  # fmt: skip
    clip_question: ClassVar = ClipQuestion(
        "Transcribe this audio into {spoken}text", "Translate this audio into {target} text"
    )
    conversation: ClassVar[str] = (
        "<start_of_turn>user\n{}: <audio_soft_token><end_of_turn>\n<start_of_turn>model\n"
    )

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        """A tower whose part of the config is left out, as when its modality is limited to 0, is neither made
        nor loaded."""
        hidden, vocabulary = self.hidden_size(), self.settings.integer("vocab_size")
        self.hearing = self.seeing = None
        if "audio_config" in whole:
            self.hearing = Gemma3nHearing(context, whole, (hidden, vocabulary))
        if "vision_config" in whole:
            self.seeing = Gemma3nSeeing(context, whole, hidden)

    @property
    def _parts(self) -> Mapping[str, Gemma3nHearing | Gemma3nSeeing]:
        both = {"image": self.seeing, "audio": self.hearing}
        return {modality: part for modality, part in both.items() if part is not None}

    @property
    def modalities(self) -> Sequence[str]:  # type: ignore[override]
        """Modalities of the towers that were made."""
        return tuple(self._parts)

    def unread_weights(self) -> Mapping[str, str]:
        """Tensors of towers that were not made."""
        names = {"audio": (_TOWER, _AUDIO), "image": ("vision_tower", _VISION)}
        return {
            rf"{name}\..*": f"{modality} is limited to 0"
            for modality, own in names.items()
            if modality not in self._parts
            for name in own
        }

    def token_vectors(self, ids: Tensor) -> Tensor:
        """ids [T] int64 -> [T, H]: tokens of images and recordings have tables of their own."""
        vectors = super().token_vectors(ids)
        for part in self._parts.values():
            vectors = part.tokens.put_into(vectors, ids)
        return vectors

    def embed_tokens(self, batch: ForwardBatch) -> Tensor:
        """[T, H]: what the first block gets."""
        return self.input_vectors(batch)

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`; inputs are those of
        :class:`Gemma3nHearing` and :class:`Gemma3nSeeing`."""
        return self._parts[modality].embed(inputs)

    # ---- what it says of itself

    @classmethod
    def get_speech_to_text_config(
        cls, model_config: ModelInfo, task_type: SpeechTask
    ) -> SpeechToTextConfig:
        """Clips of as many places as there are."""
        every = Settings({**ENCODER, **part_of(model_config.whole_config, "audio_config")})
        states = Settings(model_config.whole_config).integer("audio_soft_tokens_per_image", _PLACES)
        seconds = min(_LONGEST_SECONDS, states * every.integer("conf_reduction_factor") * _STATE)
        return SpeechToTextConfig(
            max_audio_clip_s=seconds, overlap_chunk_second=min(1.0, seconds / 2)
        )

    @classmethod
    def get_num_audio_tokens(
        cls, audio_duration_s: float, stt_config: SpeechToTextConfig, model_config: ModelInfo
    ) -> int | None:
        whole = Settings(model_config.whole_config)
        return whole.integer("audio_soft_tokens_per_image", _PLACES)


_LONGEST_SECONDS, _STATE = 30.0, 0.04

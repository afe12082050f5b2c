"""A decoder that hears: Llama's, with a linear layer that makes embeddings of bands of sound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from headrace_core.model import ModelInfo, WeightRule
from headrace_core.request import Prompt, TextPrompt
from headrace_core.speech.model import (
    AudioClip,
    SpeechTask,
    SpeechToTextConfig,
    SupportsTranscription,
)
from headrace_models.families.decoder.llama import LlamaForCausalLM
from headrace_models.layers.base import Part
from headrace_models.layers.linear import Linear
from headrace_models.loading.rules.llama import RULES

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

TOKENS_PER_SECOND = 25


class SpeechExampleForCausalLM(LlamaForCausalLM, SupportsTranscription):
    """Writes down what it hears behind the token ``<|audio|>``."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (*RULES, WeightRule("bands", "bands"))
    modalities: ClassVar[Sequence[str]] = ("audio",)

    supported_languages = {"en": "English", "de": "German"}  # noqa: RUF012 - a mapping, not changed

    def prepare(self, context: BuildContext, prefix: str) -> None:
        super().prepare(context, prefix)
        num_bands = self.settings.integer("num_bands")
        self.bands = Linear(
            context, f"{prefix}bands", num_bands, [Part(self.hidden_size())], bias=True
        )

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See ``headrace_core.model.SupportsMultiModal``; ``bands`` [tokens, num_bands] each."""
        dtype = getattr(torch, self.context.dtype)
        return [self.bands(item["bands"].to(dtype)) for item in inputs]

    @classmethod
    def get_speech_to_text_config(
        cls, model_config: ModelInfo, task_type: SpeechTask
    ) -> SpeechToTextConfig:
        return SpeechToTextConfig(sample_rate=16_000, max_audio_clip_s=20.0)

    @classmethod
    def get_generation_prompt(
        cls, audio: AudioClip, language: str | None, task_type: SpeechTask, request_prompt: str
    ) -> Prompt:
        order = "Translate" if task_type == "translate" else "Write"
        told = f"{order} {cls.supported_languages.get(language or '', '')}: {request_prompt}"
        return TextPrompt(
            prompt=f"<|audio|>{told}",
            multi_modal_data={"audio": (audio.samples, audio.sample_rate)},
        )

    @classmethod
    def get_num_audio_tokens(cls, audio_duration_s: float) -> int:
        return max(1, int(audio_duration_s * TOKENS_PER_SECOND))

"""Qwen2-Audio: Whisper's encoder, pooled by two, in front of a Qwen2 decoder.

Chu et al. 2024, arXiv:2407.10759.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
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
from headrace_models.config.chat_template import template_text
from headrace_models.config.settings import Settings
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.audio.whisper import AudioEncoder, encoder_rules
from headrace_models.layers.base import Part
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.decoders.windows import upper_layer_window
from headrace_models.layers.linear import Linear
from headrace_models.loading.rules.llama import RULES

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from headrace_core.model import BuildContext

_TEXT = "language_model."
_DECODER = {
    "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
_ENCODER = {
    "d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120,
    "num_mel_bins": 128, "max_source_positions": 1500, "activation_function": "gelu",
}  # fmt: skip
"""Values that the published configs leave to be known."""
_FRAMES_PER_SECOND = 100


class Qwen2AudioForConditionalGeneration(LlamaDecoder, AnswersAboutClips, SupportsTranscription):
    """Text from text and audio; a clip takes a placeholder for every 40 ms."""

    module_names: ClassVar[Sequence[tuple[str, str]]] = (
        (r"^model\.language_model\.", f"{_TEXT}model."),
    )
    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *(replace(rule, source=f"{_TEXT}{rule.source}") for rule in RULES),
        *encoder_rules("audio_tower", "encoder"),
        WeightRule("multi_modal_projector.linear", "projector"),
    )
    modalities: ClassVar[Sequence[str]] = ("audio",)
    media_parts: ClassVar[Sequence[str]] = ("encoder", "projector")
    supported_languages: ClassVar[Mapping[str, str]] = {
        "de": "German", "en": "English", "es": "Spanish", "fr": "French", "it": "Italian",
        "ja": "Japanese", "yue": "Cantonese", "zh": "Chinese",
    }  # fmt: skip
    clip_question: ClassVar = ClipQuestion(
        "Transcribe the {spoken}speech word for word",
        "Translate the {spoken}speech into {target}",
    )
    conversation: ClassVar[str] = (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
        "Audio 1: <|audio_bos|><|AUDIO|><|audio_eos|>\n{}<|im_end|>\n<|im_start|>assistant\n"
    )

    def __init__(self, context: BuildContext, prefix: str = "") -> None:
        whole = replace(context, config={**_DECODER, **context.config})
        super().__init__(whole, f"{prefix}{_TEXT}")

    def prepare(self, context: BuildContext, prefix: str) -> None:
        super().prepare(context, prefix)
        settings = _encoder_settings(context.whole_config)
        outer = prefix.removesuffix(_TEXT)
        self.encoder = AudioEncoder(context, settings, f"{outer}audio_tower", pools=True)
        self.projector = Linear(
            context,
            f"{outer}multi_modal_projector.linear",
            settings.integer("d_model"),
            [Part(self.hidden_size())],
            bias=True,
        )

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        """Qwen2's: biased queries, keys and values."""
        window = upper_layer_window(self.settings, index)
        return self.attention(context, name, sliding_window=window, qkv_bias=True)

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``input_features`` [frames, bins] and ``num_frames`` [1] each: the frames that
                hold audio, behind which a few of silence may follow.
        """
        lengths = [(int(item["num_frames"][0]) + 1) // 2 for item in inputs]
        states = self.encoder([item["input_features"] for item in inputs], lengths)
        return torch.split(self.projector(states), [length // 2 for length in lengths])

    # ---- what it says of itself

    @classmethod
    def get_speech_to_text_config(
        cls, model_config: ModelInfo, task_type: SpeechTask
    ) -> SpeechToTextConfig:
        settings = _encoder_settings(model_config.whole_config)
        frames = 2 * settings.integer("max_source_positions")
        seconds = frames / _FRAMES_PER_SECOND
        return SpeechToTextConfig(
            max_audio_clip_s=seconds, overlap_chunk_second=min(1.0, seconds / 2)
        )

    @classmethod
    def conversation_of(cls, path: Path) -> str:
        """Checkpoints before the instructed ones have no template."""
        return cls.conversation if template_text(path) else _PLAIN

    @classmethod
    def get_num_audio_tokens(
        cls, audio_duration_s: float, stt_config: SpeechToTextConfig, model_config: ModelInfo
    ) -> int | None:
        frames = int(audio_duration_s * _FRAMES_PER_SECOND)
        return (frames + 1) // 2 // 2


_PLAIN = "<|audio_bos|><|AUDIO|><|audio_eos|>{}:"


def _encoder_settings(whole: Mapping[str, Any]) -> Settings:
    stated = whole.get("audio_config")
    stated = {} if stated is None else stated
    if not isinstance(stated, Mapping):
        raise UnsupportedModel(f"config.json: audio_config = {stated!r:.200}: must be an object")
    return Settings({**_ENCODER, **stated})

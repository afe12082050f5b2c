"""Granite Speech: a Conformer, a Q-Former over windows of its states, in front of a Granite decoder.

Saon et al. 2025, arXiv:2505.08699. An adapter beside the weights is for prompts with recordings, and is
added to the weights where recordings are taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.errors import UnsupportedModel
from headrace_core.model import ModelInfo, WeightRule
from headrace_core.speech.model import (
    SpeechTask,
    SpeechToTextConfig,
    SupportsTranscription,
)
from headrace_models.catalogue.multimodal import WRAPPERS
from headrace_models.clip_questions import AnswersAboutClips, ClipQuestion
from headrace_models.config.chat_template import template_text
from headrace_models.config.settings import Settings
from headrace_models.layers.audio.conformer import Conformer, conformer_rules, unread_weights
from headrace_models.layers.audio.qformer import WindowQFormer, qformer_rules
from headrace_models.layers.vision.media_decoder import MediaDecoder, part_of
from headrace_models.loading.adapter import Adapter

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_TOWER, _PROJECTOR = "encoder", "projector"
_ENCODER = {
    "input_dim": 160, "num_layers": 10, "hidden_dim": 1024, "feedforward_mult": 4, "num_heads": 8,
    "output_dim": 42, "context_size": 200, "max_pos_emb": 512, "conv_kernel_size": 15,
    "conv_expansion_factor": 2,
}  # fmt: skip
_FORMER = {
    "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
}  # fmt: skip
"""Values that configs may leave to be known."""
_WINDOW, _DOWNSAMPLED = 15, 5


class GraniteSpeech(MediaDecoder, AnswersAboutClips, SupportsTranscription):
    """A recording takes three placeholders for every 300 ms."""

    modalities: ClassVar[Sequence[str]] = ("audio",)
    media_rules: ClassVar[Sequence[WeightRule]] = (
        *conformer_rules(_TOWER, "encoder"),
        *qformer_rules(_PROJECTOR, "projector"),
    )
    supported_languages: ClassVar[Mapping[str, str]] = {
        "de": "German", "en": "English", "es": "Spanish", "fr": "French", "ja": "Japanese",
        "pt": "Portuguese",
    }  # fmt: skip
    clip_question: ClassVar = ClipQuestion(
        "can you transcribe the speech into a written format?", "translate the speech to {target}"
    )

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        self.multiplier = self.settings.number("embedding_multiplier", 1.0)
        settings = Settings({**_ENCODER, **part_of(whole, "encoder_config")})
        kept = self.kept_layers(settings)
        self.encoder = Conformer(context, settings, _TOWER, kept)
        states = (len(kept) + 1) * settings.integer("hidden_dim")
        self.projector = WindowQFormer(
            context,
            {**_FORMER, **part_of(whole, "projector_config")},
            _PROJECTOR,
            (states, self.hidden_size()),
            _window(Settings(whole)),
        )

    def kept_layers(self, settings: Settings) -> Sequence[int]:
        """See :class:`Conformer`."""
        return ()

    def unread_weights(self) -> Mapping[str, str]:
        return unread_weights(_TOWER)

    def renamed(
        self, tensors: Iterable[tuple[str, Tensor, Path]]
    ) -> Iterable[tuple[str, Tensor, Path]]:
        """:meth:`translate` without the adapter that lies beside the weights."""
        inner = getattr(super(), "translate", None)
        return tensors if inner is None else inner(tensors)

    def translate(
        self, tensors: Iterable[tuple[str, Tensor, Path]]
    ) -> Iterable[tuple[str, Tensor, Path]]:
        """See :class:`headrace_core.model.TranslatesWeights`: the adapter is added."""
        named = self.renamed(tensors)
        folder = self.context.path
        own_name = WRAPPERS["GraniteSpeechForConditionalGeneration"].own_name
        adapter = None if folder is None else Adapter.of(folder, own_name)
        if adapter is None and self.context.whole_config.get("has_lora_adapter"):
            raise UnsupportedModel(
                "config.json: has_lora_adapter = true: there must be adapter_config.json and "
                "adapter_model.safetensors beside it, as recordings are not understood without; set "
                'limit_mm_per_prompt to {"audio": 0} for text alone'
            )
        return named if adapter is None else adapter.added(named)

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``input_features`` [states, 2 * bins] each: two frames of a spectrogram side by side.
        """
        vectors = (self.projector(self.encoder(item["input_features"])) for item in inputs)
        return [self.multiplier * own for own in vectors]

    # ---- what it says of itself

    @classmethod
    def get_speech_to_text_config(
        cls, model_config: ModelInfo, task_type: SpeechTask
    ) -> SpeechToTextConfig:
        """Clips that take half of the context, and two minutes at most."""
        longest = min(_LONGEST_SECONDS, model_config.max_model_len / 2 / _TOKENS_PER_SECOND)
        return SpeechToTextConfig(max_audio_clip_s=max(1.0, longest), overlap_chunk_second=0.5)

    @classmethod
    def conversation_of(cls, path: Path) -> str:
        """By the template's kind."""
        return _BY_ROLES if _ROLE in template_text(path) else _BY_NAMES

    @classmethod
    def get_num_audio_tokens(
        cls, audio_duration_s: float, stt_config: SpeechToTextConfig, model_config: ModelInfo
    ) -> int | None:
        window, queries = _window(Settings(model_config.whole_config))
        states = (int(audio_duration_s * _FRAMES_PER_SECOND) + 1) // 2
        return -(-states // window) * queries


class GraniteSpeechPlus(GraniteSpeech):
    """The projector gets the states of some of the encoder's layers, too."""

    def kept_layers(self, settings: Settings) -> Sequence[int]:
        """Raises: UnsupportedModel: ``cat_hidden_layers`` is no list of layers."""
        stated = settings.config.get("cat_hidden_layers") or []
        number = settings.integer("num_layers")
        good = isinstance(stated, list) and all(type(x) is int and 0 <= x < number for x in stated)
        if not good or len(set(stated)) < len(stated):
            raise UnsupportedModel(
                f"config.json: encoder_config.cat_hidden_layers = {stated!r:.200}: must be different "
                f"integers from 0 to {number - 1}"
            )
        return stated


_ROLE = "<|start_of_role|>"
_BY_ROLES = (
    "<|start_of_role|>system<|end_of_role|>Knowledge Cutoff Date: April 2024.\n"
    "Today's Date: April 9, 2025.\nYou are Granite, developed by IBM. You are a helpful AI assistant"
    "<|end_of_text|>\n<|start_of_role|>user<|end_of_role|><|audio|>{}<|end_of_text|>\n"
    "<|start_of_role|>assistant<|end_of_role|>"
)
"""Cards of checkpoints 3.2 and 3.3 ask for this."""
_BY_NAMES = "USER: <|audio|>{}\n ASSISTANT:"
"""Checkpoints since 4.0 have this."""
_LONGEST_SECONDS = 120.0
_FRAMES_PER_SECOND = 100
_TOKENS_PER_SECOND = 10


def _window(settings: Settings) -> tuple[int, int]:
    """States of a window, and vectors that it becomes."""
    window = settings.integer("window_size", _WINDOW, maximum=1 << 12)
    return window, max(1, window // settings.integer("downsample_rate", _DOWNSAMPLED))

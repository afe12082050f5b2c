"""Fun-ASR-Nano: SenseVoice's encoder and blocks that see the whole, in front of a Qwen3 decoder, which writes
down what is said.

Alibaba DAMO Academy 2025, "Fun-ASR Technical Report", arXiv:2509.12508.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.model import ModelInfo, WeightRule
from headrace_core.request import TextPrompt
from headrace_core.speech.model import (
    AudioClip,
    SpeechTask,
    SpeechToTextConfig,
    SupportsTranscription,
)
from headrace_models.config.settings import MAX_LAYERS, Settings
from headrace_models.config.special_tokens import refuse_special_tokens
from headrace_models.layers.audio.sanm import MemoryBlock, MemoryEncoder, block_rules
from headrace_models.layers.vision.media_decoder import MediaDecoder, part_of
from headrace_models.layers.vision.mlp import Projector

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_TOWER, _PROJECTOR = "audio_tower", "multi_modal_projector"
_ENCODER = {
    "num_mel_bins": 80, "num_stacked_frames": 7, "hidden_size": 512, "num_attention_heads": 4,
    "intermediate_size": 2048, "num_hidden_layers": 70, "num_timestamp_prediction_layers": 20,
    "layer_norm_eps": 1e-5, "hidden_act": "relu", "max_position_embeddings": 2049, "fsmn_kernel_size": 11,
}  # fmt: skip
_ADAPTOR = {
    "hidden_size": 1024, "num_attention_heads": 8, "intermediate_size": 256, "num_hidden_layers": 2,
    "layer_norm_eps": 1e-5, "hidden_act": "relu", "projector_hidden_act": "relu",
    "projector_hidden_size": 2048,
}  # fmt: skip
"""Values that configs may leave out."""


class FunAsrNano(MediaDecoder, SupportsTranscription):
    """A recording takes a placeholder for every 60 ms."""

    modalities: ClassVar[Sequence[str]] = ("audio",)
    media_rules: ClassVar[Sequence[WeightRule]] = (
        *block_rules(f"{_TOWER}.layers.{{}}", "encoder.layers.{}"),
        WeightRule(f"{_PROJECTOR}.linear_1", "projector.up"),
        WeightRule(f"{_PROJECTOR}.linear_2", "projector.down"),
        *block_rules(f"{_PROJECTOR}.layers.{{}}", "adaptor.{}"),
    )
    supported_languages: ClassVar[Mapping[str, str]] = {
        "en": "English", "ja": "Japanese", "zh": "Chinese",
    }  # fmt: skip

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        audio = Settings({**_ENCODER, **part_of(whole, "audio_config")})
        stated = part_of({"adaptor_config": {}, **whole}, "adaptor_config")
        settings = Settings({**_ADAPTOR, **stated})
        size, between = settings.integer("hidden_size"), settings.integer("projector_hidden_size")
        if size != self.hidden_size():
            raise UnsupportedModel(
                f"config.json: adaptor_config.hidden_size = {size}: must be the language model's hidden_size "
                f"= {self.hidden_size()}"
            )
        self.encoder = MemoryEncoder(context, audio, _TOWER)
        self.projector = Projector(
            context,
            f"{_PROJECTOR}.linear_1",
            f"{_PROJECTOR}.linear_2",
            (audio.integer("hidden_size"), between, size),
            settings.activation("projector_hidden_act"),
        )
        self.adaptor = [
            MemoryBlock(context, settings, f"{_PROJECTOR}.layers.{index}", size)
            for index in range(settings.integer("num_hidden_layers", maximum=MAX_LAYERS))
        ]

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``input_features`` [states, stacked * bins] each: frames that stand side by side.
        """
        return [self._recording(item["input_features"]) for item in inputs]

    def _recording(self, frames: Tensor) -> Tensor:
        x = self.projector(self.encoder(frames))
        for layer in self.adaptor:
            x = layer(x)
        return x

    # ---- what it says of itself

    @classmethod
    def get_speech_to_text_config(
        cls, model_config: ModelInfo, task_type: SpeechTask
    ) -> SpeechToTextConfig:
        """Clips that take half of the context, and as many places as the encoder has at most."""
        stated = part_of(model_config.whole_config, "audio_config")
        places = Settings({**_ENCODER, **stated}).integer("max_position_embeddings") - 1
        tokens = min(places, model_config.max_model_len // 2)
        return SpeechToTextConfig(
            max_audio_clip_s=max(1.0, tokens * _SECONDS_PER_TOKEN), overlap_chunk_second=0.5
        )

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
        """A request to write down what is said, in the words that the model was trained with; a client's text
        is its context.

        Raises:
            RequestError: a translation, or a text in another language than that which is spoken; special
                tokens in the request's prompt.
        """
        if task_type == "translate" or to_language not in (None, language):
            raise RequestError(
                "/v1/audio/translations: the model only writes down what is said", param="file"
            )
        refuse_special_tokens(model_config.path, request_prompt)
        context = _CONTEXT.format(request_prompt.strip()) if request_prompt.strip() else ""
        spoken = "" if language is None else f"成{_NAMES[language]}"
        media: dict[str, Any] = {"audio": (audio.samples, audio.sample_rate)}
        return TextPrompt(
            prompt=f"{_BEGIN}{context}语音转写{spoken}：{_END}",
            multi_modal_data=media,
        )

    @classmethod
    def get_num_audio_tokens(
        cls, audio_duration_s: float, stt_config: SpeechToTextConfig, model_config: ModelInfo
    ) -> int | None:
        return int(audio_duration_s / _SECONDS_PER_TOKEN)


_NAMES = {"en": "英文", "ja": "日文", "zh": "中文"}
_CONTEXT = (
    "请结合上下文信息，更加准确地完成语音转写任务。如果没有相关信息，我们会留空。\n\n\n"
    "**上下文信息：**\n\n\n{}\n"
)
_BEGIN = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
_END = "<|object_ref_start|><|im_end|>\n<|im_start|>assistant\n"
_SECONDS_PER_TOKEN = 0.06

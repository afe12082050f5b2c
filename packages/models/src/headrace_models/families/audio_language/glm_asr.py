"""GLM-ASR: an encoder on pieces of 30 s whose heads turn by half, four states to a vector, in front of a
Llama decoder.

Z.ai 2025, "GLM-ASR-Nano".
"""

from __future__ import annotations

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
from headrace_models.config.rope import rope_settings
from headrace_models.config.settings import MAX_LAYERS, Settings
from headrace_models.layers.audio.whisper import NORM_EPS, Conv1d
from headrace_models.layers.base import Layer
from headrace_models.layers.mlp import MLP
from headrace_models.layers.norm import LayerNorm
from headrace_models.layers.vision.axes import frequencies
from headrace_models.layers.vision.blocks import Segments, VisionAttention, VisionBlock
from headrace_models.layers.vision.media_decoder import MediaDecoder, part_of
from headrace_models.layers.vision.mlp import Projector

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_TOWER, _PROJECTOR = "audio_tower", "multi_modal_projector"
_STEM_ACTIVATION = "gelu"
_KEY = 1
"""Of query, key and value, the one without a bias."""
_NAMES = (("q_proj", "k_proj", "v_proj"), "o_proj")
_THETA, _PARTIAL = 10_000.0, 0.5
_ENCODER = {
    "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20,
    "num_mel_bins": 128, "hidden_act": "gelu", "max_position_embeddings": 1500,
}  # fmt: skip
"""Values that a config may leave to be known."""


class GlmAsrEncoder(Layer):
    """Two convolutions and blocks in which all states of a piece see each other, silence too.

    Args:
        settings: the encoder's part of the config.
        name: as the checkpoint spells it.
    """

    def __init__(self, context: BuildContext, settings: Settings, name: str) -> None:
        self.dtype: torch.dtype = getattr(torch, context.dtype)
        self.ops, self.device = context.ops, context.device
        hidden, bins = settings.integer("hidden_size"), settings.integer("num_mel_bins")
        heads = settings.integer("num_attention_heads")
        settings.refuse("num_key_value_heads", heads)
        self.conv1 = Conv1d(context, f"{name}.conv1", bins, hidden)
        self.conv2 = Conv1d(context, f"{name}.conv2", hidden, hidden, stride=2)
        rope = rope_settings(settings.config, theta=_THETA, partial=_PARTIAL)
        turning = int(hidden // heads * rope.partial_rotary_factor)
        self.frequencies = frequencies(rope.theta, turning // 2)
        self.layers = [
            _block(context, settings, f"{name}.layers.{index}")
            for index in range(settings.integer("num_hidden_layers", maximum=MAX_LAYERS))
        ]
        self.final_norm = LayerNorm(context, f"{name}.norm", hidden, NORM_EPS)

    def __call__(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Encode pieces at once; they do not hear each other.

        Args:
            pieces: [frames, bins] each.

        Returns:
            [ceil(frames / 2), hidden] each.
        """
        begun = [self._begin(piece) for piece in pieces]
        sizes = [len(states) for states in begun]
        angles = torch.cat([torch.arange(size)[:, None] * self.frequencies for size in sizes])
        rotary = torch.cat((angles.cos(), angles.sin()), dim=-1).to(self.device)
        segments = Segments.of(sizes, rotary.device)
        x, residual = torch.cat(begun), None
        for layer in self.layers:
            x, residual = layer(x, residual, segments, rotary)
        hidden, _ = self.final_norm.add(x, residual)
        return list(torch.split(hidden, sizes))

    def _begin(self, piece: Tensor) -> Tensor:
        x = self.conv1.activated(piece.to(self.dtype), _STEM_ACTIVATION)
        return self.conv2.activated(x, _STEM_ACTIVATION)


def _block(context: BuildContext, settings: Settings, name: str) -> VisionBlock:
    hidden = settings.integer("hidden_size")
    return VisionBlock(
        LayerNorm(context, f"{name}.input_layernorm", hidden, NORM_EPS),
        VisionAttention(
            context,
            f"{name}.self_attn",
            hidden_size=hidden,
            num_heads=settings.integer("num_attention_heads"),
            names=_NAMES,
            unbiased=(_KEY,),
        ),
        LayerNorm(context, f"{name}.post_attention_layernorm", hidden, NORM_EPS),
        MLP(
            context,
            f"{name}.mlp.fc1",
            f"{name}.mlp.fc2",
            hidden,
            settings.integer("intermediate_size"),
            settings.activation("hidden_act"),
        ),
    )


def _encoder_rules(source: str, target: str) -> tuple[WeightRule, ...]:
    layer, own = f"{source}.layers.{{}}", f"{target}.layers.{{}}"
    attention, qkv = f"{layer}.self_attn", f"{own}.attention.qkv"
    return (
        WeightRule(f"{source}.conv1", f"{target}.conv1"),
        WeightRule(f"{source}.conv2", f"{target}.conv2"),
        WeightRule(f"{source}.norm", f"{target}.final_norm"),
        WeightRule(f"{layer}.input_layernorm", f"{own}.attention_norm"),
        WeightRule(f"{attention}.q_proj", qkv, part=0),
        WeightRule(f"{attention}.k_proj", qkv, part=1),
        WeightRule(f"{attention}.v_proj", qkv, part=2),
        WeightRule(f"{attention}.v_proj.bias", f"{qkv}.bias", part=1),
        WeightRule(f"{attention}.o_proj", f"{own}.attention.out"),
        WeightRule(f"{layer}.post_attention_layernorm", f"{own}.mlp_norm"),
        WeightRule(f"{layer}.mlp.fc1", f"{own}.mlp.up"),
        WeightRule(f"{layer}.mlp.fc2", f"{own}.mlp.down"),
    )


class GlmAsr(MediaDecoder, AnswersAboutClips, SupportsTranscription):
    """A recording takes a placeholder for every 80 ms."""

    modalities: ClassVar[Sequence[str]] = ("audio",)
    media_rules: ClassVar[Sequence[WeightRule]] = (
        *_encoder_rules(_TOWER, "encoder"),
        WeightRule(f"{_PROJECTOR}.linear_1", "projector.up"),
        WeightRule(f"{_PROJECTOR}.linear_2", "projector.down"),
    )
    supported_languages: ClassVar[Mapping[str, str]] = {
        "ca": "Catalan", "de": "German", "en": "English", "es": "Spanish", "fr": "French",
        "id": "Indonesian", "it": "Italian", "ja": "Japanese", "lt": "Lithuanian", "ms": "Malay",
        "nl": "Dutch", "no": "Norwegian", "pt": "Portuguese", "ru": "Russian", "sl": "Slovenian",
        "uk": "Ukrainian", "yue": "Cantonese", "zh": "Chinese",
    }  # fmt: skip
    clip_question: ClassVar = ClipQuestion(
        "Please transcribe this audio into {spoken}text",
        "Please translate this audio into {target} text",
    )
    conversation: ClassVar[str] = (
        "<|user|>\n<|begin_of_audio|><|pad|><|end_of_audio|><|user|>\n{}<|assistant|>\n"
    )

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        settings = Settings({**_ENCODER, **part_of(whole, "audio_config")})
        self.group_size = settings.integer("intermediate_size")
        states = settings.integer("hidden_size")
        if self.group_size % states:
            raise UnsupportedModel(
                f"config.json: audio_config.intermediate_size = {self.group_size}: must be a multiple of "
                f"hidden_size = {states}, as so many states become a vector"
            )
        self.group = self.group_size // states
        self.encoder = GlmAsrEncoder(context, settings, _TOWER)
        hidden = self.hidden_size()
        self.projector = Projector(
            context,
            f"{_PROJECTOR}.linear_1",
            f"{_PROJECTOR}.linear_2",
            (self.group_size, 2 * hidden, hidden),
            Settings(whole).activation("projector_hidden_act", default="gelu"),
        )

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``input_features`` [pieces, frames, bins] each, and ``num_frames`` [1]: frames of all
                pieces that hold audio; silence is behind them.
        """
        return [self._recording(item["input_features"], item["num_frames"]) for item in inputs]

    def _recording(self, pieces: Tensor, num_frames: Tensor) -> Tensor:
        """A piece at a time: memory is that of one, however long the recording."""
        vectors = torch.cat([self._piece(piece) for piece in pieces])
        return vectors[: (int(num_frames[0]) + 1) // 2 // self.group]

    def _piece(self, piece: Tensor) -> Tensor:
        (states,) = self.encoder([piece])
        whole = len(states) // self.group * self.group
        return self.projector(states[:whole].reshape(-1, self.group_size))

    # ---- what it says of itself

    @classmethod
    def get_speech_to_text_config(
        cls, model_config: ModelInfo, task_type: SpeechTask
    ) -> SpeechToTextConfig:
        """Clips that take half of the context, and five minutes at most."""
        longest = min(_LONGEST_SECONDS, model_config.max_model_len / 2 / _TOKENS_PER_SECOND)
        return SpeechToTextConfig(max_audio_clip_s=max(1.0, longest), overlap_chunk_second=0.5)

    @classmethod
    def get_num_audio_tokens(
        cls, audio_duration_s: float, stt_config: SpeechToTextConfig, model_config: ModelInfo
    ) -> int | None:
        return int(audio_duration_s * _TOKENS_PER_SECOND)


_LONGEST_SECONDS = 300.0
_TOKENS_PER_SECOND = 12.5

"""Whisper in all sizes, and models distilled from it: an audio encoder, a decoder that attends to it.

Radford et al. 2022, arXiv:2212.04356; distilled: Gandhi et al. 2023, arXiv:2311.00430.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.errors import RequestError, UnsupportedFeature, UnsupportedModel
from headrace_core.model import ModelInfo, WeightRule
from headrace_core.request import EncoderDecoderPrompt
from headrace_core.speech.model import (
    AudioClip,
    LanguageProbe,
    SpeechTask,
    SpeechToTextConfig,
    SupportsTranscription,
)
from headrace_models.config.settings import MAX_LAYERS, Settings
from headrace_models.config.special_tokens import text_ids
from headrace_models.families.speech.whisper_alignment import AlignmentHeads
from headrace_models.families.speech.whisper_tokens import (
    LANGUAGES,
    SECONDS_PER_TIMESTAMP,
    WhisperTokens,
)
from headrace_models.layers.attention.cross_attention import CrossAttention
from headrace_models.layers.attention.self_attention import Attention
from headrace_models.layers.audio.whisper import (
    NORM_EPS,
    AudioEncoder,
    attention_rules,
    block_rules,
    encoder_rules,
    heads_of,
)
from headrace_models.layers.base import walk
from headrace_models.layers.decoder import Block, Decoder
from headrace_models.layers.embedding import Embedding
from headrace_models.layers.mlp import MLP
from headrace_models.layers.norm import LayerNorm

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import AttentionLayer, BuildContext

logger = logging.getLogger(__name__)

_SAMPLE_RATE = 16000
_STATES_PER_SECOND = 50
_CROSS = "layers.{}.cross_attention"


class WhisperForConditionalGeneration(Decoder, SupportsTranscription):
    """Transcribes in any of its languages, and translates into English."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *encoder_rules("model.encoder", "encoder"),
        WeightRule("model.decoder.embed_tokens", "embed"),
        WeightRule("model.decoder.embed_positions", "positions"),
        WeightRule("model.decoder.layer_norm", "final_norm"),
        *attention_rules("model.decoder.layers.{}.self_attn", "layers.{}.attention"),
        *block_rules("model.decoder.layers.{}", "layers.{}"),
        WeightRule("model.decoder.layers.{}.encoder_attn_layer_norm", "layers.{}.cross_norm"),
        WeightRule("model.decoder.layers.{}.encoder_attn.q_proj", f"{_CROSS}.query"),
        WeightRule("model.decoder.layers.{}.encoder_attn.k_proj", f"{_CROSS}.key_value", part=0),
        WeightRule("model.decoder.layers.{}.encoder_attn.v_proj", f"{_CROSS}.key_value", part=1),
        WeightRule("model.decoder.layers.{}.encoder_attn.v_proj.bias", f"{_CROSS}.key_value.bias"),
        WeightRule("model.decoder.layers.{}.encoder_attn.out_proj", f"{_CROSS}.out"),
        WeightRule("proj_out", "head"),
    )
    ties_embeddings: ClassVar[bool] = True
    embedding_name: ClassVar[str] = "model.decoder.embed_tokens"
    blocks_name: ClassVar[str] = "model.decoder.layers"
    head_name: ClassVar[str] = "proj_out"
    logits_processors: ClassVar[Sequence[str]] = (
        "headrace_models.families.speech.whisper_rules:WhisperRules",
    )

    no_stages = "it has an encoder"

    supported_languages: ClassVar[Mapping[str, str]] = LANGUAGES
    supports_transcription_only: ClassVar[bool] = True
    supports_segment_timestamp: ClassVar[bool] = True

    # ---- what it is made of

    def hidden_size(self) -> int:
        return self.settings.integer("d_model")

    def num_layers(self) -> int:
        return self.settings.integer("decoder_layers", maximum=MAX_LAYERS)

    def prepare(self, context: BuildContext, prefix: str) -> None:
        limit = self.settings.integer("max_target_positions", 448)
        if context.max_model_len > limit:
            raise UnsupportedModel(
                f"max_model_len = {context.max_model_len}: must be at most max_target_positions = "
                f"{limit}; learned positions do not extend"
            )
        self.encoder = AudioEncoder(context, self.settings, f"{prefix}model.encoder")
        name = f"{prefix}model.decoder.embed_positions"
        self.positions = Embedding(context, name, limit, self.hidden_size())
        self.tokens: WhisperTokens | None = None

    def embed_tokens(self, batch: ForwardBatch) -> Tensor:
        positions = self.positions(batch.positions)
        return self.context.ops.add(self.input_vectors(batch), positions)

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return WhisperBlock(context, self.settings, name)

    def make_final_norm(self, context: BuildContext, prefix: str) -> LayerNorm:
        name = f"{prefix}model.decoder.layer_norm"
        return LayerNorm(context, name, self.hidden_size(), NORM_EPS)

    # ---- what it does

    def attention_layers(self) -> Mapping[str, AttentionLayer]:
        """See :class:`headrace_core.model.CausalLM`."""
        kinds = (Attention, CrossAttention)
        found = (layer for _, layer in walk(self) if isinstance(layer, kinds))
        return {layer.spec.name: layer for layer in found}

    def encode(self, inputs: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """See :class:`headrace_core.model.SupportsEncoderDecoder`.

        Args:
            inputs: ``input_features`` [frames, bins] each, twice ``max_source_positions`` frames.
        """
        return self.encoder([item["input_features"] for item in inputs])

    def align(self, batch: ForwardBatch, inputs: Mapping[str, Tensor]) -> Tensor:
        """See :class:`headrace_core.model.SupportsAlignment`; rows of the prompt are zeros.

        Raises:
            UnsupportedFeature: the checkpoint does not say which heads align.
        """
        heads = AlignmentHeads.of(self.context.generation_config, self.settings)
        if self.context.communicator.world_size > 1:
            raise UnsupportedFeature("times of words: not with tensor parallelism")
        ids: list[int] = batch.input_ids.tolist()
        begin = self._tokens().begins_with(ids)
        num_states = max(1, int(inputs["num_frames"][0]) // 2)
        cross = [block.cross_attention for block in self.layers if isinstance(block, WhisperBlock)]
        with heads.watching(cross) as weights:
            self.forward(batch)
        result = torch.zeros((len(ids), num_states), device=batch.input_ids.device)
        if begin < len(ids):
            result[begin:] = heads.matrix(weights, begin, num_states)
        return result

    def _tokens(self) -> WhisperTokens:
        if self.tokens is None:
            assert self.context.path is not None
            self.tokens = WhisperTokens.of(self.context.path, self.context.generation_config)
        return self.tokens

    # ---- what it says of itself

    @classmethod
    def get_speech_to_text_config(
        cls, model_config: ModelInfo, task_type: SpeechTask
    ) -> SpeechToTextConfig:
        """Raises: RequestError if it is to translate, and knows English only."""
        _check_task(_tokens(model_config), task_type)
        clip = Settings(model_config.config).integer("max_source_positions", 1500)
        seconds = clip / _STATES_PER_SECOND
        return SpeechToTextConfig(
            sample_rate=_SAMPLE_RATE,
            max_audio_clip_s=seconds,
            overlap_chunk_second=min(1.0, seconds / 2),
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
    ) -> EncoderDecoderPrompt:
        """``[previous text] start [language task] [no timestamps]``.

        Raises:
            RequestError: a language or task that the checkpoint does not know; a target language
                other than English; special tokens in the previous text.
        """
        tokens = _tokens(model_config)
        _check_task(tokens, task_type)
        if to_language not in (None, "en" if task_type == "translate" else language):
            raise RequestError(
                f"to_language = {to_language!r}: the model translates into English only ('en'), by "
                "/v1/audio/translations",
                param="to_language",
                value=to_language,
            )
        ids = _previous(tokens, model_config, request_prompt)
        ids += [tokens.start, *_told(tokens, language, task_type)]
        if not timestamps:
            ids.append(tokens.no_timestamps)
        return _prompt(audio, ids)

    @classmethod
    def get_num_audio_tokens(
        cls, audio_duration_s: float, stt_config: SpeechToTextConfig, model_config: ModelInfo
    ) -> int | None:
        """Encoder states that hold the audio."""
        return math.ceil(audio_duration_s * _STATES_PER_SECOND)

    @classmethod
    def get_language_probe(
        cls, audio: AudioClip, model_config: ModelInfo, stt_config: SpeechToTextConfig
    ) -> LanguageProbe | None:
        """The token after the start; None for a checkpoint that knows English only."""
        tokens = _tokens(model_config)
        if not tokens.multilingual:
            return None
        codes = {token: code for code, token in tokens.languages.items()}
        return LanguageProbe(_prompt(audio, [tokens.start]), codes)

    @classmethod
    def get_timestamp(cls, token_id: int, model_config: ModelInfo) -> float | None:
        index = token_id - _tokens(model_config).first_timestamp
        limit = Settings(model_config.config).integer("max_source_positions", 1500)
        return index * SECONDS_PER_TIMESTAMP if 0 <= index <= limit else None

    @classmethod
    def says_timestamps(cls, model_config: ModelInfo) -> bool:
        """Not if its generation config suppresses all that a transcript may begin with."""
        tokens = _tokens(model_config)
        return tokens.says_timestamps(model_config.generation_config, model_config.vocab_size)

    @classmethod
    def get_no_speech_token_id(cls, model_config: ModelInfo) -> int | None:
        return _tokens(model_config).no_speech

    @classmethod
    def get_seconds_per_state(cls, model_config: ModelInfo) -> float | None:
        return 1 / _STATES_PER_SECOND


class WhisperBlock(Block):
    """Self-attention, attention to the encoder's states, feed-forward, a norm before each."""

    def __init__(self, context: BuildContext, settings: Settings, name: str) -> None:
        hidden = settings.integer("d_model")
        heads, head_dim = heads_of(settings, "decoder_attention_heads")
        self.input_norm = LayerNorm(context, f"{name}.self_attn_layer_norm", hidden, NORM_EPS)
        self.attention = Attention(
            context,
            f"{name}.self_attn",
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=head_dim,
            rotary=None,
            qkv_bias=True,
            out_bias=True,
            unbiased=(1,),
            out_name="out_proj",
        )
        self.cross_norm = LayerNorm(context, f"{name}.encoder_attn_layer_norm", hidden, NORM_EPS)
        self.cross_attention = CrossAttention(
            context,
            f"{name}.encoder_attn",
            hidden_size=hidden,
            num_heads=heads,
            head_dim=head_dim,
            max_states=settings.integer("max_source_positions", 1500),
        )
        self.mlp_norm = LayerNorm(context, f"{name}.final_layer_norm", hidden, NORM_EPS)
        self.mlp = MLP(
            context,
            f"{name}.fc1",
            f"{name}.fc2",
            hidden,
            settings.integer("decoder_ffn_dim"),
            settings.activation("activation_function"),
        )

    def __call__(
        self, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        x, stream = self.input_norm.add(x, residual)
        x = self.attention(x, batch)
        x, stream = self.cross_norm.add(x, stream)
        x = self.cross_attention(x, batch)
        x, stream = self.mlp_norm.add(x, stream)
        return self.mlp(x), stream


_KNOWN: dict[tuple[Path, int], tuple[Mapping[str, Any], WhisperTokens]] = {}
"""By folder and identity of the generation config, which is kept so that no other gets its identity:
a token's time is asked for with every token."""
_MOST_KNOWN = 64
"""Models may be loaded and unloaded as long as a server lives."""


def _tokens(info: ModelInfo) -> WhisperTokens:
    key = info.path, id(info.generation_config)
    if key not in _KNOWN:
        if len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.clear()
        tokens = WhisperTokens.of(info.path, info.generation_config)
        _KNOWN[key] = info.generation_config, tokens
        return tokens
    return _KNOWN[key][1]


def _check_task(tokens: WhisperTokens, task: SpeechTask) -> None:
    if task == "translate" and "translate" not in tokens.tasks:
        raise RequestError(
            "this checkpoint knows English only and does not translate", param="model"
        )


def _told(tokens: WhisperTokens, language: str | None, task: SpeechTask) -> list[int]:
    """The tokens that say language and task."""
    if not tokens.multilingual:
        if language not in (None, "en"):
            raise RequestError(
                f"language = {language!r}: this checkpoint knows English only ('en')",
                param="language",
                value=language,
            )
        return []
    if language is None:
        logger.warning("no language was given: en is assumed")
        language = "en"
    if language not in tokens.languages:
        raise RequestError(
            f"language = {language!r}: this checkpoint knows {', '.join(sorted(tokens.languages))}",
            param="language",
            value=language,
        )
    return [tokens.languages[language], tokens.tasks[task]]


def _previous(tokens: WhisperTokens, info: ModelInfo, text: str) -> list[int]:
    """Previous text behind its token; of long text the end, so that half the context is left."""
    if not text.strip():
        return []
    if tokens.previous is None:
        raise RequestError("prompt: this checkpoint takes no previous text", param="prompt")
    room = info.max_model_len // 2 - 1
    return [tokens.previous, *text_ids(info.path, text)[-room:]]


def _prompt(audio: AudioClip, decoder: list[int]) -> EncoderDecoderPrompt:
    media: dict[str, Any] = {"audio": (audio.samples, audio.sample_rate)}
    return EncoderDecoderPrompt(
        encoder_prompt={"prompt": "", "multi_modal_data": media}, decoder_prompt=decoder
    )

"""Speech to text of a model's class, a decoder for uploads and a splitter: :class:`ServedSpeech`."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from headrace.assembly.missing_packages import missing
from headrace.assembly.speech.declared import DeclaredSpeech
from headrace.assembly.speech.transcription import TASK, model_class
from headrace_core.errors import ConfigError
from headrace_core.speech.model import AudioClip, SpeechToTextConfig, SupportsTranscription
from headrace_engine.config import SpeechConfig

if TYPE_CHECKING:
    from headrace.assembly.resolved import ResolvedConfig
    from headrace_core.arrays import PackedArray
    from headrace_core.model import ModelInfo
    from headrace_core.request import Prompt
    from headrace_multimodal.audio.chat_decoding import ChatAudioDecoder
    from headrace_multimodal.audio.decoding import AudioDecoder, AudioLimits

FILE_SIZE_VARIABLE = "HEADRACE_MAX_AUDIO_CLIP_FILESIZE_MB"
DEFAULT_FILE_MB = 25.0
DEFAULT_SECONDS = 7200.0
OFFLINE_BYTES, OFFLINE_SECONDS = 1 << 40, 1e8
"""Limits for local files: a terabyte, three years of sound."""
OFFLINE_DECODE_SECONDS = 3600.0
CHAT_SAMPLE_RATE = 16_000
"""Samples a second of recordings of chats; a processor of another rate resamples them."""


class ServedSpeech(DeclaredSpeech):
    """The :class:`~headrace_core.speech.model.SpeechModel` of an engine.

    Args:
        model: the class, without faults.
        info: the checkpoint.
        decoder: closed along with this.
    """

    def __init__(
        self, model: type[SupportsTranscription], info: ModelInfo, decoder: AudioDecoder
    ) -> None:
        super().__init__(model, info)
        self._decoder = decoder

    @property
    def word_timestamps(self) -> bool:
        return "align" in self._info.tasks

    @property
    def max_file_bytes(self) -> int:
        return self._decoder.limits.file_bytes

    async def decode(self, data: bytes, *, name: str, sample_rate: int) -> AudioClip:
        return await self._decoder.decode(data, name=name, sample_rate=sample_rate)

    def split(self, audio: AudioClip, config: SpeechToTextConfig) -> list[AudioClip]:
        from headrace_multimodal.audio.splitting import split

        return split(audio, config)

    def continued(self, prompt: Prompt, output: Sequence[int]) -> Prompt:
        """Only of prompts whose text is given as token ids, as those of models that align are."""
        assert isinstance(prompt, Mapping)
        given = cast(dict[str, Any], {**prompt})
        field = "decoder_prompt" if "decoder_prompt" in given else "prompt_token_ids"
        given[field] = [*given[field], *output]
        return cast("Prompt", given)

    def token_times(self, weights: PackedArray, num_tokens: int, seconds: float) -> list[float]:
        import numpy as np

        from headrace_multimodal.audio.word_times import token_times

        matrix = np.frombuffer(weights.data, np.float32).reshape(weights.shape)
        state = self.seconds_per_state or seconds / weights.shape[1]
        return [min(time, seconds) for time in token_times(matrix[-num_tokens:], state)]

    def warm_up(self) -> None:
        """Have the processes that decode start now, beside what else is loaded."""
        self._decoder.warm_up()

    def close(self) -> None:
        self._decoder.close()


def served_speech(resolved: ResolvedConfig) -> ServedSpeech | None:
    """With a decoder for uploads; None: the model does not transcribe.

    Raises:
        MissingDependency: the libraries that decode audio are not installed; names the extra.
        ConfigError: a limit is wrong.
    """
    info, config = resolved.info, resolved.config.speech
    if TASK not in info.tasks:
        return None
    try:
        from headrace_multimodal.audio.decoding import AudioDecoder
    except ImportError as error:
        raise missing(error) from error
    model: type[Any] = model_class(info)
    if not issubclass(model, SupportsTranscription):
        return None
    decoder = AudioDecoder(audio_limits(config, os.environ), config.audio_decoders)
    return ServedSpeech(model, info, decoder)


def chat_audio_decoder(config: SpeechConfig, speech: ServedSpeech | None) -> ChatAudioDecoder:
    """For recordings of chats, at the rate of the model's transcriptions if it makes any.

    Raises: ConfigError: a limit is wrong.
    """
    from headrace_multimodal.audio.chat_decoding import ChatAudioDecoder

    rate = CHAT_SAMPLE_RATE if speech is None else speech.config("transcribe").sample_rate
    limits = audio_limits(config, os.environ)
    return ChatAudioDecoder(limits, sample_rate=rate, processes=config.audio_decoders)


def offline_decoder(config: SpeechConfig) -> AudioDecoder:
    """For files of one's own: bounded only where the configuration says so.

    Raises:
        MissingDependency: the libraries that decode audio are not installed; names the extra.
    """
    try:
        from headrace_multimodal.audio.decoding import AudioDecoder, AudioLimits
    except ImportError as error:
        raise missing(error) from error
    limits = AudioLimits(
        config.max_audio_file_bytes or OFFLINE_BYTES,
        config.max_audio_seconds or OFFLINE_SECONDS,
        max(config.audio_decode_seconds, OFFLINE_DECODE_SECONDS),
        held_seconds=OFFLINE_SECONDS,
    )
    return AudioDecoder(limits, config.audio_decoders)


def audio_limits(config: SpeechConfig, environ: Mapping[str, str]) -> AudioLimits:
    """The limits of one upload.

    Raises:
        ConfigError: the environment's file size is no size.
    """
    from headrace_multimodal.audio.decoding import AudioLimits

    file_bytes = config.max_audio_file_bytes
    if file_bytes is None:
        file_bytes = int(_file_mb(environ) * (1 << 20))
    return AudioLimits(
        file_bytes, config.max_audio_seconds or DEFAULT_SECONDS, config.audio_decode_seconds
    )


def _file_mb(environ: Mapping[str, str]) -> float:
    given = environ.get(FILE_SIZE_VARIABLE, "")
    if not given:
        return DEFAULT_FILE_MB
    try:
        size = float(given)
    except ValueError:
        size = math.nan
    if not 0 < size < 1 << 20:  # false for what is no number, too
        raise ConfigError(
            f"{FILE_SIZE_VARIABLE} = {given!r}: must be a number of megabytes above 0",
            field=FILE_SIZE_VARIABLE,
        )
    return size

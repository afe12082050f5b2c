"""Speech to text of a model's class, a decoder for uploads and a splitter: :class:`ServedSpeech`."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from headrace.assembly.missing import missing
from headrace.assembly.transcription import TASK, model_class
from headrace_core.config import SpeechConfig
from headrace_core.errors import ConfigError, RequestError, UnsupportedFeature
from headrace_core.speech import (
    AudioClip,
    LanguageProbe,
    SpeechTask,
    SpeechToTextConfig,
    SupportsTranscription,
)

if TYPE_CHECKING:
    from headrace.assembly.resolved import Resolved
    from headrace_core.model import ModelInfo
    from headrace_core.packed import PackedArray
    from headrace_core.request import Prompt
    from headrace_multimodal.audio.decoding import AudioDecoder, AudioLimits

FILE_SIZE_VARIABLE = "HEADRACE_MAX_AUDIO_CLIP_FILESIZE_MB"
DEFAULT_FILE_MB = 25.0
DEFAULT_SECONDS = 7200.0
_OPTIONAL: Mapping[str, tuple[str, object]] = {
    "to_language": ("to_language", None),
    "request_prompt": ("prompt", ""),
}
"""Keyword that a class need not declare -> the client's field for it, and its value when unused."""

T = TypeVar("T")


class ServedSpeech:
    """The :class:`~headrace_core.speech.SpeechModel` of an engine.

    Args:
        model: the class, without faults.
        info: the checkpoint.
        decoder: closed along with this.
    """

    def __init__(
        self, model: type[SupportsTranscription], info: ModelInfo, decoder: AudioDecoder
    ) -> None:
        self._model = model
        self._info = info
        self._decoder = decoder

    @property
    def languages(self) -> Mapping[str, str]:
        return self._model.supported_languages

    @property
    def segment_timestamps(self) -> bool:
        return self._model.supports_segment_timestamp

    @property
    def word_timestamps(self) -> bool:
        return "align" in self._info.tasks

    @property
    def max_file_bytes(self) -> int:
        return self._decoder.limits.file_bytes

    def config(self, task: SpeechTask) -> SpeechToTextConfig:
        return self._ask(self._model.get_speech_to_text_config, task_type=task)

    def validate_language(self, language: str | None) -> str | None:
        try:
            return self._ask(self._model.validate_language, language=language)
        except RequestError:
            raise
        except ValueError as error:  # how a foreign class says so
            raise RequestError(str(error), param="language", value=language) from error

    def prompt(
        self,
        audio: AudioClip,
        *,
        language: str | None,
        task: SpeechTask,
        request_prompt: str = "",
        to_language: str | None = None,
        timestamps: bool = False,
    ) -> Prompt:
        """Raises: UnsupportedFeature for what the client sent and the class does not take."""
        make: Callable[..., Prompt] = self._model.get_generation_prompt
        sent = {"request_prompt": request_prompt, "to_language": to_language}
        for keyword, (field, unused) in _OPTIONAL.items():
            if sent[keyword] != unused and not _declares(make, keyword):
                raise UnsupportedFeature(
                    f"{field} = {sent[keyword]!r:.100}: {self._model.__qualname__} takes none; "
                    "leave it out",
                    param=field,
                )
        return self._ask(
            make,
            audio=audio,
            stt_config=self.config(task),
            language=language,
            task_type=task,
            timestamps=timestamps and self.segment_timestamps,
            **sent,
        )

    def num_audio_tokens(self, seconds: float, task: SpeechTask) -> int | None:
        return self._ask(
            self._model.get_num_audio_tokens, audio_duration_s=seconds, stt_config=self.config(task)
        )

    def language_probe(self, audio: AudioClip) -> LanguageProbe | None:
        return self._ask(
            self._model.get_language_probe, audio=audio, stt_config=self.config("transcribe")
        )

    def timestamp(self, token_id: int) -> float | None:
        return self._ask(self._model.get_timestamp, token_id=token_id)

    @property
    def no_speech_token_id(self) -> int | None:
        return self._ask(self._model.get_no_speech_token_id)

    async def decode(self, data: bytes, *, name: str, sample_rate: int) -> AudioClip:
        return await self._decoder.decode(data, name=name, sample_rate=sample_rate)

    def decode_now(self, data: bytes, name: str) -> AudioClip:
        """:meth:`decode` for a thread, at the rate of transcriptions: of what chats bring."""
        rate = self.config("transcribe").sample_rate
        return self._decoder.decode_now(data, name=name, sample_rate=rate)

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
        return token_times(matrix[-num_tokens:], seconds / weights.shape[1])

    def close(self) -> None:
        self._decoder.close()

    def _ask(self, method: Callable[..., T], **keywords: Any) -> T:
        """Call a method of the class with those keywords that it declares."""
        keywords["model_config"] = self._info
        return method(**{k: v for k, v in keywords.items() if _declares(method, k)})


def served_speech(resolved: Resolved) -> ServedSpeech | None:
    """With a decoder whose processes start now, beside what else is loaded; None: the model does not
    transcribe.

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
    decoder = AudioDecoder(audio_limits(config, os.environ), config.audio_decoders)
    decoder.warm_up()
    return ServedSpeech(model, info, decoder)


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


def _declares(method: Callable[..., Any], keyword: str) -> bool:
    parameters = inspect.signature(method).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return takes_any or keyword in parameters

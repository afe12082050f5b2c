"""A speech model's class with its keywords filled in: what it says of a checkpoint, by plain questions.

Classes are called with those keywords only that they declare, so that one written for an earlier version
of the interface works.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_core.speech.diagnosis import METHODS
from headrace_core.speech.model import (
    AudioClip,
    LanguageProbe,
    SpeechTask,
    SpeechToTextConfig,
    SupportsTranscription,
)

if TYPE_CHECKING:
    from headrace_core.model import ModelInfo
    from headrace_core.request import Prompt

_OPTIONAL: Mapping[str, tuple[str, object]] = {
    "to_language": ("to_language", None),
    "request_prompt": ("prompt", ""),
}
"""Keyword that a class need not declare -> the client's field for it, and its value when unused."""


class DeclaredSpeech:
    """The :class:`~headrace_core.speech.model.SpeechMembers` of a class.

    Args:
        model: the class, without faults (:mod:`headrace_core.speech.diagnosis`).
        info: the checkpoint.
    """

    def __init__(self, model: type[SupportsTranscription], info: ModelInfo) -> None:
        self._model = model
        self._info = info
        self._declared = {name: _declared(getattr(model, name)) for name in METHODS}

    @property
    def languages(self) -> Mapping[str, str]:
        return self._model.supported_languages

    @cached_property
    def segment_timestamps(self) -> bool:
        return self._model.supports_segment_timestamp and bool(self._ask("says_timestamps"))

    def config(self, task: SpeechTask) -> SpeechToTextConfig:
        found: SpeechToTextConfig = self._ask("get_speech_to_text_config", task_type=task)
        return found

    def validate_language(self, language: str | None) -> str | None:
        try:
            found: str | None = self._ask("validate_language", language=language)
        except RequestError:
            raise
        except ValueError as error:  # how a foreign class says so
            raise RequestError(str(error), param="language", value=language) from error
        return found

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
        make = "get_generation_prompt"
        sent = {"request_prompt": request_prompt, "to_language": to_language}
        for keyword, (field, unused) in _OPTIONAL.items():
            if sent[keyword] != unused and keyword not in self._declared[make]:
                raise UnsupportedFeature(
                    f"{field} = {sent[keyword]!r:.100}: {self._model.__qualname__} takes none; "
                    "leave it out",
                    param=field,
                )
        found: Prompt = self._ask(
            make,
            audio=audio,
            stt_config=self.config(task),
            language=language,
            task_type=task,
            timestamps=timestamps and self.segment_timestamps,
            **sent,
        )
        return found

    def num_audio_tokens(self, seconds: float, task: SpeechTask) -> int | None:
        found: int | None = self._ask(
            "get_num_audio_tokens", audio_duration_s=seconds, stt_config=self.config(task)
        )
        return found

    def language_probe(self, audio: AudioClip) -> LanguageProbe | None:
        found: LanguageProbe | None = self._ask(
            "get_language_probe", audio=audio, stt_config=self.config("transcribe")
        )
        return found

    def timestamp(self, token_id: int) -> float | None:
        found: float | None = self._ask("get_timestamp", token_id=token_id)
        return found

    @property
    def no_speech_token_id(self) -> int | None:
        found: int | None = self._ask("get_no_speech_token_id")
        return found

    @property
    def seconds_per_state(self) -> float | None:
        found: float | None = self._ask("get_seconds_per_state")
        return found

    def _ask(self, method: str, **keywords: Any) -> Any:
        """Call a method of the class with those keywords that it declares."""
        keywords["model_config"] = self._info
        declared = self._declared[method]
        return getattr(self._model, method)(**{k: v for k, v in keywords.items() if k in declared})


def _declared(method: Callable[..., Any]) -> frozenset[str]:
    """The interface's keywords that a method takes."""
    parameters = inspect.signature(method).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return frozenset(keyword for keywords in METHODS.values() for keyword in keywords)
    return frozenset(parameters)

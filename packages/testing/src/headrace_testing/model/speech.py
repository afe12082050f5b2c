"""Conformance suite of classes that turn speech into text. Inherit, and say which checkpoint it serves::

    class TestEars(TranscriptionConformance):
        model = Ears

        @pytest.fixture
        def info(self, checkpoint):
            return ModelInfo(path=checkpoint, ...)

The checks are plain functions of a class and a checkpoint (:data:`CHECKS`), and look at no weights, so
that ``headrace plugins check MODEL`` runs them, too, without pytest.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from headrace_core.model import ModelInfo
from headrace_core.request import Prompt
from headrace_core.speech.diagnosis import METHODS, faults
from headrace_core.speech.model import (
    SPEECH_TASKS,
    AudioClip,
    LanguageProbe,
    SpeechMembers,
    SpeechTask,
    SpeechToTextConfig,
    SupportsTranscription,
)

SECONDS = 1.0
"""Length of the clip of silence that prompts are made for."""
_UNKNOWN_LANGUAGE = "qqq"
"""Reserved for private use by ISO 639."""

Check = Callable[[type, ModelInfo, SpeechMembers], None]


def has_every_member(model: type, info: ModelInfo, speech: SpeechMembers) -> None:
    assert not faults(model), "\n".join(faults(model))


def prepares_audio(model: type, info: ModelInfo, speech: SpeechMembers) -> None:
    for task in tasks_of(speech):
        config = speech.config(task)
        assert isinstance(config, SpeechToTextConfig), (
            f"get_speech_to_text_config gives {type(config).__name__}, no SpeechToTextConfig"
        )


def has_a_task(model: type, info: ModelInfo, speech: SpeechMembers) -> None:
    assert tasks_of(speech), "get_speech_to_text_config refuses both transcribe and translate"


def knows_its_languages(model: type, info: ModelInfo, speech: SpeechMembers) -> None:
    for code in speech.languages:
        found = speech.validate_language(code)
        assert found == code, f"validate_language({code!r}) gives {found!r}, not the code itself"


def refuses_other_languages(model: type, info: ModelInfo, speech: SpeechMembers) -> None:
    if _UNKNOWN_LANGUAGE in speech.languages:
        return
    said, known = _refusal_of(speech, _UNKNOWN_LANGUAGE), next(iter(speech.languages))
    assert said is not None, f"validate_language({_UNKNOWN_LANGUAGE!r}) does not refuse it"
    assert known in said, f"the refusal of a language does not list {known!r}: {said}"


def _refusal_of(speech: SpeechMembers, language: str) -> str | None:
    try:
        speech.validate_language(language)
    except ValueError as error:
        return str(error)
    return None


def leaves_the_language_open_or_chooses(
    model: type, info: ModelInfo, speech: SpeechMembers
) -> None:
    found = speech.validate_language(None)
    assert found is None or found in speech.languages, f"validate_language(None) gives {found!r}"


def prompts_bring_the_audio(model: type, info: ModelInfo, speech: SpeechMembers) -> None:
    for task in tasks_of(speech):
        clip = silence(speech.config(task))
        language = speech.validate_language(None) or next(iter(speech.languages))
        for timed in {False, speech.segment_timestamps}:
            prompt = speech.prompt(clip, language=language, task=task, timestamps=timed)
            assert _brings_audio(prompt), (
                f"get_generation_prompt({task}) gives {_shown(prompt)}: must be a prompt with "
                "multi_modal_data = {'audio': (samples, sample rate)}, or encoder_prompt with it and "
                "decoder_prompt"
            )


def estimates_tokens(model: type, info: ModelInfo, speech: SpeechMembers) -> None:
    for task in tasks_of(speech):
        counts = [speech.num_audio_tokens(seconds, task) for seconds in (1.0, 10.0)]
        if None in counts:
            assert counts == [None, None], f"get_num_audio_tokens gives {counts} for 1 and 10 s"
            continue
        short, long = counts
        fits = isinstance(short, int) and isinstance(long, int) and 0 < short <= long
        assert fits, f"get_num_audio_tokens gives {counts} for 1 and 10 s: must be whole and grow"


def probes_for_known_languages(model: type, info: ModelInfo, speech: SpeechMembers) -> None:
    probe = speech.language_probe(silence(speech.config(tasks_of(speech)[0])))
    if probe is None:
        return
    assert isinstance(probe, LanguageProbe), f"get_language_probe gives {type(probe).__name__}"
    assert _brings_audio(probe.prompt), f"get_language_probe's prompt is {_shown(probe.prompt)}"
    strange = sorted(set(probe.languages.values()) - set(speech.languages))
    assert not strange, f"get_language_probe knows {strange}, supported_languages does not"
    beyond = [token for token in probe.languages if not 0 <= token < info.vocab_size]
    assert not beyond, f"get_language_probe: tokens {beyond} are not in the vocabulary"


def has_times_if_it_says_so(model: type, info: ModelInfo, speech: SpeechMembers) -> None:
    times = [t for token in range(info.vocab_size) if (t := speech.timestamp(token)) is not None]
    assert not speech.segment_timestamps or times, (
        "supports_segment_timestamp is True, and get_timestamp gives a time for no token"
    )
    assert all(time >= 0 for time in times), "get_timestamp gives times before the clip's beginning"


def has_a_token_for_silence_or_none(model: type, info: ModelInfo, speech: SpeechMembers) -> None:
    token = speech.no_speech_token_id
    assert token is None or 0 <= token < info.vocab_size, (
        f"get_no_speech_token_id gives {token!r}, which is not in the vocabulary"
    )


def has_states_of_a_length_or_none(model: type, info: ModelInfo, speech: SpeechMembers) -> None:
    found = speech.seconds_per_state
    assert found is None or found > 0, f"get_seconds_per_state gives {found!r}: must be above 0"


CHECKS: Sequence[Check] = (
    has_every_member,
    has_a_task,
    prepares_audio,
    knows_its_languages,
    refuses_other_languages,
    leaves_the_language_open_or_chooses,
    prompts_bring_the_audio,
    estimates_tokens,
    probes_for_known_languages,
    has_times_if_it_says_so,
    has_a_token_for_silence_or_none,
    has_states_of_a_length_or_none,
)
"""All of them; each raises an AssertionError that says what is wrong. Without the first none makes sense."""


class AskedSpeech:
    """The :class:`~headrace_core.speech.model.SpeechMembers` of a class, as an engine has them."""

    def __init__(self, model: type[SupportsTranscription], info: ModelInfo) -> None:
        self._model, self._info = model, info

    def _ask(self, method: str, **given: Any) -> Any:
        call, given = getattr(self._model, method), {**given, "model_config": self._info}
        takes = inspect.signature(call).parameters
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values()):
            takes = dict.fromkeys(METHODS[method])  # type: ignore[assignment]
        return call(**{name: value for name, value in given.items() if name in takes})

    @property
    def languages(self) -> Mapping[str, str]:
        return self._model.supported_languages

    @property
    def segment_timestamps(self) -> bool:
        return self._model.supports_segment_timestamp and bool(self._ask("says_timestamps"))

    def config(self, task: SpeechTask) -> Any:
        return self._ask("get_speech_to_text_config", task_type=task)

    def validate_language(self, language: str | None) -> Any:
        return self._ask("validate_language", language=language)

    def prompt(
        self, audio: AudioClip, *, language: str | None, task: SpeechTask, request_prompt: str = "",
        to_language: str | None = None, timestamps: bool = False,
    ) -> Any:  # fmt: skip
        return self._ask(
            "get_generation_prompt", audio=audio, stt_config=self.config(task), language=language,
            task_type=task, request_prompt=request_prompt, to_language=to_language,
            timestamps=timestamps,
        )  # fmt: skip

    def num_audio_tokens(self, seconds: float, task: SpeechTask) -> Any:
        config = self.config(task)
        return self._ask("get_num_audio_tokens", audio_duration_s=seconds, stt_config=config)

    def language_probe(self, audio: AudioClip) -> Any:
        config = self.config("transcribe")
        return self._ask("get_language_probe", audio=audio, stt_config=config)

    def timestamp(self, token_id: int) -> Any:
        return self._ask("get_timestamp", token_id=token_id)

    @property
    def no_speech_token_id(self) -> Any:
        return self._ask("get_no_speech_token_id")

    @property
    def seconds_per_state(self) -> Any:
        return self._ask("get_seconds_per_state")


class TranscriptionConformance:
    """Inherit as ``Test...``; set :attr:`model`, and have a fixture ``info``."""

    model: ClassVar[type[SupportsTranscription]]

    def test_class(self) -> None:
        assert not faults(self.model), "\n".join(faults(self.model))

    def test_checks(self, info: ModelInfo) -> None:
        speech, wrong = AskedSpeech(self.model, info), []
        for check in CHECKS:
            try:
                check(self.model, info, speech)
            except AssertionError as error:
                wrong.append(f"{check.__name__}: {error}")
        assert not wrong, "\n".join(wrong)


def tasks_of(speech: SpeechMembers) -> list[SpeechTask]:
    """Tasks of a model: those for which it has a configuration."""
    found: list[SpeechTask] = []
    for task in SPEECH_TASKS:
        try:
            speech.config(task)
        except ValueError:
            continue
        found.append(task)
    return found


def silence(config: SpeechToTextConfig) -> AudioClip:
    """A short clip of it."""
    import numpy as np

    return AudioClip(np.zeros(int(SECONDS * config.sample_rate), np.float32), config.sample_rate)


def _brings_audio(prompt: Prompt) -> bool:
    if not isinstance(prompt, Mapping):
        return False
    given: Mapping[str, Any] = prompt
    if "encoder_prompt" in given:
        has_decoder = "decoder_prompt" in given
        return has_decoder and _has_audio(given["encoder_prompt"])
    return ("prompt" in given or "prompt_token_ids" in given) and _has_audio(given)


def _has_audio(part: object) -> bool:
    media = part.get("multi_modal_data") if isinstance(part, Mapping) else None
    audio = media.get("audio") if isinstance(media, Mapping) else None
    return isinstance(audio, tuple) and len(audio) == 2 and isinstance(audio[1], int)


def _shown(prompt: object) -> str:
    if not isinstance(prompt, Mapping):
        return f"a {type(prompt).__name__}"
    return f"a mapping with {', '.join(map(repr, prompt))}"

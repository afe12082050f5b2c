"""A class is called with the keywords that it declares, and refuses by name what it has no keyword for."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from headrace.assembly.speech.declared import DeclaredSpeech
from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_core.model import ModelInfo
from headrace_core.request import TextPrompt
from headrace_core.speech.model import (
    AudioClip,
    LanguageProbe,
    SpeechModel,
    SpeechToTextConfig,
    SupportsTranscription,
)
from headrace_testing.fakes.speech import FakeSpeech
from headrace_testing.model.speech import TranscriptionConformance

CLIP = AudioClip(np.zeros(100, np.float32), 100)


def media(audio: AudioClip) -> dict:
    return {"audio": (audio.samples, audio.sample_rate)}


class New(SupportsTranscription):
    """Declares everything."""

    supported_languages = {"en": "English", "de": "German"}  # noqa: RUF012
    supports_segment_timestamp = True

    @classmethod
    def get_speech_to_text_config(cls, model_config, task_type):
        return SpeechToTextConfig(sample_rate=100 if task_type == "transcribe" else 200)

    @classmethod
    def get_generation_prompt(
        cls, audio, model_config, stt_config, language, task_type, request_prompt, to_language,
        timestamps=False,
    ):  # fmt: skip
        told = (
            stt_config.sample_rate,
            language,
            task_type,
            request_prompt,
            to_language,
            timestamps,
        )
        return TextPrompt(prompt=repr(told), multi_modal_data=media(audio))

    @classmethod
    def get_num_audio_tokens(cls, audio_duration_s, stt_config, model_config):
        return int(audio_duration_s * stt_config.sample_rate)

    @classmethod
    def get_language_probe(cls, audio, model_config, stt_config):
        return LanguageProbe(
            TextPrompt(prompt="", multi_modal_data=media(audio)), {1: "en", 2: "de"}
        )

    @classmethod
    def get_timestamp(cls, token_id, model_config):
        return token_id / 2 if token_id < 5 else None

    @classmethod
    def get_seconds_per_state(cls, model_config):
        return 0.04

    @classmethod
    def get_no_speech_token_id(cls, model_config):
        return model_config.vocab_size - 1


class Old(SupportsTranscription):
    """Knows nothing of what came later."""

    supported_languages = {"en": "English"}  # noqa: RUF012

    @classmethod
    def get_speech_to_text_config(cls, task_type):
        return SpeechToTextConfig(sample_rate=100)

    @classmethod
    def get_generation_prompt(cls, audio, language):
        return TextPrompt(prompt=f"in {language}", multi_modal_data=media(audio))

    @classmethod
    def validate_language(cls, language):
        if language not in ("en", None):
            raise ValueError(f"{language}: only en")
        return language


@pytest.fixture
def info() -> ModelInfo:
    return ModelInfo(
        name="m", path=Path("/m"), architecture="New", config={}, generation_config={},
        dtype="float32", max_model_len=100, vocab_size=10, eos_token_ids=(1,),
    )  # fmt: skip


class TestNew(TranscriptionConformance):
    model = New


class TestOld(TranscriptionConformance):
    model = Old


def test_everything_reaches_a_class_that_declares_it(info):
    speech = DeclaredSpeech(New, info)
    prompt = speech.prompt(CLIP, language="de", task="translate", request_prompt="x",
                           to_language="en", timestamps=True)  # fmt: skip
    assert prompt["prompt"] == "(200, 'de', 'translate', 'x', 'en', True)"
    assert speech.num_audio_tokens(2.0, "transcribe") == 200
    assert speech.no_speech_token_id == 9
    assert speech.seconds_per_state == 0.04
    assert speech.timestamp(3) == 1.5


def test_a_checkpoint_may_have_no_timestamps_though_its_class_has(info):
    class Untimed(New):
        @classmethod
        def says_timestamps(cls, model_config):
            return model_config.vocab_size > 10

    assert DeclaredSpeech(New, info).segment_timestamps
    speech = DeclaredSpeech(Untimed, info)
    assert not speech.segment_timestamps
    prompt = speech.prompt(CLIP, language="de", task="transcribe", timestamps=True)
    assert prompt["prompt"].endswith("False)")


def test_an_older_class_is_called_as_it_was(info):
    prompt = DeclaredSpeech(Old, info).prompt(CLIP, language="en", task="transcribe")
    assert prompt["prompt"] == "in en"


@pytest.mark.parametrize(("sent", "param"), [({"to_language": "de"}, "to_language"),
                                             ({"request_prompt": "x"}, "prompt")])  # fmt: skip
def test_what_a_class_does_not_take_is_refused_by_the_clients_name(info, sent, param):
    with pytest.raises(UnsupportedFeature, match="Old takes none") as caught:
        DeclaredSpeech(Old, info).prompt(CLIP, language="en", task="transcribe", **sent)
    assert caught.value.param == param


def test_a_plain_value_error_is_the_clients_fault(info):
    with pytest.raises(RequestError, match="only en") as caught:
        DeclaredSpeech(Old, info).validate_language("xx")
    assert caught.value.param == "language"


def test_a_language_of_another_type_is_none_that_is_spoken():
    class Speaks(SupportsTranscription):
        supported_languages: ClassVar = {"en": "English"}

    assert Speaks.validate_language("en") == "en"
    with pytest.raises(RequestError, match=r"language = \['en'\]: must be one of en"):
        Speaks.validate_language(["en"])


@pytest.mark.parametrize(
    ("name", "function", "said"),
    [
        ("get_generation_prompt", lambda cls, audio: "text", "gives a str"),
        ("get_speech_to_text_config", lambda cls: {}, "gives dict"),
        ("validate_language", lambda cls, language: "en", "gives 'en'"),
        ("get_num_audio_tokens", lambda cls, audio_duration_s: -1, "must be whole and grow"),
        ("get_timestamp", lambda cls, token_id: None, "a time for no token"),
        ("get_no_speech_token_id", lambda cls: 10, "not in the vocabulary"),
        ("get_seconds_per_state", lambda cls: 0.0, "must be above 0"),
        ("get_language_probe", lambda cls, audio: LanguageProbe(TextPrompt(
            prompt="", multi_modal_data=media(audio)), {1: "fr"}), "knows ['fr']"),
    ],
)  # fmt: skip
def test_the_suite_finds_what_is_wrong(info, name, function, said):
    suite = TranscriptionConformance()
    suite.model = type("Broken", (New,), {name: classmethod(function)})
    with pytest.raises((AssertionError, AttributeError)) as caught:
        suite.test_checks(info)
    assert said in str(caught.value) or name == "get_speech_to_text_config"


def test_the_fake_is_a_speech_model():
    speech: SpeechModel = FakeSpeech()
    assert speech.config("transcribe").sample_rate == 16_000

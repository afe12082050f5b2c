"""What keeps a class from transcribing is said line by line."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_core.errors import ModelError
from headrace_core.speech.diagnosis import METHODS, REQUIRED, comes_close, faults
from headrace_core.speech.model import SpeechToTextConfig, SupportsTranscription


class Whole(SupportsTranscription):
    """As little as is needed, with an older signature."""

    supported_languages = {"en": "English", "yue": "Cantonese"}  # noqa: RUF012

    @classmethod
    def get_speech_to_text_config(cls, model_config: Any, task_type: Any) -> SpeechToTextConfig:
        return SpeechToTextConfig()

    @classmethod
    def get_generation_prompt(cls, audio: Any, language: Any) -> Any:
        return "prompt"


def test_the_interface_is_known_from_itself():
    assert REQUIRED == ("get_speech_to_text_config", "get_generation_prompt")
    assert METHODS["get_generation_prompt"][:2] == ("audio", "model_config")
    assert METHODS["validate_language"] == ("language",)


def test_a_whole_class_has_no_faults_and_is_marked_by_inheritance():
    assert faults(Whole) == []
    assert Whole.supports_transcription is True


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"get_generation_prompt": lambda cls: 1}, "is a function, no classmethod"),
        ({"get_generation_prompt": staticmethod(lambda audio: 1)}, "is a staticmethod, no classmethod"),
        ({"get_generation_prompt": "x"}, "is a str, no classmethod"),
        ({"get_generation_prompt": classmethod(lambda cls, language: 1)}, "it does not take audio"),
        ({"get_generation_prompt": classmethod(lambda cls, audio, mood: 1)}, "headrace does not pass mood"),
        ({"get_generation_prompt": classmethod(lambda cls, audio, /: 1)}, "all are passed by keyword"),
        ({"validate_language": classmethod(lambda cls: 1)}, "it does not take language"),
        ({"get_no_speech_token_id": lambda self: 1}, "is a function, no classmethod"),
        ({"supports_transcription": False}, "supports_transcription = False: leave it out"),
        ({"supports_transcription_only": 1}, "supports_transcription_only = 1: must be True or False"),
        ({"supports_segment_timestamp": True}, "get_timestamp is not defined"),
    ],
)  # fmt: skip
def test_each_fault_is_one_line(members, said):
    broken = type("Broken", (Whole,), members)
    (line,) = faults(broken)
    assert line.startswith("Broken")
    assert said in line


@pytest.mark.parametrize(
    "members",
    [
        {"get_generation_prompt": classmethod(lambda cls, audio, mood="calm": 1)},
        {"get_generation_prompt": classmethod(lambda cls, **anything: 1)},
        {"get_speech_to_text_config": classmethod(lambda cls: 1)},
    ],
)
def test_what_can_be_called_is_no_fault(members):
    assert faults(type("Fine", (Whole,), members)) == []


def test_all_faults_at_once():
    lines = faults(type("Nothing", (), {"get_timestamp": 1}))
    assert len(lines) == 5
    assert lines[0].startswith("Nothing does not inherit SupportsTranscription")


@pytest.mark.parametrize(
    "languages", [{}, {"english": "English"}, {"EN": "English"}, ["en"], {"en": ""}]
)
def test_languages_are_checked_when_the_class_is_made(languages):
    with pytest.raises(ModelError, match="supported_languages"):
        type("Bad", (SupportsTranscription,), {"supported_languages": languages})


def test_who_comes_close():
    assert comes_close(type("Close", (), {"supported_languages": {}}))
    assert comes_close(type("Inherits", (SupportsTranscription,), {}))
    assert not comes_close(type("Far", (), {"forward": None}))

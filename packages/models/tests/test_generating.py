"""What a class does besides generating: the table agrees with the classes, foreign ones are asked."""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from typing import ClassVar

import pytest

from headrace_core import plugins
from headrace_core.speech.model import SupportsTranscription
from headrace_models.generating import (
    TRAITS,
    GeneratingTraits,
    generating_traits,
    processor_of,
    traits_of,
)


@pytest.mark.parametrize("architecture", sorted(plugins.installed("headrace.models")))
def test_the_table_agrees_with_the_classes(architecture):
    own = traits_of(plugins.load("headrace.models", architecture))
    assert TRAITS.get(architecture, GeneratingTraits()) == own


class Ears(SupportsTranscription):
    supported_languages: ClassVar[Mapping[str, str]] = {"en": "English"}
    supports_transcription_only = True

    def encode(self, inputs):
        return inputs


def test_a_class_of_another_distribution_is_asked(monkeypatch):
    module = types.ModuleType("some_ears")
    module.Ears = Ears
    monkeypatch.setitem(sys.modules, "some_ears", module)
    entry = EntryPoint("EarsForAll", "some_ears:Ears", "headrace.models")
    monkeypatch.setattr(plugins, "entry_points", lambda group: [entry])
    plugins.forget()
    try:
        traits = generating_traits("EarsForAll")
        assert processor_of("EarsForAll", {}, {}) == "EarsForAll"
        assert processor_of("Other", {}, {}) == ""
    finally:
        monkeypatch.undo()
        plugins.forget()
    assert traits == GeneratingTraits(
        transcribes=True, generates=False, is_encoder_decoder=True, aligns=False
    )
    assert traits.tasks({}, {}) == ("transcription",)


def test_a_checkpoint_without_alignment_heads_does_not_align():
    traits = GeneratingTraits(transcribes=True, aligns=True)
    config = {"decoder_layers": 2, "decoder_attention_heads": 3}
    assert traits.tasks({}, config) == ("generate", "transcription")
    named = traits.tasks({"alignment_heads": [[0, 1], [1, 2]]}, config)
    assert named == ("generate", "transcription", "align")


@pytest.mark.parametrize("heads", [[[2, 0]], [[0, 3]], [[0]], [[0, True]], "all", [[-1, 0]], {}])
def test_wrong_alignment_heads_are_told_and_cost_the_times_of_words_only(heads, caplog):
    traits = GeneratingTraits(transcribes=True, aligns=True)
    config = {"decoder_layers": 2, "decoder_attention_heads": 3}
    assert traits.tasks({"alignment_heads": heads}, config) == ("generate", "transcription")
    assert "below 2 and a head below 3" in caplog.text


def test_what_is_no_class_generates():
    assert traits_of(lambda context: None) == GeneratingTraits()


def test_images_are_taken_by_towers_of_known_kinds_unless_none_are_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "LlavaForConditionalGeneration"
    entry = EntryPoint(name, "somewhere:Processor", "headrace.multimodal_processors")
    monkeypatch.setattr(plugins, "entry_points", lambda group: [entry])
    plugins.forget()
    clip = {"vision_config": {"model_type": "clip_vision_model"}}
    try:
        assert processor_of(name, clip, {}) == name
        assert processor_of(name, clip, {"image": 2}) == name
        for whole, limits in (
            (clip, {"image": 0}),
            ({"vision_config": {"model_type": "another"}}, {}),
            ({}, {}),
        ):
            assert processor_of(name, whole, limits) == ""
    finally:
        monkeypatch.undo()
        plugins.forget()


def test_recordings_are_taken_by_towers_of_known_kinds_unless_none_are_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "VoxtralForConditionalGeneration"
    entry = EntryPoint(name, "somewhere:Processor", "headrace.multimodal_processors")
    monkeypatch.setattr(plugins, "entry_points", lambda group: [entry])
    plugins.forget()
    whole = {"audio_config": {"model_type": "voxtral_encoder"}}
    try:
        assert processor_of(name, whole, {"image": 0}) == name
        assert processor_of(name, whole, {"audio": 0}) == ""
        assert processor_of(name, {"audio_config": {}}, {}) == ""
    finally:
        monkeypatch.undo()
        plugins.forget()

"""A model's capabilities are read off its class, and are those that the catalogue of models tells."""

from __future__ import annotations

import importlib
from typing import Any

from headrace.assembly.interfaces import (
    interfaces_of,
    is_pooling_model,
    is_text_generation_model,
    supports_multimodal,
    supports_transcription,
)
from headrace_core.speech.model import SpeechToTextConfig, SupportsTranscription
from headrace_models.catalogue import ARCHITECTURES


class Whole(SupportsTranscription):
    """As little as is needed, with an older signature."""

    supported_languages = {"en": "English", "yue": "Cantonese"}  # noqa: RUF012

    @classmethod
    def get_speech_to_text_config(cls, model_config: Any, task_type: Any) -> SpeechToTextConfig:
        return SpeechToTextConfig()

    @classmethod
    def get_generation_prompt(cls, audio: Any, language: Any) -> Any:
        return "prompt"


def test_a_speech_model_lacks_nothing() -> None:
    assert supports_transcription(Whole)
    assert supports_transcription(Whole())
    assert not supports_transcription(type("Broken", (Whole,), {"supports_transcription": False}))


def test_predicates_take_classes_and_instances():
    class Chat:
        modalities = ("audio",)

        def forward(self): ...
        def compute_logits(self): ...
        def embed_media(self): ...

    class Pools:
        pooler: object

        def forward(self): ...

    for model in (Chat, Chat()):
        assert is_text_generation_model(model)
        assert supports_multimodal(model)
        assert not is_pooling_model(model)
    assert is_pooling_model(Pools)
    assert not is_text_generation_model(Pools)
    only = type("Only", (Chat, Whole), {"supports_transcription_only": True})
    assert not is_text_generation_model(only)
    assert interfaces_of(only) == ("generation", "multimodal", "transcription")


def test_the_rows_load() -> None:
    for row in ARCHITECTURES.values():
        module, _, name = row.entry.partition(":")
        found = getattr(importlib.import_module(module), name)
        assert is_text_generation_model(found) or row.task != "generate", row.name


def test_features_are_those_of_the_classes() -> None:
    for row in ARCHITECTURES.values():
        module, _, name = row.entry.partition(":")
        found = interfaces_of(getattr(importlib.import_module(module), name))
        assert row.lora == ("LoRA" in found), row.name
        assert row.pp == ("pipeline parallel" in found), row.name

"""Adapters of prompts that bring media and name none."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_core.lora import LoRARequest
from headrace_core.request import ChatPrompt
from headrace_engine.lora.default_by_modality import default_adapter

PATHS = {"video": "/v", "audio": "/a"}


def chat(*kinds: str) -> ChatPrompt:
    parts: list[Any] = [{"type": kind, kind: {}} for kind in kinds]
    return ChatPrompt(messages=[{"role": "system", "content": "s"},
                                {"role": "user", "content": parts}])  # fmt: skip


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("text", None),
        ([1, 2], None),
        ({"prompt": "x"}, None),
        ({"prompt": "x", "multi_modal_data": {"audio": object()}}, "audio"),
        ({"prompt": "x", "multi_modal_data": {"audio": [1, 2]}}, "audio"),
        ({"prompt": "x", "multi_modal_data": {"audio": [], "video": [3]}}, "video"),
        ({"prompt": "x", "multi_modal_data": {"image": 1}}, None),
        ({"prompt": "x", "multi_modal_data": {"image": 1, "audio": 2}}, "audio"),
        ({"prompt": "x", "multi_modal_data": {"video": 1, "audio": 2}}, None),
        ({"encoder_prompt": {"multi_modal_data": {"audio": 2}}, "decoder_prompt": "x"}, "audio"),
        ({"prompt": "x", "multi_modal_data": 5}, None),
        (chat("text"), None),
        (chat("text", "audio_url", "input_audio"), "audio"),
        (chat("image_url", "video_url"), "video"),
        (chat("audio_url", "video_url"), None),
    ],
)
def test_one_modality_with_an_adapter(prompt: Any, expected: str | None) -> None:
    found = default_adapter(PATHS, prompt)
    assert (None if found is None else found.lora_name) == expected


def test_ids_by_the_alphabet() -> None:
    audio = default_adapter(PATHS, {"prompt": "x", "multi_modal_data": {"audio": 1}})
    video = default_adapter(PATHS, {"prompt": "x", "multi_modal_data": {"video": 1}})
    assert (audio, video) == (LoRARequest("audio", 1, "/a"), LoRARequest("video", 2, "/v"))
    assert default_adapter({}, {"prompt": "x", "multi_modal_data": {"audio": 1}}) is None


def test_an_adapter_of_two_modalities_together() -> None:
    """In any order, and with the id of the one that it is."""
    paths = {"video+audio": "/v", **PATHS}
    both: Any = {"prompt": "x", "multi_modal_data": {"video": 1, "audio": 2}}
    assert default_adapter(paths, both) == LoRARequest("video", 2, "/v")
    assert default_adapter({**paths, "video+audio": "/b"}, both) == LoRARequest(
        "audio+video", 3, "/b"
    )
    video = {"prompt": "x", "multi_modal_data": {"video": 1, "image": 2}}
    assert default_adapter(paths, video) == LoRARequest("video", 2, "/v")
    alone = {"audio+video": "/b"}
    assert default_adapter(alone, both) == LoRARequest("audio+video", 1, "/b")
    assert default_adapter(alone, video) is None

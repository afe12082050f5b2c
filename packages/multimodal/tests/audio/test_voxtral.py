"""Voxtral's media processor: numbers of transformers', tokens by pieces, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import MediaItem
from headrace_multimodal.audio.voxtral import VoxtralProcessor

TINY = {
    "audio_config": {
        "num_mel_bins": 16, "max_source_positions": 100, "hidden_size": 8, "intermediate_size": 32,
    },
    "text_config": {"max_position_embeddings": 80},
    "audio_token_id": 7,
}  # fmt: skip
"""Pieces of two seconds, 25 tokens each; a context holds three."""


def noise(count: int) -> np.ndarray:
    return (0.1 * np.random.default_rng(count).standard_normal(count)).astype(np.float32)


def item(count: int) -> MediaItem:
    return MediaItem("audio", noise(count), "0" * 64, {"sample_rate": 16000})


@pytest.fixture
def processor(tmp_path: Path) -> VoxtralProcessor:
    return VoxtralProcessor(TINY, tmp_path)


@pytest.mark.parametrize(
    ("count", "pieces"), [(1, 1), (7_777, 1), (32_000, 1), (32_001, 2), (96_000, 3)]
)
def test_recordings_are_filled_up_to_whole_pieces(processor, count, pieces):
    (made,) = processor.process([item(count)], {})
    assert made.num_tokens == 25 * pieces
    assert tuple(made.inputs["input_features"].shape) == (200 * pieces, 16)


@pytest.mark.parametrize("count", [7_777, 480_000, 480_001, 700_003])
def test_numbers_are_those_of_transformers(tmp_path, count):
    transformers = pytest.importorskip("transformers")
    (made,) = VoxtralProcessor({}, tmp_path).process([item(count)], {})
    expected = transformers.WhisperFeatureExtractor(feature_size=128)(
        noise(count), sampling_rate=16000, padding=True, truncation=False,
        pad_to_multiple_of=480_000, return_tensors="np",
    )["input_features"][0].T  # fmt: skip
    packed = made.inputs["input_features"]
    found = np.frombuffer(packed.data, np.float32).reshape(packed.shape)
    # Both are of float32; beside one of float64, transformers' is off by 1.1e-5, ours by 3e-6.
    np.testing.assert_allclose(found, expected, atol=2e-5, rtol=0)
    assert made.num_tokens == 375 * (len(expected) // 3000)


def test_placeholders_become_as_many_as_the_pieces(processor):
    media = processor.process([item(100), item(33_000)], {})
    placed = processor.place([3, 7, 4, 7, 5], media)
    assert placed.token_ids == [3, *[7] * 25, 4, *[7] * 50, 5]
    assert placed.offsets == [1, 27]


def test_what_no_context_holds_is_refused(processor):
    with pytest.raises(RequestError, match=r"6\.00 s: at most 6 s"):
        processor.process([item(96_001)], {})


def test_options_are_refused(processor):
    with pytest.raises(RequestError, match="'truncation'"):
        processor.process([item(100)], {"truncation": True})


def test_memory_is_measured_with_a_piece(processor):
    assert processor.largest("audio", {}).num_tokens == 25


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"audio_config": 3}, "audio_config = 3"),
        ({"text_config": []}, "text_config"),
        ({"audio_token_id": "x"}, "audio_token_id = 'x'"),
        ({"audio_config": {**TINY["audio_config"], "hidden_size": 0}}, "hidden_size = 0"),
    ],
)
def test_unusable_configs_are_refused(tmp_path: Path, change: dict[str, Any], words: str):
    with pytest.raises(UnsupportedModel, match=words):
        VoxtralProcessor({**TINY, **change}, tmp_path)

"""Media processors of GLM-ASR and the Flamingos: numbers and tokens of transformers', pieces, refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headrace_core.errors import RequestError
from headrace_core.multimodal import MediaItem, ProcessedMedia
from headrace_multimodal.audio.glm_asr import (
    AudioFlamingo3Processor,
    GlmAsrProcessor,
    MusicFlamingoProcessor,
)

CONFIG = {"text_config": {"max_position_embeddings": 800}, "audio_token_id": 7}
"""A context of two pieces of 30 s, 375 tokens each."""


def item(count: int) -> MediaItem:
    samples = (0.1 * np.random.default_rng(count).standard_normal(count)).astype(np.float32)
    return MediaItem("audio", samples, "0" * 64, {"sample_rate": 16_000})


def array(made: ProcessedMedia, name: str) -> np.ndarray:
    packed = made.inputs[name]
    return np.frombuffer(packed.data, packed.dtype).reshape(packed.shape)


@pytest.fixture
def processor(tmp_path: Path) -> GlmAsrProcessor:
    return GlmAsrProcessor(CONFIG, tmp_path)


@pytest.mark.parametrize("count", [7_777, 480_000, 700_003])
def test_numbers_and_tokens_are_those_of_transformers(processor, count):
    """Of each piece by itself: a spectrogram's floor is that of its loudest point."""
    transformers = pytest.importorskip("transformers")
    (made,) = processor.process([item(count)], {})
    samples = item(count).data
    pieces = [samples[begin : begin + 480_000] for begin in range(0, count, 480_000)]
    theirs = transformers.WhisperFeatureExtractor(feature_size=128)(
        pieces, sampling_rate=16_000, return_attention_mask=True, return_tensors="np"
    )
    expected = theirs["input_features"].transpose(0, 2, 1)
    np.testing.assert_allclose(array(made, "input_features"), expected, atol=2e-5, rtol=0)
    frames = int(theirs["attention_mask"].sum())
    assert array(made, "num_frames").tolist() == [frames]
    states = (frames - 1) // 2 + 1
    assert made.num_tokens == (states - 4) // 4 + 1


def test_refusals(processor):
    with pytest.raises(RequestError, match=r"61\.00 s: at most 60 s"):
        processor.process([item(61 * 16_000)], {})
    with pytest.raises(RequestError, match="too short to become a token"):
        processor.process([item(900)], {})
    with pytest.raises(RequestError, match="'truncation': GLM-ASR's processor has no options"):
        processor.process([item(9000)], {"truncation": True})


def test_placeholders(processor):
    media = processor.process([item(16_000), item(8_000)], {})
    placed = processor.place([3, 7, 4, 7, 5], media)
    assert placed.token_ids == [3, *[7] * 12, 4, *[7] * 6, 5]
    assert processor.placeholder("audio", 0) == "<|begin_of_audio|><|pad|><|end_of_audio|>"
    assert processor.largest("audio", {}).num_tokens == 375


def test_audio_flamingo_3(tmp_path: Path):
    """A token for every 40 ms; its own processor takes ten minutes, or what it says."""
    own = AudioFlamingo3Processor({"audio_token_id": 7}, tmp_path)
    assert own.max_pieces == 20
    (made,) = own.process([item(700_003)], {})
    assert tuple(made.inputs["input_features"].shape) == (2, 3000, 128)
    assert made.num_tokens == 750 + 1376 // 2 // 2
    assert own.placeholder("audio", 0) == "<sound>"
    (tmp_path / "processor_config.json").write_text('{"max_audio_len": 60}')
    assert AudioFlamingo3Processor({}, tmp_path).max_pieces == 2


def test_music_flamingo(tmp_path: Path):
    """Its tokens stand between two others, which take no vectors."""
    config = {"audio_token_id": 7, "audio_bos_token_id": 8, "audio_eos_token_id": 9}
    own = MusicFlamingoProcessor(config, tmp_path)
    assert own.max_pieces == 40
    (made,) = own.process([item(7_777)], {})
    assert made.runs == ((1, 12),)
    placed = own.place([3, 7, 4], [made])
    assert placed.token_ids == [3, 8, *[7] * 12, 9, 4]
    assert own.embedded("audio", 5, {}).runs == ((1, 5),)


def test_vectors_of_any_number(processor):
    assert processor.embedded("audio", 13, {}).num_tokens == 13
    with pytest.raises(RequestError, match="at most 750"):
        processor.embedded("audio", 751, {})

"""Qwen3-Omni's media processor: numbers and tokens of transformers'."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from headrace_core.errors import RequestError
from headrace_core.multimodal import MediaItem, ProcessedMedia
from headrace_multimodal.omni.qwen3_omni import Qwen3OmniProcessor

AUDIO, IMAGE, VIDEO = 7, 8, 9
THINKER = {
    "audio_config": {"num_mel_bins": 128, "n_window": 50},
    "vision_config": {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2},
    "text_config": {"max_position_embeddings": 100}, "position_id_per_seconds": 13,
    "audio_token_id": AUDIO, "image_token_id": IMAGE, "video_token_id": VIDEO,
}  # fmt: skip
"""A context of seven pieces of a second, 13 tokens each."""
SETTINGS = {
    "feature_size": 128, "chunk_length": 30, "n_fft": 400, "hop_length": 160, "dither": 0.0,
    "sampling_rate": 16_000, "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2,
    "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "min_pixels": 3136, "max_pixels": 12_845_056,
}  # fmt: skip


def sound(count: int) -> MediaItem:
    samples = (0.1 * np.random.default_rng(count).standard_normal(count)).astype(np.float32)
    return MediaItem("audio", samples, "0" * 64, {"sample_rate": 16_000})


def film(count: int) -> MediaItem:
    frames = np.random.default_rng(count).integers(0, 256, (count, 60, 60, 3), np.uint8)
    return MediaItem("video", frames, "0" * 64, {})


def array(made: ProcessedMedia, name: str) -> np.ndarray:
    packed = made.inputs[name]
    return np.frombuffer(packed.data, packed.dtype).reshape(packed.shape)


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Qwen3OmniProcessor:
    folder: Path = tmp_path_factory.mktemp("omni")
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    return Qwen3OmniProcessor({"thinker_config": THINKER}, folder)


@pytest.mark.parametrize("count", [777, 16_000, 20_001, 63_999])
def test_numbers_of_recordings_are_those_of_transformers(processor, count):
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import (
        _get_feat_extract_output_lengths,
    )

    (made,) = processor.process([sound(count)], {})
    theirs = transformers.WhisperFeatureExtractor(feature_size=128)(
        sound(count).data, sampling_rate=16_000, padding=True, truncation=False,
        return_attention_mask=True, return_tensors="np",
    )  # fmt: skip
    assert theirs["attention_mask"].all()
    expected = theirs["input_features"][0].T
    np.testing.assert_allclose(array(made, "input_features"), expected, atol=2e-5, rtol=0)
    assert made.num_tokens == _get_feat_extract_output_lengths(len(expected))


def test_what_the_context_does_not_hold_is_refused(processor):
    with pytest.raises(RequestError, match=r"8\.00 s: at most 7 s"):
        processor.process([sound(16_000 * 8)], {})
    (cut,) = processor.process([sound(16_000 * 8)], {"truncation": True})
    assert cut.num_tokens == 91
    with pytest.raises(RequestError, match="too short to become a token"):
        processor.process([sound(200)], {})
    with pytest.raises(RequestError, match=r"video of 8\.0 s: at most 7\.7 s"):
        processor.process([film(8)], {})


def test_videos(processor):
    """A frame a second where nothing is said; bounds are of pixels of one frame."""
    (made,) = processor.process([film(2)], {})
    assert array(made, "second_per_grid_ts").tolist() == [2.0]
    time, rows, columns = array(made, "video_grid_thw")
    assert time == 1
    assert rows * columns * 16**2 >= 128 * 32 * 32


def test_placeholders(processor):
    texts = {m: processor.placeholder(m, 0) for m in ("audio", "image", "video")}
    assert texts == {
        "audio": "<|audio_start|><|audio_pad|><|audio_end|>",
        "image": "<|vision_start|><|image_pad|><|vision_end|>",
        "video": "<|vision_start|><|video_pad|><|vision_end|>",
    }


def test_memory_is_measured_with_a_long_recording(processor):
    assert processor.largest("audio", {}).num_tokens == 91
    assert processor.largest("audio", {"num_tokens": 30}).num_tokens >= 30

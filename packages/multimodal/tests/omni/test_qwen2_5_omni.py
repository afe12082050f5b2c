"""Qwen2.5-Omni's media processor: numbers and tokens of transformers', each modality by itself and all in
one prompt, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace_core.errors import RequestError
from headrace_core.multimodal import MediaItem, ProcessedMedia
from headrace_multimodal.omni.qwen2_5_omni import Qwen2_5OmniProcessor

AUDIO, IMAGE, VIDEO = 7, 8, 9
THINKER = {
    "audio_config": {"num_mel_bins": 128},
    "vision_config": {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2},
    "audio_token_index": AUDIO, "image_token_index": IMAGE, "video_token_index": VIDEO,
}  # fmt: skip
SECONDS = 4
SETTINGS = {
    "feature_size": 128, "chunk_length": SECONDS, "n_fft": 400, "hop_length": 160, "dither": 0.0,
    "sampling_rate": 16_000, "min_pixels": 3136, "max_pixels": 12_845_056, "patch_size": 14,
    "temporal_patch_size": 2, "merge_size": 2,
}  # fmt: skip
"""As the published checkpoints have them, in one file for all; there recordings are up to 300 s."""


def sound(count: int) -> MediaItem:
    samples = (0.1 * np.random.default_rng(count).standard_normal(count)).astype(np.float32)
    return MediaItem("audio", samples, "0" * 64, {"sample_rate": 16_000})


def picture(height: int, width: int) -> MediaItem:
    pixels = np.random.default_rng(height).integers(0, 256, (height, width, 3), np.uint8)
    return MediaItem("image", pixels, "0" * 64, {})


def film(count: int, height: int, width: int, **metadata: Any) -> MediaItem:
    shape = (count, height, width, 3)
    frames = np.random.default_rng(count).integers(0, 256, shape, np.uint8)
    return MediaItem("video", frames, "0" * 64, metadata)


def array(made: ProcessedMedia, name: str) -> np.ndarray:
    packed = made.inputs[name]
    return np.frombuffer(packed.data, packed.dtype).reshape(packed.shape)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("omni")
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    return folder


@pytest.fixture(scope="module")
def processor(folder: Path) -> Qwen2_5OmniProcessor:
    return Qwen2_5OmniProcessor({"thinker_config": THINKER}, folder)


@pytest.mark.parametrize("count", [7_777, 16_000, 63_999, 16_000 * SECONDS])
def test_numbers_of_recordings_are_those_of_transformers(processor, count):
    """Of a recording that is filled up with silence to the longest, those frames that hold it."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import (
        _get_feat_extract_output_lengths,
    )

    (made,) = processor.process([sound(count)], {})
    theirs = transformers.WhisperFeatureExtractor(feature_size=128, chunk_length=SECONDS)(
        sound(count).data, sampling_rate=16_000, padding="max_length", return_attention_mask=True,
        return_tensors="np",
    )  # fmt: skip
    kept = theirs["attention_mask"][0].astype(bool)
    expected = theirs["input_features"][0].T[kept]
    np.testing.assert_allclose(array(made, "input_features"), expected, atol=2e-5, rtol=0)
    assert made.num_tokens == _get_feat_extract_output_lengths(kept.sum())


def test_numbers_of_images_are_those_of_transformers(processor):
    pytest.importorskip("transformers")
    from transformers import Qwen2VLImageProcessorPil

    item = picture(61, 100)
    (made,) = processor.process([item], {})
    size = {"shortest_edge": 3136, "longest_edge": 12_845_056}
    theirs = Qwen2VLImageProcessorPil(size=size)(item.data, return_tensors="np")
    np.testing.assert_allclose(
        array(made, "pixel_values"), theirs["pixel_values"], atol=1e-5, rtol=0
    )
    assert array(made, "image_grid_thw").tolist() == theirs["image_grid_thw"][0].tolist()


def test_bounds_of_videos_are_the_models_own(processor):
    """Settings of images, which stand in the same file, allow 16 times as many pixels."""
    (small,) = processor.process([film(2, 60, 60)], {})
    _, rows, columns = array(small, "video_grid_thw")
    assert rows * columns * 14**2 >= 128 * 28 * 28
    assert processor.largest("video", {"num_frames": 2, "num_tokens": 4096}).num_tokens <= 768


@pytest.mark.parametrize(
    ("metadata", "seconds"),
    [({}, 1.0), ({"fps": 4.0}, 0.5), ({"fps": 30.0, "total_num_frames": 120}, 2.0)],
)
def test_the_model_is_told_the_seconds_of_two_frames(processor, metadata, seconds):
    """Two a second where nothing is said, as with transformers."""
    (made,) = processor.process([film(4, 60, 60, **metadata)], {})
    assert array(made, "second_per_grid_ts").tolist() == [seconds]


def test_all_in_one_prompt(processor):
    items = [picture(60, 60), sound(16_000), film(2, 60, 60), sound(8_000)]
    media = processor.process(items, {})
    seen, heard, watched, more = (item.num_tokens for item in media)
    assert (heard, more) == (25, 12)
    placed = processor.place([1, AUDIO, 2, IMAGE, VIDEO, 3, AUDIO, 4], media)
    expected = [1, *[AUDIO] * heard, 2, *[IMAGE] * seen, *[VIDEO] * watched, 3, *[AUDIO] * more, 4]
    assert placed.token_ids == expected
    assert [placed.token_ids[offset] for offset in placed.offsets] == [IMAGE, AUDIO, VIDEO, AUDIO]
    with pytest.raises(RequestError, match=r"2 placeholders \(token 7\) and comes with 1"):
        processor.place([AUDIO, AUDIO, IMAGE], media[:2])


def test_options_go_to_the_processors_that_have_them(processor):
    items = [picture(100, 100), sound(16_000 * SECONDS + 800)]
    options = {"max_pixels": 3136, "min_pixels": 3136, "truncation": True}
    image, cut = processor.process(items, options)
    assert (image.num_tokens, cut.num_tokens) == (4, 100)
    with pytest.raises(RequestError, match=r"4\.05 s: at most 4 s"):
        processor.process(items[1:], {})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"use_audio_in_video": True}, "use_audio_in_video: a video's sound is not"),
        ({"fps": 1}, "fps: no such option; this model's are max_pixels, min_pixels, truncation"),
        ({"truncation": 1}, "truncation = 1"),
    ],
)
def test_options_that_are_refused(processor, options, words):
    with pytest.raises(RequestError, match=words):
        processor.process([sound(8_000)], options)


def test_a_recording_too_short_for_a_token_is_refused(processor):
    with pytest.raises(RequestError, match="too short"):
        processor.process([sound(320)], {})


@pytest.mark.parametrize(
    ("part", "left"), [("audio_config", ("image", "video")), ("vision_config", ("audio",))]
)
def test_a_tower_that_is_left_out_takes_nothing(folder, part, left):
    thinker = {key: value for key, value in THINKER.items() if key != part}
    assert tuple(Qwen2_5OmniProcessor(thinker, folder).modalities()) == left


def test_memory_is_measured_with_a_long_recording(processor):
    assert processor.largest("audio", {}).num_tokens == 25 * SECONDS
    assert processor.largest("audio", {"num_tokens": 30}).num_tokens == 30
    assert processor.largest("audio", {"length": 32_000}).num_tokens == 50

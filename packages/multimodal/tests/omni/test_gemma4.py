"""Gemma 4's recordings: numbers and places of transformers'; pictures beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import MediaItem, TakesEmbeds
from headrace_multimodal.omni.gemma4 import Gemma4Media, Gemma4Recordings, gemma4_processor
from headrace_multimodal.video.gemma4 import Gemma4Processor

VISION: dict[str, Any] = {}
CONFIG: dict[str, Any] = {
    "audio_token_id": 7, "boa_token_id": 8, "eoa_token_index": 9, "audio_config": {},
    "image_token_id": 90, "video_token_id": 91, "boi_token_id": 92, "eoi_token_id": 93,
    "vision_config": VISION,
}  # fmt: skip
SETTINGS = (
    {},
    {
        "per_bin_mean": [0.1] * 128,
        "per_bin_stddev": [2.0] * 128,
        "preemphasis": 0.9,
        "mel_floor": 0.1,
    },
)


def item(count: int) -> MediaItem:
    samples = (0.1 * np.random.default_rng(count).standard_normal(count)).astype(np.float32)
    return MediaItem("audio", samples, f"{count:064d}", {"sample_rate": 16_000})


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("count", [640, 7_777, 48_001])
def test_numbers_are_those_of_transformers(
    tmp_path: Path, count: int, settings: dict[str, Any]
) -> None:
    theirs = pytest.importorskip("transformers.models.gemma4.feature_extraction_gemma4")
    whole = {"feature_extractor": settings}
    (tmp_path / "processor_config.json").write_text(json.dumps(whole), encoding="utf-8")
    (made,) = Gemma4Recordings(CONFIG, tmp_path).process([item(count)], {})
    packed = made.inputs["input_features"]
    found = np.frombuffer(packed.data, packed.dtype).reshape(packed.shape)
    expected = theirs.Gemma4AudioFeatureExtractor(**settings)([item(count).data])
    mask, values = expected["input_features_mask"][0], expected["input_features"][0]
    assert len(found) == mask.sum()
    np.testing.assert_allclose(found, values[mask], atol=1e-5, rtol=0)
    module = pytest.importorskip("transformers.models.gemma4.processing_gemma4")
    made_by = module.Gemma4Processor.__new__(module.Gemma4Processor)
    made_by.boa_token, made_by.audio_token, made_by.eoa_token = "(", "x", ")"
    text = made_by.replace_audio_token(expected, 0)
    assert made.token_ids == tuple({"(": 8, "x": 7, ")": 9}[letter] for letter in text)
    assert made.runs == ((1, len(text) - 2),)


def test_items_in_a_prompt(tmp_path: Path) -> None:
    processor = gemma4_processor(CONFIG, tmp_path)
    assert isinstance(processor, Gemma4Media)
    assert tuple(processor.modalities()) == ("image", "video", "audio")
    picture = MediaItem("image", np.zeros((30, 40, 3), np.uint8), "1" * 64, {})
    media = processor.process([item(9_000), picture, item(640)], {"max_soft_tokens": 70})
    sound, image, short = media
    placed = processor.place([1, 7, 2, 90, 3, 7], media)
    expected = [1, *sound.token_ids, 2, *image.token_ids, 3, *short.token_ids]
    assert placed.token_ids == expected
    assert processor.placeholder("audio", 0) == "<|audio|>"
    assert processor.largest("audio", {}).num_tokens == 752
    given = [
        processor.embedded("image", 0, {"image_sizes": [30, 40]}),
        processor.embedded("audio", 3, {}),
    ]
    placed = processor.place([7, 2, 90], given)  # items that come as vectors, in any order
    assert placed.token_ids == [8, 7, 7, 7, 9, 2, *given[0].token_ids]
    with pytest.raises(RequestError, match=r"31\.00 s: at most 30 s"):
        processor.process([item(31 * 16_000)], {})
    (cut,) = processor.process([item(31 * 16_000)], {"truncation": True})
    assert cut.num_tokens == 752
    with pytest.raises(RequestError, match="too short for one frame"):
        processor.process([item(160)], {})
    with pytest.raises(RequestError, match="no such option"):
        processor.process([item(640)], {"max_patches": 9})
    assert isinstance(processor, TakesEmbeds)
    assert processor.embedded("audio", 3, {}).token_ids == (8, 7, 7, 7, 9)
    assert processor.embedded("image", 0, {"image_sizes": [30, 40]}).num_tokens > 60


def test_towers_that_the_config_has(tmp_path: Path) -> None:
    """Or that no limit takes away."""
    seen = {**CONFIG, "audio_config": None}
    assert isinstance(gemma4_processor(seen, tmp_path), Gemma4Processor)
    heard = {key: value for key, value in CONFIG.items() if key != "vision_config"}
    assert tuple(gemma4_processor(heard, tmp_path).modalities()) == ("audio",)
    few = {**CONFIG, "audio_config": {"subsampling_conv_channels": [64, 32]}}
    with pytest.raises(UnsupportedModel, match="makes 128 bins"):
        gemma4_processor(few, tmp_path)

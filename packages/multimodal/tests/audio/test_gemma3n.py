"""Gemma 3n's recordings: numbers of transformers', places, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import MediaItem
from headrace_multimodal.audio.gemma3n import Gemma3nRecordings

CONFIG = {
    "audio_token_id": 7, "boa_token_id": 8, "eoa_token_id": 9, "audio_soft_tokens_per_image": 188,
}  # fmt: skip
SETTINGS = (
    {},
    {"per_bin_mean": [0.1] * 128, "per_bin_stddev": [2.0] * 128, "fft_overdrive": False},
)


def item(count: int) -> MediaItem:
    samples = (0.1 * np.random.default_rng(count).standard_normal(count)).astype(np.float32)
    return MediaItem("audio", samples, "0" * 64, {"sample_rate": 16_000})


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("count", [640, 7_777, 48_001])
def test_numbers_are_those_of_transformers(tmp_path: Path, count, settings):
    theirs = pytest.importorskip("transformers.models.gemma3n.feature_extraction_gemma3n")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (made,) = Gemma3nRecordings(CONFIG, tmp_path).process([item(count)], {})
    packed = made.inputs["input_features"]
    found = np.frombuffer(packed.data, packed.dtype).reshape(packed.shape)
    expected = theirs.Gemma3nAudioFeatureExtractor(**settings)(
        [item(count).data], return_tensors="np"
    )
    assert expected["input_features_mask"].all()
    np.testing.assert_allclose(found, expected["input_features"][0], atol=1e-5, rtol=0)


def test_places(tmp_path: Path):
    processor = Gemma3nRecordings(CONFIG, tmp_path)
    (made,) = processor.process([item(4_800)], {})
    assert (made.token_ids, made.runs) == ((8, *[7] * 188, 9), ((1, 188),))
    assert processor.place([1, 7], [made]).token_ids == [1, *made.token_ids]
    assert processor.placeholder("audio", 0) == "<audio_soft_token>"
    assert processor.largest("audio", {}).num_tokens == 190


def test_refusals(tmp_path: Path):
    processor = Gemma3nRecordings(CONFIG, tmp_path)
    with pytest.raises(RequestError, match=r"31\.00 s: at most 30 s"):
        processor.process([item(31 * 16_000)], {})
    (cut,) = processor.process([item(31 * 16_000)], {"truncation": True})
    assert cut.inputs["input_features"].shape == (2997, 128)
    with pytest.raises(RequestError, match="too short for one frame"):
        processor.process([item(384)], {})
    few = Gemma3nRecordings({**CONFIG, "audio_soft_tokens_per_image": 3}, tmp_path)
    with pytest.raises(RequestError, match=r"1\.00 s: at most 0\.48 s"):
        few.process([item(16_000)], {})
    (tmp_path / "preprocessor_config.json").write_text('{"dither": 0.1}', encoding="utf-8")
    with pytest.raises(UnsupportedModel, match=r"dither = 0\.1"):
        Gemma3nRecordings(CONFIG, tmp_path)

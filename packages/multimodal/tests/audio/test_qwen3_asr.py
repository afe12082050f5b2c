"""Qwen3-ASR's media processor: numbers and tokens of transformers'."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headrace_core.errors import RequestError
from headrace_core.multimodal import MediaItem
from headrace_multimodal.audio.qwen3 import Qwen3ASRProcessor

CONFIG = {"thinker_config": {"audio_token_id": 7, "text_config": {"max_position_embeddings": 130}}}
"""A context of ten seconds."""


def item(count: int) -> MediaItem:
    samples = (0.1 * np.random.default_rng(count).standard_normal(count)).astype(np.float32)
    return MediaItem("audio", samples, "0" * 64, {"sample_rate": 16_000})


@pytest.mark.parametrize(("count", "tokens"), [(3_001, 7), (16_000, 13), (48_333, 40)])
def test_numbers_and_tokens_are_those_of_transformers(tmp_path: Path, count, tokens):
    asr = pytest.importorskip("transformers.models.qwen3_asr.feature_extraction_qwen3_asr")
    (made,) = Qwen3ASRProcessor(CONFIG, tmp_path).process([item(count)], {})
    packed = made.inputs["input_features"]
    found = np.frombuffer(packed.data, packed.dtype).reshape(packed.shape)
    theirs = asr.Qwen3ASRFeatureExtractor()(
        [item(count).data],
        sampling_rate=16_000,
        padding=True,
        return_tensors="np",
        return_attention_mask=True,
    )
    length = int(theirs["attention_mask"].sum())
    expected = theirs["input_features"][0, :, :length].T
    assert len(found) == length
    np.testing.assert_allclose(found, expected, atol=2e-5, rtol=0)
    whole, rest = divmod(length, 100)
    assert made.num_tokens == 13 * whole + -(-rest // 8) == tokens


def test_placeholders_and_refusals(tmp_path: Path):
    processor = Qwen3ASRProcessor(CONFIG, tmp_path)
    media = processor.process([item(16_000), item(4_800)], {})
    assert processor.place([3, 7, 4, 7], media).token_ids == [3, *[7] * 13, 4, *[7] * 7]
    assert processor.placeholder("audio", 0) == "<|audio_start|><|audio_pad|><|audio_end|>"
    assert processor.largest("audio", {}).num_tokens == 130
    with pytest.raises(RequestError, match=r"11\.00 s: at most 10 s"):
        processor.process([item(11 * 16_000)], {})

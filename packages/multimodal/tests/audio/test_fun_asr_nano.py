"""Fun-ASR-Nano's media processor: numbers of a plain reading with the library's filters, as its extractor
needs torchaudio."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import MediaItem
from headrace_multimodal.audio.fun_asr_nano import FunAsrNanoProcessor

CONFIG = {"audio_token_id": 7, "audio_config": {"max_position_embeddings": 101}}


def item(count: int) -> MediaItem:
    samples = (0.1 * np.random.default_rng(count).standard_normal(count) + 0.02).astype(np.float32)
    return MediaItem("audio", samples, "0" * 64, {"sample_rate": 16_000})


@pytest.mark.parametrize(("count", "tokens"), [(400, 1), (7_777, 8), (48_101, 50)])
def test_numbers_and_tokens(tmp_path: Path, count, tokens):
    audio = pytest.importorskip("transformers.audio_utils")
    (made,) = FunAsrNanoProcessor(CONFIG, tmp_path).process([item(count)], {})
    packed = made.inputs["input_features"]
    found = np.frombuffer(packed.data, packed.dtype).reshape(packed.shape)
    filters = audio.mel_filter_bank(
        257, 80, 20.0, 8000.0, 16_000, norm=None, mel_scale="kaldi", triangularize_in_mel_space=True
    )
    samples = item(count).data.astype(np.float64)
    cut = np.stack([samples[begin : begin + 400] for begin in range(0, count - 399, 160)])
    cut -= cut.mean(1, keepdims=True)
    cut -= 0.97 * np.concatenate([cut[:, :1], cut[:, :-1]], axis=1)
    power = np.abs(np.fft.rfft(cut * np.hamming(400), 512)) ** 2
    mel = np.log(np.maximum(power @ filters, np.finfo(np.float32).eps))
    padded = np.concatenate([mel[:1]] * 3 + [mel] + [mel[-1:]] * 9)
    expected = np.stack([padded[6 * i : 6 * i + 7].ravel() for i in range(tokens)])
    assert made.num_tokens == tokens == -(-len(mel) // 6)
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)


def test_placeholders_and_refusals(tmp_path: Path):
    processor = FunAsrNanoProcessor(CONFIG, tmp_path)
    media = processor.process([item(16_000), item(4_800)], {})
    assert processor.place([3, 7, 4, 7], media).token_ids == [3, *[7] * 17, 4, *[7] * 5]
    assert processor.placeholder("audio", 0) == "<|object_ref_start|>"
    assert processor.largest("audio", {}).num_tokens == 100
    assert processor.largest("audio", {"num_tokens": 9}).num_tokens == 9
    with pytest.raises(RequestError, match=r"7\.00 s: at most 6 s"):
        processor.process([item(7 * 16_000)], {})
    with pytest.raises(RequestError, match="too short for one frame"):
        processor.process([item(399)], {})
    with pytest.raises(RequestError, match="'fps': Fun-ASR-Nano's processor has no options"):
        processor.process([item(9000)], {"fps": 1})
    with pytest.raises(UnsupportedModel, match="7 frames of 80 bins, the encoder takes 5 of 80"):
        FunAsrNanoProcessor({"audio_config": {"num_stacked_frames": 5}}, tmp_path)
    settings = json.dumps({"window": "povey"})
    (tmp_path / "preprocessor_config.json").write_text(settings, encoding="utf-8")
    with pytest.raises(UnsupportedModel, match="window = 'povey'"):
        FunAsrNanoProcessor(CONFIG, tmp_path)

"""Granite Speech's media processor: numbers of a plain reading in double precision, tokens, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import MediaItem
from headrace_multimodal.audio.granite_speech import GraniteSpeechProcessor

CONFIG = {"audio_token_index": 7, "window_size": 15, "downsample_rate": 5}


def item(count: int) -> MediaItem:
    samples = (0.1 * np.random.default_rng(count).standard_normal(count)).astype(np.float32)
    return MediaItem("audio", samples, "0" * 64, {"sample_rate": 16_000})


@pytest.fixture
def processor(tmp_path: Path) -> GraniteSpeechProcessor:
    settings = {"melspec_kwargs": {"n_mels": 80, "n_fft": 512}, "projector_window_size": 15}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return GraniteSpeechProcessor(CONFIG, tmp_path)


@pytest.mark.parametrize(("count", "states"), [(7_777, 24), (16_000, 50), (48_101, 150), (257, 1)])
def test_numbers_are_those_of_the_library(processor, count, states):
    """Its own extractor needs torchaudio; its functions for spectrograms do not."""
    audio = pytest.importorskip("transformers.audio_utils")
    (made,) = processor.process([item(count)], {})
    packed = made.inputs["input_features"]
    found = np.frombuffer(packed.data, packed.dtype).reshape(packed.shape)
    filters = audio.mel_filter_bank(257, 80, 0.0, 8000.0, 16_000, norm=None, mel_scale="htk")
    window = audio.window_function(400, "hann", frame_length=512, center=True)
    mel = audio.spectrogram(
        item(count).data.astype(np.float64), window, frame_length=512, hop_length=160, fft_length=512,
        power=2.0, mel_filters=filters, log_mel="log10", mel_floor=1e-10,
    ).T  # fmt: skip
    mel = np.maximum(mel, mel.max() - 8) / 4 + 1
    expected = mel[: 2 * states].reshape(states, 160)
    assert len(mel) // 2 == states
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)
    assert made.num_tokens == -(-states // 15) * 3


def test_placeholders(processor):
    media = processor.process([item(16_000), item(4_800)], {})
    placed = processor.place([3, 7, 4, 7, 5], media)
    assert placed.token_ids == [3, *[7] * 12, 4, *[7] * 3, 5]
    assert processor.placeholder("audio", 0) == "<|audio|>"
    assert processor.largest("audio", {}).num_tokens == 6000
    assert processor.largest("audio", {"num_tokens": 31}).num_tokens == 30


def test_refusals(processor, tmp_path: Path):
    with pytest.raises(RequestError, match=r"601\.00 s: at most 600 s"):
        processor.process([item(601 * 16_000)], {})
    with pytest.raises(RequestError, match="too short for one frame"):
        processor.process([item(256)], {})
    with pytest.raises(
        RequestError, match="'truncation': Granite Speech's processor has no options"
    ):
        processor.process([item(9000)], {"truncation": True})
    with pytest.raises(UnsupportedModel, match="160 bins of two frames, the encoder takes 128"):
        GraniteSpeechProcessor({"encoder_config": {"input_dim": 128}}, tmp_path)
    with pytest.raises(UnsupportedModel, match="windows of 15 for 3 tokens, the model of 12 for 2"):
        GraniteSpeechProcessor({"window_size": 12}, tmp_path)


def test_text_alone_is_refused_where_an_adapter_is_in_the_weights(processor, tmp_path: Path):
    assert not processor.needs_media
    (tmp_path / "adapter_config.json").write_text("{}", encoding="utf-8")
    assert '{"audio": 0}' in GraniteSpeechProcessor(CONFIG, tmp_path).needs_media

"""Media processors of speech models: spectrograms, lengths, placeholders, refusals."""

from __future__ import annotations

import builtins
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace_core.errors import MissingDependency, RequestError, UnsupportedModel
from headrace_core.multimodal import MediaItem, MediaPlacement, ProcessedMedia
from headrace_multimodal.audio.qwen2_audio import Qwen2AudioProcessor
from headrace_multimodal.audio.whisper import WhisperProcessor

TINY = {"num_mel_bins": 16, "max_source_positions": 50}  # one second


def item(samples: Any, rate: int | None = 16000) -> MediaItem:
    metadata = {} if rate is None else {"sample_rate": rate}
    return MediaItem("audio", samples, "0" * 64, metadata)


def noise(count: int, seed: int = 0) -> np.ndarray:
    return (0.1 * np.random.default_rng(seed).standard_normal(count)).astype(np.float32)


def arrays(media: ProcessedMedia) -> Mapping[str, np.ndarray]:
    return {
        name: np.frombuffer(array.data, dtype=array.dtype).reshape(array.shape)
        for name, array in media.inputs.items()
    }


@pytest.fixture
def whisper(tmp_path: Path) -> WhisperProcessor:
    return WhisperProcessor(TINY, tmp_path)


def test_whisper_pads_every_clip_to_its_length(whisper):
    short, full = whisper.process([item(noise(8001)), item(noise(16000))], {})
    assert (short.num_tokens, full.num_tokens) == (50, 50)
    assert arrays(short)["input_features"].shape == (100, 16)
    assert arrays(short)["num_frames"].tolist() == [51]
    assert arrays(full)["num_frames"].tolist() == [100]
    padded = whisper.process([item(np.append(noise(8001), np.zeros(100, np.float32)))], {})
    assert padded[0].inputs["input_features"] == short.inputs["input_features"]


@pytest.mark.parametrize("count", [480_000, 123_457])
def test_whisper_equals_transformers(tmp_path, count):
    transformers = pytest.importorskip("transformers")
    processor = WhisperProcessor({"num_mel_bins": 80, "max_source_positions": 1500}, tmp_path)
    (made,) = processor.process([item(noise(count))], {})
    expected = transformers.WhisperFeatureExtractor()(
        noise(count), sampling_rate=16000, return_attention_mask=True, return_tensors="np"
    )
    found = arrays(made)
    np.testing.assert_allclose(found["input_features"], expected["input_features"][0].T, atol=1e-4)
    assert found["num_frames"].tolist() == [int(expected["attention_mask"].sum())]


def test_longer_audio_is_refused_or_cut(whisper):
    with pytest.raises(RequestError, match=r"1\.50 s: at most 1 s.*truncation"):
        whisper.process([item(noise(24000))], {})
    (cut,) = whisper.process([item(noise(24000))], {"truncation": True})
    (whole,) = whisper.process([item(noise(24000)[:16000])], {})
    assert cut.inputs == whole.inputs
    (made,) = whisper.process([item(noise(16002))], {})  # what resampling may add
    assert made.inputs == whole.inputs


@pytest.mark.parametrize("options", [{"truncate": True}, {"truncation": 1}])
def test_unknown_options_are_refused(whisper, options):
    with pytest.raises(RequestError, match="truncation") as caught:
        whisper.process([item(noise(100))], options)
    assert caught.value.param == "mm_processor_kwargs"


def test_channels_are_averaged_and_rates_converted(whisper):
    pytest.importorskip("soxr")
    time = np.arange(22050) / 44100
    wave = np.sin(2 * np.pi * 440 * time)
    stereo = np.stack([wave, np.zeros_like(wave)])
    (found,) = whisper.process([item(stereo, 44100)], {})
    direct = 0.5 * np.sin(2 * np.pi * 440 * np.arange(8000) / 16000)
    (expected,) = whisper.process([item(direct.astype(np.float32), None)], {})
    assert arrays(found)["num_frames"].tolist() == [50]
    inside = slice(5, 45)
    np.testing.assert_allclose(
        arrays(found)["input_features"][inside].argmax(1),
        arrays(expected)["input_features"][inside].argmax(1),
    )


def test_without_soxr_the_error_says_what_to_install(whisper, monkeypatch):
    plain = builtins.__import__

    def without(name: str, *rest: Any, **keywords: Any) -> Any:
        if name == "soxr":
            raise ImportError(name)
        return plain(name, *rest, **keywords)

    monkeypatch.delitem(sys.modules, "soxr", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingDependency, match=r"soxr.*headrace-multimodal\[audio\]"):
        whisper.process([item(noise(100), 8000)], {})
    whisper.process([item(noise(100), 16000)], {})


@pytest.mark.parametrize(
    ("samples", "rate", "words"),
    [
        (np.zeros(0, np.float32), 16000, "not be empty|not empty"),
        (np.zeros((2, 3, 4), np.float32), 16000, "shape"),
        (np.zeros(9, np.int16), 16000, "int16"),
        (np.array([0.0, np.nan], np.float32), 16000, "not finite"),
        (np.zeros(9, np.float32), 0, "sample rate = 0"),
        (np.zeros(9, np.float32), "16000", "sample rate = '16000'"),
    ],
)
def test_what_is_no_audio(whisper, samples, rate, words):
    with pytest.raises(RequestError, match=words):
        whisper.process([item(samples, rate)], {})


def test_another_modality(whisper):
    picture = MediaItem("image", np.zeros((2, 2, 3), np.uint8), "0" * 64, {})
    with pytest.raises(RequestError, match="must be audio"):
        whisper.process([picture], {})


def test_whisper_places_nothing_and_wants_one_clip(whisper):
    (media,) = whisper.process([item(noise(100))], {})
    assert whisper.place([5, 6], [media]) == MediaPlacement([5, 6], [-1])
    for wrong in ([], [media, media]):
        with pytest.raises(RequestError, match="exactly one"):
            whisper.place([5, 6], wrong)
    assert whisper.placeholder("audio", 0) == ""
    assert whisper.largest("audio", {}).num_tokens == 50


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"feature_size": 20}, "20 bins"),
        ({"chunk_length": 30}, "30 s"),
        ({"dither": 0.1}, "dither"),
        ({"n_fft": "many"}, "n_fft"),
        ([], "JSON object"),
    ],
)
def test_preprocessor_settings_that_do_not_fit(tmp_path, settings, words):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(UnsupportedModel, match=words):
        WhisperProcessor(TINY, tmp_path)


def test_preprocessor_settings_in_either_file(tmp_path):
    settings = {"feature_size": 16, "chunk_length": 1, "n_fft": 200, "hop_length": 160}
    (tmp_path / "processor_config.json").write_text(json.dumps({"feature_extractor": settings}))
    assert WhisperProcessor(TINY, tmp_path).extract.mel.fft_size == 200
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(UnsupportedModel, match="unreadable"):
        WhisperProcessor(TINY, tmp_path)


class TestQwen2Audio:
    @pytest.fixture
    def processor(self, tmp_path: Path) -> Qwen2AudioProcessor:
        return Qwen2AudioProcessor({"audio_config": TINY, "audio_token_index": 7}, tmp_path)

    @pytest.mark.parametrize("count", [321, 480, 481, 8000, 15999, 16000])
    def test_lengths_are_those_of_transformers(self, processor, count):
        pytest.importorskip("transformers")
        (made,) = processor.process([item(noise(count))], {})
        frames = -(-count // 160)
        halved = (frames - 1) // 2 + 1
        assert made.num_tokens == (halved - 2) // 2 + 1
        found = arrays(made)
        assert found["num_frames"].tolist() == [frames]
        assert found["input_features"].shape == (min(100, frames + 2), 16)

    def test_placeholders(self, processor):
        first, second = processor.process([item(noise(16000)), item(noise(2000))], {})
        assert (first.num_tokens, second.num_tokens) == (25, 3)
        placed = processor.place([1, 7, 2, 7], [first, second])
        assert placed.token_ids == [1, *[7] * 25, 2, 7, 7, 7]
        assert placed.offsets == [1, 27]
        for wrong in ([1, 7, 2], [7, 7, 7]):
            with pytest.raises(RequestError, match="placeholders"):
                processor.place(wrong, [first, second])

    def test_too_short(self, processor):
        with pytest.raises(RequestError, match="too short"):
            processor.process([item(noise(160))], {})

    def test_largest_and_the_text_of_a_placeholder(self, processor):
        assert processor.largest("audio", {}).num_tokens == 25
        assert processor.placeholder("audio", 1).startswith("Audio 2: ")
        assert "<|AUDIO|>" in processor.placeholder("audio", 0)

    @pytest.mark.parametrize("config", [{"audio_config": []}, {"audio_token_index": "x"}])
    def test_wrong_configs(self, tmp_path, config):
        with pytest.raises(UnsupportedModel, match=next(iter(config))):
            Qwen2AudioProcessor({"audio_config": TINY, **config}, tmp_path)

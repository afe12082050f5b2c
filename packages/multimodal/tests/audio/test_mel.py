from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headrace_core.errors import UnsupportedModel
from headrace_multimodal.audio.mel import MelSettings, log_mel, mel_filters


def tone(seconds: float, hertz: float, rate: int = 16000) -> np.ndarray:
    time = np.arange(int(seconds * rate)) / rate
    return (0.3 * np.sin(2 * np.pi * hertz * time)).astype(np.float32)


@pytest.mark.parametrize("bins", [80, 128])
def test_filters_are_those_of_the_authors(bins):
    asset = _shared() / "whisper" / "mel_filters.npz"
    if not asset.is_file():
        pytest.skip("the authors' filters are in ../shared/data, which is not here")
    with np.load(asset, allow_pickle=False) as theirs:
        np.testing.assert_allclose(mel_filters(MelSettings(bins)), theirs[f"mel_{bins}"], atol=1e-7)


def _shared() -> Path:
    """``shared/data`` beside the project, or beside where it is checked out."""
    for parent in Path(__file__).resolve().parents:
        if (parent / "shared" / "data").is_dir():
            return parent / "shared" / "data"
    return Path("/nonexistent")


@pytest.mark.parametrize("bins", [80, 128])
def test_spectrograms_are_those_of_transformers(bins):
    transformers = pytest.importorskip("transformers")
    extract = transformers.WhisperFeatureExtractor(feature_size=bins)
    noise = np.random.default_rng(0).standard_normal(480_000).astype(np.float32)
    for samples in (0.1 * noise, tone(30, 440), tone(30, 3000) * (noise > 0)):
        expected = extract(samples, sampling_rate=16000, return_tensors="np")["input_features"][0]
        found = log_mel(samples, MelSettings(bins))
        assert found.shape == (3000, bins)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected.T, atol=1e-4)


def test_a_tone_is_loudest_in_its_bin_for_as_long_as_it_lasts():
    samples = np.concatenate([tone(1, 1000), np.zeros(16000, dtype=np.float32)])
    found = log_mel(samples, MelSettings())
    peaks = mel_filters(MelSettings())[:, round(1000 / 40)]
    assert (found[5:95].argmax(1) == peaks.argmax()).all()
    assert found[105:].max() == pytest.approx(found.min())


def test_silence_is_finite():
    assert np.isfinite(log_mel(np.zeros(1600, dtype=np.float32), MelSettings())).all()


def test_other_rates_and_sizes():
    settings = MelSettings(num_bins=40, sample_rate=8000, fft_size=256, hop=80)
    assert log_mel(tone(1, 500, 8000), settings).shape == (100, 40)


@pytest.mark.parametrize("wrong", [{"num_bins": 0}, {"hop": 500}, {"sample_rate": 1}])
def test_settings_out_of_range(wrong):
    with pytest.raises(UnsupportedModel, match=next(iter(wrong))):
        MelSettings(**wrong)

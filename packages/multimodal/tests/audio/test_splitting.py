"""Where long audio is cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_core.errors import RequestError
from headrace_core.speech.model import AudioClip, SpeechToTextConfig
from headrace_multimodal.audio.splitting import quietest, split

RATE = 16_000
CONFIG = SpeechToTextConfig()


def noise(seconds: float, *silences: tuple[float, float]) -> np.ndarray:
    """Loud, but for the silences."""
    samples = np.random.default_rng(7).uniform(-0.5, 0.5, int(seconds * RATE)).astype("float32")
    for begin, end in silences:
        samples[int(begin * RATE) : int(end * RATE)] = 0
    return samples


def test_short_audio_is_one_clip():
    audio = AudioClip(noise(30), RATE)
    assert split(audio, CONFIG) == [audio]


def test_the_cuts_lie_in_the_silences_and_nothing_is_lost():
    samples = noise(75, (29.5, 29.7), (59.0, 59.3))
    clips = split(AudioClip(samples, RATE), CONFIG)
    cuts = np.cumsum([clip.seconds for clip in clips])
    assert len(clips) == 3
    assert 29.5 <= cuts[0] <= 29.7
    assert 59.0 <= cuts[1] <= 59.3
    np.testing.assert_array_equal(np.concatenate([clip.samples for clip in clips]), samples)


def test_the_quietest_of_several_quiet_places():
    samples = noise(1)
    samples[2000:4000] *= 0.01
    samples[9000:11000] *= 0.1
    assert 2000 <= quietest(samples, 1600) <= 4000


def test_a_silence_shorter_than_the_window_is_found():
    assert abs(quietest(noise(1, (0.6, 0.61)), 1600) - 9680) <= 800


def test_of_equal_stretches_the_last_is_taken():
    assert quietest(np.zeros(16_000, "float32"), 1600) == 16_000 - 1600 + 800


def test_what_may_not_be_cut_is_refused_with_both_numbers():
    config = SpeechToTextConfig(min_energy_split_window_size=None)
    with pytest.raises(RequestError, match=r"31\.0 seconds of audio; at most 30") as caught:
        split(AudioClip(noise(31), RATE), config)
    assert caught.value.param == "file"


@given(
    length=st.integers(1, 3000),
    limit=st.floats(0.05, 2.0),
    overlap=st.floats(0.01, 0.04),
    window=st.integers(1, 500),
)
def test_clips_are_the_audio_and_none_is_too_long(length, limit, overlap, window):
    samples = np.random.default_rng(length).uniform(-1, 1, length).astype("float32")
    config = SpeechToTextConfig(
        sample_rate=100, max_audio_clip_s=limit, overlap_chunk_second=overlap,
        min_energy_split_window_size=window,
    )  # fmt: skip
    clips = split(AudioClip(samples, 100), config)
    np.testing.assert_array_equal(np.concatenate([clip.samples for clip in clips]), samples)
    assert all(0 < clip.seconds <= limit for clip in clips)

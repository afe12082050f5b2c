"""Limits of uploads, from flags and the environment; what the libraries' absence does."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.assembly.speech.served import ServedSpeech, audio_limits
from headrace.assembly.speech.transcription import missing_libraries
from headrace.cli.serve import prepare
from headrace_core.arrays import PackedArray
from headrace_core.errors import ConfigError
from headrace_core.speech.model import SupportsTranscription
from headrace_engine.config import SpeechConfig


def test_limits_are_25_mib_and_two_hours():
    limits = audio_limits(SpeechConfig(), {})
    assert (limits.file_bytes, limits.seconds, limits.decode_seconds) == (25 << 20, 7200, 60)


def test_the_environment_says_how_large_a_file_may_be():
    environ = {"HEADRACE_MAX_AUDIO_CLIP_FILESIZE_MB": "1.5"}
    assert audio_limits(SpeechConfig(), environ).file_bytes == 3 << 19
    assert audio_limits(SpeechConfig(max_audio_file_bytes=7), environ).file_bytes == 7


@pytest.mark.parametrize("size", ["x", "0", "-1", "nan", "inf"])
def test_a_size_that_is_none(size):
    with pytest.raises(ConfigError, match="HEADRACE_MAX_AUDIO_CLIP_FILESIZE_MB"):
        audio_limits(SpeechConfig(), {"HEADRACE_MAX_AUDIO_CLIP_FILESIZE_MB": size})


@pytest.mark.req("SEC-07")
def test_the_hardened_profile_takes_an_hour_of_audio():
    assert prepare(["--hardened"]).config.speech.max_audio_seconds == 3600
    assert (
        prepare(["--hardened", "--max-audio-seconds", "60"]).config.speech.max_audio_seconds == 60
    )
    assert prepare([]).config.speech.max_audio_seconds is None


@pytest.mark.parametrize("settings", [{"audio_decoders": 0}, {"max_audio_seconds": 0.0},
                                      {"audio_decode_seconds": -1.0}])  # fmt: skip
def test_settings_out_of_range(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        SpeechConfig(**settings)


def test_missing_libraries_are_named_with_the_extra(monkeypatch):
    assert missing_libraries() == ()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    lines = missing_libraries()
    assert len(lines) == 3
    assert "'soundfile' is not installed: run pip install 'headrace[audio]'" in lines[0]


class _Even(SupportsTranscription):
    """Says nothing of its states."""


class _Whisperish(SupportsTranscription):
    @classmethod
    def get_seconds_per_state(cls, model_config):
        return 0.02


@pytest.mark.parametrize(
    ("model", "seconds", "times"),
    [(_Whisperish, 0.139, [0.0, 0.06, 0.1]), (_Whisperish, 0.09, [0.0, 0.06, 0.09]),
     (_Even, 0.12, [0.0, 0.06, 0.1])],
)  # fmt: skip
def test_times_of_words_go_by_the_length_of_a_state(model, seconds, times):
    """139 ms are 13 frames, 6 states; a clip's length over that is more than a state's."""
    states = np.full((3, 6), -1.0, np.float32)
    states[0, :3] = states[1, 3:5] = states[2, 5:] = 1.0
    speech = ServedSpeech(model, info=None, decoder=None)
    weights = PackedArray("float32", states.shape, states.tobytes())
    assert speech.token_times(weights, 3, seconds) == pytest.approx(times)

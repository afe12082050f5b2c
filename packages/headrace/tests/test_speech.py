"""Limits of uploads, from flags and the environment; what the libraries' absence does."""

from __future__ import annotations

import pytest

from headrace.assembly.speech import audio_limits
from headrace.assembly.transcription import missing_libraries
from headrace.cli.serve import prepare
from headrace_core.config import SpeechConfig
from headrace_core.errors import ConfigError


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

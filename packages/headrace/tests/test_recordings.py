"""What :meth:`LLM.transcribe` may be given, and how it shows how far it is."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.assembly.speech.served import offline_decoder
from headrace.offline.recordings import as_recordings, read_ahead
from headrace.offline.transcribing import TranscriptionOptions
from headrace.progress import audio_bar
from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_core.speech.model import AudioClip
from headrace_engine.config import SpeechConfig
from headrace_testing.fakes.speech import FakeSpeech, wav_file

SAMPLES = np.zeros(800, np.float32)


class Decoder:
    """Takes a file's length for its sound."""

    def __init__(self) -> None:
        self.read = threading.Semaphore(0)

    def decode_now(self, data: bytes, *, name: str, sample_rate: int) -> AudioClip:
        self.read.release()
        if not data:
            raise RequestError(f"file {name!r}: no audio")
        return AudioClip(np.zeros(len(data), np.float32), sample_rate)


@pytest.mark.parametrize(
    "one",
    [
        "a.wav",
        Path("a.wav"),
        b"RIFF",
        bytearray(b"RIFF"),
        (SAMPLES, 8000),
        (SAMPLES, np.int64(8000)),
        AudioClip(SAMPLES, 1),
    ],
)
def test_one_is_a_list_of_one(one: Any) -> None:
    assert as_recordings(one) == [one]
    assert len(as_recordings([one, one])) == 2


@pytest.mark.parametrize(
    ("audio", "said"),
    [
        (SAMPLES, "must come with their rate"),
        ([SAMPLES], "ndarray: must be a path"),
        ([3], "int"),
        (None, "NoneType: must be a path, a file's bytes or"),
        (5, "int: must be a path"),
        ({"array": SAMPLES, "sampling_rate": 8000}, "dict: must be a path"),
        (io.BytesIO(b"RIFF"), r"BytesIO: must be .*; read\(\) gives a file's bytes"),
        ((SAMPLES, "8000"), "ndarray: must be a path, a file's bytes or \\(samples, rate\\)"),
    ],
)
def test_what_is_no_recording(audio: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        as_recordings(audio)


def test_recordings_are_read_in_order_one_ahead(tmp_path: Path) -> None:
    decoder: Any = Decoder()
    (tmp_path / "a.wav").write_bytes(b"123")
    every = [tmp_path / "a.wav", (np.zeros((2, 8000), np.float64), 8000), b"12", b"1"]
    clips = read_ahead(every, decoder, 16_000)
    assert len(next(clips).samples) == 3
    assert [len(clip.samples) for clip in (next(clips), next(clips))] == [16_000, 2]
    for _ in range(3):
        assert decoder.read.acquire(timeout=60), "the last one is read while nobody waits for it"
    assert [len(clip.samples) for clip in clips] == [1]
    assert list(read_ahead([], decoder, 16_000)) == []


def test_a_recording_that_cannot_be_read(tmp_path: Path) -> None:
    decoder: Any = Decoder()
    (tmp_path / "empty.wav").touch()
    with pytest.raises(RequestError, match=r"empty.wav': no audio"):
        list(read_ahead([tmp_path / "empty.wav"], decoder, 16_000))
    with pytest.raises(FileNotFoundError):
        list(read_ahead([tmp_path / "none.wav"], decoder, 16_000))
    with pytest.raises(RequestError, match="samples of shape"):
        list(read_ahead([(np.zeros(3, np.int16), 8000)], decoder, 16_000))
    with pytest.raises(RequestError, match="samples of list that are not an array"):
        list(read_ahead([([[0.0], [0.0, 1.0]], 8000)], decoder, 16_000))
    [clip] = read_ahead([(SAMPLES, np.int64(16_000))], decoder, 16_000)
    assert len(clip.samples) == len(SAMPLES)
    [clip] = read_ahead([bytearray(b"123")], decoder, 16_000)
    assert len(clip.samples) == 3
    clips = read_ahead([b"1", b""], decoder, 16_000)
    assert len(next(clips).samples) == 1
    with pytest.raises(RequestError, match=r"^audio\[1\]: file '': no audio"):
        next(clips)


def test_files_of_ones_own_may_be_long() -> None:
    decoder = offline_decoder(SpeechConfig())
    try:
        clip = decoder.decode_now(wav_file([1] * 80_000, 8000), name="", sample_rate=16_000)
        assert clip.seconds == 10
        assert decoder.limits.file_bytes > 1 << 35
    finally:
        decoder.close()
    bounded = offline_decoder(SpeechConfig(max_audio_seconds=7.0, max_audio_file_bytes=1 << 20))
    assert bounded.limits.held_seconds == decoder.limits.seconds, (
        "a limit of one file is not of all"
    )
    try:
        with pytest.raises(RequestError, match="at most 7 are taken"):
            bounded.decode_now(wav_file([1] * 80_000, 8000), name="", sample_rate=16_000)
    finally:
        bounded.close()


def test_what_is_wanted() -> None:
    assert list(TranscriptionOptions(task="transcribe").temperatures) == [
        0.0,
        0.2,
        0.4,
        0.6,
        0.8,
        1.0,
    ]
    assert list(TranscriptionOptions(task="transcribe", temperature=0.3).temperatures) == [0.3]
    assert list(TranscriptionOptions(task="transcribe", temperature=[0, 1]).temperatures) == [0, 1]
    assert list(
        TranscriptionOptions(task="transcribe", temperature=np.float32(0.5)).temperatures
    ) == [0.5]
    timed, plain = FakeSpeech(word_timestamps=True), FakeSpeech(segment_timestamps=False)
    assert TranscriptionOptions(task="transcribe").segments(timed)
    assert not TranscriptionOptions(task="transcribe").segments(plain)
    assert not TranscriptionOptions(task="transcribe").words(timed)
    both = TranscriptionOptions(task="transcribe", timestamps=("segment", "word"))
    assert both.segments(timed)
    assert both.words(timed)
    with pytest.raises(UnsupportedFeature, match="no timestamps of segments"):
        both.segments(plain)
    with pytest.raises(UnsupportedFeature, match="timestamps of words"):
        both.words(plain)


@pytest.mark.parametrize(
    ("values", "error", "said"),
    [
        ({"timestamps": "word"}, RequestError, "must be of"),
        ({"timestamps": ["line"]}, RequestError, "timestamp_granularities = "),
        ({"temperature": 1.5}, RequestError, "temperature = 1.5: must be 0 to 1"),
        ({"temperature": []}, RequestError, "one or several"),
        ({"temperature": "0.5"}, RequestError, "temperature = '0.5': must be 0 to 1"),
        ({"temperature": None}, RequestError, "temperature = None: must be 0 to 1"),
        ({"temperature": True}, RequestError, "temperature = True: must be 0 to 1"),
        ({"temperature": [0.0, None]}, RequestError, r"temperature = \[0.0, None\]: must be"),
        ({"timestamps": 5}, RequestError, "timestamp_granularities = 5: must be of"),
        ({"timestamps": [["word"]]}, RequestError, r"= \[\['word'\]\]: must be of"),
        ({"prompt": None}, RequestError, "prompt = None: must be text"),
        ({"sampling": {"stop": "x"}}, TypeError, r"\['stop'\]: must be of top_p"),
    ],
)
def test_what_cannot_be_wanted(values: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        TranscriptionOptions(task="transcribe", **values)


def test_the_bar_counts_seconds() -> None:
    class Bar:
        def __init__(self, **options: Any) -> None:
            self.unit, self.total, self.n, self.closed = options["unit"], options["total"], 0, False

        def update(self, more: int) -> None:
            self.n += more

        def refresh(self) -> None: ...

        def close(self) -> None:
            self.closed = True

    made: list[Bar] = []
    with audio_bar(lambda **options: made.append(Bar(**options)) or made[-1]) as bar:
        bar.add(2.6)
        bar.add(2.6)
        for _ in range(4):
            bar.advance(1.3)
    assert (made[0].unit, made[0].total, made[0].n, made[0].closed) == ("s", 5, 5, True)
    with audio_bar(False) as none:
        none.add(1.0)
        none.advance(1.0)

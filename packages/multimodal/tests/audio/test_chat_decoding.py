"""Audio files of chats become samples, in turns."""

from __future__ import annotations

import io
import wave
from concurrent.futures import CancelledError, Future

import numpy as np
import pytest

from headrace_core.errors import QueueFull, RequestError, UnsupportedFeature
from headrace_multimodal.audio import decoding
from headrace_multimodal.audio.chat_decoding import ChatAudioDecoder
from headrace_multimodal.audio.decoding import AudioLimits
from headrace_multimodal.reading import reading

RATE, SECONDS = 16_000, 1.5
WHERE = "messages[0].content[1].input_audio.data"


def tone(seconds: float = SECONDS) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * 440 * np.arange(int(RATE * seconds)) / RATE).astype("float32")


def wav(samples: np.ndarray) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(RATE)
        out.writeframes((samples * 32767).astype("<i2").tobytes())
    return file.getvalue()


@pytest.fixture(scope="module")
def decoder():
    made = ChatAudioDecoder(
        AudioLimits(file_bytes=1 << 20, seconds=2 * SECONDS, held_seconds=2 * SECONDS)
    )
    yield made
    made.close()


def test_samples_come_as_they_are_in_the_file(decoder):
    clip = decoder(wav(tone()), WHERE)
    assert clip.sample_rate == RATE
    assert clip.samples.flags.aligned
    np.testing.assert_allclose(clip.samples, tone(), atol=1e-4)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"hello, I am text", "not a supported audio file"),
        (bytes((1 << 20) + 1), r"audio file of 1048577 bytes: at most 1048576"),
        (wav(tone(seconds=4.0)), "seconds of audio; at most 3"),
    ],
    ids=["text", "large", "long"],
)
def test_errors_name_the_part(decoder, data, message):
    with pytest.raises(RequestError, match=message) as caught:
        decoder(data, WHERE)
    assert caught.value.param == WHERE
    assert str(caught.value).startswith(f"{WHERE}: ")


def test_a_file_that_nobody_waits_for_is_not_decoded(decoder):
    abandoned: Future[None] = Future()
    abandoned.set_result(None)
    with reading(abandoned, lambda: None), pytest.raises(CancelledError):
        decoder(wav(tone()), WHERE)


def test_sound_in_use_is_bounded(decoder):
    kept = [decoder(wav(tone()), WHERE) for _ in range(2)]
    with pytest.raises(QueueFull, match="3 seconds of audio are in work"):
        decoder(wav(tone()), WHERE)
    kept.clear()
    assert decoder(wav(tone()), WHERE).seconds == SECONDS


def test_a_missing_library_is_named_with_its_extra(decoder, monkeypatch):
    monkeypatch.setattr(decoding, "LIBRARIES", ("no_such_library",))
    with pytest.raises(UnsupportedFeature, match=r"'no_such_library'.*headrace\[audio\]"):
        decoder(wav(tone()), WHERE)

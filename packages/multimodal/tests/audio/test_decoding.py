"""Uploads become samples, or a sentence that says why not."""

from __future__ import annotations

import asyncio
import gc
import io
import queue
import struct
import sys
import threading
import wave
from contextlib import suppress
from types import SimpleNamespace

import av
import numpy as np
import pytest
import soundfile

from headrace_core.errors import MissingDependency, QueueFull, RequestError
from headrace_multimodal.audio import decoding
from headrace_multimodal.audio.decoding import AudioDecoder, AudioLimits
from headrace_multimodal.audio.formats import says_length
from headrace_testing.waiting import until

RATE = 16_000
SECONDS = 1.5


def tone(rate: int = RATE, seconds: float = SECONDS, hertz: float = 440.0) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate).astype("float32")


def wav(samples: np.ndarray, rate: int = RATE, channels: int = 1) -> bytes:
    """By the standard library; the same on all channels."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes(np.repeat((samples * 32767).astype("<i2"), channels).tobytes())
    return file.getvalue()


def encoded(
    container: str, codec: str, rate: int = 44_100, bit_rate: int = 0, **options: str
) -> bytes:
    """By FFmpeg."""
    file = io.BytesIO()
    with av.open(file, "w", format=container, options=options) as out:
        stream = out.add_stream(codec, rate=rate, layout="mono")
        if bit_rate:
            stream.bit_rate = bit_rate
        frame = av.AudioFrame.from_ndarray(tone(rate)[None], format="fltp", layout="mono")
        frame.sample_rate = rate
        to_codec = av.AudioResampler(
            format=stream.format.name, frame_size=stream.frame_size or 1024
        )
        for part in [*to_codec.resample(frame), *to_codec.resample(None)]:
            out.mux(stream.encode(part))
        out.mux(stream.encode(None))
    return file.getvalue()


@pytest.fixture(scope="module")
def decoder():
    made = AudioDecoder(AudioLimits(file_bytes=4 << 20, seconds=60.0, decode_seconds=30.0))
    yield made
    made.close()


def decode(decoder, data, rate=RATE):
    return asyncio.run(decoder.decode(data, name="speech.x", sample_rate=rate))


def is_the_tone(samples, rate=RATE, *, tolerance):
    """Whether, its edges apart, the loudest frequency is the tone's and its strength the same."""
    middle = samples[len(samples) // 4 : -len(samples) // 4]
    spectrum = np.abs(np.fft.rfft(middle * np.hanning(len(middle))))
    hertz = np.fft.rfftfreq(len(middle), 1 / rate)[spectrum.argmax()]
    return abs(hertz - 440) < 3 and abs(np.sqrt(np.mean(middle**2)) - 0.5 / 2**0.5) < tolerance


def test_a_wav_file_of_the_models_rate_stays_as_it_is(decoder):
    clip = decode(decoder, wav(tone()))
    assert clip.sample_rate == RATE
    assert clip.samples.dtype == np.float32
    np.testing.assert_allclose(clip.samples, tone(), atol=1e-4)


def test_stereo_of_another_rate_becomes_one_channel_of_the_models(decoder):
    clip = decode(decoder, wav(tone(44_100), 44_100, channels=2))
    assert abs(clip.seconds - SECONDS) < 0.01
    assert is_the_tone(clip.samples, tolerance=0.01)


def test_channels_are_averaged(decoder):
    file = io.BytesIO()
    soundfile.write(file, np.stack([tone(), -tone()], axis=1), RATE, format="FLAC")
    assert np.abs(decode(decoder, file.getvalue()).samples).max() < 1e-3


@pytest.mark.parametrize(
    ("container", "codec", "rate"),
    [
        ("mp3", "libmp3lame", 44_100),
        ("mp4", "aac", 44_100),
        ("ipod", "aac", 44_100),  # .m4a
        ("webm", "libopus", 48_000),
        ("ogg", "libopus", 48_000),
        ("flac", "flac", 44_100),
        ("adts", "aac", 44_100),
        ("mpeg", "mp2", 44_100),
        ("wav", "adpcm_ms", 44_100),
    ],
)
def test_the_formats_that_clients_may_send(decoder, container, codec, rate):
    clip = decode(decoder, encoded(container, codec, rate))
    assert abs(clip.seconds - SECONDS) < 0.15
    assert is_the_tone(clip.samples, tolerance=0.03)


def test_mp3_without_a_note_of_its_length_is_not_taken_for_cut_off(decoder):
    """Frames of a low rate first: from these, a library guesses several times the length."""
    parts = [
        encoded("mp3", "libmp3lame", 44_100, rate, write_xing="0", id3v2_version="0")
        for rate in (32_000, 256_000)
    ]
    assert abs(decode(decoder, b"".join(parts)).seconds - 2 * SECONDS) < 0.2


def test_a_codec_that_nobody_knows_is_no_crash(decoder):
    data = bytearray(wav(tone()))
    place = data.index(b"fmt ") + 8
    data[place : place + 2] = b"\xad\xde"
    before = decoder._workers[0].pid
    with pytest.raises(RequestError, match="codec is not known"):
        decode(decoder, bytes(data))
    assert decoder._workers[0].pid == before


def _tagged(mp3: bytes, text: bytes) -> bytes:
    frame = b"TXXX" + struct.pack(">I", len(text)) + b"\0\0" + text
    size = bytes(len(frame) >> shift & 0x7F for shift in (21, 14, 7, 0))
    return b"ID3\3\0\0" + size + frame + mp3


def test_what_an_mp3s_tag_says_is_no_note(decoder):
    data = encoded("mp3", "libmp3lame", write_xing="0", id3v2_version="0")
    assert not says_length(_tagged(data, b"\0Info"), "mp3")
    assert decode(decoder, _tagged(data, b"\0Info" * 3)).seconds > SECONDS - 0.1
    noted = encoded("mp3", "libmp3lame", id3v2_version="0")
    assert says_length(_tagged(noted, b"\0" * 20_000), "mp3")


def test_mp3_with_a_note_that_is_cut_off(decoder):
    data = encoded("mp3", "libmp3lame")
    with pytest.raises(RequestError, match=r"cut off: .* of the .* samples"):
        decode(decoder, data[: len(data) // 2])


@pytest.mark.req("SEC-08")
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a supported audio file"),
        (b"hello, I am text", "not a supported audio file"),
        (b"#EXTM3U\nhttp://127.0.0.1/secret", "not a supported audio file"),
        (b"ffconcat version 1.0\nfile /etc/passwd", "not a supported audio file"),
        (encoded("avi", "pcm_s16le"), "not a supported audio file"),
        (wav(tone())[:20_000], "cut off: .* bytes of sound"),
        (encoded("mp4", "aac")[:9_000], "damaged|cut off"),
        (b"\x1a\x45\xdf\xa3" + bytes(1000), "damaged|no sound"),
        (b"fLaC" + bytes(1000), "damaged"),
        (b"OggS" + bytes(range(256)) * 4, "damaged|cut off"),
        (wav(np.zeros(0, "float32")), "no sound"),
        (wav(tone(), rate=5), "seconds of audio|samples a second"),
    ],
    ids=["empty", "text", "playlist", "concat", "avi", "cut-wav", "cut-mp4", "matroska", "flac",
         "ogg", "no-sound", "slow"],
)  # fmt: skip
def test_what_is_no_audio_is_refused_in_words(decoder, data, message):
    with pytest.raises(RequestError, match=message) as caught:
        decode(decoder, data)
    assert caught.value.param == "file"
    assert "speech.x" in str(caught.value)


def test_numbers_that_are_not_finite_are_refused(decoder):
    file = io.BytesIO()
    soundfile.write(file, np.full(100, np.nan, "float32"), RATE, format="WAV", subtype="FLOAT")
    with pytest.raises(RequestError, match="not finite"):
        decode(decoder, file.getvalue())


def test_a_file_may_be_too_large_and_sound_too_long(decoder):
    with pytest.raises(RequestError, match=r"4194305 bytes; at most 4194304 \(4 MiB\)"):
        decode(decoder, bytes((4 << 20) + 1))
    with pytest.raises(RequestError, match="seconds of audio; at most 60"):
        decode(decoder, encoded_silence(61))


def encoded_silence(seconds: int) -> bytes:
    """Small: what is long need not be large."""
    file = io.BytesIO()
    soundfile.write(file, np.zeros(seconds * 8000, "float32"), 8000, format="FLAC")
    return file.getvalue()


@pytest.mark.req("SEC-07")
def test_a_bomb_is_refused_before_it_is_large(decoder):
    """FLAC of silence: some kilobytes that announce no length and hold hours."""
    data = bytearray(encoded_silence(600))
    data[21:26] = bytes([data[21] & 0xF0, 0, 0, 0, 0])  # STREAMINFO: unknown number of samples
    with pytest.raises(RequestError, match="seconds of audio; at most 60"):
        decode(decoder, bytes(data))


def test_a_child_that_hangs_is_killed_and_replaced():
    decoder = AudioDecoder(AudioLimits(decode_seconds=0.001))
    try:
        with pytest.raises(RequestError, match=r"took longer than 0\.001 s"):
            decode(decoder, wav(tone(seconds=30)))
        decoder._workers[0]._limits = AudioLimits()
        assert decode(decoder, wav(tone())).seconds == SECONDS
    finally:
        decoder.close()


def test_whoever_gives_up_frees_the_child():
    decoder = AudioDecoder()

    async def give_up() -> None:
        task = asyncio.create_task(decoder.decode(wav(tone()), name="a", sample_rate=RATE))
        await until(lambda: decoder._workers[0].pid is not None)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        again = await decoder.decode(wav(tone()), name="b", sample_rate=RATE)
        assert again.seconds == SECONDS

    try:
        asyncio.run(give_up())
    finally:
        decoder.close()
    assert decoder._workers[0].pid is None


def test_whoever_gives_up_in_the_queue_leaves_no_file_there(monkeypatch):
    decoder = AudioDecoder()
    begun, go_on = threading.Event(), threading.Event()

    def slow(job):
        begun.set()
        go_on.wait(60)
        return decoding.GOOD + bytes(4)

    monkeypatch.setattr(decoder._workers[0], "decode", slow)

    async def give_up() -> None:
        first = asyncio.create_task(decoder.decode(b"first", name="a", sample_rate=RATE))
        await until(begun.is_set)
        data = bytes(1000)
        references = sys.getrefcount(data)
        second = asyncio.create_task(decoder.decode(data, name="b", sample_rate=RATE))
        await until(lambda: decoder._num_jobs == 2)
        second.cancel()
        with suppress(asyncio.CancelledError):
            await second
        del second
        await asyncio.sleep(0)
        gc.collect()  # tracebacks
        left = sys.getrefcount(data)
        assert left == references
        go_on.set()
        await first

    try:
        asyncio.run(give_up())
    finally:
        go_on.set()
        decoder.close()


def test_a_process_that_was_killed_after_its_answer_gets_no_other_file():
    """Else the next client would be told that its file is damaged."""
    calls = []

    class Worker:
        def decode(self, job):
            task.cancel()  # the client leaves just now
            return b"answer"

        def interrupt(self):
            calls.append("interrupt")

        def kill(self):
            calls.append(("kill", idle.empty()))

    idle = queue.SimpleQueue()
    idle.put(Worker())
    task = decoding._Task(idle, decoding.AudioDecodeJob(b"", RATE))
    assert task.run() == b"answer"
    assert calls == ["interrupt", ("kill", True)]
    assert not idle.empty()


def test_sound_in_use_is_bounded():
    decoder = AudioDecoder(AudioLimits(seconds=2 * SECONDS, held_seconds=2 * SECONDS))
    try:
        kept = [decode(decoder, wav(tone())) for _ in range(2)]
        with pytest.raises(QueueFull, match="3 seconds of audio are in work; with 2 more"):
            decode(decoder, wav(tone()))
        part = kept.pop().samples[10:20]
        with pytest.raises(QueueFull):
            decode(decoder, wav(tone()))
        del part
        assert decode(decoder, wav(tone())).seconds == SECONDS
        kept.clear()
        assert decode(decoder, wav(tone(seconds=2 * SECONDS))).seconds == 2 * SECONDS
    finally:
        decoder.close()


def test_only_so_many_files_wait(monkeypatch):
    monkeypatch.setattr(decoding, "MAX_WAITING", 0)
    decoder = AudioDecoder()
    with pytest.raises(QueueFull):
        decode(decoder, wav(tone()))
    decoder.close()


def test_a_missing_library_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(decoding, "LIBRARIES", ("soundfile", "no_such_library"))
    with pytest.raises(MissingDependency, match=r"'no_such_library'.*headrace\[audio\]"):
        AudioDecoder()


def test_wav_files_of_writers_that_cannot_know_the_length(decoder):
    data = bytearray(wav(tone()))
    place = data.index(b"data") + 4
    data[place : place + 4] = struct.pack("<I", 0xFFFFFFFF)
    assert abs(decode(decoder, bytes(data)).seconds - SECONDS) < 0.01


def test_a_thread_may_wait_for_its_file(decoder, monkeypatch):
    clip = decoder.decode_now(wav(tone()), name="speech.x", sample_rate=RATE)
    assert clip.seconds == SECONDS
    with pytest.raises(RequestError, match=r"speech\.x.*not a supported audio file"):
        decoder.decode_now(b"text", name="speech.x", sample_rate=RATE)
    monkeypatch.setattr(decoding, "WAIT_SECONDS", 0.0)
    with pytest.raises(QueueFull):
        decoder.decode_now(wav(tone(seconds=20)), name="speech.x", sample_rate=RATE)


def test_a_file_that_may_take_longer_is_waited_for_longer(monkeypatch):
    decoder, waited = AudioDecoder(AudioLimits(decode_seconds=600.0)), []

    class Waiting:
        def result(self, seconds):
            waited.append(seconds)
            raise TimeoutError

    with monkeypatch.context() as patched:
        patched.setattr(decoder, "_threads", SimpleNamespace(submit=lambda run: Waiting()))
        with pytest.raises(QueueFull):
            decoder.decode_now(wav(tone()), name="", sample_rate=RATE)
    decoder.close()
    assert waited == [10 * decoding.WAIT_SECONDS]

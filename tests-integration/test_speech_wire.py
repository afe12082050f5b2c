"""Speech over HTTP: a tiny Whisper in a real server, asked by the openai client, equals transformers."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import wave
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import openai
import pytest
import torch
from servers import RunningServer, alive, children_of, serving
from speech_checkpoints import RATE, SECONDS, features, save_whisper, sound

from headrace_core.speech.model import AudioClip, SpeechToTextConfig
from headrace_multimodal.audio.splitting import split
from headrace_testing.waiting import wait_until

NAME = "openai/whisper-small"
PAGE = Path(__file__).parents[1] / "docs" / "speech.md"
ONCE = {"temperature": [0]}
"""One attempt: what random weights say looks wrong. The client sends it as ``temperature[]``."""
TOKENS = 12


class Whisper(NamedTuple):
    folder: Path
    oracle: Any


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Whisper:
    """One that never says timestamps, as transformers cuts its texts at them."""
    folder = tmp_path_factory.mktemp("whisper")
    return Whisper(folder, save_whisper(folder))


@pytest.fixture(scope="module")
def server(whisper: Whisper) -> Iterator[RunningServer]:
    with _serving(whisper.folder) as running:
        yield running


@pytest.fixture(scope="module")
def timed_folder(whisper: Whisper, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, but it may say timestamps."""
    folder = tmp_path_factory.mktemp("timed") / "whisper"
    shutil.copytree(whisper.folder, folder)
    path = folder / "generation_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**settings, "suppress_tokens": [3, 4]}), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def timed(timed_folder: Path) -> Iterator[RunningServer]:
    with _serving(timed_folder) as running:
        yield running


def _serving(folder: Path, *more: str) -> AbstractContextManager[RunningServer]:
    words = ("--served-model-name", NAME, "--dtype", "float32", "--enforce-eager",
             "--num-threads", "1", "--kv-cache-memory-bytes", "16M")  # fmt: skip
    return serving(str(folder), *words, *more)


def _client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.api, api_key="none", max_retries=0)


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with _client(server) as made:
        yield made


def wav(samples: np.ndarray) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(RATE)
        out.writeframes((samples * 32768).clip(-32768, 32767).astype("<i2").tobytes())
    return file.getvalue()


LONG = wav(sound(1, 5.0))
"""Several clips."""


def clips(data: bytes, longest: float = SECONDS) -> list[np.ndarray]:
    """As the server cuts them."""
    samples = np.frombuffer(data[44:], "<i2").astype(np.float32) / 32768
    config = SpeechToTextConfig(max_audio_clip_s=longest)
    return [clip.samples for clip in split(AudioClip(samples, RATE), config)]


def texts(
    whisper: Whisper, data: bytes, language: str, task: str, longest: float = SECONDS
) -> list[str]:
    """By transformers, clip by clip."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(whisper.folder / "tokenizer.json"))
    found = []
    for samples in clips(data, longest):
        with torch.inference_mode():
            tokens = whisper.oracle.generate(
                features(whisper.folder, samples), language=language, task=task,
                max_new_tokens=TOKENS, do_sample=False,
            )  # fmt: skip
        found.append(tokenizer.decode(tokens[0].tolist(), skip_special_tokens=True))
    return found


def test_transcripts_and_translations_equal_transformers(
    whisper: Whisper, client: openai.OpenAI
) -> None:
    assert len(clips(LONG)) > 2
    extra = {"max_completion_tokens": TOKENS, **ONCE}
    for create, task in (
        (client.audio.transcriptions.create, "transcribe"),
        (client.audio.translations.create, "translate"),
    ):
        answer = create(model=NAME, file=("a.wav", LONG), extra_body={"language": "de", **extra})
        wanted = " ".join(text.strip() for text in texts(whisper, LONG, "de", task))
        assert answer.text == wanted


def test_ninety_seconds_are_heard_clip_by_clip(tmp_path: Path) -> None:
    """With clips of 30 s, as real checkpoints have them. Cut at quiet places, each clip is what
    transformers makes of it alone; its own long form begins clips elsewhere."""
    whisper = Whisper(tmp_path, save_whisper(tmp_path, seconds=30))
    data = wav(np.concatenate([sound(seed, 9.0) * (0.2 + seed % 2) for seed in range(10)]))
    assert len(clips(data, 30)) == 4
    with _serving(tmp_path) as server, _client(server) as client:
        answer = client.audio.transcriptions.create(
            model=NAME, file=("a.wav", data), language="de",
            extra_body={"max_completion_tokens": TOKENS, **ONCE},
        )  # fmt: skip
    assert answer.text == " ".join(
        text.strip() for text in texts(whisper, data, "de", "transcribe", 30)
    )


def test_a_stream_is_what_the_whole_is(client: openai.OpenAI) -> None:
    given: dict[str, Any] = {"model": NAME, "file": ("a.wav", LONG), "language": "en"}
    whole = client.audio.transcriptions.create(**given, extra_body=ONCE)
    events = list(client.audio.transcriptions.create(**given, stream=True))
    said = "".join(event.delta for event in events if event.type == "transcript.text.delta")
    assert said == whole.text == events[-1].text


def test_times_of_segments_and_words(timed: RunningServer) -> None:
    with _client(timed) as client:
        _check_times(client)


def _check_times(client: openai.OpenAI) -> None:
    answer = client.audio.transcriptions.create(
        model=NAME, file=("a.wav", LONG), language="en", response_format="verbose_json",
        timestamp_granularities=["segment", "word"], extra_body=ONCE,
    )  # fmt: skip
    assert answer.duration == 5.0
    assert answer.segments
    assert answer.words
    assert {segment.seek for segment in answer.segments} == set(_starts())
    for segment in answer.segments:
        assert 0 <= segment.start <= segment.end <= 5.0
        assert segment.avg_logprob < 0
        assert 0 <= segment.no_speech_prob <= 1
    starts = [word.start for word in answer.words]
    assert starts == sorted(starts)
    assert all(word.start <= word.end <= 5.0 and word.word for word in answer.words)


def _starts() -> list[int]:
    """Where the clips begin, in hundredths of a second."""
    lengths = [len(samples) / RATE for samples in clips(LONG)]
    return [round(100 * sum(lengths[:index])) for index in range(len(lengths))]


@pytest.mark.keep(1, every_value=False)
@pytest.mark.parametrize("more", [("--engine-process",), ("--api-server-count", "2")])
def test_several_processes_hear_the_same(
    more: tuple[str, ...], timed: RunningServer, timed_folder: Path
) -> None:
    """Clips, the probe for the language and the weights that words are aligned by go to the engine's
    process and back; each HTTP process decodes by itself, and leaves no decoder behind."""
    given: dict[str, Any] = {
        "model": NAME, "file": ("a.wav", LONG), "response_format": "verbose_json",
        "timestamp_granularities": ["segment", "word"], "extra_body": ONCE,
    }  # fmt: skip
    with _client(timed) as client:
        wanted = client.audio.transcriptions.create(**given)
    with _serving(timed_folder, *more) as server:
        for _ in range(6):  # with two processes, connections to both
            with _client(server) as client:
                assert client.audio.transcriptions.create(**given) == wanted
        started = _descendants(server.process.pid)
        assert sum("decode_worker" in words for words in map(_command, started)) >= 1
        assert server.stop() == 0
    wait_until(lambda: not any(map(alive, started)), 10, "processes are left")


def _descendants(pid: int) -> list[int]:
    found = children_of(pid)
    return [*found, *(below for child in found for below in _descendants(child))]


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def test_the_language_is_found_out(timed: RunningServer) -> None:
    with _client(timed) as client:
        answer = client.audio.transcriptions.create(
            model=NAME, file=("a.wav", LONG), response_format="verbose_json", extra_body=ONCE
        )
    assert answer.language in ("en", "de")


def test_other_formats_and_what_is_refused(client: openai.OpenAI) -> None:
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="webm") as out:
        stream = out.add_stream("libopus", rate=48_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(sound(2, 1.5)[None], format="fltp", layout="mono")
        frame.sample_rate = RATE
        resampler = av.AudioResampler("flt", "mono", 48_000, frame_size=960)
        for part in [*resampler.resample(frame), *resampler.resample(None)]:
            out.mux(stream.encode(part))
        out.mux(stream.encode(None))
    given: dict[str, Any] = {"model": NAME, "language": "en", "response_format": "text"}
    answer = client.audio.transcriptions.create(
        file=("a.webm", file.getvalue()), **given, extra_body=ONCE
    )
    assert isinstance(answer, str)
    for data, said in ((b"text", "not a supported audio file"), (LONG[:20_000], "cut off")):
        with pytest.raises(openai.BadRequestError, match=said):
            client.audio.transcriptions.create(file=("a.wav", data), **given)
    for form in ("verbose_json", "srt", "vtt"):
        with pytest.raises(openai.BadRequestError, match=f"'{form}': this model has no timestamps"):
            client.audio.transcriptions.create(
                file=("a.wav", LONG), **{**given, "response_format": form}
            )
    with pytest.raises(openai.BadRequestError, match="language = 'xx'"):
        client.audio.transcriptions.create(file=("a.wav", LONG), **{**given, "language": "xx"})
    with pytest.raises(openai.BadRequestError, match="Chat Completions"):
        client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "x"}])


def test_the_log_says_what_is_served(server: RunningServer) -> None:
    log = "".join(server.log)
    assert re.search(r"supported_tasks +align, transcription", log)
    assert re.search(r"routes +/v1/audio/transcriptions, /v1/audio/translations", log)
    assert re.search(r"interfaces .*transcription", log)


def test_the_examples_of_the_page_run(
    timed: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "speech.wav").write_bytes(wav(sound(3, 1.0)))
    blocks = re.findall(r"```(console|python)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    num_run = 0
    for kind, text in blocks:
        text = text.replace("http://localhost:8000", timed.url)
        if kind == "python":
            exec(compile(text, PAGE.name, "exec", dont_inherit=True), {})
            num_run += 1
        for command in re.findall(r"^\$ (curl .*)$", text, re.MULTILINE):
            done = subprocess.run(
                ["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True
            )
            assert '"error"' not in done.stdout, done.stdout
            num_run += 1
    assert num_run == 4

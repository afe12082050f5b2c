"""Recordings written down offline by a tiny Whisper: texts as transformers has them, times, refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from speech_checkpoints import RATE, SECONDS, features, save_whisper, sound, wav

from headrace import LLM
from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_core.speech.model import AudioClip, SpeechToTextConfig
from headrace_multimodal.audio.splitting import split

PAGE = Path(__file__).parents[1] / "docs" / "speech.md"
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_num_seqs": 8, "num_threads": 1, "block_size": 8,
    "kv_cache_memory_bytes": 16 << 20, "use_tqdm_on_load": False, "enforce_eager": True,
}  # fmt: skip
TOKENS = 12
ONCE: dict[str, Any] = {"temperature": [0], "max_tokens": TOKENS, "use_tqdm": False}
"""One attempt: what random weights say looks wrong."""
LENGTHS = (5.0, 1.5, 3.1)


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("whisper")
    return save_whisper(folder), folder


@pytest.fixture(scope="module")
def llm(whisper: tuple[Any, Path]) -> Any:
    with LLM(str(whisper[1]), **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def timed(whisper: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same, but it may say timestamps."""
    import shutil

    folder = tmp_path_factory.mktemp("timed") / "whisper"
    shutil.copytree(whisper[1], folder)
    path = folder / "generation_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**settings, "suppress_tokens": [3, 4]}), encoding="utf-8")
    with LLM(str(folder), **SETTINGS) as llm:
        yield llm


def stored(seed: int, seconds: float) -> np.ndarray:
    """Samples as a file of 16 bits has them."""
    return np.frombuffer(wav(sound(seed, seconds))[44:], "<i2").astype(np.float32) / 32768


def expected(whisper: tuple[Any, Path], samples: np.ndarray, language: str, task: str) -> str:
    """By transformers, clip by clip."""
    from tokenizers import Tokenizer

    oracle, folder = whisper
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = []
    for clip in split(AudioClip(samples, RATE), SpeechToTextConfig(max_audio_clip_s=SECONDS)):
        with torch.inference_mode():
            tokens = oracle.generate(
                features(folder, clip.samples), language=language, task=task,
                max_new_tokens=TOKENS, do_sample=False,
            )  # fmt: skip
        texts.append(tokenizer.decode(tokens[0].tolist(), skip_special_tokens=True).strip())
    return " ".join(texts)


def test_recordings_of_all_kinds_equal_transformers(
    whisper: tuple[Any, Path], llm: LLM, tmp_path: Path
) -> None:
    clips = [stored(seed, seconds) for seed, seconds in enumerate(LENGTHS)]
    (tmp_path / "a.wav").write_bytes(wav(sound(0, LENGTHS[0])))
    given: list[Any] = [tmp_path / "a.wav", wav(sound(1, LENGTHS[1])), (clips[2], RATE)]
    for call, task in ((llm.transcribe, "transcribe"), (llm.translate, "translate")):
        found = call(given, language="de", timestamp_granularities=(), **ONCE)
        assert [one.text for one in found] == [
            expected(whisper, clip, "de", task) for clip in clips
        ]
        assert [(one.task, one.language, one.segments, one.words) for one in found] == [
            (task, "de", None, None)
        ] * 3
        assert [one.duration for one in found] == list(LENGTHS)


def test_nothing_is_left_behind(llm: LLM) -> None:
    with pytest.raises(RequestError, match="not a supported audio file"):
        llm.transcribe([wav(sound(0, 5.0)), b"text"], language="en", use_tqdm=False)
    with pytest.raises(RequestError, match="language = 'xx'"):
        llm.transcribe(wav(sound(0)), language="xx")
    llm.transcribe(wav(sound(0)), timestamp_granularities=(), **ONCE)
    stats = llm.engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert not llm.engine.has_unfinished_requests()


def test_segments_words_and_the_language(timed: LLM) -> None:
    (found,) = timed.transcribe(
        wav(sound(1, 5.0)), timestamp_granularities=["segment", "word"], **ONCE
    )
    assert found.language in ("en", "de")
    assert found.segments
    assert found.words
    assert len({segment.seek for segment in found.segments}) > 2
    assert all(0 <= s.start <= s.end <= 5.0 and s.avg_logprob < 0 for s in found.segments)
    assert all(0 <= (s.no_speech_prob or 0) <= 1 for s in found.segments)
    starts = [word.start for word in found.words]
    assert starts == sorted(starts)
    assert found.srt().startswith("1\n00:00:0")
    (again,) = timed.transcribe((stored(1, 5.0), RATE), language=found.language, **ONCE)
    assert again.segments == found.segments


def test_words_without_segments(llm: LLM) -> None:
    (found,) = llm.transcribe(
        (stored(1, 1.5), RATE), language="en", timestamp_granularities=["word"], **ONCE
    )
    assert found.segments is None
    assert found.words
    said = "".join(word.word for word in found.words)
    assert "".join(said.split()) == "".join(found.text.split())


def test_attempts_go_on_where_a_text_looks_wrong(timed: LLM) -> None:
    given: dict[str, Any] = {"language": "en", "use_tqdm": False, "max_tokens": 4, "seed": 7}
    (found,) = timed.transcribe(wav(sound(1)), **given)
    assert found.segments
    assert found.segments[0].temperature > 0, "random weights are never sure"


def test_a_model_that_hears_nothing() -> None:
    with LLM(**SETTINGS) as demo, pytest.raises(UnsupportedFeature, match="does not transcribe"):
        demo.transcribe("a.wav")


def test_the_example_of_the_page_runs(timed: LLM, tmp_path: Path, monkeypatch: Any) -> None:
    blocks = re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (code,) = (block for block in blocks if "llm.transcribe(" in block)
    monkeypatch.chdir(tmp_path)
    for name in ("interview.mp3", "meeting.flac"):  # told by their bytes, not by their names
        (tmp_path / name).write_bytes(wav(sound(3, 3.0)))
    exec(compile(code, PAGE.name, "exec"), {"LLM": lambda _: timed})
    assert (tmp_path / "interview.srt").read_text().startswith("1\n")

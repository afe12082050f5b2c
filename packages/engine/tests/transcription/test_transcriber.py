"""The attempt at a clip that counts, and the requests for it."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_core.arrays import PackedArray
from headrace_core.output import CompletionOutput, Logprob
from headrace_core.speech.model import AudioClip
from headrace_core.speech.transcription import FALLBACK_TEMPERATURES, TranscriptionParams
from headrace_engine.transcription.hypothesis import Clip, compression_ratio, placed
from headrace_engine.transcription.parts import transcript
from headrace_engine.transcription.transcriber import Transcriber, find_language
from headrace_testing.fakes.engine import fake_served_model
from headrace_testing.fakes.speech import NO_SPEECH, FakeSpeech, time_mark

MODEL = fake_served_model(tasks=("transcription", "align"), eos_token_ids=(3,))
SOUND = AudioClip([0.0] * 200, 100)
CLIP = Clip(SOUND, 0, 10.0)


class Engine:
    """The calls of transcription: each attempt gets a text and its mean log-probability."""

    def __init__(self, *attempts: tuple[str, float], silence: float = -9.0) -> None:
        self.attempts, self.silence = list(attempts), silence
        self.temperatures: list[float] = []
        self.silence_asked = 0

    async def generate(self, prompt: Any, params: Any) -> CompletionOutput:
        if params.logprob_token_ids:
            self.silence_asked += 1
            entry = {NO_SPEECH: Logprob(self.silence)}
            return CompletionOutput(0, "", [0], logprobs=[entry])
        self.temperatures.append(params.temperature)
        text, mean = self.attempts.pop(0)
        tokens = [*map(ord, text), 3]
        return CompletionOutput(0, text, tokens, cumulative_logprob=mean * len(tokens))

    async def align(self, prompt: Any) -> PackedArray:
        size = len(prompt["prompt_token_ids"])
        return PackedArray("float32", (size, 1), bytes(4 * size))

    async def detokenize(self, token_ids: Any) -> str:
        return "".join(map(chr, token_ids))

    async def compute(self, work: Any) -> Any:
        return work()

    def transcriber(self, params: TranscriptionParams | None = None, **speech: Any) -> Transcriber:
        return Transcriber(self, FakeSpeech(**speech), MODEL, params or wanted())


def wanted(**fields: Any) -> TranscriptionParams:
    return TranscriptionParams(task="transcribe", language="en", **fields)


@pytest.mark.parametrize(
    ("attempts", "tried"),
    [
        ([("fine", -0.5)], 1),
        ([("improbable", -1.5), ("fine", -0.5)], 2),
        ([("again " * 40, -0.1), ("fine", -0.5)], 2),
        ([("improbable", -1.5)] * 6, 6),
    ],
)
async def test_attempts_end_with_one_that_looks_right(
    attempts: list[tuple[str, float]], tried: int
) -> None:
    engine = Engine(*attempts)
    found = await engine.transcriber().hypothesis(CLIP)
    assert engine.temperatures == list(FALLBACK_TEMPERATURES[:tried])
    assert (found.text, found.temperature) == (attempts[-1][0], FALLBACK_TEMPERATURES[tried - 1])
    assert found.avg_logprob == pytest.approx(attempts[-1][1])
    assert 3 not in found.token_ids


async def test_improbable_text_of_silence_is_none() -> None:
    engine = Engine(("thank you", -1.5), silence=-0.1)
    found = await engine.transcriber(no_speech=True).hypothesis(CLIP)
    assert (found.text, list(found.token_ids), found.no_speech_prob) == (
        "", [], pytest.approx(0.905, abs=1e-3),
    )  # fmt: skip
    engine = Engine(("thank you", -0.5), silence=-0.1)
    found = await engine.transcriber(no_speech=True).hypothesis(CLIP)
    assert found.text == "thank you"
    assert engine.silence_asked == 0, "a probable text raises no question"


async def test_a_part_has_what_the_task_wants() -> None:
    said = f"{time_mark(0)} ab,{time_mark(1)} c{time_mark(2)}"
    both = wanted(timestamps=True, words=True)
    part = await Engine((said, -0.5)).transcriber(both, word_timestamps=True).part(CLIP)
    assert [(s.start, s.end, s.text, s.seek) for s in part.segments] == [
        (10.0, 11.0, " ab,", 1000), (11.0, 12.0, " c", 1000),
    ]  # fmt: skip
    assert [(w.word, w.start, w.end) for w in part.words] == [
        ("ab,", 10.0, 11.14),
        ("c", 11.14, 11.71),
    ]
    plain = await Engine((said, -0.5)).transcriber(word_timestamps=True).part(CLIP)
    assert (plain.segments, plain.words) == ((), ())


async def test_parts_become_one_transcript() -> None:
    clips = list(placed([SOUND, SOUND]))
    assert [clip.start for clip in clips] == [0.0, 2.0]
    params = wanted(timestamps=True)
    parts = [
        await Engine((f"{time_mark(0)}{text}{time_mark(1)}", -0.5)).transcriber(params).part(clip)
        for clip, text in zip(clips, (" one", " two"), strict=True)
    ]
    for part, text in zip(parts, (" one ", " two"), strict=True):
        part.text = text
    found = transcript(parts, params, 4.004)
    assert (found.text, found.language, found.duration) == ("one two", "en", 4.0)
    assert [(s.id, s.start) for s in found.segments or ()] == [(0, 0.0), (1, 2.0)]
    assert found.words is None
    assert found.srt().startswith("1\n00:00:00,000 --> 00:00:01,000\none\n")
    assert found.vtt().startswith("WEBVTT\n")
    with pytest.raises(ValueError, match="segments = None"):
        transcript(parts, wanted(), 4.0).srt()


async def test_languages_are_probed() -> None:
    engine = Engine(("D", -0.1))
    assert await find_language(engine, FakeSpeech(probes=True), CLIP) == "de"
    assert await find_language(Engine(), FakeSpeech(), CLIP) is None


def test_parameters_of_an_attempt() -> None:
    model = fake_served_model(default_sampling_params={"max_tokens": 9, "top_p": 0.5})
    params = wanted(sampling={"max_tokens": 4, "seed": 1}).attempt(model, 0.2)
    assert (params.max_tokens, params.top_p, params.seed, params.temperature) == (4, 0.5, 1, 0.2)
    assert params.logprobs == 0
    longer = wanted(sampling={"max_tokens": 40})
    assert longer.attempt(model, 0.2, streamed=True).max_tokens == 9


def test_compression() -> None:
    assert compression_ratio("") == 1.0
    assert compression_ratio("abc") < 1 < compression_ratio("abc" * 99)

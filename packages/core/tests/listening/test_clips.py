"""Which attempt at a clip counts, and what is asked for it."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_core.listening.asks import Align, Compute, Detokenize, Generate
from headrace_core.listening.clips import LADDER, Listener, attempt_params
from headrace_core.listening.heard import Clip, compression_ratio, placed
from headrace_core.listening.transcript import Task, transcript
from headrace_core.output import CompletionOutput, Logprob
from headrace_core.packed import PackedArray
from headrace_core.speech import AudioClip
from headrace_core.testing.engine import fake_served_model
from headrace_core.testing.fake_speech import NO_SPEECH, FakeSpeech, time_mark

MODEL = fake_served_model(tasks=("transcription", "align"), eos_token_ids=(3,))
SOUND = AudioClip([0.0] * 200, 100)
CLIP = Clip(SOUND, 0, 10.0)


class Engine:
    """Answers asks: to each temperature a text and its mean log-probability."""

    def __init__(self, *attempts: tuple[str, float], silence: float = -9.0) -> None:
        self.attempts, self.silence = list(attempts), silence
        self.temperatures: list[float] = []
        self.silence_asked = 0

    def drive(self, steps: Any) -> Any:
        answer = None
        while True:
            try:
                ask = steps.send(answer)
            except StopIteration as end:
                return end.value
            answer = self.answer(ask)

    def answer(self, ask: Any) -> Any:
        match ask:
            case Generate(_, params) if params.logprob_token_ids:
                self.silence_asked += 1
                entry = {NO_SPEECH: Logprob(self.silence)}
                return CompletionOutput(0, "", [0], logprobs=[entry])
            case Generate(_, params):
                self.temperatures.append(params.temperature)
                text, mean = self.attempts.pop(0)
                tokens = [*map(ord, text), 3]
                return CompletionOutput(0, text, tokens, cumulative_logprob=mean * len(tokens))
            case Detokenize(tokens):
                return "".join(map(chr, tokens))
            case Align(prompt):
                size = len(prompt["prompt_token_ids"])
                return PackedArray("float32", (size, 1), bytes(4 * size))
            case Compute(call):
                return call()


def listener(**speech: Any) -> Listener:
    return Listener(FakeSpeech(**speech), MODEL, lambda t: attempt_params(MODEL, t, {}), LADDER)


def task(**wanted: Any) -> Task:
    return Task(task="transcribe", language="en", **wanted)


@pytest.mark.parametrize(
    ("attempts", "tried"),
    [
        ([("fine", -0.5)], 1),
        ([("improbable", -1.5), ("fine", -0.5)], 2),
        ([("again " * 40, -0.1), ("fine", -0.5)], 2),
        ([("improbable", -1.5)] * 6, 6),
    ],
)
def test_attempts_end_with_one_that_looks_right(
    attempts: list[tuple[str, float]], tried: int
) -> None:
    engine = Engine(*attempts)
    heard = engine.drive(listener().hear(CLIP, task()))
    assert engine.temperatures == list(LADDER[:tried])
    assert (heard.text, heard.temperature) == (attempts[-1][0], LADDER[tried - 1])
    assert heard.avg_logprob == pytest.approx(attempts[-1][1])
    assert 3 not in heard.token_ids


def test_improbable_text_of_silence_is_none() -> None:
    engine = Engine(("thank you", -1.5), silence=-0.1)
    heard = engine.drive(listener(no_speech=True).hear(CLIP, task()))
    assert (heard.text, list(heard.token_ids), heard.no_speech_prob) == (
        "", [], pytest.approx(0.905, abs=1e-3),
    )  # fmt: skip
    engine = Engine(("thank you", -0.5), silence=-0.1)
    assert engine.drive(listener(no_speech=True).hear(CLIP, task())).text == "thank you"
    assert engine.silence_asked == 0, "a probable text raises no question"


def test_a_part_has_what_the_task_wants() -> None:
    said = f"{time_mark(0)} ab,{time_mark(1)} c{time_mark(2)}"
    hears = listener(word_timestamps=True)
    part = Engine((said, -0.5)).drive(hears.part(CLIP, task(timestamps=True, words=True)))
    assert [(s.start, s.end, s.text, s.seek) for s in part.segments] == [
        (10.0, 11.0, " ab,", 1000), (11.0, 12.0, " c", 1000),
    ]  # fmt: skip
    assert [(w.word, w.start, w.end) for w in part.words] == [
        ("ab,", 10.0, 11.14),
        ("c", 11.14, 11.71),
    ]
    plain = Engine((said, -0.5)).drive(hears.part(CLIP, task()))
    assert (plain.segments, plain.words) == ((), ())


def test_parts_become_one_transcript() -> None:
    clips = list(placed([SOUND, SOUND]))
    assert [clip.start for clip in clips] == [0.0, 2.0]
    wanted = task(timestamps=True)
    hears = listener()
    parts = [
        Engine((f"{time_mark(0)}{text}{time_mark(1)}", -0.5)).drive(hears.part(clip, wanted))
        for clip, text in zip(clips, (" one", " two"), strict=True)
    ]
    for part, text in zip(parts, (" one ", " two"), strict=True):
        part.text = text
    found = transcript(parts, wanted, 4.004)
    assert (found.text, found.language, found.duration) == ("one two", "en", 4.0)
    assert [(s.id, s.start) for s in found.segments or ()] == [(0, 0.0), (1, 2.0)]
    assert found.words is None
    assert found.srt().startswith("1\n00:00:00,000 --> 00:00:01,000\none\n")
    assert found.vtt().startswith("WEBVTT\n")
    with pytest.raises(ValueError, match="segments = None"):
        transcript(parts, task(), 4.0).srt()


def test_languages_are_probed() -> None:
    engine = Engine(("D", -0.1))
    assert engine.drive(listener(probes=True).language(CLIP)) == "de"
    assert Engine().drive(listener().language(CLIP)) is None


def test_parameters_of_an_attempt() -> None:
    model = fake_served_model(default_sampling_params={"max_tokens": 9, "top_p": 0.5})
    params = attempt_params(model, 0.2, {"max_tokens": 4, "seed": 1})
    assert (params.max_tokens, params.top_p, params.seed, params.temperature) == (4, 0.5, 1, 0.2)
    assert params.logprobs == 0
    assert attempt_params(model, 0.2, {"max_tokens": 40}, streamed=True).max_tokens == 9


def test_compression() -> None:
    assert compression_ratio("") == 1.0
    assert compression_ratio("abc") < 1 < compression_ratio("abc" * 99)

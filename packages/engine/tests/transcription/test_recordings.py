"""Whole recordings: clips side by side, languages, times, attempts and streams, over a scripted engine."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from headrace_core.errors import GenerateError, RequestError, UnsupportedFeature
from headrace_core.output import Logprob
from headrace_core.sampling.params import SamplingParams
from headrace_core.speech.model import AudioClip, SpeechToTextConfig
from headrace_core.speech.transcription import Transcript, TranscriptionParams, TranscriptPiece
from headrace_engine.transcription import recordings
from headrace_engine.transcription.calls import StreamedClipRequests
from headrace_engine.transcription.recordings import RecordingTask
from headrace_testing.fakes.engine import FakeEngine, fake_served_model
from headrace_testing.fakes.speech import NO_SPEECH, FakeSpeech, time_mark

RATE = 100
SHORT = SpeechToTextConfig(sample_rate=RATE)


def engine(reply: Any = "hello", speech: FakeSpeech | None = None, **changes: Any) -> FakeEngine:
    facts = {"tasks": ("transcription", "align"), **changes.pop("model", {})}
    model = fake_served_model(**facts)
    return FakeEngine(reply, model=model, speech=speech or FakeSpeech(SHORT), **changes)


def task(fake: FakeEngine, seconds: float = 2.0, **fields: Any) -> RecordingTask:
    async def at_once(work: Any) -> Any:
        return work()

    audio = AudioClip([0.0] * int(seconds * RATE), RATE)
    params = TranscriptionParams(**{"task": "transcribe", "language": "en", **fields})
    return RecordingTask(
        fake, StreamedClipRequests(fake, fake.generate, "r", at_once), audio, params, "r"
    )


async def transcribe(fake: FakeEngine, seconds: float = 2.0, **fields: Any) -> Transcript:
    return await task(fake, seconds, **fields).whole()


async def streamed(fake: FakeEngine, seconds: float = 2.0, **fields: Any) -> list[TranscriptPiece]:
    return [piece async for piece in task(fake, seconds, **fields).pieces()]


def by_clip(texts: dict[str, str]) -> Any:
    """A reply to each prompt, by its beginning."""
    return lambda prompt, index: next(t for start, t in texts.items() if prompt.startswith(start))


THREE = by_clip(
    {"transcribe:en:0.0": " one ", "transcribe:en:30.0": "two", "transcribe:en:60.0": " three"}
)


async def test_a_request_for_each_clip_texts_in_order() -> None:
    fake = engine(THREE)
    found = await transcribe(fake, 70)
    assert (found.text, found.duration, found.language) == ("one two three", 70.0, "en")
    assert (found.segments, found.words) == (None, None)
    assert [request.request_id for request in fake.requests] == ["r-0", "r-1", "r-2"]
    lengths = [len(r.prompt["multi_modal_data"]["audio"][0]) for r in fake.requests]  # type: ignore[index,call-overload]
    assert lengths == [3000, 3000, 1000]


@pytest.mark.parametrize("streams", [False, True])
async def test_clips_run_side_by_side_and_end_with_the_call(streams: bool) -> None:
    fake = engine(THREE, gate=asyncio.Event())
    run = streamed(fake, 70) if streams else transcribe(fake, 70)
    call = asyncio.ensure_future(run)  # type: ignore[arg-type]
    async with asyncio.timeout(60):
        while fake.num_running < 3:
            await asyncio.sleep(0)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert fake.num_running == 0
    assert sorted(fake.aborted) == ["r-0", "r-1", "r-2"]


async def test_few_clips_run_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "AT_ONCE", 2)
    for run in (transcribe, streamed):
        fake, most = engine("x"), 0
        generate = fake.generate

        async def play(*given: Any) -> Any:
            nonlocal most
            async for output in generate(*given):  # noqa: B023
                most = max(most, fake.num_running)  # noqa: B023
                yield output

        fake.generate = play  # type: ignore[method-assign,assignment]
        await run(fake, 150)
        assert (len(fake.requests), most) == (5, 2)


async def test_the_first_failure_ends_all_clips() -> None:
    fake = engine(fail_after=1)
    with pytest.raises(GenerateError):
        await transcribe(fake, 70)
    with pytest.raises(GenerateError):
        await streamed(fake, 70)
    assert fake.num_running == 0


async def test_a_model_that_does_not_transcribe_says_why() -> None:
    fake = engine(model={"tasks": ("generate",), "unmet": {"transcription": ("no ears",)}})
    with pytest.raises(UnsupportedFeature, match="does not transcribe; no ears"):
        await transcribe(fake)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"language": "ja"}, "yesyesyes"),
        ({"language": "ja", "task": "translate"}, "yes yes yes"),
        ({"language": "en", "task": "translate", "to_language": "ja"}, "yesyesyes"),
    ],
)
async def test_the_language_of_the_text_decides_how_clips_are_joined(
    fields: dict[str, Any], text: str
) -> None:
    assert (await transcribe(engine("yes"), 70, **fields)).text == text
    assert "".join(p.text for p in await streamed(engine("yes"), 70, **fields)) == text


@pytest.mark.parametrize("run", [transcribe, streamed])
async def test_the_progress_of_long_recordings_is_logged(
    run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "headrace_engine.transcription")
    await run(engine("x"), 300)
    lines = [r.getMessage() for r in caplog.records if "clips transcribed" in r.getMessage()]
    assert len(lines) == 10
    assert "r: 10 of 10 clips transcribed, 300 of 300 seconds" in lines[-1]


async def test_the_language_is_found_out() -> None:
    fake = engine(by_clip({"probe": "D", "": "ja"}), FakeSpeech(SHORT, probes=True))
    assert (await transcribe(fake, language=None)).language == "de"
    probe, request = fake.requests
    assert (probe.params.max_tokens, probe.params.temperature) == (1, 0)
    assert probe.params.allowed_token_ids == [ord("D"), ord("E")]
    assert request.prompt_text == "transcribe:de:0.0"


async def test_fields_reach_the_model_and_the_sampler() -> None:
    defaults = {"temperature": 0.9, "top_p": 0.5, "max_tokens": 4}
    fake = engine(model={"default_sampling_params": defaults})
    found = await transcribe(
        fake, task="translate", to_language="de", prompt="Names: Ärger", timestamps=True,
        temperatures=[0.3], sampling={"seed": 11, "max_tokens": 9},
    )  # fmt: skip
    assert found.text == "hell"
    (request,) = fake.requests
    assert request.prompt_text == "translate:en:0.0:timed:to de:Names: Ärger"
    params = request.params
    assert (params.temperature, params.top_p, params.seed, params.max_tokens) == (0.3, 0.5, 11, 4)


async def test_refusals_of_requests_are_passed_on() -> None:
    fake = engine(reject=RequestError("max_tokens: too many", param="max_tokens"))
    for run in (transcribe, streamed):
        with pytest.raises(RequestError, match="too many"):
            await run(fake)


# ---- times


def timed(*segments: tuple[float, str, float]) -> str:
    return "".join(f"{time_mark(a)}{text}{time_mark(b)}" for a, text, b in segments)


SPOKEN = by_clip({
    "transcribe:en:0.0:timed": timed((0, " one", 1), (1, " two", 2.5)),
    "transcribe:en:30.0:timed": timed((0.5, " three", 4)),
})  # fmt: skip


async def test_segments() -> None:
    found = await transcribe(engine(SPOKEN), 35, timestamps=True)
    assert found.segments is not None
    assert [(s.id, s.seek, s.start, s.end, s.text) for s in found.segments] == [
        (0, 0, 0.0, 1.0, " one"), (1, 0, 1.0, 2.5, " two"), (2, 3000, 30.5, 34.0, " three"),
    ]  # fmt: skip
    first = found.segments[0]
    assert first.tokens == [ord(c) for c in timed((0, " one", 1))]
    assert (first.temperature, first.no_speech_prob) == (0, None)
    assert first.avg_logprob == pytest.approx(-0.5)
    assert first.compression_ratio is not None
    assert 0 < first.compression_ratio < 1
    assert found.srt() == (
        "1\n00:00:00,000 --> 00:00:01,000\none\n\n"
        "2\n00:00:01,000 --> 00:00:02,500\ntwo\n\n"
        "3\n00:00:30,500 --> 00:00:34,000\nthree\n"
    )
    assert found.vtt().startswith("WEBVTT\n\n00:00:00.000 --> 00:00:01.000\none\n\n")


async def test_subtitles_hold_text_and_no_markup() -> None:
    said = timed((0, " ", 1), (1, " a <b> & --> c", 2))
    found = await transcribe(engine(said), timestamps=True)
    assert found.vtt() == "WEBVTT\n\n00:00:01.000 --> 00:00:02.000\na &lt;b&gt; &amp; -&gt; c\n"
    assert found.srt() == "1\n00:00:01,000 --> 00:00:02,000\na <b> & -> c\n"


async def test_words() -> None:
    fake = engine(timed((0, " ab, c", 2)), FakeSpeech(SHORT, word_timestamps=True))
    words = (await transcribe(fake, timestamps=True, words=True)).words or []
    # Seven tokens, the end included, evenly over two seconds.
    assert [(w.word, w.start, w.end) for w in words] == [("ab,", 0.0, 1.14), ("c", 1.14, 1.71)]


class _Terse(FakeSpeech):
    """Asked for times, its prompt has one token less."""

    def prompt(self, audio: Any, *, timestamps: bool = False, **given: Any) -> Any:
        return {
            "prompt_token_ids": [1, 2, 3] if timestamps else [1, 2, 3, 4],
            "multi_modal_data": {"audio": (audio.samples, audio.sample_rate)},
        }


async def test_words_of_a_text_that_fills_the_context() -> None:
    terse = _Terse(SHORT, word_timestamps=True)
    fake = engine("abcdefghijkl", terse, model={"max_model_len": 10})
    found = await transcribe(fake, timestamps=True, words=True)
    assert found.text == "abcdefg"
    assert [(w.word, w.start, w.end) for w in found.words or ()] == [("abcdef", 0.0, 2.0)]


async def test_words_of_long_audio_are_aligned_some_clips_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recordings, "AT_ONCE", 2)
    fake = engine("x", FakeSpeech(SHORT, word_timestamps=True))
    align, running, most = fake.align, 0, 0

    async def watched(*args: Any) -> Any:
        nonlocal most, running
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return await align(*args)

    fake.align = watched  # type: ignore[method-assign]
    found = await transcribe(fake, 150, words=True)
    assert [word.word for word in found.words or ()] == ["x"] * 5
    assert most == 2


# ---- attempts


def logprobs_of(fake: FakeEngine, by_temperature: dict[float, float]) -> None:
    """Make outputs of a temperature have that mean log-probability."""
    generate = fake.generate

    async def play(prompt: Any, params: SamplingParams, request_id: str, **rest: Any) -> Any:
        async for output in generate(prompt, params, request_id, **rest):
            for part in output.outputs:
                if part.cumulative_logprob is not None:
                    mean = by_temperature[params.temperature]
                    part.cumulative_logprob = mean * len(part.token_ids)
            yield output

    fake.generate = play  # type: ignore[method-assign,assignment]


async def test_an_improbable_text_is_tried_again_warmer() -> None:
    fake = engine()
    logprobs_of(fake, {0.0: -2.0, 0.2: -1.5, 0.4: -0.9})
    found = await transcribe(fake, timestamps=True, tell_silence=True)
    assert [r.params.temperature for r in fake.requests] == [0.0, 0.2, 0.4]
    assert [s.temperature for s in found.segments or ()] == [0.4]


async def test_a_text_that_repeats_itself_is_tried_again() -> None:
    replies = iter(["la " * 50, "la la land"])
    fake = engine(lambda prompt, index: next(replies))
    assert (await transcribe(fake)).text == "la la land"
    assert [r.params.temperature for r in fake.requests] == [0.0, 0.2]


async def test_the_last_attempt_stands() -> None:
    fake = engine("la " * 50)
    found = await transcribe(fake, temperatures=[0.0, 0.5])
    assert found.text == ("la " * 50).strip()
    assert [r.params.temperature for r in fake.requests] == [0.0, 0.5]


async def test_one_temperature_is_one_attempt() -> None:
    fake = engine("la " * 50)
    await transcribe(fake, temperatures=[0.3])
    assert len(fake.requests) == 1


def silent(fake: FakeEngine, chance: float, mean: float) -> None:
    """Make requests for the chance of silence say so, and all others improbable."""
    generate = fake.generate

    async def play(prompt: Any, params: SamplingParams, request_id: str, **rest: Any) -> Any:
        async for output in generate(prompt, params, request_id, **rest):
            (part,) = output.outputs
            if params.logprob_token_ids:
                part.logprobs = [{NO_SPEECH: Logprob(math.log(chance))}]
            elif part.cumulative_logprob is not None:
                part.cumulative_logprob = mean * len(part.token_ids)
            yield output

    fake.generate = play  # type: ignore[method-assign,assignment]


async def test_improbable_words_where_nobody_speaks_are_none() -> None:
    fake = engine("thanks for watching", FakeSpeech(SHORT, no_speech=True))
    silent(fake, chance=0.9, mean=-2.0)
    assert (await transcribe(fake)).text == ""
    words, asked = fake.requests
    assert asked.prompt_text == words.prompt_text[:1], "after the first token of the prompt"
    assert (asked.params.logprob_token_ids, asked.params.max_tokens) == ([NO_SPEECH], 1)


async def test_probable_words_stay_and_segments_tell_the_chance() -> None:
    fake = engine(timed((0, " so", 1)), FakeSpeech(SHORT, no_speech=True))
    silent(fake, chance=0.9, mean=-0.2)
    found = await transcribe(fake, timestamps=True, tell_silence=True)
    (segment,) = found.segments or ()
    assert segment.text == " so"
    assert segment.no_speech_prob == pytest.approx(0.9)


# ---- streams


async def test_a_stream() -> None:
    pieces = await streamed(engine(THREE), 70)
    assert "".join(piece.text for piece in pieces) == "one two three"
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["stop"] * 3
    assert "length" in {
        p.finish_reason for p in await streamed(engine(), sampling={"max_tokens": 2})
    }

"""POST /v1/audio/transcriptions and /v1/audio/translations."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from starlette.requests import Request

from headrace_core.errors import RequestError
from headrace_core.output import Logprob
from headrace_core.sampling import SamplingParams
from headrace_core.speech import SpeechToTextConfig
from headrace_core.testing.engine import FakeEngine, fake_served_model
from headrace_core.testing.fake_speech import NO_SPEECH, FakeSpeech, time_mark, wav_file
from headrace_core.testing.router import RouterConformance
from headrace_server import ServerSettings
from headrace_server.errors import ClientGone
from headrace_server.routes.speech import ROUTER
from headrace_server.speech.upload import read_upload

TRANSCRIBE, TRANSLATE = "/v1/audio/transcriptions", "/v1/audio/translations"
RATE = 100
SHORT = SpeechToTextConfig(sample_rate=RATE)
pytestmark = pytest.mark.spec("API-STT")


class TestSpeechRouter(RouterConformance):
    router = ROUTER

    def settings(self) -> ServerSettings:
        return ServerSettings()


def engine(reply: Any = "hello", speech: FakeSpeech | None = None, **changes: Any) -> FakeEngine:
    tasks = {
        "tasks": ("transcription",),
        "name": "ears",
        "names": ("ears",),
        **changes.pop("model", {}),
    }
    return FakeEngine(
        reply, model=fake_served_model(**tasks), speech=speech or FakeSpeech(SHORT), **changes
    )


def sound(seconds: float = 2.0) -> bytes:
    return wav_file([0] * int(seconds * RATE), RATE)


async def post(
    client: Any, url: str = TRANSCRIBE, *, data: bytes | None = None, **form: Any
) -> Any:
    file = sound() if data is None else data
    return await client.post(url, files={"file": ("speech.wav", file)}, data=form)


async def told(client: Any, **form: Any) -> Any:
    answer = await post(client, **form)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


async def test_json(connect: Any) -> None:
    fake = engine(" hello world ")
    answer = await post(connect(fake), model="ears", language="en")
    assert answer.status_code == 200, answer.text
    assert answer.json() == {"text": "hello world", "usage": {"type": "duration", "seconds": 2}}
    (request,) = fake.requests
    assert request.prompt_text == "transcribe:en:0.0"
    assert request.prompt["multi_modal_data"]["audio"][1] == RATE
    assert request.params.temperature == 0
    assert request.params.max_tokens is None


async def test_text(connect: Any) -> None:
    answer = await post(connect(engine()), response_format="text")
    assert answer.text == "hello"
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"


async def test_fields_reach_the_model_and_the_sampler(connect: Any) -> None:
    fake = engine()
    answer = await post(
        connect(fake), language="de", prompt="Names: Ärger", to_language="en", temperature="0.4",
        top_p="0.9", top_k="7", min_p="0.1", repetition_penalty="1.1", frequency_penalty="0.2",
        presence_penalty="0.3", seed="11", max_completion_tokens="3", headrace_xargs='{"a": 1}',
        vllm_xargs='{"a": 2, "b": [1]}', request_id="mine",
    )  # fmt: skip
    assert answer.json()["text"] == "hel"
    (request,) = fake.requests
    assert request.prompt_text == "transcribe:de:0.0:to en:Names: Ärger"
    assert request.request_id.startswith("trsc-mine-0-")
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.4, 0.9, 7, 0.1)
    assert (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) == (
        1.1, 0.2, 0.3,
    )  # fmt: skip
    assert (params.seed, params.max_tokens, params.extra_args) == (11, 3, {"a": 1, "b": [1]})


async def test_translations(connect: Any) -> None:
    fake = engine()
    answer = await post(connect(fake), TRANSLATE, language="de")
    assert answer.json()["text"] == "hello"
    assert fake.requests[0].prompt_text == "translate:de:0.0"


async def test_the_models_defaults_are_those_of_sampling(connect: Any) -> None:
    defaults = {"temperature": 0.9, "top_p": 0.5, "max_tokens": 4}
    fake = engine(model={"default_sampling_params": defaults})
    assert (await post(connect(fake))).json()["text"] == "hell"
    assert fake.requests[0].params.temperature == 0, "greedy, whatever the model's default is"
    await post(connect(fake), temperature="0.3")
    assert (fake.requests[1].params.temperature, fake.requests[1].params.top_p) == (0.3, 0.5)


# ---- long audio


def by_clip(texts: dict[str, str]) -> Any:
    """A reply to each prompt, by its beginning."""
    return lambda prompt, index: next(t for start, t in texts.items() if prompt.startswith(start))


THREE = by_clip(
    {"transcribe:en:0.0": " one ", "transcribe:en:30.0": "two", "transcribe:en:60.0": " three"}
)


@pytest.mark.spec("TRANSCRIBE-PREPROC")
async def test_a_request_for_each_clip_texts_in_order(connect: Any) -> None:
    fake = engine(THREE)
    answer = await post(connect(fake), language="en", data=sound(70))
    assert answer.json() == {"text": "one two three", "usage": {"type": "duration", "seconds": 70}}
    assert len(fake.requests) == 3
    lengths = [len(r.prompt["multi_modal_data"]["audio"][0]) for r in fake.requests]
    assert lengths == [3000, 3000, 1000]


async def test_clips_run_side_by_side(connect: Any, until: Any) -> None:
    fake = engine(THREE, gate=asyncio.Event())
    task = asyncio.create_task(post(connect(fake), language="en", data=sound(70)))
    await until(lambda: fake.num_running == 3)
    fake.gate.set()
    assert (await task).json()["text"] == "one two three"


async def test_a_language_without_spaces_is_joined_without(connect: Any) -> None:
    answer = await post(connect(engine("はい")), language="ja", data=sound(70))
    assert answer.json()["text"] == "はいはいはい"


@pytest.mark.parametrize("stream", ["false", "true"])
async def test_a_translation_is_not_in_the_language_that_is_spoken(
    connect: Any, events: Any, stream: str
) -> None:
    client = connect(engine("yes"))
    answer = await post(client, TRANSLATE, language="ja", data=sound(70), stream=stream)
    if stream == "true":
        assert events(answer.text)[-1]["text"] == "yes yes yes"
    else:
        assert answer.json()["text"] == "yes yes yes"
    answer = await post(client, TRANSLATE, language="en", to_language="ja", data=sound(70))
    assert answer.json()["text"] == "yesyesyes"


async def test_the_progress_of_long_files_is_logged(connect: Any, caplog: Any) -> None:
    caplog.set_level("INFO", "headrace_server.speech")
    await post(connect(engine("x")), language="en", data=sound(300))
    lines = [r.getMessage() for r in caplog.records if "clips heard" in r.getMessage()]
    assert len(lines) == 10
    assert "10 of 10 clips heard, 300 of 300 seconds" in lines[-1]


def test_prompts_of_encoder_decoders_are_logged(caplog: Any) -> None:
    from headrace_server.request_log import log_request

    caplog.set_level("DEBUG", "headrace_server.request_log")
    encoder = {"prompt": "", "multi_modal_data": {"audio": ([0.0] * 9999, RATE)}}
    prompt: Any = {"encoder_prompt": encoder, "decoder_prompt": [7, 8]}
    log_request(ServerSettings(enable_log_requests=True), "r", SamplingParams(), prompt)
    assert "prompt [7, 8]" in caplog.text
    assert len(caplog.text) < 4000


# ---- languages


async def test_the_language_is_found_out(connect: Any) -> None:
    fake = engine(by_clip({"probe": "D", "": "ja"}), FakeSpeech(SHORT, probes=True))
    answer = await post(connect(fake), response_format="verbose_json")
    assert answer.json()["language"] == "de"
    probe, request = fake.requests
    assert (probe.params.max_tokens, probe.params.temperature) == (1, 0)
    assert probe.params.allowed_token_ids == [ord("D"), ord("E")]
    assert request.prompt_text == "transcribe:de:0.0:timed"


async def test_a_language_that_the_model_does_not_know(connect: Any) -> None:
    error = await told(connect(engine()), language="xx")
    assert error["param"] == "language"
    assert "must be one of en, de, ja" in error["message"]


# ---- times


def timed(*segments: tuple[float, str, float]) -> str:
    return "".join(f"{time_mark(a)}{text}{time_mark(b)}" for a, text, b in segments)


SPOKEN = by_clip({
    "transcribe:en:0.0:timed": timed((0, " one", 1), (1, " two", 2.5)),
    "transcribe:en:30.0:timed": timed((0.5, " three", 4)),
})  # fmt: skip


async def test_verbose_json_has_segments(connect: Any) -> None:
    answer = await post(
        connect(engine(SPOKEN)), language="en", response_format="verbose_json", data=sound(35)
    )
    body = answer.json()
    segments = body.pop("segments")
    assert body == {
        "task": "transcribe", "language": "en", "duration": 35.0,
        "text": f"{SPOKEN('transcribe:en:0.0:timed', 0)} {SPOKEN('transcribe:en:30.0:timed', 0)}",
        "words": None, "usage": {"type": "duration", "seconds": 35},
    }  # fmt: skip
    assert [(s["id"], s["seek"], s["start"], s["end"], s["text"]) for s in segments] == [
        (0, 0, 0.0, 1.0, " one"), (1, 0, 1.0, 2.5, " two"), (2, 3000, 30.5, 34.0, " three"),
    ]  # fmt: skip
    assert segments[0]["tokens"] == [ord(c) for c in timed((0, " one", 1))]
    assert segments[0]["temperature"] == 0
    assert segments[0]["avg_logprob"] == pytest.approx(-0.5)
    assert 0 < segments[0]["compression_ratio"] < 1
    assert segments[0]["no_speech_prob"] is None


async def test_subtitles(connect: Any) -> None:
    client = connect(engine(SPOKEN))
    answer = await post(client, language="en", response_format="srt", data=sound(35))
    assert answer.text == (
        "1\n00:00:00,000 --> 00:00:01,000\none\n\n"
        "2\n00:00:01,000 --> 00:00:02,500\ntwo\n\n"
        "3\n00:00:30,500 --> 00:00:34,000\nthree\n"
    )
    answer = await post(client, language="en", response_format="vtt", data=sound(35))
    assert answer.text.startswith("WEBVTT\n\n00:00:00.000 --> 00:00:01.000\none\n\n")
    assert answer.headers["content-type"] == "text/vtt; charset=utf-8"


async def test_subtitles_hold_text_and_no_markup(connect: Any) -> None:
    said = timed((0, " ", 1), (1, " a <b> & --> c", 2))
    client = connect(engine(said))
    answer = await post(client, language="en", response_format="vtt")
    assert answer.text == ("WEBVTT\n\n00:00:01.000 --> 00:00:02.000\na &lt;b&gt; &amp; -&gt; c\n")
    answer = await post(client, language="en", response_format="srt")
    assert answer.text == "1\n00:00:01,000 --> 00:00:02,000\na <b> & -> c\n"


async def test_words(connect: Any) -> None:
    fake = engine(
        timed((0, " ab, c", 2)),
        FakeSpeech(SHORT, word_timestamps=True),
        model={"tasks": ("transcription", "align")},
    )
    form = {"timestamp_granularities[]": ["word"], "response_format": "verbose_json"}
    body = (await post(connect(fake), language="en", **form)).json()
    assert body["segments"] is None
    # Seven tokens, the end included, evenly over two seconds.
    assert body["words"] == [
        {"word": "ab,", "start": 0.0, "end": 1.14}, {"word": "c", "start": 1.14, "end": 1.71},
    ]  # fmt: skip


class _Terse(FakeSpeech):
    """Asked for times, it is told one token less."""

    def prompt(self, audio: Any, *, timestamps: bool = False, **told: Any) -> Any:
        ids = [1, 2, 3] if timestamps else [1, 2, 3, 4]
        return {
            "prompt_token_ids": ids,
            "multi_modal_data": {"audio": (audio.samples, audio.sample_rate)},
        }


async def test_words_of_a_text_that_fills_the_context(connect: Any) -> None:
    fake = engine(
        "abcdefghijkl",
        _Terse(SHORT, word_timestamps=True),
        model={"tasks": ("transcription", "align"), "max_model_len": 10},
    )
    form = {"timestamp_granularities[]": ["word"], "response_format": "verbose_json"}
    answer = await post(connect(fake), language="en", **form)
    assert answer.status_code == 200, answer.text
    assert answer.json()["text"] == "abcdefg"
    assert answer.json()["words"] == [{"word": "abcdef", "start": 0.0, "end": 2.0}]


async def test_words_of_long_audio_are_aligned_some_clips_at_a_time(
    connect: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr("headrace_server.speech.run.AT_ONCE", 2)
    fake = engine(
        "x", FakeSpeech(SHORT, word_timestamps=True), model={"tasks": ("transcription", "align")}
    )
    align, running = fake.align, [0]
    most = 0

    async def watched(*args: Any) -> Any:
        nonlocal most
        running[0] += 1
        most = max(most, running[0])
        await asyncio.sleep(0)
        running[0] -= 1
        return await align(*args)

    fake.align = watched  # type: ignore[method-assign]
    form = {"timestamp_granularities[]": ["word"], "response_format": "verbose_json"}
    body = (await post(connect(fake), language="en", data=sound(150), **form)).json()
    assert [word["word"] for word in body["words"]] == ["x"] * 5
    assert most == 2


@pytest.mark.parametrize(
    ("speech", "form", "param", "message"),
    [
        ({"segment_timestamps": False}, {"response_format": "verbose_json"}, "response_format",
         "gives no times"),
        ({"segment_timestamps": False}, {"response_format": "srt"}, "response_format", "gives no times"),
        ({}, {"response_format": "verbose_json", "timestamp_granularities[]": "word"},
         "timestamp_granularities[]", "must be segment"),
        ({}, {"timestamp_granularities[]": "segment"}, "timestamp_granularities[]",
         "only with response_format verbose_json"),
        ({}, {"response_format": "verbose_json", "stream": "true"}, "response_format",
         "json or text with stream"),
        ({}, {"stream": "true", "temperature[]": ["0", "1"]}, "temperature[]", "one value"),
        ({}, {"stream_include_usage": "true"}, "stream_include_usage", "only with stream"),
        ({}, {"response_format": "diarized_json"}, "response_format", "verbose_json"),
        ({}, {"temperature": "1.5"}, "temperature", "less than or equal to 1"),
        ({}, {"temperature[]": ["0", "x"]}, "temperature[]", "temperature[]: Input should be a valid"),
        ({}, {"timestamp_granularities[]": "words"}, "timestamp_granularities[]", "[]: Input should be"),
        ({}, {"model": ["ears", "ears"]}, "model", "sent twice"),
        ({}, {"include[]": "logprobs"}, "include[]", "not served"),
        ({}, {"headrace_xargs": "{"}, "headrace_xargs", "must be JSON"),
        ({}, {"data": b"no audio"}, "file", "'speech.wav': damaged"),
        ({"max_file_bytes": 100}, {}, "file", "444 bytes; at most 100 bytes"),
    ],
)  # fmt: skip
async def test_refusals(connect: Any, speech: Any, form: Any, param: str, message: str) -> None:
    error = await told(connect(engine(speech=FakeSpeech(SHORT, **speech))), **form)
    assert error["param"] == param
    assert message in error["message"]


async def test_sampling_fields_of_translations_are_refused(connect: Any) -> None:
    for name, value in (
        ("top_p", "0.5"),
        ("timestamp_granularities[]", "word"),
        ("timestamp_granularities", "word"),
    ):
        answer = await post(connect(engine()), TRANSLATE, **{name: value})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == name


async def test_another_model_is_not_served(connect: Any) -> None:
    assert (await post(connect(engine()), model="whisper-1")).status_code == 404


async def test_what_is_no_form(connect: Any) -> None:
    client = connect(engine())
    answer = await client.post(TRANSCRIBE, json={})
    assert answer.status_code == 400
    assert "multipart/form-data" in answer.json()["error"]["message"]
    answer = await client.post(TRANSCRIBE, files={"other": ("a", b"x")})
    assert answer.json()["error"]["param"] == "file"
    kind = {"content-type": "multipart/form-data; boundary=x"}
    answer = await client.post(TRANSCRIBE, content=b"--x\r\ngarbage", headers=kind)
    assert answer.status_code == 400


@pytest.mark.req("SEC-07")
async def test_a_body_that_is_too_long_is_not_read_to_its_end(connect: Any) -> None:
    sent = 0

    async def body() -> Any:
        nonlocal sent
        yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        for _ in range(64):
            sent += 1 << 20
            yield bytes(1 << 20)

    client = connect(engine(speech=FakeSpeech(SHORT, max_file_bytes=1 << 20)))
    kind = {"content-type": "multipart/form-data; boundary=x"}
    answer = await client.post(TRANSCRIBE, content=body(), headers=kind)
    assert answer.status_code == 400
    assert "1 MiB" in answer.json()["error"]["message"]


async def test_a_client_that_leaves_in_the_middle_of_its_file() -> None:
    pieces = iter([
        {"type": "http.request", "more_body": True,
         "body": b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nRIFF'},
        {"type": "http.disconnect"},
    ])  # fmt: skip

    async def receive() -> Any:
        return next(pieces)

    headers = [(b"content-type", b"multipart/form-data; boundary=x")]
    request = Request({"type": "http", "method": "POST", "headers": headers}, receive)
    with pytest.raises(ClientGone):
        await read_upload(request, 1000)


async def test_the_engines_names_of_fields_are_the_clients(connect: Any) -> None:
    fake = engine(reject=RequestError("max_tokens: too many", param="max_tokens"))
    error = await told(connect(fake), language="en", max_completion_tokens="9")
    assert error["param"] == "max_completion_tokens"


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


async def test_an_improbable_text_is_tried_again_warmer(connect: Any) -> None:
    fake = engine()
    logprobs_of(fake, {0.0: -2.0, 0.2: -1.5, 0.4: -0.9})
    body = (await post(connect(fake), language="en", response_format="verbose_json")).json()
    assert [r.params.temperature for r in fake.requests] == [0.0, 0.2, 0.4]
    assert body["segments"][0]["temperature"] == 0.4


async def test_a_text_that_repeats_itself_is_tried_again(connect: Any) -> None:
    replies = iter(["la " * 50, "la la land"])
    fake = engine(lambda prompt, index: next(replies))
    assert (await post(connect(fake), language="en")).json()["text"] == "la la land"
    assert [r.params.temperature for r in fake.requests] == [0.0, 0.2]


async def test_the_last_attempt_stands(connect: Any) -> None:
    fake = engine("la " * 50)
    body = (await post(connect(fake), language="en", **{"temperature[]": ["0", "0.5"]})).json()
    assert body["text"] == ("la " * 50).strip()
    assert [r.params.temperature for r in fake.requests] == [0.0, 0.5]


async def test_one_temperature_is_one_attempt(connect: Any) -> None:
    fake = engine("la " * 50)
    await post(connect(fake), language="en", temperature="0.3")
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


async def test_improbable_words_where_nobody_speaks_are_none(connect: Any) -> None:
    fake = engine("thanks for watching", FakeSpeech(SHORT, no_speech=True))
    silent(fake, chance=0.9, mean=-2.0)
    assert (await post(connect(fake), language="en")).json()["text"] == ""
    words, asked = fake.requests
    assert asked.prompt_text == words.prompt_text[:1], "after the first token of the prompt"
    assert (asked.params.logprob_token_ids, asked.params.max_tokens) == ([NO_SPEECH], 1)


async def test_probable_words_stay_and_verbose_json_tells_the_chance(connect: Any) -> None:
    fake = engine(timed((0, " so", 1)), FakeSpeech(SHORT, no_speech=True))
    silent(fake, chance=0.9, mean=-0.2)
    body = (await post(connect(fake), language="en", response_format="verbose_json")).json()
    (segment,) = body["segments"]
    assert segment["text"] == " so"
    assert segment["no_speech_prob"] == pytest.approx(0.9)


# ---- streams


async def test_a_stream(connect: Any, events: Any) -> None:
    fake = engine(THREE)
    answer = await post(
        connect(fake), language="en", data=sound(70), stream="true", stream_include_usage="true"
    )
    assert answer.headers["content-type"].startswith("text/event-stream")
    *deltas, end, usage = events(answer.text)
    assert "".join(e["choices"][0]["delta"]["content"] for e in deltas) == "one two three"
    assert "".join(e["delta"] for e in deltas) == "one two three"
    assert {(e["object"], e["type"], e["model"]) for e in deltas} == {
        ("transcription.chunk", "transcript.text.delta", "ears")
    }
    assert (end["type"], end["text"]) == ("transcript.text.done", "one two three")
    assert end["choices"][0]["finish_reason"] == "stop"
    # 10 tokens of audio a second; each clip's characters and its end.
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens"] == 700
    assert usage["usage"]["completion_tokens"] == len(" one two three") + 3
    assert len({e["id"] for e in [*deltas, end, usage]}) == 1


async def test_a_stream_of_a_translation_with_usage_so_far(connect: Any, events: Any) -> None:
    answer = await post(
        connect(engine("ab")), TRANSLATE, stream="true", stream_continuous_usage_stats="true"
    )
    first, second, _ = events(answer.text)
    assert first["object"] == "translation.chunk"
    assert [e["usage"]["completion_tokens"] for e in (first, second)] == [1, 2]


async def test_later_clips_run_while_the_first_is_streamed(connect: Any, until: Any) -> None:
    fake = engine(THREE, gate=asyncio.Event())
    task = asyncio.create_task(post(connect(fake), language="en", data=sound(70), stream="true"))
    await until(lambda: fake.num_running == 3)
    fake.gate.set()
    assert "one" in (await task).text


async def test_early_errors_of_a_stream_have_a_status(connect: Any) -> None:
    answer = await post(connect(engine()), data=b"x", stream="true")
    assert answer.status_code == 400


@pytest.mark.parametrize("stream", ["false", "true"])
async def test_a_client_that_leaves_aborts_all_clips(live: Any, until: Any, stream: str) -> None:
    import httpx2

    fake = engine(THREE, gate=asyncio.Event())
    server = await live(fake)
    async with httpx2.AsyncClient(base_url=server.url) as client:
        task = asyncio.create_task(post(client, language="en", data=sound(70), stream=stream))
        await until(lambda: fake.num_running == 3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await until(lambda: fake.num_running == 0)
    assert len(fake.aborted) == 3


async def test_models_that_do_not_transcribe_say_why(connect: Any) -> None:
    why = {"transcription": ("Ears.get_generation_prompt is missing: add it",)}
    fake = FakeEngine(model=fake_served_model(class_path="ears:Ears", unmet=why))
    for url in (TRANSCRIBE, TRANSLATE):
        answer = await post(connect(fake), url)
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert "ears:Ears" in message
        assert why["transcription"][0] in message


async def test_the_openai_client(live: Any) -> None:
    openai = pytest.importorskip("openai")
    server = await live(engine(SPOKEN))
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="k") as client:
        audio = client.audio
        file = ("speech.wav", sound(35))
        verbose = await audio.transcriptions.create(
            model="ears", file=file, language="en", response_format="verbose_json",
            timestamp_granularities=["segment"],
        )  # fmt: skip
        assert [s.text for s in verbose.segments] == [" one", " two", " three"]
        subtitles = await audio.transcriptions.create(
            model="ears", file=file, language="en", response_format="srt"
        )
        assert subtitles.startswith("1\n00:00:00,000")
    server = await live(engine(" one two"))
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="k") as client:
        audio, file = client.audio, ("speech.wav", sound())
        assert (await audio.transcriptions.create(model="ears", file=file)).text == "one two"
        assert (await audio.translations.create(model="ears", file=file)).text == "one two"
        stream = await audio.transcriptions.create(model="ears", file=file, stream=True)
        events = [event async for event in stream]
        assert "".join(e.delta for e in events if e.type == "transcript.text.delta") == "one two"
        assert events[-1].type == "transcript.text.done"
        assert events[-1].text == "one two"

"""POST /v1/audio/transcriptions and /v1/audio/translations."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import pytest
from starlette.requests import Request

from headrace_core.errors import RequestError
from headrace_core.sampling.params import SamplingParams
from headrace_core.speech.model import SpeechToTextConfig
from headrace_core.speech.transcription import FALLBACK_TEMPERATURES
from headrace_server import ServerSettings, create_app
from headrace_server.errors.mapping import ClientGone
from headrace_server.routes.speech import ROUTER
from headrace_server.speech.upload import read_upload
from headrace_testing.fakes.engine import EOS, FakeEngine, fake_served_model
from headrace_testing.fakes.speech import FakeSpeech, wav_file
from headrace_testing.http_routers import RouterConformance

TRANSCRIBE, TRANSLATE = "/v1/audio/transcriptions", "/v1/audio/translations"
RATE = 100
SHORT = SpeechToTextConfig(sample_rate=RATE)


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
    {"transcribe:en:0.0": "one", "transcribe:en:30.0": "two", "transcribe:en:60.0": "three"}
)


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


def test_prompts_of_encoder_decoders_are_logged(caplog: Any) -> None:
    from headrace_server.observability.request_log import log_request

    caplog.set_level("DEBUG", "headrace_server.observability.request_log")
    encoder = {"prompt": "", "multi_modal_data": {"audio": ([0.0] * 9999, RATE)}}
    prompt: Any = {"encoder_prompt": encoder, "decoder_prompt": [7, 8]}
    app = create_app(engine(), ServerSettings(enable_log_requests=True))
    log_request(app.state.headrace, "r", SamplingParams(), prompt)
    assert "prompt [7, 8]" in caplog.text
    assert len(caplog.text) < 4000


async def test_an_adapter(live: Any, tmp_path: Any) -> None:
    """Every call of the model has it; an alignment has none."""
    (tmp_path / "adapter_config.json").write_text("{}")
    fake = engine(speech=FakeSpeech(SHORT, word_timestamps=True), model={"max_loras": 1})
    server = await live(fake, lora_modules=(f"dialect={tmp_path}",))
    async with httpx2.AsyncClient(base_url=server.url) as client:
        assert (await post(client, model="dialect")).json()["text"] == "hello"
        stream = await post(client, model="dialect", stream="true")
        assert '"model":"dialect"' in stream.text
        assert {r.lora_request and r.lora_request.lora_name for r in fake.requests} == {"dialect"}
        form = {"response_format": "verbose_json", "timestamp_granularities[]": "word"}
        error = await told(client, model="dialect", **form)
        assert error["param"] == "timestamp_granularities[]"
        assert (await post(client, model="other")).status_code == 404


# ---- languages


async def test_the_engine_finds_the_language_out(connect: Any) -> None:
    fake = engine(speech=FakeSpeech(SHORT, probes=True))
    answer = await post(connect(fake), response_format="verbose_json")
    assert answer.json()["language"] == "en"
    assert fake.transcribed[0].language is None


async def test_a_language_that_the_model_does_not_know(connect: Any) -> None:
    error = await told(connect(engine()), language="xx")
    assert error["param"] == "language"
    assert "must be one of en, de, ja" in error["message"]


# ---- times


SPOKEN = by_clip({"transcribe:en:0.0:timed": " one two", "transcribe:en:30.0:timed": " three"})


async def test_verbose_json_has_segments(connect: Any) -> None:
    fake = engine(SPOKEN)
    answer = await post(
        connect(fake), language="en", response_format="verbose_json", data=sound(35)
    )
    body = answer.json()
    segments = body.pop("segments")
    assert body == {
        "task": "transcribe", "language": "en", "duration": 35.0, "text": "one two three",
        "words": None, "usage": {"type": "duration", "seconds": 35},
    }  # fmt: skip
    assert segments[1] == {
        "id": 1, "seek": 3000, "start": 30.0, "end": 35.0, "text": " three",
        "tokens": [*map(ord, " three"), EOS], "temperature": 0.0, "avg_logprob": -0.5,
        "compression_ratio": 1.0, "no_speech_prob": None,
    }  # fmt: skip
    (params,) = fake.transcribed
    assert (params.timestamps, params.words, params.tell_silence) == (True, False, True)


async def test_subtitles(connect: Any) -> None:
    fake = engine(SPOKEN)
    client = connect(fake)
    answer = await post(client, language="en", response_format="srt", data=sound(35))
    assert answer.text == (
        "1\n00:00:00,000 --> 00:00:30,000\none two\n\n2\n00:00:30,000 --> 00:00:35,000\nthree\n"
    )
    answer = await post(client, language="en", response_format="vtt", data=sound(35))
    assert answer.text.startswith("WEBVTT\n\n00:00:00.000 --> 00:00:30.000\none two\n\n")
    assert answer.headers["content-type"] == "text/vtt; charset=utf-8"
    assert {(p.timestamps, p.tell_silence) for p in fake.transcribed} == {(True, False)}


async def test_words(connect: Any) -> None:
    fake = engine("ab, c", FakeSpeech(SHORT, word_timestamps=True))
    form = {"timestamp_granularities[]": ["word"], "response_format": "verbose_json"}
    body = (await post(connect(fake), language="en", **form)).json()
    assert body["segments"] is None
    assert body["words"] == [
        {"word": "ab,", "start": 0.0, "end": 1.0}, {"word": "c", "start": 1.0, "end": 2.0},
    ]  # fmt: skip
    assert fake.transcribed[0].words


@pytest.mark.parametrize(
    ("speech", "form", "param", "message"),
    [
        ({"segment_timestamps": False}, {"response_format": "verbose_json"}, "response_format",
         "has no timestamps"),
        ({"segment_timestamps": False}, {"response_format": "srt"}, "response_format", "has no timestamps"),
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
        ({}, {"include[]": "logprobs"}, "include[]", "not supported"),
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


@pytest.mark.parametrize(
    ("form", "temperatures"),
    [
        ({}, FALLBACK_TEMPERATURES),
        ({"temperature": "0"}, FALLBACK_TEMPERATURES),
        ({"temperature": "0.3"}, (0.3,)),
        ({"temperature[]": ["0", "0.5"]}, (0.0, 0.5)),
    ],
)
async def test_temperatures(connect: Any, form: Any, temperatures: tuple[float, ...]) -> None:
    fake = engine()
    await post(connect(fake), language="en", **form)
    assert tuple(fake.transcribed[0].temperatures) == temperatures


# ---- requests


@pytest.mark.parametrize("stream", ["false", "true"])
async def test_each_clip_is_a_request_to_watchers_and_metrics(
    connect: Any, caplog: Any, stream: str
) -> None:
    caplog.set_level("INFO", "headrace_server.observability.request_log")
    fake = engine(THREE)
    settings = {"enable_log_requests": True, "enable_log_outputs": True}
    client = connect(fake, prefix_cache_scope="key", api_key=("k",), **settings)
    client.headers["Authorization"] = "Bearer k"
    answer = await post(client, language="en", data=sound(70), stream=stream)
    assert answer.status_code == 200, answer.text
    ids = [request.request_id for request in fake.requests]
    assert all(request.prompt["cache_salt"] for request in fake.requests)
    lines = [record.getMessage() for record in caplog.records]
    for request_id in ids:
        assert any(line.startswith(f"request {request_id}: ") for line in lines)
        assert any(line.startswith(f"output {request_id}[0] (complete)") for line in lines)
    metrics = (await client.get("/metrics")).text
    (finished,) = (
        x for x in metrics.splitlines() if "request_success_total" in x and '"stop"' in x
    )
    assert float(finished.rpartition(" ")[2]) == 3


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
    assert usage["usage"]["completion_tokens"] == len("onetwothree") + 3
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
        assert "API: Ears has" in message
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
        assert [s.text for s in verbose.segments] == [" one two", " three"]
        subtitles = await audio.transcriptions.create(
            model="ears", file=file, language="en", response_format="srt"
        )
        assert subtitles.startswith("1\n00:00:00,000")
    server = await live(engine("one two"))
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="k") as client:
        audio, file = client.audio, ("speech.wav", sound())
        assert (await audio.transcriptions.create(model="ears", file=file)).text == "one two"
        assert (await audio.translations.create(model="ears", file=file)).text == "one two"
        stream = await audio.transcriptions.create(model="ears", file=file, stream=True)
        events = [event async for event in stream]
        assert "".join(e.delta for e in events if e.type == "transcript.text.delta") == "one two"
        assert events[-1].type == "transcript.text.done"
        assert events[-1].text == "one two"

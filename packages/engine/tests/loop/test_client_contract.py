"""What every EngineClient does: the real one and the fake that other packages test with."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from engine_fakes import (
    PATIENCE,
    CharTokenizer,
    Steps,
    Turnstile,
    make_core,
    served_model,
    until_stats,
)

from headrace_core.engine import EngineClient
from headrace_core.errors import EngineDead, PromptTooLong, RequestError, UnsupportedFeature
from headrace_core.request import ChatPrompt
from headrace_core.sampling.params import BeamSearchParams, RequestOutputKind, SamplingParams
from headrace_core.speech.model import AudioClip, SpeechToTextConfig
from headrace_core.speech.transcription import TranscriptionParams
from headrace_engine.clients.inproc import InprocClient
from headrace_engine.engine import Engine
from headrace_engine.input_processing.input_processor import InputProcessor
from headrace_testing.fakes.engine import FakeEngine, fake_served_model
from headrace_testing.fakes.speech import FakeSpeech
from headrace_testing.waiting import until

DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
LONG = "a fairly long answer that goes on and on, with some letters and some more, " * 4


class Held(Steps):
    """The steps of either: the real one's worker, and the fake, which makes none ahead."""

    def __init__(self) -> None:
        self.turnstile, self.gate = Turnstile(), asyncio.Event()
        self.open()

    def hold(self) -> None:
        self.turnstile.hold()
        self.gate.clear()

    def release(self, count: float = 1) -> None:
        self.turnstile.release(count)
        self.gate.set()

    def open(self) -> None:
        self.release(math.inf)

    async def begun(self, stream: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """The stream after its first output; then the steps are held."""
        self.hold()
        first = asyncio.ensure_future(anext(stream))
        await self.go_on_until(first.done)
        self.hold()
        return stream


@pytest.fixture
def steps() -> Held:
    return Held()


@pytest_asyncio.fixture(params=["real", "fake"])
async def client(request: pytest.FixtureRequest, steps: Held) -> AsyncIterator[EngineClient]:
    made: EngineClient
    tasks = ("generate", "transcription")
    if request.param == "real":
        made = Engine(
            InprocClient(lambda _: make_core(turnstile=steps.turnstile, step_seconds=PATIENCE)),
            InputProcessor(CharTokenizer(), served_model(tasks=tasks)),
        )
        # Then the loop knows how long a step is said to take, and hears commands meanwhile.
        await collect(made, "x", "first", max_tokens=2)
    else:
        model = fake_served_model(max_model_len=512, tasks=tasks)
        made = FakeEngine(LONG, model=model, gate=steps.gate)
    yield made
    steps.open()
    await made.shutdown()


async def collect(client: EngineClient, prompt: Any, request_id: str = "r", **params: Any) -> Any:
    params = {"max_tokens": 30, "ignore_eos": True, **params}
    stream = client.generate(prompt, SamplingParams(**params), request_id)
    return [output async for output in stream]


async def several_rounds(client: EngineClient) -> None:
    """As many rounds to the core and back as anything that is not held back would need many times over."""
    for _ in range(30):
        await client.stats()


async def test_kinds_agree(client: EngineClient) -> None:
    whole = await collect(client, "x")
    deltas = await collect(client, "x", output_kind=DELTA)
    final = await collect(client, "x", output_kind=FINAL)
    assert len(final) == 1
    assert final[0].outputs == whole[-1].outputs
    merged = deltas[0]
    for later in deltas[1:]:
        merged.add(later, aggregate=True)
    assert merged.outputs == whole[-1].outputs
    assert [o.finished for o in whole] == [False] * (len(whole) - 1) + [True]
    assert final[0].outputs[0].finish_reason == "length"
    assert final[0].request_id == "r"
    assert final[0].prompt == "x"


async def test_stop_strings(client: EngineClient) -> None:
    text = (await collect(client, "x"))[-1].outputs[0].text
    stop = text[9:12]
    for keep in (False, True):
        deltas = await collect(
            client, "x", stop=[stop], include_stop_str_in_output=keep, output_kind=DELTA
        )
        shown = "".join(c.text for o in deltas for c in o.outputs)
        assert shown == text[: text.index(stop) + 3 * keep]
        last = deltas[-1].outputs[-1]
        assert (last.finish_reason, last.stop_reason) == ("stop", stop)


async def test_several_completions_with_log_probabilities(client: EngineClient) -> None:
    outputs = await collect(client, "xyz", n=2, logprobs=2, prompt_logprobs=1, seed=1)
    last = outputs[-1]
    assert [c.index for c in last.outputs] == [0, 1]
    for completion in last.outputs:
        assert len(completion.logprobs) == len(completion.token_ids) == 30
        for token, position in zip(completion.token_ids, completion.logprobs, strict=True):
            assert next(iter(position)) == token
    assert last.prompt_logprobs[0] is None
    assert len(last.prompt_logprobs) == 3


async def test_abort_and_close(client: EngineClient, steps: Held) -> None:
    params = SamplingParams(max_tokens=400, ignore_eos=True, output_kind=DELTA)
    stream = await steps.begun(client.generate("x", params, "r"))
    await client.abort(["r", "other"])
    steps.open()
    rest = [output async for output in stream]
    assert rest[-1].finished
    assert rest[-1].outputs[0].finish_reason == "abort"
    closed = await steps.begun(client.generate("x", params, "r"))
    with pytest.raises(RequestError):
        await anext(client.generate("x", params, "r"))
    await closed.aclose()
    steps.hold()
    task = asyncio.create_task(collect(client, "x", "r", max_tokens=400))
    await steps.go_on_until_running(client, 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    steps.open()
    await until_stats(client, lambda stats: stats.num_requests_running == 0)


@pytest.mark.parametrize(
    ("prompt", "params", "error"),
    [
        ("", {}, RequestError),
        ("x" * 600, {}, PromptTooLong),
        ("x" * 500, {"max_tokens": 100}, PromptTooLong),
        ("x", {"logprobs": 21}, RequestError),
    ],
)
async def test_refusals(
    client: EngineClient, prompt: str, params: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        await collect(client, prompt, **params)


async def test_tokens_and_texts(client: EngineClient) -> None:
    found = await client.tokenize("abc", strings=True)
    assert found.token_ids == [97, 98, 99]
    assert found.token_strings == ["a", "b", "c"]
    assert await client.detokenize([97, 98]) == "ab"
    chat = await client.tokenize(ChatPrompt([{"role": "user", "content": "hello"}]))
    assert "hello" in await client.detokenize(chat.token_ids)


@pytest.mark.parametrize("penalty", [1.0, 0.5])
async def test_a_beam_search(client: EngineClient, penalty: float) -> None:
    params = BeamSearchParams(3, 12, length_penalty=penalty)
    found = await client.beam_search("xyz", params, "r", priority=0)
    assert found.prompt_token_ids == [ord(c) for c in "xyz"]
    assert len(found.sequences) == 3
    scores = [one.score for one in found.sequences]
    assert scores == sorted(scores, reverse=True)
    for one in found.sequences:
        assert one.tokens == found.prompt_token_ids + one.output_token_ids
        assert len(one.logprobs) == len(one.output_token_ids)
        assert [next(iter(position)) for position in one.logprobs] == one.output_token_ids
        assert one.score == pytest.approx(one.cum_logprob / len(one.output_token_ids) ** penalty)
        ended = one.finish_reason == "stop"
        assert ended == (one.stop_reason is not None)
        assert ended or (one.finish_reason == "length" and len(one.output_token_ids) == 12)
        shown = one.output_token_ids[: -1 if ended else None]
        assert one.output_text == "".join(map(chr, shown))
        assert one.text == "xyz" + one.output_text


@pytest.mark.parametrize(
    ("prompt", "params", "error"),
    [
        ("x", BeamSearchParams(11, 3), "beam_width"),
        ("x" * 510, BeamSearchParams(2, 10), "length is 512 tokens"),
    ],
)
async def test_a_refused_beam_search(
    client: EngineClient, prompt: str, params: BeamSearchParams, error: str
) -> None:
    with pytest.raises(RequestError, match=error):
        await client.beam_search(prompt, params, "r")
    assert (await client.stats()).num_requests_running == 0


async def test_a_cancelled_beam_search_leaves_nothing_running(client: EngineClient) -> None:
    params = BeamSearchParams(3, 300, ignore_eos=True)
    search = asyncio.create_task(client.beam_search("x", params, "r"))
    async with asyncio.timeout(PATIENCE):
        while (await client.stats()).prompt_tokens == 0:
            await asyncio.sleep(0)
        search.cancel()
        await asyncio.gather(search, return_exceptions=True)
        while (await client.stats()).num_requests_running:
            await asyncio.sleep(0)
    assert search.cancelled()


async def test_without_a_speech_model_nothing_is_transcribed(client: EngineClient) -> None:
    sound, params = AudioClip([0.0] * 10, 10), TranscriptionParams(task="transcribe")
    with pytest.raises(UnsupportedFeature, match="does not transcribe"):
        await client.transcribe(sound, params, "r")
    with pytest.raises(UnsupportedFeature, match="does not transcribe"):
        await anext(client.stream_transcript(sound, params, "r"))


class TextSpeech(FakeSpeech):
    """A speech model whose prompts have no audio, which the core of these tests cannot take."""

    def prompt(self, audio: AudioClip, **asked: Any) -> Any:
        return f"clip {len(audio.samples)}"


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("given", [False, True])
async def test_a_transcript(client: EngineClient, streams: bool, given: bool) -> None:
    speech = TextSpeech(SpeechToTextConfig(sample_rate=10))
    client.speech = speech  # type: ignore[misc]
    params = TranscriptionParams(
        task="transcribe", language="en", temperatures=[0.0],
        sampling={"max_tokens": 5, "ignore_eos": True},
    )  # fmt: skip
    ids: list[str] = []

    def generate(prompt: Any, sampling: SamplingParams, request_id: str) -> Any:
        ids.append(request_id)
        return client.generate(prompt, sampling, request_id)

    sound = AudioClip([0.0] * 650, 10)
    run = generate if given else None
    if streams:
        pieces = [p async for p in client.stream_transcript(sound, params, "r", generate=run)]
        text = "".join(piece.text for piece in pieces)
        assert [p.finish_reason for p in pieces if p.finish_reason] == ["length"] * 3
    else:
        found = await client.transcribe(sound, params, "r", generate=run)
        text = found.text
        assert (found.duration, found.language, found.task) == (65.0, "en", "transcribe")
    lengths = [300, 300, 50]
    finals = [
        (await collect(client, f"clip {n}", f"own{i}", max_tokens=5, temperature=0.0))[-1]
        for i, n in enumerate(lengths)
    ]
    assert text == " ".join(final.outputs[0].text.strip() for final in finals)
    assert ids == (["r-0", "r-1", "r-2"] if given else [])


async def test_health_reset_and_shutdown(client: EngineClient) -> None:
    await client.check_health()
    assert await client.reset_prefix_cache() is True
    await client.shutdown()
    assert client.model.max_model_len == 512


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("clear", [False, True])
async def test_pause(client: EngineClient, steps: Held, waits: bool, clear: bool) -> None:
    steps.hold()
    running = [asyncio.create_task(collect(client, "x", f"r{i}", max_tokens=200)) for i in range(3)]
    await steps.go_on_until_running(client, 3)
    assert not await client.is_paused()
    pausing = asyncio.create_task(
        client.pause_generation(wait_for_inflight_requests=waits, clear_cache=clear)
    )
    await until(client.is_paused)  # and what it aborts is aborted
    steps.open()
    await pausing
    assert await client.is_paused()
    await client.check_health()
    for outputs in await asyncio.gather(*running):
        assert outputs[-1].outputs[0].finish_reason == ("length" if waits else "abort")
    stats = await client.stats()
    assert stats.num_requests_running == 0
    assert stats.num_free_blocks == stats.num_blocks

    held = asyncio.create_task(collect(client, "x", "held"))
    gone = asyncio.create_task(collect(client, "x", "gone"))
    with pytest.raises(RequestError):
        await collect(client, "", "refused")
    await several_rounds(client)
    assert not held.done()
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    await client.resume_generation()
    assert not await client.is_paused()
    assert (await held)[-1].outputs[0].finish_reason == "length"
    await client.resume_generation()


async def test_resuming_ends_a_pause_that_waits(client: EngineClient, steps: Held) -> None:
    steps.hold()
    running = asyncio.create_task(collect(client, "x", "r", max_tokens=300))
    await steps.go_on_until_running(client, 1)
    pausing = asyncio.create_task(client.pause_generation(wait_for_inflight_requests=True))
    await several_rounds(client)
    assert not pausing.done()
    await client.resume_generation()
    async with asyncio.timeout(PATIENCE):
        await pausing
    steps.open()
    assert len((await running)[-1].outputs[0].token_ids) == 300


async def test_calls_of_workers(client: EngineClient) -> None:
    assert await client.collective_rpc("report") == [{"rank": 0}]
    for method, args in (("close", ()), ("execute", ()), ("report", (1,)), ("__init__", ())):
        with pytest.raises(RequestError):
            await client.collective_rpc(method, args=args)
    assert "profiler_config" in client.settings


async def test_the_fake_plays_its_script() -> None:
    gate = asyncio.Event()
    fake = FakeEngine(["one", "two"], gate=gate)
    task = asyncio.create_task(collect(fake, "x", n=2, seed=1, ignore_eos=False))
    while not fake.requests:
        await asyncio.sleep(0)
    assert fake.num_running == 1
    gate.set()
    assert [c.text for c in (await task)[-1].outputs] == ["one", "two"]
    assert fake.requests[0].params.n == 2
    assert fake.finished == ["r"]
    assert fake.num_running == 0
    dying = FakeEngine("a long text", die_after=3)
    with pytest.raises(EngineDead):
        await collect(dying, "x")
    with pytest.raises(EngineDead):
        await dying.check_health()
    assert dying.num_running == 0

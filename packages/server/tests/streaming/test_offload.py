"""Nothing large holds the event loop: what its thread does between two turns is counted, not timed."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import httpx2
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_core.engine import TokenizedPrompt
from headrace_core.errors import RequestError
from headrace_core.output import CompletionOutput, Logprob, RequestOutput
from headrace_core.sampling.params import RequestOutputKind
from headrace_server import ServerSettings, create_app
from headrace_server.http import json_counts, routing
from headrace_server.http.json_counts import SLICE, JsonCounts, exceeds
from headrace_server.protocols.base import without_nulls
from headrace_server.protocols.openai.bodies import sampling
from headrace_server.requests import prompt_embeds as embeds
from headrace_server.requests.prompt_embeds import _PIECE as PIECE_OF_BASE64
from headrace_server.requests.prompt_embeds import decode_embeds
from headrace_server.streaming import offload
from headrace_server.streaming.offload import PIECE, OffLoop, encoded, pieces
from headrace_testing.fakes.engine import FakeEngine, fake_served_model
from headrace_testing.waiting import until

pytestmark = pytest.mark.req("REL-21")

POSITIONS = 4000
WIDE = {i: Logprob(-0.5 - i, i + 1, f"{i:040}") for i in range(20)}
"""Twenty tokens with texts so long that a thousand positions are 5 MB."""
LONG = "word <tool_call> {\n" * 8_000
NEVER = 10**15


def _output(text: str, count: int, *, wide: bool, finished: bool, prompt: bool) -> RequestOutput:
    part = CompletionOutput(0, text, [0] * count, logprobs=[WIDE] * count if wide else None)
    part.finish_reason = "length" if finished else None
    return RequestOutput(
        "r", "prompt", [0] * 4, [part], finished,
        prompt_logprobs=[None, *[WIDE] * POSITIONS] if prompt else None,
    )  # fmt: skip


class Prepared(FakeEngine):
    """Answers with a large output that costs it nothing; streams put a small one before it."""

    def __init__(self, text: str = "text", *, wide: bool = True, prompt: bool = False) -> None:
        super().__init__()
        self._text, self._wide, self._prompt = text, wide, prompt

    def generate(self, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = [
            _output(self._text, POSITIONS, wide=self._wide, finished=True, prompt=self._prompt)
        ]
        if params.output_kind is RequestOutputKind.DELTA:
            outputs.insert(0, _output("a", 1, wide=self._wide, finished=False, prompt=False))
        return _Stream(outputs)

    async def tokenize(self, *args: Any, **kwargs: Any) -> TokenizedPrompt:
        return TokenizedPrompt([5] * 1_000_000, ["text"] * 1_000_000)


class _Stream(AsyncIterator[RequestOutput]):
    def __init__(self, outputs: list[RequestOutput]) -> None:
        self._outputs = outputs

    async def __anext__(self) -> RequestOutput:
        if not self._outputs:
            raise StopAsyncIteration
        return self._outputs.pop(0)

    async def aclose(self) -> None:
        self._outputs.clear()

    async def push(self, take: Callable[[RequestOutput], bool], take_text: Any = None) -> None:
        while self._outputs:
            if not take(self._outputs.pop(0)):
                return


class _Watched:
    """What the loop's thread does while a request is answered, in counts that no other load changes."""

    def __init__(self) -> None:
        self.most_calls = 0
        """Calls of functions, Python's and C's, between two turns of the loop."""
        self.slices: list[tuple[str, int]] = []
        """Thread that encoded a slice of a large list, and bytes."""
        self._calls = 0

    def count(self, frame: object, event: str, argument: object) -> None:
        """See :func:`sys.setprofile`."""
        self._calls += event in ("call", "c_call")

    def turn(self) -> None:
        """The loop has got round."""
        self.most_calls, self._calls = max(self.most_calls, self._calls), 0

    @property
    def sliced_on_loop(self) -> int:
        """Bytes."""
        return sum(size for thread, size in self.slices if thread == "MainThread")


@contextlib.contextmanager
def _watching(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Watched]:
    watched, loop, going_on = _Watched(), asyncio.get_running_loop(), True
    encoder = msgspec.json.Encoder()

    def turn() -> None:
        watched.turn()
        if going_on:
            loop.call_soon(turn)

    def encode(items: object) -> bytes:
        data = encoder.encode(items)
        watched.slices.append((_thread(), len(data)))
        return data

    with monkeypatch.context() as patched:
        patched.setattr(offload, "_encoder", SimpleNamespace(encode=encode))
        loop.call_soon(turn)
        sys.setprofile(watched.count)
        try:
            yield watched
        finally:
            sys.setprofile(None)
            going_on = False
            watched.turn()


def _chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9, **fields}


MANY = {"logprobs": True, "top_logprobs": 20}
ENTRIES = ["message.output_text.logprobs"]
CASES: dict[str, tuple[FakeEngine, str, dict[str, Any]]] = {
    "chat": (Prepared(), "/v1/chat/completions", _chat(**MANY)),
    "chat-stream": (Prepared(), "/v1/chat/completions", _chat(stream=True, **MANY)),
    "chat-prompt": (Prepared(wide=False, prompt=True), "/v1/chat/completions",
                    _chat(prompt_logprobs=20)),
    "completion": (Prepared(), "/v1/completions", {"prompt": "a", "logprobs": 20}),
    "completion-stream": (Prepared(), "/v1/completions",
                          {"prompt": "a", "logprobs": 20, "stream": True}),
    "completion-prompt": (Prepared(wide=False, prompt=True), "/v1/completions",
                          {"prompt": "a", "prompt_logprobs": 20}),
    "tokens": (Prepared(), "/inference/v1/generate",
               {"token_ids": [1], "sampling_params": {"logprobs": 20}}),
    "tokens-stream": (Prepared(), "/inference/v1/generate",
                      {"token_ids": [1], "sampling_params": {"logprobs": 20}, "stream": True}),
    "responses": (Prepared(), "/v1/responses",
                  {"input": "a", "include": ENTRIES, "top_logprobs": 20}),
    "responses-stream": (Prepared(), "/v1/responses",
                         {"input": "a", "include": ENTRIES, "top_logprobs": 20, "stream": True}),
    "tokenize": (Prepared(), "/tokenize", {"prompt": "a", "return_token_strs": True}),
}  # fmt: skip
PARSED: dict[str, tuple[FakeEngine, str, dict[str, Any]]] = {
    "messages": (Prepared(LONG, wide=False), "/v1/messages", _chat(model="fake-model")),
    "messages-stream": (
        Prepared(LONG, wide=False),
        "/v1/messages",
        _chat(model="fake-model", stream=True),
    ),
    "chat-calls": (Prepared(LONG, wide=False), "/v1/chat/completions", _chat()),
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


class _Asked(NamedTuple):
    watched: _Watched
    answer: bytes


async def _ask(
    patch: pytest.MonkeyPatch,
    engine: FakeEngine,
    path: str,
    body: dict[str, Any],
    light: int | None = None,
    **settings: Any,
) -> _Asked:
    app = create_app(engine, ServerSettings(**settings))
    state = app.state.headrace
    if light is not None:
        state.off_loop.light = light
    transport = httpx2.ASGITransport(app=app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://server") as client:
        content = msgspec.json.encode(body)
        headers = {"Content-Type": "application/json"}
        await client.post(path, content=b"{}", headers=headers)  # what the first request loads
        with _watching(patch) as watched:
            answer = await client.post(path, content=content, headers=headers)
        assert answer.status_code == 200, answer.text[:500]
    state.off_loop.close()
    return _Asked(watched, answer.content)


@pytest.mark.parametrize("name", CASES)
async def test_a_large_answer_does_not_hold_the_loop(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made in a thread, in slices, as one call into C keeps the interpreter's lock to its end."""
    engine, path, body = CASES[name]
    held = await _ask(monkeypatch, engine, path, body, NEVER)
    found = await _ask(monkeypatch, engine, path, body)
    slices = [size for _, size in found.watched.slices]
    assert sum(slices) > 4_000_000
    assert max(slices) < sum(slices) / 16
    assert found.watched.sliced_on_loop < held.watched.sliced_on_loop / 100
    if name != "tokenize":  # all of whose work is in slices
        assert found.watched.most_calls < held.watched.most_calls / 10


@pytest.mark.parametrize("name", PARSED)
async def test_nor_does_looking_for_calls_in_a_long_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, path, body = PARSED[name]
    tools = TOOLS if "chat" in name else [{"name": "f", "input_schema": {"type": "object"}}]
    words = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    body = {**body, "tools": tools}
    held = await _ask(monkeypatch, engine, path, body, NEVER, **words)
    found = await _ask(monkeypatch, engine, path, body, **words)
    assert found.watched.most_calls < held.watched.most_calls / 10


async def test_nor_does_reading_a_body_of_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting the body's values and decoding base64 run in slices, in another thread."""

    class Embedding(Prepared):
        def __init__(self) -> None:
            super().__init__(wide=False)
            self._model = fake_served_model(prompt_embeds=True)

    scanned, decoded = list[str](), list[tuple[str, int]]()

    def scan(body: bytes, most: JsonCounts) -> bool:
        if len(body) > 10_000_000:  # not the one before it
            scanned.append(_thread())
        return exceeds(body, most)

    def decode(text: str, **options: Any) -> bytes:
        decoded.append((_thread(), len(text)))
        return base64.b64decode(text, **options)

    monkeypatch.setattr(routing, "exceeds", scan)
    monkeypatch.setattr(embeds, "base64", SimpleNamespace(b64decode=decode))
    text = base64.b64encode(bytes(9_000_000)).decode()
    await _ask(monkeypatch, Embedding(), "/v1/completions", {"prompt_embeds": text})
    assert scanned == ["headrace-offload"]
    assert {name for name, _ in decoded} == {"headrace-offload"}
    assert max(size for _, size in decoded) <= PIECE_OF_BASE64
    assert sum(size for _, size in decoded) == len(text)


def _thread() -> str:
    return threading.current_thread().name.partition("_")[0]


@pytest.mark.parametrize("large", [False, True])
async def test_large_bodies_are_decoded_and_validated_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    seen = set[str]()

    def checking(data: Any, keep: frozenset[str]) -> Any:
        if isinstance(data, dict) and data.get("prompt") == prompt:  # then it is validated
            seen.add(_thread())
        return without_nulls(data, keep)

    monkeypatch.setattr(sampling, "without_nulls", checking)
    prompt = "a" * (300_000 if large else 1000)
    body = {"prompt": prompt, "max_tokens": 1}
    await _ask(monkeypatch, Prepared(wide=False), "/v1/completions", body)
    assert seen == {"headrace-offload" if large else "MainThread"}


def _counted(data: bytes) -> JsonCounts:
    """The counts, found by looking at every byte, as a decoder does."""
    names = items = 0
    inside = escaped = False
    for byte in data:
        if inside:
            inside = escaped or byte != ord('"')
            escaped = not escaped and byte == ord("\\")
            continue
        inside = byte == ord('"')
        names += byte in b":[{"
        items += byte == ord(",")
    return JsonCounts(names, items)


@given(
    st.lists(
        st.sampled_from(
            [b'"', b"\\", b'\\"', b"[", b"{", b":", b",", b"x" * 5, b"1", b'"a": [1, 2], ']
        ),
        max_size=60,
    ),
    st.integers(1, 9),
)
@settings(deadline=None)
def test_what_a_body_holds_is_counted_across_slices(parts: list[bytes], size: int) -> None:
    data = (
        b'{"a": '
        + json.dumps("".join(p.decode() for p in parts)).encode()
        + b", "
        + b"".join(part for part in parts if b"\\" not in part)
    )
    expected = _counted(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_counts, "SLICE", size)
        assert not exceeds(data, expected)
        assert exceeds(data, expected._replace(names=expected.names - 1))
        assert not expected.items or exceeds(data, expected._replace(items=expected.items - 1))


def test_texts_are_not_counted() -> None:
    text = json.dumps({"prompt": '[{"a": 1, "b": "\\""}], ' * SLICE}).encode()
    assert not exceeds(text, JsonCounts(2, 0))
    assert exceeds(text, JsonCounts(1, 0))


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (lambda: b'{"prompt": "x", "a": [' + b"[]," * routing.MAX_NAMES + b"[]]}", "more than 131072 names"),
        (lambda: b'{"prompt": [' + b"1," * (routing.MAX_ITEMS + 1) + b"1]}", "more than 1048576 values"),
        (lambda: json.dumps({f"a{i}": 1 for i in range(1025)}).encode(), "more than 1024 fields"),
    ],
)  # fmt: skip
async def test_bodies_that_hold_too_much_are_refused(
    connect: Any, body: Callable[[], bytes], problem: str
) -> None:
    answer = await connect().post(
        "/v1/completions", content=body(), headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 400
    assert problem in answer.json()["error"]["message"]


async def test_a_longer_context_takes_more_values(connect: Any) -> None:
    engine = FakeEngine(model=fake_served_model(max_model_len=routing.MAX_ITEMS))
    body = b'{"prompt": [' + b"1," * (routing.MAX_ITEMS + 1) + b"1]}"
    answer = await connect(engine).post(
        "/v1/completions", content=body, headers={"Content-Type": "application/json"}
    )
    assert "values" not in answer.json()["error"]["message"]


def test_a_list_in_slices_is_the_list() -> None:
    for count in (0, 1, 3, 4, 5, 9):
        items = [{"a": [i], "b": "}],["} for i in range(count)]
        assert msgspec.json.encode(encoded(iter(items))) == msgspec.json.encode(items)
    assert b"".join(pieces(b"abc" * PIECE)) == b"abc" * PIECE


async def test_whoever_is_cancelled_waits_for_the_work_and_work_speaks_in_order() -> None:
    off_loop, begun, seen = OffLoop(), threading.Event(), list[int]()
    released = threading.Event()

    def work() -> None:
        for number in range(100):
            off_loop.back(seen.append, number)
        begun.set()
        released.wait(60)
        seen.append(-1)

    task = asyncio.ensure_future(off_loop(NEVER, work))
    await until(begun.is_set)
    task.cancel()
    for _ in range(50):
        await asyncio.sleep(0)
    assert not task.done(), "it left its work behind"
    released.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == [*range(100), -1]
    with pytest.raises(ZeroDivisionError):
        await off_loop(NEVER, lambda: 1 // 0)
    assert await off_loop(0, threading.current_thread) is threading.current_thread()
    off_loop.close()


@pytest.mark.parametrize("at", [4, PIECE_OF_BASE64 - 4, PIECE_OF_BASE64])
def test_padding_is_at_the_end_only(at: int) -> None:
    data = bytes(range(256)) * 2048
    text = base64.b64encode(data).decode()
    assert decode_embeds(text, enabled=True) == [data]
    with pytest.raises(RequestError):
        decode_embeds(text[: at - 1] + "=" + text[at:], enabled=True)


async def test_a_body_of_millions_of_arrays_is_refused_before_it_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoded = list[int]()

    def decode(body: bytes, **options: Any) -> Any:
        decoded.append(len(body))
        return msgspec.json.Decoder().decode(body)

    app = create_app(FakeEngine(), ServerSettings())
    transport = httpx2.ASGITransport(app=app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://server") as client:
        content = b'{"prompt": [' + b"[]," * 1_000_001 + b"1]}"
        headers = {"Content-Type": "application/json"}
        monkeypatch.setattr(msgspec.json, "decode", decode)
        answer = await client.post("/v1/completions", content=content, headers=headers)
    monkeypatch.undo()
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, 400), answer.text
    assert decoded == []

"""``use_beam_search``: what is searched, and how it is shown. The search itself is the engine's."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_core.errors import GenerateError
from headrace_core.output import RequestOutput
from headrace_core.sampling.params import BeamSearchParams
from headrace_server.observability.instrumentation import InstrumentedEngine
from headrace_testing.fakes.engine import FakeEngine, fake_served_model

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(
        lambda _, index: f"beam {index}", model=fake_served_model(max_model_len=100, max_logprobs=9)
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_completions(connect: Any, events: Any, engine: FakeEngine, stream: bool) -> None:
    body = {"prompt": ["a", "b"], "n": 2, "use_beam_search": True, "length_penalty": 1.5,
            "temperature": 0, "max_tokens": 7, "stream": stream, "add_special_tokens": False,
            "echo": True}  # fmt: skip
    answer = await connect(engine).post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    if stream:
        choices = [choice for chunk in events(answer.text) for choice in chunk["choices"]]
    else:
        choices = answer.json()["choices"]
        assert answer.json()["usage"]["completion_tokens"] == 28
    texts = {choice["index"]: choice["text"] for choice in choices}
    assert texts == {0: "abeam 0", 1: "abeam 1", 2: "bbeam 0", 3: "bbeam 1"}
    search, _ = engine.searched
    params = search.params
    assert (params.beam_width, params.max_tokens, params.length_penalty) == (2, 7, 1.5)
    assert (params.temperature, params.ignore_eos) == (0.0, False)
    assert (search.priority, search.add_special_tokens) == (0, False)


async def test_chats(connect: Any, engine: FakeEngine) -> None:
    body = {**CHAT, "use_beam_search": True, "n": 3, "response_format": {"type": "text"}}
    answer = await connect(engine).post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    contents = [choice["message"]["content"] for choice in answer.json()["choices"]]
    assert contents == ["beam 0", "beam 1", "beam 2"]
    (search,) = engine.searched
    assert search.params.max_tokens == 100 - answer.json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", "x"), ("stop_token_ids", [1]), ("min_tokens", 1), ("logit_bias", {"1": 1}),
        ("allowed_token_ids", [1]), ("bad_words", ["x"]), ("frequency_penalty", 1),
        ("presence_penalty", 1), ("repetition_penalty", 2), ("top_p", 0.5), ("top_k", 3),
        ("min_p", 0.5), ("logprobs", 0), ("prompt_logprobs", 1), ("truncate_prompt_tokens", 3),
        ("response_format", {"type": "json_object"}), ("structured_outputs", {"regex": "a"}),
        ("vllm_xargs", {"a": 1}),
    ],
)  # fmt: skip
async def test_fields_without_effect_are_refused(
    connect: Any, engine: FakeEngine, field: str, value: Any
) -> None:
    body = {"prompt": "a", "use_beam_search": True, "max_tokens": 3, field: value}
    answer = await connect(engine).post("/v1/completions", json=body)
    assert answer.json()["error"]["param"] == field, answer.text
    assert engine.searched == []


async def test_errors_name_the_clients_fields(connect: Any, engine: FakeEngine) -> None:
    answer = await connect(engine).post(
        "/v1/completions", json={"prompt": "a", "length_penalty": 2}
    )
    assert answer.json()["error"]["param"] == "length_penalty"
    for url, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", CHAT)):
        answer = await connect(engine).post(url, json={**body, "use_beam_search": True, "n": 5})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
    tool = {"type": "function", "function": {"name": "f"}}
    body = {**CHAT, "use_beam_search": True, "tools": [tool], "tool_choice": "required"}
    answer = await connect(engine).post("/v1/chat/completions", json=body)
    assert answer.json()["error"]["param"] == "tool_choice"


class Recorder:
    """A watcher that notes what it sees."""

    every_output = True

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def begin(self, prompt: Any, params: Any, request_id: str) -> Recorder:
        self.seen.append((prompt, params.n, params.max_tokens, params.temperature, request_id))
        return self

    def begin_pooling(self, task: str, request_id: str) -> Any:
        raise AssertionError("nothing is pooled here")

    def saw(self, output: RequestOutput) -> None:
        self.seen.append([(part.index, part.text) for part in output.outputs])

    def ended(self, error: BaseException | None) -> None:
        self.seen.append(error)


async def test_a_search_is_one_request_to_watchers(engine: FakeEngine) -> None:
    recorder = Recorder()
    watched = InstrumentedEngine(
        engine, [recorder], lambda prompt: {"prompt": "p", "cache_salt": "s"}
    )
    found = await watched.beam_search("p", BeamSearchParams(2, 7), "r", priority=1)
    assert [one.output_text for one in found.sequences] == ["beam 0", "beam 1"]
    assert recorder.seen == [("p", 2, 7, 0.0, "r"), [(0, "beam 0"), (1, "beam 1")], None]
    (search,) = engine.searched
    assert (search.prompt, search.priority) == ({"prompt": "p", "cache_salt": "s"}, 1)


async def test_watchers_hear_why_a_search_failed(engine: FakeEngine) -> None:
    recorder = Recorder()
    engine.fail_after = 1
    with pytest.raises(GenerateError):
        await InstrumentedEngine(engine, [recorder]).beam_search("p", BeamSearchParams(2, 7), "r")
    (_, error) = recorder.seen
    assert isinstance(error, GenerateError)

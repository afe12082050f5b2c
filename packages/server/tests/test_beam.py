"""``use_beam_search``: what is searched, and how it is shown. The search itself is core's."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest

from headrace_core.errors import RequestError
from headrace_core.testing.engine import FakeEngine, fake_served_model

pytestmark = pytest.mark.spec("GEN-BEAM")
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


@dataclass
class _Sequence:
    output_text: str
    output_token_ids: list[int]
    cum_logprob: float = -1.0
    finish_reason: str = "stop"


@dataclass
class _Found:
    sequences: list[_Sequence]
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0


@dataclass
class _Search:
    """Stands for ``headrace_core.beam``."""

    calls: list[Any] = field(default_factory=list)

    async def __call__(self, engine: Any, prompt: Any, params: Any, name: str, **more: Any) -> Any:
        self.calls.append((prompt, params, more))
        if params.beam_width > 4:
            raise RequestError("beam_width = 5: too many", param="beam_width")
        tokens = await engine.tokenize(prompt, add_special_tokens=more["add_special_tokens"])
        found = [_Sequence(f"beam {i}", [98, i]) for i in range(params.beam_width)]
        return _Found(found, tokens.token_ids)


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> _Search:
    made, module = _Search(), ModuleType("headrace_core.beam")
    module.beam_search = made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "headrace_core.beam", module)
    return made


@pytest.mark.parametrize("stream", [False, True])
async def test_completions(connect: Any, events: Any, search: _Search, stream: bool) -> None:
    body = {"prompt": ["a", "b"], "n": 2, "use_beam_search": True, "length_penalty": 1.5,
            "temperature": 0, "max_tokens": 7, "stream": stream, "add_special_tokens": False,
            "echo": True}  # fmt: skip
    answer = await connect().post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    if stream:
        choices = [choice for chunk in events(answer.text) for choice in chunk["choices"]]
    else:
        choices = answer.json()["choices"]
        assert answer.json()["usage"]["completion_tokens"] == 8
    texts = {choice["index"]: choice["text"] for choice in choices}
    assert texts == {0: "abeam 0", 1: "abeam 1", 2: "bbeam 0", 3: "bbeam 1"}
    (_, params, more), _ = search.calls
    assert (params.beam_width, params.max_tokens, params.length_penalty) == (2, 7, 1.5)
    assert (params.temperature, params.ignore_eos) == (0.0, False)
    assert more == {"priority": 0, "add_special_tokens": False}


async def test_chats(connect: Any, search: _Search) -> None:
    engine = FakeEngine(model=fake_served_model(max_model_len=100))
    body = {**CHAT, "use_beam_search": True, "n": 3, "response_format": {"type": "text"}}
    answer = await connect(engine).post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    contents = [choice["message"]["content"] for choice in answer.json()["choices"]]
    assert contents == ["beam 0", "beam 1", "beam 2"]
    ((_, params, _),) = search.calls
    assert params.max_tokens == 100 - answer.json()["usage"]["prompt_tokens"]


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
    connect: Any, search: _Search, field: str, value: Any
) -> None:
    body = {"prompt": "a", "use_beam_search": True, "max_tokens": 3, field: value}
    answer = await connect().post("/v1/completions", json=body)
    assert answer.json()["error"]["param"] == field, answer.text
    assert search.calls == []


async def test_errors_name_the_clients_fields(connect: Any, search: _Search) -> None:
    answer = await connect().post("/v1/completions", json={"prompt": "a", "length_penalty": 2})
    assert answer.json()["error"]["param"] == "length_penalty"
    for url, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", CHAT)):
        answer = await connect().post(url, json={**body, "use_beam_search": True, "n": 5})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
    tool = {"type": "function", "function": {"name": "f"}}
    body = {**CHAT, "use_beam_search": True, "tools": [tool], "tool_choice": "required"}
    answer = await connect().post("/v1/chat/completions", json=body)
    assert answer.json()["error"]["param"] == "tool_choice"

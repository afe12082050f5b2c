"""POST /v1/chat/completions/batch: many conversations, one answer."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_testing.fakes.engine import FakeEngine

URL = "/v1/chat/completions/batch"
CHATS = [[{"role": "user", "content": text}] for text in ("a", "bc", "def")]


async def post(client: Any, status: int = 200, **body: Any) -> Any:
    answer = await client.post(URL, json={"messages": CHATS, **body})
    assert answer.status_code == status, answer.text
    return answer.json()


async def test_choices_are_those_of_the_chats_one_by_one(connect: Any) -> None:
    engine = FakeEngine()  # repeats its prompt
    client = connect(engine)
    asked = {"n": 2, "max_tokens": 40, "return_token_ids": True, "logprobs": True, "user": "x"}
    answer = await post(client, request_id="mine", **asked)
    assert (answer["id"], answer["object"]) == ("chatcmpl-mine", "chat.completion")
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    used = 0
    for position, messages in enumerate(CHATS):
        alone = await client.post("/v1/chat/completions", json={"messages": messages, **asked})
        one = alone.json()
        used += one["usage"]["total_tokens"]
        for choice in one["choices"]:
            got = answer["choices"][position * 2 + choice["index"]]
            ids = got.pop("prompt_token_ids")
            assert ids == (one["prompt_token_ids"] if choice["index"] == 0 else None)
            assert got.pop("prompt_logprobs") is None
            assert {**got, "index": choice["index"]} == choice
    assert answer["usage"]["total_tokens"] == used
    assert len({request.request_id for request in engine.requests}) == 6
    assert answer["prompt_token_ids"] is None


async def test_an_error_names_the_conversation_and_ends_all(connect: Any) -> None:
    engine = FakeEngine()
    wrong = [*CHATS, [{"role": "user", "content": [{"type": "image_url"}]}]]
    told = await post(connect(engine), 400, messages=wrong)
    assert told["error"]["param"] == "messages[3][0].content[0].type"
    begun = {request.request_id for request in engine.requests}
    assert begun <= {*engine.finished, *engine.aborted}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"stream": True}, "stream"), ({"messages": []}, "messages"), ({"n": 128, "messages": CHATS * 3},
         "messages"), ({"messages": CHATS[0]}, "messages"), ({"messages": [[]]}, "messages"),
        ({"tool_choice": "required"}, "tool_choice"), ({"temperature": -1}, "temperature"),
    ],
)  # fmt: skip
async def test_refusals(connect: Any, body: Any, param: str) -> None:
    told = await post(connect(), 400, **body)
    assert told["error"]["param"].startswith(param), told


async def test_limits_of_the_profile(connect: Any) -> None:
    few = connect(request_limits={"prompt": 2})
    assert "at most 2 conversations" in (await post(few, 400))["error"]["message"]
    await post(few, messages=CHATS[:2])
    strict = connect(strict_requests=True)
    assert "unknown field" in (await post(strict, 400, strange=1))["error"]["message"]


async def test_unknown_fields_of_messages_are_found(connect: Any) -> None:
    client = connect(FakeEngine(), strict_requests=True)
    wrong = [*CHATS, [{"role": "user", "content": "a", "contnt": 1}]]
    told = await post(client, 400, messages=wrong)
    assert told["error"]["param"] == "messages[3][0].contnt"
    assert "'content'" in told["error"]["message"]

"""Answers whose request left the model no next token: told on every wire, and never as a failure."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_testing.fakes.engine import FakeEngine

WHY = "no token is possible with min_tokens and bad_words"
HI = [{"role": "user", "content": "Hi"}]
CHATS = ("/v1/chat/completions", {"messages": HI})
TEXTS = ("/v1/completions", {"prompt": "Hi"})
RESPONSES = ("/v1/responses", {"input": "Hi"})
MESSAGES = ("/v1/messages", {"messages": HI, "max_tokens": 20})


class StuckEngine(FakeEngine):
    """Every answer ends in a dead end."""

    async def _play(self, *args: Any) -> Any:
        async for output in super()._play(*args):
            if output.finished:
                for part in output.outputs:
                    part.finish_reason, part.stop_reason = "error", WHY
            yield output


async def ask(connect: Any, wire: Any, **fields: Any) -> Any:
    path, body = wire
    client = connect(StuckEngine("Hello there."))
    return await client.post(path, json={"model": "fake-model", **body, **fields})


@pytest.mark.parametrize("wire", [CHATS, TEXTS], ids=["chat", "completion"])
async def test_choices_end_with_error_and_its_reason(connect: Any, events: Any, wire: Any) -> None:
    answer = await ask(connect, wire)
    assert answer.status_code == 200
    (choice,) = answer.json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("error", WHY)
    assert "Hello there." in (choice.get("text") or choice["message"]["content"])
    *_, last = events((await ask(connect, wire, stream=True)).text)
    (choice,) = last["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("error", WHY)


async def test_a_response_fails(connect: Any) -> None:
    answer = await ask(connect, RESPONSES)
    assert answer.status_code == 200
    body = answer.json()
    assert (body["status"], body["error"]) == ("failed", {"code": "invalid_prompt", "message": WHY})
    (item,) = body["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "Hello there.")
    streamed = (await ask(connect, RESPONSES, stream=True)).text
    assert "event: response.failed" in streamed
    assert WHY in streamed
    assert "response.completed" not in streamed


async def test_a_message_is_refused(connect: Any) -> None:
    """Its protocol has no reason of this kind for an end."""
    error = {"type": "error", "error": {"type": "invalid_request_error", "message": WHY}}
    answer = await ask(connect, MESSAGES)
    assert (answer.status_code, answer.json()) == (400, error)
    streamed = (await ask(connect, MESSAGES, stream=True)).text
    assert "event: error" in streamed
    assert WHY in streamed
    assert "message_stop" not in streamed

"""Roles that a wire does not have are refused with those that it has, and the nearest."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_core.errors import RequestError
from headrace_server.harmony.messages import from_chat
from headrace_testing.fakes.engine import FakeEngine


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/responses", "input"),
        ("/v1/messages", "messages"),
        ("/v1/messages/count_tokens", "messages"),
    ],
)
@pytest.mark.parametrize(
    ("role", "near"),
    [("usr", "user"), ("User", "user"), ("asistant", "assistant"), ("critic", None)],
)
async def test_a_wire_with_few_roles_names_them_and_the_nearest(
    connect: Any, path: str, field: str, role: str, near: str | None
) -> None:
    body = {"model": "fake-model", field: [{"role": role, "content": "Hi"}]}
    limit = {"max_tokens": 9} if path == "/v1/messages" else {}
    answer = await connect(FakeEngine("x")).post(path, json={**body, **limit})
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message.startswith(f"{field}[0].role: Input should be 'user', ")
    assert (f"; did you mean {near!r}?" in message) == (near is not None)
    assert ("did you mean" in message) == (near is not None)


async def test_a_misspelled_word_of_another_field_gets_the_same_hint(connect: Any) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": "hihg"}
    answer = await connect(FakeEngine("x")).post("/v1/chat/completions", json=body)
    assert "; did you mean 'high'?" in answer.json()["error"]["message"]


def test_the_gpt_oss_format_refuses_misspelled_roles() -> None:
    with pytest.raises(RequestError) as caught:
        from_chat([{"role": "user", "content": "a"}, {"role": "usr", "content": "b"}])
    assert caught.value.param == "messages[1].role"
    assert "did you mean 'user'?" in str(caught.value)
    [critic] = from_chat([{"role": "critic", "content": "b"}])
    assert critic.author == "critic"

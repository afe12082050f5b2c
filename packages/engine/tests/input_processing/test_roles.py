"""Roles of messages: misspelled ones, a template's own, and those that it leaves out."""

from __future__ import annotations

from typing import Any

import pytest
from test_template import CHATML, FakeTokenizer

from headrace_core.errors import RequestError
from headrace_core.request import ChatPrompt
from headrace_engine.input_processing.chat.template import ChatRenderer

PICKY = (
    "{% for m in messages %}{% if m.role == 'user' %}U:{{ m.content }}"
    '{% elif m.role == "assistant" %}A:{{ m.content }}{% elif m.role in ["usr"] %}X:{{ m.content }}'
    "{% endif %}{% endfor %}"
)
USER = {"role": "user", "content": "hi"}


def render(template: str, *messages: dict[str, Any]) -> str:
    renderer = ChatRenderer(FakeTokenizer(template))  # type: ignore[arg-type]
    return renderer.render(ChatPrompt(messages)).text


@pytest.mark.parametrize(
    ("role", "meant"),
    [
        ("usr", "user"), ("User", "user"), ("user ", "user"), ("users", "user"), ("SYSTEM", "system"),
        ("asistant", "assistant"), ("assitant", "assistant"), ("sytem", "system"), ("tools", "tool"),
        ("devloper", "developer"), ("funtion", "function"),
    ],
)  # fmt: skip
def test_a_misspelled_role_is_refused_with_the_nearest(role: str, meant: str) -> None:
    with pytest.raises(RequestError) as caught:
        render(CHATML, USER, {"role": role, "content": "x"})
    assert caught.value.param == "messages[1].role"
    assert str(caught.value).startswith(f"messages[1].role = {role!r}: did you mean {meant!r}?")
    assert "'assistant', 'developer', 'function', 'system', 'tool', 'user'" in str(caught.value)


@pytest.mark.parametrize(
    "role",
    ["critic", "narrator", "user2", "user_1", "tool_response", "ipython", "model", "observation"],
)
def test_a_role_of_the_client_s_own_reaches_the_template(role: str) -> None:
    text = render(CHATML, USER, {"role": role, "content": "x"})
    assert f"<|im_start|>{role}\nx<|im_end|>" in text


def test_a_role_that_the_template_names_is_no_misspelling() -> None:
    assert render(PICKY, USER, {"role": "usr", "content": "x"}) == "U:hiX:x"


@pytest.mark.parametrize("content", ["x", [{"type": "text", "text": "x"}]])
def test_messages_that_the_template_would_leave_out_are_refused(content: Any) -> None:
    with pytest.raises(RequestError) as caught:
        render(PICKY, USER, {"role": "critic", "content": content})
    assert caught.value.param == "messages[1].role"
    assert "the chat template leaves messages of this role out" in str(caught.value)


def test_a_template_that_needs_the_content_takes_the_role() -> None:
    needs = (
        "{% for m in messages %}{% if not m.content %}{{ raise_exception('empty') }}{% endif %}"
        "{% endfor %}same"
    )
    assert render(needs, {"role": "critic", "content": "x"}) == "same"


def test_an_empty_message_of_an_own_role_is_left_out() -> None:
    assert render(PICKY, USER, {"role": "critic", "content": ""}) == "U:hi"

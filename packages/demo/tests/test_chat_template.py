"""The chat template renders every kind of message, in the sandbox that engines render it in."""

from __future__ import annotations

import json
from typing import Any

import pytest

import headrace_demo

sandbox = pytest.importorskip("jinja2.sandbox")

_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
_ASK = {"role": "user", "content": "What is the weather in Oslo?"}
_CALL = {"function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
_RESULT = {"role": "tool", "content": "sunny"}


def _render(messages: list[dict[str, Any]], **variables: Any) -> str:
    environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = json.dumps
    source = (headrace_demo.model_path() / "chat_template.jinja").read_text("utf-8")
    return str(environment.from_string(source).render(messages=messages, **variables))


def test_user_and_generation_prompt() -> None:
    assert _render([{"role": "user", "content": "Hi"}], add_generation_prompt=True) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("role", ["system", "developer"])
def test_leading_instructions_become_the_system_block(role: str) -> None:
    rendered = _render([{"role": role, "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    assert rendered == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"


def test_content_in_parts_is_joined() -> None:
    parts = [{"type": "text", "text": "Hello, "}, {"type": "text", "text": "you"}]
    assert "user\nHello, you<|im_end|>" in _render([{"role": "user", "content": parts}])


def test_tools_are_json_lines_in_the_system_block() -> None:
    rendered = _render(
        [{"role": "system", "content": "Be brief."}, _ASK], tools=[_WEATHER, _WEATHER]
    )
    assert rendered.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    block = rendered.split("<tools>\n")[1].split("\n</tools>")[0]
    assert [json.loads(line) for line in block.splitlines()] == [_WEATHER, _WEATHER]


@pytest.mark.parametrize(
    "arguments", [{"city": "Oslo"}, '{"city": "Oslo"}'], ids=["object", "text"]
)
@pytest.mark.parametrize("wrapped", [True, False])
def test_tool_calls(arguments: object, wrapped: bool) -> None:
    function = {"name": "get_weather", "arguments": arguments}
    call = {"id": "1", "type": "function", "function": function} if wrapped else function
    rendered = _render([_ASK, {"role": "assistant", "content": None, "tool_calls": [call]}])
    assert rendered.endswith(
        "<|im_start|>assistant\n<tool_call>\n"
        '{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>\n'
    )


def test_two_tool_calls_stand_on_lines_of_their_own() -> None:
    rendered = _render([_ASK, {"role": "assistant", "content": "", "tool_calls": [_CALL, _CALL]}])
    assert rendered.count("</tool_call>\n<tool_call>") == 1


def test_tool_result() -> None:
    rendered = _render([_ASK, _RESULT])
    assert rendered.endswith(
        "<|im_start|>tool\n<tool_response>\nsunny\n</tool_response><|im_end|>\n"
    )


def test_thinking_is_asked_for_only_when_enabled() -> None:
    assert "think" not in _render([_ASK], enable_thinking=False)
    assert "between <think> and </think>" in _render([_ASK], enable_thinking=True)


@pytest.mark.parametrize(
    "answer",
    [
        {"role": "assistant", "content": "Yes.", "reasoning_content": "I am sure."},
        {"role": "assistant", "content": "<think>\nI am sure.\n</think>\n\nYes."},
    ],
    ids=["field", "text"],
)
def test_thoughts_are_shown_after_the_last_user_message_alone(answer: dict[str, Any]) -> None:
    shown = "assistant\n<think>\nI am sure.\n</think>\n\nYes.<|im_end|>"
    assert shown in _render([_ASK, answer], enable_thinking=True)
    assert "I am sure." not in _render([_ASK, answer, _ASK], enable_thinking=True)
    assert "I am sure." not in _render([_ASK, answer], enable_thinking=False)
    assert "assistant\nYes.<|im_end|>" in _render([_ASK, answer, _ASK], enable_thinking=True)


def test_a_conversation_only_grows() -> None:
    """Each turn's prompt starts with the last one's: what lets an engine reuse its cache."""
    first = _render([_ASK], add_generation_prompt=True)
    answered = [_ASK, {"role": "assistant", "content": "Sunny."}, _ASK]
    assert _render(answered, add_generation_prompt=True).startswith(first)

"""Every answer and event is what the clients' own types say, checked strictly."""

from __future__ import annotations

import json
import typing
from typing import Any

import openai.types.chat as chat_types
import openai.types.responses as response_types
import pytest
from openai.types import Completion
from pydantic import TypeAdapter

from headrace_testing.fakes.engine import FakeEngine, fake_served_model

HI = [{"role": "user", "content": "Hi"}]
PARSERS = {
    "enable_auto_tool_choice": True,
    "tool_call_parser": "hermes",
    "reasoning_parser": "qwen3",
    "enable_prompt_tokens_details": True,
}
TEXT = '<think>hm</think>Text.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
FUNCTION = {"name": "add", "parameters": {"type": "object"}}
PLAIN = {"text": ("Hello.", {}), "calls": (TEXT, PARSERS)}


async def events_of(client: Any, url: str, **body: Any) -> list[Any]:
    answer = await client.post(url, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    lines = [x.removeprefix("data: ") for x in answer.text.splitlines() if x.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("kind", PLAIN)
async def test_chats_and_completions(connect: Any, kind: str) -> None:
    text, settings = PLAIN[kind]
    client = connect(FakeEngine(text, tokens_per_output=3), **settings)
    body: dict[str, Any] = {"messages": HI, "logprobs": True, "top_logprobs": 1, "n": 2}
    if kind == "calls":
        body["tools"] = [{"type": "function", "function": FUNCTION}]
    whole = (await client.post("/v1/chat/completions", json=body)).json()
    read = chat_types.ChatCompletion.model_validate(whole)
    assert (read.choices[0].message.tool_calls is not None) == (kind == "calls")
    for chunk in await events_of(
        client, "/v1/chat/completions", **body, stream_options={"continuous_usage_stats": True}
    ):
        assert chat_types.ChatCompletionChunk.model_validate(chunk).id == chunk["id"]
    body = {"prompt": "Hi", "model": "fake-model", "logprobs": 1}
    whole = (await client.post("/v1/completions", json=body)).json()
    Completion.model_validate(whole)
    chunks = await events_of(client, "/v1/completions", **body)
    assert chunks[-1]["choices"][0]["finish_reason"]


EVENTS = {
    cls.model_fields["type"].annotation.__args__[0]: cls
    for cls in typing.get_args(typing.get_args(response_types.ResponseStreamEvent)[0])
}
OWN = {"response.reasoning_part.added", "response.reasoning_part.done"}
"""Events that OpenAI's types do not have, and vLLM's clients read; the helper passes them on."""


def checked(event: dict[str, Any]) -> str:
    """The event's type; it must be one that the client knows, with all its fields."""
    kind = str(event["type"])
    if kind not in OWN:
        EVENTS[kind].model_validate(event)
    if "response" in event:
        response_types.Response.model_validate(event["response"])
    return kind


@pytest.mark.parametrize("kind", PLAIN)
async def test_responses(connect: Any, kind: str) -> None:
    text, settings = PLAIN[kind]
    client = connect(FakeEngine(text, tokens_per_output=3), **settings)
    body: dict[str, Any] = {"input": "Hi"}
    if kind == "calls":
        body["tools"] = [{"type": "function", "strict": False, **FUNCTION}]
    whole = (await client.post("/v1/responses", json=body)).json()
    response_types.Response.model_validate(whole)
    types = [checked(event) for event in await events_of(client, "/v1/responses", **body)]
    assert types[-1] == "response.completed"
    failing = connect(FakeEngine(text, tokens_per_output=3, fail_after=1), **settings)
    types = [checked(event) for event in await events_of(failing, "/v1/responses", **body)]
    assert types[-1] == "response.failed"


@pytest.mark.parametrize("kind", PLAIN)
async def test_messages(connect: Any, kind: str) -> None:
    anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed")
    text, settings = PLAIN[kind]
    client = connect(FakeEngine(text, tokens_per_output=3), **settings)
    body: dict[str, Any] = {"model": "fake-model", "max_tokens": 2000, "messages": HI,
                            "thinking": {"type": "enabled", "budget_tokens": 1024}}  # fmt: skip
    if kind == "calls":
        body["tools"] = [{"name": "add", "input_schema": {"type": "object"}}]
    whole = (await client.post("/v1/messages", json=body)).json()
    anthropic.types.Message.model_validate(whole)
    known: TypeAdapter[Any] = TypeAdapter(anthropic.types.RawMessageStreamEvent)
    for event in await events_of(client, "/v1/messages", **body):
        if event["type"] != "ping":
            assert known.validate_python(event).type == event["type"]


async def test_gpt_oss(connect: Any) -> None:
    said = (
        "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>final<|message|>Hi."
    )
    model = fake_served_model(architecture="GptOssForCausalLM")
    client = connect(FakeEngine(said, model=model, tokens_per_output=3))
    for event in await events_of(client, "/v1/responses", input="Hi"):
        checked(event)
    for chunk in await events_of(client, "/v1/chat/completions", messages=HI):
        chat_types.ChatCompletionChunk.model_validate(chunk)

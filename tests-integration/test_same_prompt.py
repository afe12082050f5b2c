"""One conversation with tools, as three protocols spell it, is one prompt of the real engine."""

from __future__ import annotations

from typing import Any

import httpx
from servers import PATIENCE, serving

SCHEMA = {"properties": {"city": {"type": "string"}}, "required": ["city"], "type": "object"}
ABOUT, ARGUMENTS = "The weather of a day, as it was measured.", '{"city": "Bern"}'
WORDS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes",
         "--enable-prompt-tokens-details")  # fmt: skip
BLOCK = 16
CHAT: dict[str, Any] = {
    "tools": [
        {"type": "function",
         "function": {"name": "weather", "description": ABOUT, "parameters": SCHEMA}},
    ],
    "messages": [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Will it rain?"},
        {"role": "assistant", "content": None,
         "tool_calls": [{"id": "c1", "type": "function",
                         "function": {"name": "weather", "arguments": ARGUMENTS}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "user", "content": "Thanks."},
    ],
}  # fmt: skip
RESPONSES: dict[str, Any] = {
    "tools": [{"type": "function", "parameters": SCHEMA, "description": ABOUT, "name": "weather"}],
    "instructions": "Be short.",
    "input": [
        {"role": "user", "content": "Will it rain?"},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": ARGUMENTS},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"role": "user", "content": "Thanks."},
    ],
}
MESSAGES: dict[str, Any] = {
    "tools": [{"input_schema": SCHEMA, "description": ABOUT, "name": "weather"}],
    "system": "Be short.",
    "messages": [
        {"role": "user", "content": "Will it rain?"},
        {"role": "assistant", "content": [
            {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Bern"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": "rain"},
            {"type": "text", "text": "Thanks."}]},
    ],
}  # fmt: skip


def ask(url: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(url, json={**body, "temperature": 0}, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_three_protocols_have_the_same_prompt_tokens() -> None:
    with serving(*WORDS) as server:
        chat = ask(server.api + "/chat/completions", {**CHAT, "max_tokens": 4})
        responses = ask(server.api + "/responses", {**RESPONSES, "max_output_tokens": 4})
        body = {**MESSAGES, "model": chat["model"], "max_tokens": 4}
        messages = ask(server.api + "/messages", body)
    total = chat["usage"]["prompt_tokens"]
    shared = (total - 1) // BLOCK * BLOCK
    used = responses["usage"]
    cached = used["input_tokens_details"]["cached_tokens"]
    assert (used["input_tokens"], cached) == (total, shared), "the first request's blocks are found"
    used = messages["usage"]
    cached = used["cache_read_input_tokens"]
    assert (used["input_tokens"] + cached, cached) == (total, shared)

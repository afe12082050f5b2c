"""Strange values in the fields of constraints, tools and prompts: answered or refused, never a 5xx."""

from __future__ import annotations

import functools
from typing import Any

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_server import ServerSettings, create_app
from headrace_testing.fakes.engine import FakeEngine, fake_served_model

NAMES = st.sampled_from(
    ["type", "function", "name", "parameters", "strict", "$ref", "$defs", "definitions", "const",
     "properties", "anyOf", "json", "regex", "choice", "json_schema", "schema", "format", "triggers",
     "structures", "begin", "end", "grammar", "a", "", "é"]
)  # fmt: skip
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["", "function", "object", "#", "#/", "#/$defs/a", "json_schema", "auto", "required",
                     "none", "structural_tag", "AAEC", "\x00", "é" * 40]),
)  # fmt: skip
VALUES: Any = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=4)),
    max_leaves=12,
)
TOOL = st.fixed_dictionaries(
    {"type": st.just("function")},
    optional={
        "function": st.fixed_dictionaries(
            {"name": st.sampled_from(["f", "g", ""])},
            optional={"parameters": VALUES, "strict": SCALARS, "description": VALUES},
        )
    },
)
FIELDS = {
    "response_format": VALUES | st.fixed_dictionaries(
        {"type": st.sampled_from(["json_schema", "structural_tag", "json_object"])},
        optional={"json_schema": VALUES, "format": VALUES, "structures": VALUES, "triggers": VALUES},
    ),
    "structured_outputs": VALUES | st.dictionaries(NAMES, VALUES, max_size=2),
    "tools": VALUES | st.lists(TOOL, max_size=3),
    "tool_choice": VALUES | st.sampled_from(
        ["required", {"type": "function", "function": {"name": "f"}}]
    ),
    "prompt_embeds": VALUES,
    "prompt": VALUES,
    "headrace_xargs": VALUES,
    "chat_template_kwargs": VALUES,
    "reasoning_effort": SCALARS,
    "thinking_token_budget": SCALARS,
    "best_of": SCALARS,
    "length_penalty": SCALARS,
    "sampling_params": VALUES,
    "stream": st.booleans(),
    "n": st.sampled_from([1, 2, 128, 129]),
}  # fmt: skip
BODIES = st.sampled_from(sorted(FIELDS)).flatmap(
    lambda one: st.fixed_dictionaries(
        {one: FIELDS[one]}, optional={name: FIELDS[name] for name in FIELDS if name != one}
    )
)
ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
    "/inference/v1/generate": {"token_ids": [72]},
    "/tokenize": {"messages": [{"role": "user", "content": "Hi"}]},
}


@functools.cache
def transport() -> httpx2.ASGITransport:
    """One application for all examples."""
    engine = FakeEngine("x", model=fake_served_model(prompt_embeds=True), tokens_per_output=9)
    options = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    app = create_app(engine, ServerSettings(reasoning_parser="qwen3", **options))  # type: ignore[arg-type]
    return httpx2.ASGITransport(app=app, raise_app_exceptions=False)


@pytest.mark.req("SEC-13")
@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(ROUTES)), BODIES)
async def test_no_value_is_our_fault(route: str, fields: Any) -> None:
    async with httpx2.AsyncClient(transport=transport(), base_url="http://x") as client:
        answer = await client.post(route, json={**ROUTES[route], **fields})
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        assert answer.json()["error"]["message"]
    elif fields.get("stream") is True and route != "/tokenize":
        assert answer.text.endswith("data: [DONE]\n\n")
        assert '"code":500' not in answer.text

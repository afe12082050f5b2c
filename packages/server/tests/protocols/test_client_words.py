"""Errors and endings name the client's own fields: on every wire, for every spelling of a constraint."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_core.errors import RequestError
from headrace_testing.fakes.engine import FakeEngine

FORM = "the constraint on the form (structured_outputs, response_format or tools)"
HI = [{"role": "user", "content": "Hi"}]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
CHAT_TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
FLAT_TOOL = {"type": "function", "name": "f", "parameters": SCHEMA}
OWN_TOOL = {"name": "f", "input_schema": SCHEMA}
JSON_FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}

SPELLINGS: dict[str, Any] = {
    "structured_outputs": {"regex": "a"}, "json_schema": SCHEMA, "grammar": 'root ::= "a"',
    "regex": "a", "ebnf": 'root ::= "a"', "structural_tag": TAG, "guided_json": SCHEMA,
    "guided_regex": "a", "guided_choice": ["a"], "guided_grammar": 'root ::= "a"',
    "guided_json_object": True,
}  # fmt: skip
"""Those that all wires take."""
FORCED_CHAT = {"tools": [CHAT_TOOL], "tool_choice": "required"}
FORCED_FLAT = {"tools": [FLAT_TOOL], "tool_choice": "required"}
FORCED_OWN = {"tools": [OWN_TOOL], "tool_choice": {"type": "any"}}
TEXT = {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}}
CONFIG = {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
WIRES: dict[str, tuple[str, dict[str, Any], list[tuple[str, dict[str, Any]]]]] = {
    "chat": ("/v1/chat/completions", {"messages": HI}, [
        ("response_format", {"response_format": JSON_FORM}), ("tools", FORCED_CHAT),
        ("tools", {**FORCED_CHAT, "response_format": JSON_FORM}),
    ]),
    "batch": ("/v1/chat/completions/batch", {"messages": [HI]}, [
        ("response_format", {"response_format": JSON_FORM}), ("tools", FORCED_CHAT),
    ]),
    "completions": ("/v1/completions", {"prompt": "Hi"}, [
        ("response_format", {"response_format": JSON_FORM}),
    ]),
    "responses": ("/v1/responses", {"input": "Hi"}, [
        ("text.format", TEXT), ("tools", FORCED_FLAT), ("tools", {**FORCED_FLAT, **TEXT}),
    ]),
    "messages": ("/v1/messages", {"messages": HI, "max_tokens": 20}, [
        ("output_config.format", CONFIG), ("tools", FORCED_OWN), ("tools", {**FORCED_OWN, **CONFIG}),
    ]),
    "tokens": ("/inference/v1/generate", {"token_ids": [1]}, []),
}  # fmt: skip
CASES = [
    (wire, field, fields)
    for wire, (_, _, own) in WIRES.items()
    for field, fields in [
        *own,
        *(() if wire == "tokens" else ((name, {name: value}) for name, value in SPELLINGS.items())),
    ]
]
CASES.append(
    ("tokens", "sampling_params.structured_outputs",
     {"sampling_params": {"structured_outputs": {"regex": "a"}}})
)  # fmt: skip


class StuckEngine(FakeEngine):
    """Every answer ends in a dead end."""

    why = f"no token is possible with {FORM} and min_tokens"

    async def _play(self, *args: Any) -> Any:
        async for output in super()._play(*args):
            if output.finished:
                for part in output.outputs:
                    part.finish_reason, part.stop_reason = "error", self.why
            yield output


class GivesUp(StuckEngine):
    """Matching the constraint takes too long."""

    why = "structured_outputs: matching the constraint takes too long"


class LateRefusal(FakeEngine):
    """A refusal that comes when the stream has begun."""

    async def _play(self, *args: Any) -> Any:
        async for output in super()._play(*args):
            yield output
            raise RequestError("structured_outputs: out of memory", param="structured_outputs")


async def ask(connect: Any, engine: Any, wire: str, fields: Any, *, stream: bool = False) -> Any:
    path, body, _ = WIRES[wire]
    client = connect(engine, enable_auto_tool_choice=True, tool_call_parser="hermes")
    body = {"model": "fake-model", **body, **fields}
    return await client.post(path, json={**body, "stream": True} if stream else body)


STREAMS = [pytest.param(False, id="whole"), pytest.param(True, id="streamed")]


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize(("wire", "field", "fields"), CASES)
async def test_a_dead_end_names_the_client_s_field(
    connect: Any, wire: str, field: str, fields: Any, stream: bool
) -> None:
    if wire == "batch" and stream:
        pytest.skip("batches are not streamed")
    answer = await ask(connect, StuckEngine("Hello there."), wire, fields, stream=stream)
    rule = "sampling_params.min_tokens" if wire == "tokens" else "min_tokens"
    assert f"with the constraint on the form ({field}) and {rule}" in answer.text
    again = await ask(connect, GivesUp("Hello there."), wire, fields, stream=stream)
    assert f'"{field}: matching the constraint takes too long' in again.text


@pytest.mark.parametrize(("wire", "field", "fields"), CASES)
async def test_a_late_error_of_a_stream_names_the_client_s_field(
    connect: Any, wire: str, field: str, fields: Any
) -> None:
    if wire == "batch":
        pytest.skip("batches are not streamed")
    answer = await ask(connect, LateRefusal("Hello there."), wire, fields, stream=True)
    assert answer.status_code == 200
    assert f'"{field}: out of memory' in answer.text


async def test_an_error_of_a_batch_names_the_client_s_field(connect: Any) -> None:
    error = RequestError("structured_outputs.regex: bad", param="structured_outputs.regex")
    answer = await ask(connect, FakeEngine(reject=error), "batch", {"guided_regex": "a"})
    told = answer.json()["error"]
    assert (told["param"], told["message"]) == ("guided_regex", "guided_regex: bad")


NAMED = {"type": "function", "function": {"name": "f"}}
FLAT_NAMED = {"type": "function", "name": "f"}
OWN_NAMED = {"type": "tool", "name": "f"}
CHOICES = [
    ("chat", CHAT_TOOL, "required", "'required'"),
    ("chat", CHAT_TOOL, NAMED, '{"type": "function", "function": {"name": "f"}}'),
    ("batch", CHAT_TOOL, "required", "'required'"),
    ("responses", FLAT_TOOL, "required", "'required'"),
    ("responses", FLAT_TOOL, FLAT_NAMED, '{"type": "function", "name": "f"}'),
    ("messages", OWN_TOOL, {"type": "any"}, "'any'"),
    ("messages", OWN_TOOL, OWN_NAMED, '{"type": "tool", "name": "f"}'),
]


@pytest.mark.parametrize(("wire", "tool", "choice", "shown"), CHOICES)
async def test_a_choice_is_quoted_as_it_was_sent(
    connect: Any, wire: str, tool: Any, choice: Any, shown: str
) -> None:
    fields = {"tools": [tool], "tool_choice": choice}
    for other in ({"regex": "a"}, {"guided_choice": ["a"]}, {"ignore_eos": True}):
        answer = await ask(connect, FakeEngine("x"), wire, {**fields, **other})
        assert answer.status_code == 400
        (field,) = other
        assert field in answer.json()["error"]["message"]
        assert f"cannot be combined with tool_choice {shown}: " in answer.json()["error"]["message"]


@pytest.mark.parametrize("wire", ["chat", "responses", "messages"])
async def test_advice_to_force_a_call_fits_the_wire(connect: Any, wire: str) -> None:
    tool = {"chat": CHAT_TOOL, "responses": FLAT_TOOL, "messages": OWN_TOOL}[wire]
    path, body, _ = WIRES[wire]
    answer = await connect(FakeEngine("x")).post(
        path, json={"model": "fake-model", **body, "tools": [tool]}
    )
    assert answer.status_code == 400
    assert "'required' or one function (in messages, 'any' or 'tool')" in answer.text


@pytest.mark.parametrize("value", [False, True])
async def test_the_usage_of_a_streamed_response_is_always_there(connect: Any, value: bool) -> None:
    fields = {"stream_options": {"include_usage": value}}
    answer = await ask(connect, FakeEngine("x"), "responses", fields, stream=True)
    if value:
        assert answer.status_code == 200
        assert '"output_tokens":' in answer.text
        return
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "stream_options.include_usage")
    assert "the last event of every response has its usage" in error["message"]


@pytest.mark.parametrize("choice", [None, "auto", "required", "named"])
@pytest.mark.parametrize("wire", ["chat", "responses"])
async def test_a_tool_that_could_never_be_called_is_refused(
    connect: Any, wire: str, choice: Any
) -> None:
    """``false`` admits no arguments."""
    tool: dict[str, Any] = {**FLAT_TOOL, "parameters": False}
    place = "tools[0].parameters"
    if wire == "chat":
        tool = {"type": "function", "function": {"name": "f", "parameters": False}}
        place = "tools[0].function.parameters"
    fields: dict[str, Any] = {"tools": [tool]}
    if choice is not None:
        named = NAMED if wire == "chat" else FLAT_NAMED
        fields["tool_choice"] = named if choice == "named" else choice
    answer = await ask(connect, FakeEngine("x"), wire, fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == place
    assert error["message"].startswith(f"{place} = false: ")

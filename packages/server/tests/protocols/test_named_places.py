"""Errors name the deepest place that is to blame, in ``param`` and in the message, as the client wrote it."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_core.errors import RequestError
from headrace_testing.fakes.engine import FakeEngine

JSON = {"content-type": "application/json"}
HI = [{"role": "user", "content": "Hi"}]


async def refused(client: Any, url: str, body: Any) -> dict[str, Any]:
    answer = await client.post(url, json=body)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


@pytest.mark.parametrize(
    ("form", "place"),
    [
        ({"type": "json_schema"}, "text.format.schema"),
        ({"type": "json_schema", "schema": 5}, "text.format.schema"),
        ({"type": "json_schema", "schema": {"a": "x" * 1_100_000}}, "text.format.schema"),
        ({"type": "json_schema", "name": 5, "schema": {}}, "text.format.name"),
        ({"type": "json_schema", "strict": [], "schema": {}}, "text.format.strict"),
        ({"type": "json_schema", "description": 5, "schema": {}}, "text.format.description"),
        ({"type": "json_object", "schema": 5}, "text.format.schema"),
        ({"type": "wat"}, "text.format.type"),
    ],
)
async def test_a_form_of_responses_is_named_as_it_is_there(
    connect: Any, form: Any, place: str
) -> None:
    error = await refused(connect(), "/v1/responses", {"input": "x", "text": {"format": form}})
    assert error["param"] == place
    assert error["message"].startswith(place)
    assert "response_format" not in error["message"].partition(":")[0]


async def test_a_schema_of_messages_is_named_as_it_is_there(connect: Any) -> None:
    form = {"type": "json_schema", "schema": {"a": "x" * 1_100_000}}
    body = {
        "model": "fake-model",
        "max_tokens": 5,
        "messages": HI,
        "output_config": {"format": form},
    }
    error = await refused(connect(), "/v1/messages", body)
    assert error["message"].startswith("output_config.format.schema: longer")


class Refusing(FakeEngine):
    """Refuses every prompt that is empty, or all of them for one field."""

    field = ""

    async def generate(self, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        if self.field:
            raise RequestError(f"{self.field} = 5: must be 6", param=self.field)
        if not (prompt.get("prompt") or prompt.get("prompt_token_ids")):
            raise RequestError("prompt: must hold at least one token", param="prompt")
        async for output in super().generate(prompt, *args, **kwargs):
            yield output


@pytest.mark.parametrize(
    "field",
    ["structured_outputs.regex", "structured_outputs", "allowed_token_ids", "bad_words", "min_tokens"],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
async def test_fields_of_sampling_params_are_named_within_it(
    connect: Any, field: str, stream: bool
) -> None:
    engine = Refusing()
    engine.field = field
    body = {"token_ids": [1], "sampling_params": {}, "stream": stream}
    error = await refused(connect(engine), "/inference/v1/generate", body)
    assert error["param"] == f"sampling_params.{field}"
    assert error["message"] == f"sampling_params.{field} = 5: must be 6"


@pytest.mark.parametrize(
    ("sampling", "place"),
    [
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"top_p": 7}, "top_p"),
    ],
)
async def test_checks_of_sampling_params_name_places_within_it(
    connect: Any, sampling: Any, place: str
) -> None:
    body = {"token_ids": [1], "sampling_params": sampling}
    error = await refused(connect(), "/inference/v1/generate", body)
    assert error["param"] == f"sampling_params.{place}", error


async def test_log_probabilities_of_prompts_beside_a_stream_name_their_place(connect: Any) -> None:
    body = {"token_ids": [1], "sampling_params": {"prompt_logprobs": 1}, "stream": True}
    error = await refused(connect(), "/inference/v1/generate", body)
    assert error["param"] == "sampling_params.prompt_logprobs"
    assert error["message"].startswith("sampling_params.prompt_logprobs: not")


@pytest.mark.parametrize(
    ("choice", "shown"),
    [({"type": "any"}, '{"type": "any"}'), ({"type": "tool", "name": "f"}, '{"type": "tool", "name": "f"}')],
)  # fmt: skip
async def test_a_choice_of_messages_without_tools_is_told_as_it_was_sent(
    connect: Any, choice: Any, shown: str
) -> None:
    body = {"model": "fake-model", "max_tokens": 5, "messages": HI, "tool_choice": choice}
    error = await refused(connect(), "/v1/messages", body)
    assert error["message"] == f"tool_choice = {shown}: needs tools"


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"type": "function", "name": "f"}, 'tool_choice = {"type": "function", "name": "f"}: needs tools'),
        ({"type": "function", "function": {"name": "f"}},
         'tool_choice = {"type": "function", "function": {"name": "f"}}: must be'),
        ({"type": "x" * 200}, 'tool_choice = {"type": "' + "x" * 90 + "...: must be"),
    ],
)  # fmt: skip
async def test_a_choice_of_responses_is_told_as_json(connect: Any, choice: Any, said: str) -> None:
    error = await refused(connect(), "/v1/responses", {"input": "x", "tool_choice": choice})
    assert error["message"].startswith(said)
    assert error["param"] == "tool_choice"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (rb'{"user":"\ud800"}', "half of a surrogate pair (line 1, column 10)"),
        (rb'{"user":"\udc00"}', "half of a surrogate pair"),
        (rb'{"user":"\ud800 and more text behind it"}', "half of a surrogate pair"),
        (b'{"seed":' + b"1" * 5000 + b"}", "a number is too long or too large (line 1, column 9)"),
        (b'{"top_p":1e999}', "a number is too long or too large (line 1, column 10)"),
        (
            '{"user": "é 1e999",\n "é": [1e9, -1.5, -1e999, 1e999]}'.encode(),
            "a number is too long or too large (line 2, column 19)",
        ),
        (
            rb'{"user": "\" 1e999", "seed":' + b"-" + b"1" * 5000 + b".5}",
            "a number is too long or too large (line 1, column 29)",
        ),
        (
            b'{"top_p":1e999, "user": "\xff", x',
            "a number is too long or too large (line 1, column 10)",
        ),
        (b'{"a": 1,\n  "\xc3\xa9": x}', "unexpected character (line 2, column 8)"),
        (b'{"a": "\xff"}', "not UTF-8 (line 1, column 8)"),
        (b'{"a": 1', "it ends too early (line 1, column 8)"),
        (rb'{"a":"\\ud800"', "it ends too early (line 1, column 15)"),
        (b'{"a": 1,}', "trailing comma (line 1, column 9)"),
        (b"{'a': 1}", "names must be strings in double quotes (line 1, column 2)"),
        (b'{"a" 1}', "a colon is missing (line 1, column 6)"),
        (b'{"a":1 "b":2}', "a comma or closing bracket is missing (line 1, column 8)"),
        (b'{"a":1} {}', "more text behind the value (line 1, column 9)"),
    ],
)
async def test_a_body_that_is_not_json_is_told_why(connect: Any, body: bytes, said: str) -> None:
    answer = await connect().post("/v1/completions", content=body, headers=JSON)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message.startswith(f"the body is not valid JSON: {said}")
    assert len(message) < 120


@pytest.mark.parametrize(
    ("url", "body"),
    [("/v1/responses", {"input": "x"}), ("/v1/chat/completions", {"messages": HI})],
)
async def test_stream_options_have_one_check(connect: Any, url: str, body: Any) -> None:
    body = {**body, "stream": True, "stream_options": {"include_usage": "x"}}
    error = await refused(connect(), url, body)
    assert error["param"] == "stream_options.include_usage"


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def _tool(**changed: Any) -> dict[str, Any]:
    return {**TOOL, "function": {**TOOL["function"], **changed}}  # type: ignore[dict-item]


def _says(*parts: Any) -> dict[str, Any]:
    return {"messages": [*HI, {"role": "user", "content": list(parts)}]}


@pytest.mark.parametrize(
    ("body", "place"),
    [
        (_says({"type": "text", "text": 5}), "messages[1].content[0].text"),
        (_says("x", {"type": "wat"}), "messages[1].content[1].type"),
        (_says({"type": "image_url", "image_url": {"url": "x"}}), "messages[1].content[0].type"),
        (_says({"image_url": {"url": "x"}}), "messages[1].content[0]"),
        ({"messages": HI, "tools": [_tool(name="a b")]}, "tools[0].function.name"),
        ({"messages": HI, "tools": [TOOL, _tool(name=5)]}, "tools[1].function.name"),
        ({"messages": HI, "tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"messages": HI, "tools": [{"type": "function"}]}, "tools[0]"),
        ({"messages": HI, "tools": [_tool(parameters=5)]}, "tools[0].function.parameters"),
        ({"messages": HI, "tools": [_tool(parameters={"type": "array"})]},
         "tools[0].function.parameters.type"),
    ],
)  # fmt: skip
async def test_param_of_chats_is_the_deepest_place(connect: Any, body: Any, place: str) -> None:
    client = connect(FakeEngine("x"), enable_auto_tool_choice=True, tool_call_parser="hermes")
    error = await refused(client, "/v1/chat/completions", body)
    assert error["param"] == place
    assert place.removesuffix(".type") in error["message"]


@pytest.mark.parametrize(
    ("body", "place"),
    [
        (_says({"type": "text", "text": 5}), "messages[1][1].content[0].text"),
        (_says({"type": "wat"}), "messages[1][1].content[0].type"),
    ],
)
async def test_param_of_batches_is_the_deepest_place(connect: Any, body: Any, place: str) -> None:
    sent = {"messages": [HI, body["messages"]]}
    error = await refused(connect(), "/v1/chat/completions/batch", sent)
    assert error["param"] == place


def _items(*items: Any) -> list[Any]:
    return [{"role": "user", "content": "Hi"}, *items]


def _part(**part: Any) -> list[Any]:
    return _items({"role": "user", "content": [part]})


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"input": _items({"type": "wat"})}, "input[1].type"),
        ({"input": _part(type="input_text", text=5)}, "input[1].content[0].text"),
        ({"input": _part(type="wat")}, "input[1].content[0].type"),
        ({"input": _part(type="input_image")}, "input[1].content[0].type"),
        ({"input": _items({"type": "function_call_output", "call_id": "c", "output": "x"})},
         "input[1].call_id"),
        ({"input": "x", "tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"input": "x", "tools": [{"type": "function", "name": 5}]}, "tools[0].name"),
        ({"input": "x", "tools": [{"type": "wat"}]}, "tools[0].type"),
        ({"input": "x", "tools": [{"type": "mcp"}]}, "tools[0].server_label"),
        ({"input": "x", "tools": [{"type": "mcp", "server_label": "s", "server_url": "u"}]},
         "tools[0].server_url"),
    ],
)  # fmt: skip
async def test_param_of_responses_is_the_deepest_place(connect: Any, body: Any, place: str) -> None:
    error = await refused(connect(), "/v1/responses", body)
    assert error["param"] == place
    assert place.removesuffix(".type") in error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "place"), [(["a", ""], "prompt[1]"), ([""], "prompt[0]"), ("", "prompt")]
)
async def test_the_prompt_of_several_is_named(
    connect: Any, prompt: Any, place: str, stream: bool
) -> None:
    body = {"prompt": prompt, "stream": stream}
    error = await refused(connect(Refusing("x")), "/v1/completions", body)
    assert (error["param"], error["message"]) == (place, f"{place}: must hold at least one token")

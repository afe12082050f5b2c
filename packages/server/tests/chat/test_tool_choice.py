"""``tool_choice``: plans, schemas, answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace_core import plugins
from headrace_core.errors import RequestError
from headrace_core.text import CallDelimiters, ParsedDelta, ToolCallDelta, ToolCallParser
from headrace_server.chat.tool_choice import calls_schema, plan_tools
from headrace_server.parsing.registry import Parsers
from headrace_server.tool_parsers.formats.hermes import HermesToolParser
from headrace_testing.fakes.engine import FakeEngine, fake_served_model

URL = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]


def tool(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    function = {"name": name, **more}
    if parameters is not None:
        function["parameters"] = parameters
    return {"type": "function", "function": function}


ADD = tool("add", {"type": "object", "properties": {"a": {"type": "integer"}}})
LOOK = tool("look_up", {"type": "object", "properties": {"q": {"type": "string"}}})
NAMED = {"type": "function", "function": {"name": "look_up"}}
REQUIRED_TEXT = '[{"name": "add", "parameters": {"a": 1}}, {"name": "look_up", "parameters": {}}]'


async def post(client: Any, **body: Any) -> Any:
    answer = await client.post(URL, json={"messages": HI, "tools": [ADD, LOOK], **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def refused(client: Any, **body: Any) -> Any:
    answer = await client.post(URL, json={"messages": HI, "tools": [ADD, LOOK], **body})
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def streamed_message(chunks: list[Any]) -> tuple[str, list[dict[str, Any]], str]:
    """(content, calls, finish reason) of a stream with one choice."""
    content, calls, reason = "", {}, ""
    for chunk in chunks:
        for choice in chunk["choices"]:
            content += choice["delta"].get("content") or ""
            for piece in choice["delta"].get("tool_calls", []):
                call = calls.setdefault(piece["index"], {"arguments": ""})
                if "id" in piece:
                    assert "id" not in call, "a call has one first piece"
                    assert piece["type"] == "function"
                    call |= {"id": piece["id"], "name": piece["function"]["name"]}
                call["arguments"] += piece["function"].get("arguments", "")
            reason = choice["finish_reason"] or reason
    return content, [calls[i] for i in sorted(calls)], reason


async def test_required(connect: Any, events: Any) -> None:
    engine = FakeEngine(REQUIRED_TEXT, tokens_per_output=4)
    client = connect(engine)
    (choice,) = (await post(client, tool_choice="required"))["choices"]
    calls = choice["message"]["tool_calls"]
    assert [c["function"]["name"] for c in calls] == ["add", "look_up"]
    assert [json.loads(c["function"]["arguments"]) for c in calls] == [{"a": 1}, {}]
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"
    schema = engine.requests[0].params.structured_outputs.json  # type: ignore[union-attr]
    assert schema == calls_schema([ADD, LOOK])
    assert (schema["minItems"], schema["maxItems"]) == (1, 16)
    assert engine.requests[0].prompt.tools == [ADD, LOOK]  # type: ignore[union-attr]
    answer = await client.post(
        URL, json={"messages": HI, "tools": [ADD, LOOK], "tool_choice": "required", "stream": True}
    )
    content, found, reason = streamed_message(events(answer.text))
    assert (content, reason) == ("", "tool_calls")
    assert [c["name"] for c in found] == ["add", "look_up"]
    assert [json.loads(c["arguments"]) for c in found] == [{"a": 1}, {}]
    assert len({c["id"] for c in found}) == 2


async def test_at_most_one_call(connect: Any) -> None:
    engine = FakeEngine(REQUIRED_TEXT)
    answer = await post(connect(engine), tool_choice="required", parallel_tool_calls=False)
    assert len(answer["choices"][0]["message"]["tool_calls"]) == 1
    schema = engine.requests[0].params.structured_outputs.json  # type: ignore[union-attr]
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)


async def test_named(connect: Any, events: Any) -> None:
    engine = FakeEngine('{"q": "größe"}', tokens_per_output=3)
    client = connect(engine)
    (choice,) = (await post(client, tool_choice=NAMED))["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "look_up", "arguments": '{"q": "größe"}'}
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "stop")
    assert engine.requests[0].params.structured_outputs.json == LOOK["function"]["parameters"]  # type: ignore[union-attr]
    body = {"messages": HI, "tools": [ADD, LOOK], "tool_choice": NAMED, "stream": True}
    _, found, reason = streamed_message(events((await client.post(URL, json=body)).text))
    assert [(c["name"], c["arguments"]) for c in found] == [("look_up", '{"q": "größe"}')]
    assert reason == "stop"


async def test_forced_calls_that_are_cut_short(connect: Any) -> None:
    client = connect(FakeEngine(REQUIRED_TEXT))
    for choice in ("required", NAMED):
        (answer,) = (await post(client, tool_choice=choice, max_tokens=9))["choices"]
        assert answer["finish_reason"] == "length"


async def test_forced_calls_come_after_the_reasoning(connect: Any, events: Any) -> None:
    text = f"<think>[why]</think>{REQUIRED_TEXT}"
    client = connect(FakeEngine(text, tokens_per_output=5), reasoning_parser="qwen3")
    message = (await post(client, tool_choice="required"))["choices"][0]["message"]
    assert message["reasoning"] == "[why]"
    assert len(message["tool_calls"]) == 2
    client = connect(FakeEngine('<think>w</think>{"q": "x"}'), reasoning_parser="qwen3")
    message = (await post(client, tool_choice=NAMED))["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["arguments"] == '{"q": "x"}'


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": NAMED}, "tool_choice"),
        ({"tools": None, "tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "function": {"name": "add"}}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [tool("x", [1])]}, "tools[0].function.parameters"),
        ({"tools": [{"type": "web_surfing"}]}, "tools[0]"),
        ({"tool_choice": "auto"}, "tools"),
        ({"tool_choice": "required", "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ],
)
async def test_errors_name_the_field(connect: Any, body: Any, param: str) -> None:
    engine = FakeEngine("x")
    assert (await refused(connect(engine), **body))["param"] == param
    assert engine.requests == []


async def test_a_form_for_content_is_no_matter_for_a_forced_call(connect: Any) -> None:
    """Agents send both; the answer is a call, whose form is the tool's."""
    engine = FakeEngine('{"q": "x"}')
    await post(connect(engine), tool_choice=NAMED, response_format={"type": "json_object"})
    assert engine.requests[0].params.structured_outputs.json == LOOK["function"]["parameters"]  # type: ignore[union-attr]


class TestSchema:
    """The union schema of required calls."""

    def test_definitions_move_to_the_root(self) -> None:
        node = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$id": "https://example.org/node",
            "type": "object",
            "properties": {
                "node": {"$ref": "#/$defs/Node"},
                "old": {"$ref": "#/definitions/Node"},
                "deep": {"$ref": "#/$defs/Node/properties/next"},
                "self": {"$ref": "#"},
                "sibling": {"$ref": "#/properties/node"},
                "abroad": {"$ref": "https://example.org/x#/y"},
                "$ref": {"const": {"$ref": "#/$defs/Node"}},
            },
            "$defs": {"Node": {"properties": {"next": {"$ref": "#/$defs/Node"}}}},
            "definitions": {"Node": {"type": "string"}},
        }
        schema = calls_schema([ADD, tool("walk", node)])
        walk = schema["items"]["anyOf"][1]["properties"]["parameters"]
        home = "#/items/anyOf/1/properties/parameters"
        assert walk["properties"] == {
            "node": {"$ref": "#/$defs/1_Node"},
            "old": {"$ref": "#/$defs/d1_Node"},
            "deep": {"$ref": "#/$defs/1_Node/properties/next"},
            "self": {"$ref": home},
            "sibling": {"$ref": home + "/properties/node"},
            "abroad": {"$ref": "https://example.org/x#/y"},
            "$ref": {"const": {"$ref": "#/$defs/Node"}},
        }
        assert schema["$defs"] == {
            "1_Node": {"properties": {"next": {"$ref": "#/$defs/1_Node"}}},
            "d1_Node": {"type": "string"},
        }
        assert not {"$schema", "$id", "$defs", "definitions"} & walk.keys()
        assert "$defs" in node, "the caller's tools stay as they are"

    def test_every_reference_leads_somewhere(self) -> None:
        jsonschema = pytest.importorskip("jsonschema")
        point = {
            "type": "object",
            "properties": {"p": {"$ref": "#/$defs/Point"}, "me": {"$ref": "#"}},
            "required": ["p"],
            "additionalProperties": False,
            "$defs": {"Point": {"type": "array", "items": {"type": "number"}}},
        }
        for tools in ([tool("a", point)], [tool("a", point), ADD, tool("c", point)]):
            validator = jsonschema.Draft202012Validator(calls_schema(tools))
            good = {"p": [1], "me": {"p": []}}
            assert validator.is_valid([{"name": "a", "parameters": good}])
            bad = {"p": [1], "me": {"p": ["x"]}}
            assert not validator.is_valid([{"name": "a", "parameters": bad}])
            assert not validator.is_valid([])
            assert not validator.is_valid([{"name": "b", "parameters": good}])

    def test_arguments_are_objects(self) -> None:
        def parameters(*given: Any) -> Any:
            return calls_schema([tool("f", *given)])["items"]["properties"]["parameters"]

        assert parameters()["additionalProperties"] is False
        assert parameters({}) == {"type": "object"}
        assert parameters(True) == {"type": "object"}
        assert parameters({"properties": {}}) == {"type": "object", "properties": {}}
        assert parameters({"anyOf": []}) == {"anyOf": []}


class Framed(ToolCallParser):
    """Calls as ``<call:NAME>ARGUMENTS</call>``; the tags are special tokens."""

    needs_special_tokens = True

    def __init__(self, tools: Any = ()) -> None:
        super().__init__(tools)
        self._text = ""

    def call_id(self, index: int, name: str) -> str | None:
        return f"functions.{name}:{index}"

    @classmethod
    def call_delimiters(cls, name: str) -> CallDelimiters | None:
        return CallDelimiters("<call:", f"<call:{name}>", "</call>")

    def feed(self, text: str) -> ParsedDelta:
        self._text += text
        return ParsedDelta()

    def finish(self) -> ParsedDelta:
        content, *calls = self._text.split("<call:")
        delta = ParsedDelta(content)
        for index, call in enumerate(calls):
            name, _, arguments = call.partition(">")
            delta.tool_calls.append(ToolCallDelta(index, name, arguments.removesuffix("</call>")))
        return delta


def framed(connect: Any, engine: FakeEngine) -> Any:
    client = connect(engine, enable_auto_tool_choice=True, tool_call_parser="hermes")
    client._transport.app.state.headrace.parsers = Parsers(Framed)
    return client


async def test_strict_tools_are_held_to_their_schemas(connect: Any) -> None:
    engine = FakeEngine("x")
    client = framed(connect, engine)
    await post(client, tools=[{**ADD, "function": {**ADD["function"], "strict": True}}, LOOK])
    tag = engine.requests[0].params.structured_outputs.structural_tag  # type: ignore[union-attr]
    assert tag == {
        "type": "structural_tag",
        "triggers": ["<call:"],
        "structures": [
            {"begin": "<call:add>", "schema": ADD["function"]["parameters"], "end": "</call>"},
            {"begin": "<call:look_up>", "schema": {"type": "object"}, "end": "</call>"},
        ],
    }
    await post(client)
    assert engine.requests[1].params.structured_outputs is None


STRICT = {**ADD, "function": {**ADD["function"], "strict": True}}


@pytest.mark.parametrize("name", ["gigachat3", "xlam"])
async def test_strict_is_refused_where_it_cannot_be_held(connect: Any, name: str) -> None:
    engine = FakeEngine("x")
    client = connect(engine, enable_auto_tool_choice=True, tool_call_parser=name)
    error = await refused(client, tools=[STRICT])
    assert "'strict' cannot be enforced" in error["message"]
    assert "send strict false" in error["message"]
    assert error["param"] == "tools"
    assert engine.requests == []
    await post(client)


async def test_strict_names_what_a_format_cannot_hold(connect: Any) -> None:
    client = connect(FakeEngine("x"), enable_auto_tool_choice=True, tool_call_parser="glm45")
    bad = tool("f", {"properties": {"a": {"type": "string", "pattern": "x"}}}, strict=True)
    error = await refused(client, tools=[bad])
    assert "'f' cannot be strict" in error["message"]
    assert error["message"].startswith("tools[0].function.parameters#/properties/a: ")
    assert "parser: 'pattern': cannot be held" in error["message"]


@pytest.mark.parametrize("gate", ["openai_gptoss", None])
async def test_strict_calls_of_gpt_oss(connect: Any, gate: str | None) -> None:
    """Its calls come before the mark that ends the reasoning: the form describes that, too."""
    text = '<|channel|>commentary to=functions.add<|message|>{"a": 1}<|call|>'
    engine = FakeEngine(text)
    client = connect(engine, enable_auto_tool_choice=True, tool_call_parser="openai",
                     reasoning_parser=gate)  # fmt: skip
    await post(client, tools=[STRICT])
    held = engine.requests[0].params.structured_outputs
    assert held is not None
    assert held.enable_in_reasoning is bool(gate)
    if gate:
        error = await refused(client, tools=[STRICT], thinking_token_budget=9)
        assert "send strict false, or no thinking_token_budget" in error["message"]


async def test_strict_calls_of_another_format_beside_gpt_oss_reasoning(connect: Any) -> None:
    client = connect(FakeEngine("x"), enable_auto_tool_choice=True, tool_call_parser="hermes",
                     reasoning_parser="openai_gptoss")  # fmt: skip
    error = await refused(client, tools=[STRICT])
    assert error["message"].endswith("send strict false")


@pytest.mark.parametrize("entry", plugins.installed("headrace.tool_parsers").values())
def test_every_opening_mark_begins_what_is_held(entry: Any) -> None:
    """Behind another one a call would be free."""
    parser = entry.load()
    form = parser.strict_structural_tag({"f": {"type": "object", "properties": {}}})
    waiting, triggers = [form], set()
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            triggers |= set(part.get("triggers", ()))
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
    assert form is None or triggers == set(parser.opens)


async def test_forced_calls_of_a_format_of_frames(connect: Any) -> None:
    """A parser that only describes delimiters is enough to force calls."""
    engine = FakeEngine("<call:add>{}</call><call:look_up>{}</call>")
    client = framed(connect, engine)
    message = (await post(client, tool_choice="required"))["choices"][0]["message"]
    assert [c["function"]["name"] for c in message["tool_calls"]] == ["add", "look_up"]
    form = json.dumps(engine.requests[0].params.structured_outputs.structural_tag)  # type: ignore[union-attr]
    assert '"begin": "<call:add>"' in form
    assert '"max": 16' in form


async def test_answers_have_a_form_and_calls_theirs(connect: Any) -> None:
    """Agents send tools and response_format in every turn: the model chooses which to write."""
    engine = FakeEngine("x")
    client = framed(connect, engine)
    schema = {"type": "object", "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    await post(client, response_format=form, parallel_tool_calls=False)
    tag = engine.requests[0].params.structured_outputs.structural_tag  # type: ignore[union-attr]
    answer, calls = tag["format"]["elements"]  # type: ignore[index,call-overload]
    assert tag["format"]["type"] == "or"  # type: ignore[index,call-overload]
    assert answer == {"type": "json_schema", "json_schema": schema}
    assert (calls["at_least_one"], calls["stop_after_first"]) == (True, True)
    assert [(t["begin"], t["end"]) for t in calls["tags"]] == [
        ("<call:add>", "</call>"), ("<call:look_up>", "</call>"),
    ]  # fmt: skip
    await post(client, response_format={"type": "json_object"})
    tag = engine.requests[1].params.structured_outputs.structural_tag  # type: ignore[union-attr]
    assert tag["format"]["elements"][0]["json_schema"] == {"type": "object"}  # type: ignore[index,call-overload]
    await post(client, structured_outputs={"regex": "a"})
    assert engine.requests[2].params.structured_outputs.regex == "a"  # type: ignore[union-attr]


async def test_ids_of_the_format(connect: Any, events: Any) -> None:
    engine = FakeEngine("a<call:add>{}</call><call:look_up>{}</call>")
    client = framed(connect, engine)
    calls = (await post(client))["choices"][0]["message"]["tool_calls"]
    assert [c["id"] for c in calls] == ["functions.add:0", "functions.look_up:1"]
    body = {"messages": HI, "tools": [ADD, LOOK], "stream": True}
    _, found, _ = streamed_message(events((await client.post(URL, json=body)).text))
    assert [c["id"] for c in found] == ["functions.add:0", "functions.look_up:1"]


async def test_special_tokens_reach_parsers_and_not_clients(connect: Any, events: Any) -> None:
    model = fake_served_model(special_tokens=("<pad>", "<padding>", "</s>"))
    engine = FakeEngine("a<padding>b<pad><p</s>ad>c<call:add>{}</call>", model=model)
    client = framed(connect, engine)
    answer = await post(client)
    assert answer["choices"][0]["message"]["content"] == "ab<pad>c"
    assert engine.requests[0].params.skip_special_tokens is False
    body = {"messages": HI, "tools": [ADD, LOOK], "stream": True}
    content, _, _ = streamed_message(events((await client.post(URL, json=body)).text))
    assert content == "ab<pad>c"
    answer = await post(client, skip_special_tokens=False)
    assert answer["choices"][0]["message"]["content"] == "a<padding>b<pad><p</s>ad>c"
    await post(client, tool_choice="required")
    assert engine.requests[-1].params.skip_special_tokens is False


class Ending(FakeEngine):
    """Its outputs show the end token, as engines do that keep special tokens in the text."""

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        async for output in super().generate(*args, **kwargs):
            for part in output.outputs:
                if part.finish_reason == "stop" and not isinstance(part.stop_reason, str):
                    part.text += "</s>"
                    for token_id, entry in (part.logprobs or [{}])[-1].items():
                        if token_id == part.token_ids[-1]:
                            entry.token_bytes = b"</s>"
            yield output


@pytest.mark.parametrize("size", [1, 100])
@pytest.mark.parametrize("shows", [False, True])
async def test_the_end_token_is_no_part_of_an_answer(
    connect: Any, events: Any, size: int, shows: bool
) -> None:
    """Not even of the arguments of a call that it ends, nor of its entry; unless it was asked for."""
    model = fake_served_model(special_tokens=("<pad>", "</s>", "/s>"))
    for text, arguments, said in (("a", [], "a"), ('<call:add>{"a": "b', ['{"a": "b'], "")):
        client = framed(connect, Ending(text, model=model, tokens_per_output=size))
        body = {
            "messages": HI, "tools": [ADD, LOOK], "logprobs": True, "max_tokens": 99,
            "skip_special_tokens": not shows,
        }  # fmt: skip
        choice = (await client.post(URL, json=body)).json()["choices"][0]
        found = [c["function"]["arguments"] for c in choice["message"].get("tool_calls") or []]
        streamed = events((await client.post(URL, json={**body, "stream": True})).text)
        content, calls, _ = streamed_message(streamed)
        assert [c["arguments"] for c in calls] == found
        assert content == (choice["message"]["content"] or "")
        assert "".join(found) + content == "".join(arguments) + said + "</s>" * shows
        last = choice["logprobs"]["content"][-1]
        entries = [c["logprobs"] for e in streamed for c in e["choices"] if c.get("logprobs")]
        assert entries[-1]["content"][-1] == last
        assert (last["token"], bytes(last["bytes"])) == ("</s>", b"</s>" * shows)


def test_plans() -> None:
    assert plan_tools([], None, None).choice == "none"
    assert plan_tools([ADD], "none", None).make_parser is None
    plan = plan_tools([ADD], None, Framed)
    assert (plan.choice, plan.needs_special_tokens, plan.forced) == ("auto", True, False)
    assert plan_tools([ADD], "required", None).forced


@pytest.mark.parametrize("name", ["größe", "ns/f.x:1", "f" * 256])
def test_a_forced_call_of_any_name_is_found(name: str) -> None:
    tools = [{"type": "function", "function": {"name": name}}]
    plan = plan_tools(tools, "required", None)
    assert plan.make_parser is not None
    content, [call] = plan.make_parser().parse(json.dumps([{"name": name, "parameters": {"a": 1}}]))
    assert (content, call.name, json.loads(call.arguments)) == ("", name, {"a": 1})


@pytest.mark.parametrize("kind", ["string", "array", ["array", "null"], 5])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_arguments_are_objects(kind: Any, choice: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": kind}}}]
    with pytest.raises(RequestError, match=r"tools\[0\].function.parameters.type = .*'object'"):
        plan_tools(tools, choice, HermesToolParser)


PARSERS = sorted(plugins.installed("headrace.tool_parsers"))
BAD_PARTS = [
    ({"$ref": "#/$defs/Nope"}, "/properties/x", "Nope' leads nowhere"),
    ({"$ref": "#/definitions/Nope"}, "/properties/x", "leads nowhere"),
    ({"type": "array", "items": {"$ref": "#/nowhere"}}, "/properties/x/items", "leads nowhere"),
    ({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/D/1"}]}, "/properties/x/anyOf/1", "nowhere"),
    (5, "/properties/x", "must be a JSON schema"),
]


def bad_tool(part: Any, **more: Any) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {"x": part, "e": {"enum": [{"$ref": "#/a name in a value"}]}},
        "$defs": {"D": {"type": "string"}},
    }
    return tool("bad", schema, **more)


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize(("part", "pointer", "said"), BAD_PARTS)
def test_a_reference_to_nothing_is_refused_whatever_the_format(
    name: str, part: Any, pointer: str, said: str
) -> None:
    parser = plugins.load("headrace.tool_parsers", name)
    where = f"tools[1].function.parameters#{pointer}"
    named = {"type": "function", "function": {"name": "bad"}}
    for choice in ("required", named):
        with pytest.raises(RequestError, match=said) as caught:
            plan_tools([ADD, bad_tool(part)], choice, parser)
        assert where in str(caught.value)
        assert caught.value.param == "tools"
    with pytest.raises(RequestError, match=said) as caught:
        plan_tools([ADD, bad_tool(part, strict=True)], "auto", parser)
    assert where in str(caught.value)


def test_schemas_that_do_not_hold_may_say_anything() -> None:
    free = [ADD, bad_tool({"$ref": "#/$defs/Nope"})]
    assert plan_tools(free, "auto", HermesToolParser).constraint is None
    assert plan_tools(free, {"type": "function", "function": {"name": "add"}}, None).forced


def test_references_that_lead_somewhere() -> None:
    for part in (
        {"$ref": "#/$defs/D"},
        {"$ref": "#"},
        {"$ref": "#/properties/e"},
        {"enum": ["$ref"]},
        {"type": "object", "properties": {"$ref": {"type": "string"}}},
        True,
    ):
        assert plan_tools([bad_tool(part)], "required", None).forced


def test_what_cannot_be_strict_is_named() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string", "pattern": "a"}}}
    parser = plugins.load("headrace.tool_parsers", "qwen3_coder")
    with pytest.raises(RequestError) as caught:
        plan_tools([ADD, tool("bad", schema, strict=True)], "auto", parser)
    assert str(caught.value).startswith(
        "tools[1].function.parameters#/properties/x: 'bad' cannot be strict"
    )
    schema = {"type": "object", "minProperties": 1}
    with pytest.raises(RequestError) as caught:
        plan_tools([ADD, tool("bad", schema, strict=True)], "auto", parser, paths=["a", "b"])
    assert str(caught.value).startswith("b: 'bad' cannot be strict")

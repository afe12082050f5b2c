"""/v1/responses: items, events, chaining, background, tools."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace_core.errors import EngineDead, GenerateError
from headrace_server import ServerSettings, create_app
from headrace_server.routes import responses as routes
from headrace_server.settings import from_environment
from headrace_server.tools.base import Namespace, Tool, ToolResult, ToolServer, ToolSession
from headrace_testing import waiting
from headrace_testing.fakes.engine import FakeEngine, fake_served_model

URL = "/v1/responses"
ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
PARSERS = {
    "enable_auto_tool_choice": True,
    "tool_call_parser": "hermes",
    "reasoning_parser": "qwen3",
}


async def post(client: Any, given: Any = "Hi", **body: Any) -> Any:
    answer = await client.post(URL, json={"input": given, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def refused(client: Any, status: int = 400, /, **body: Any) -> Any:
    answer = await client.post(URL, json={"input": "Hi", **body})
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


def named(text: str) -> list[dict[str, Any]]:
    """The events of a stream; checks framing and numbers."""
    found = []
    for block in text.split("\n\n"):
        if not block or block.startswith(":"):
            continue
        head, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert head == f"event: {event['type']}"
        found.append(event)
    numbers = [event["sequence_number"] for event in found]
    assert numbers == list(range(numbers[0], numbers[0] + len(found)))
    return found


async def streamed(client: Any, given: Any = "Hi", **body: Any) -> list[dict[str, Any]]:
    answer = await client.post(URL, json={"input": given, "stream": True, **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    return named(answer.text)


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in items]


def said(response: Any) -> str:
    return "".join(
        part["text"] for i in response["output"] if i["type"] == "message" for part in i["content"]
    )


# Whole and streamed


async def test_the_answer_has_every_field(connect: Any) -> None:
    answer = await post(
        connect(FakeEngine("Hello.")), instructions="Be brief.", metadata={"a": "b"}
    )
    assert answer["id"].startswith("resp_")
    assert (answer["object"], answer["status"], answer["error"]) == ("response", "completed", None)
    (item,) = answer["output"]
    assert item["id"].startswith("msg_")
    assert without_ids([item]) == [
        {"type": "message", "status": "completed", "role": "assistant", "content": [
            {"type": "output_text", "text": "Hello.", "annotations": [], "logprobs": []}]}
    ]  # fmt: skip
    assert answer["metadata"] == {"a": "b"}
    assert answer["usage"]["output_tokens"] == 7
    assert answer["usage"]["output_tokens_details"]["output_tokens_per_turn"] == [7]
    assert answer["usage"]["total_tokens"] == answer["usage"]["input_tokens"] + 7


async def test_the_events_of_a_text(connect: Any) -> None:
    events = await streamed(connect(FakeEngine("abc")))
    assert [e["type"].removeprefix("response.") for e in events] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
        "output_text.delta", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    assert events[0]["sequence_number"] == 0
    assert [events[i]["response"]["status"] for i in (0, 1, -1)] == [
        "in_progress", "in_progress", "completed",
    ]  # fmt: skip
    item = events[-1]["response"]["output"][0]
    assert {e["item_id"] for e in events if "item_id" in e} == {item["id"]}
    assert events[-2]["item"] == item


async def test_the_events_of_reasoning_and_calls(connect: Any) -> None:
    engine = FakeEngine(f"<think>hm</think>{CALL}{CALL}", tokens_per_output=100)
    events = await streamed(connect(engine, **PARSERS), tools=[ADD])
    assert [e["type"].removeprefix("response.") for e in events] == [
        "created", "in_progress",
        "output_item.added", "reasoning_part.added", "reasoning_text.delta",
        "reasoning_text.done", "reasoning_part.done", "output_item.done",
        *["output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
          "output_item.done"] * 2,
        "completed",
    ]  # fmt: skip
    part = events[3]
    assert (part["output_index"], part["content_index"], part["part"]) == (
        0, 0, {"type": "reasoning_text", "text": ""},
    )  # fmt: skip
    reasoning, first, second = events[-1]["response"]["output"]
    assert reasoning["id"].startswith("rs_")
    assert (reasoning["summary"], reasoning["content"][0]["text"]) == ([], "hm")
    assert (first["name"], json.loads(first["arguments"])) == ("add", {"a": 1})
    assert first["id"].startswith("fc_")
    assert first["call_id"].startswith("call_")
    assert first["call_id"] != second["call_id"]


_TEXTS = st.lists(
    st.sampled_from(
        ["<think>", "</think>", "thought ", "\n\n", CALL, "größe ", "<tool", "{}", " "]
    ),
    max_size=8,
).map("".join)


@pytest.mark.req("REL-16")
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(text=_TEXTS, size=st.integers(1, 12), pushes=st.booleans())
async def test_streams_equal_the_whole(connect: Any, text: str, size: int, pushes: bool) -> None:
    client = connect(FakeEngine(text, tokens_per_output=size, pushes=pushes), **PARSERS)
    whole = await post(client, tools=[ADD])
    events = await streamed(client, tools=[ADD])
    final = events[-1]["response"]
    assert without_ids(final["output"]) == without_ids(whole["output"])
    assert final["usage"] == whole["usage"]
    assert final["status"] == whole["status"]
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert done == final["output"]
    for kind, key in (("output_text", "text"), ("function_call_arguments", "arguments")):
        for end in (e for e in events if e["type"] == f"response.{kind}.done"):
            deltas = [e["delta"] for e in events if e["type"] == f"response.{kind}.delta"
                      and e["item_id"] == end["item_id"]]  # fmt: skip
            assert "".join(deltas) == end[key]


async def test_the_limit_makes_it_incomplete(connect: Any) -> None:
    client = connect(FakeEngine("Hello."))
    answer = await post(client, max_output_tokens=3)
    assert (answer["status"], said(answer)) == ("incomplete", "Hel")
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["output"][0]["status"] == "incomplete"
    events = await streamed(client, max_output_tokens=3)
    assert events[-1]["type"] == "response.incomplete"
    assert without_ids(events[-1]["response"]["output"]) == without_ids(answer["output"])


async def test_logprobs(connect: Any) -> None:
    client = connect(FakeEngine("ab"))
    wanted = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = (await post(client, **wanted))["output"][0]["content"][0]["logprobs"]
    assert [e["token"] for e in whole][:2] == ["a", "b"]
    assert len(whole[0]["top_logprobs"]) == 2
    events = await streamed(client, **wanted)
    (done,) = [e for e in events if e["type"] == "response.output_text.done"]
    assert done["logprobs"] == whole
    deltas = [e["logprobs"] for e in events if e["type"] == "response.output_text.delta"]
    assert [entry for part in deltas for entry in part] == whole
    assert len(whole) == 3  # the end token is one, too
    assert (await refused(client, top_logprobs=2))["param"] == "top_logprobs"
    parsed = connect(FakeEngine("ab"), **PARSERS)
    assert "parsed out" in (await refused(parsed, **wanted))["message"]


async def test_raw_messages(connect: Any) -> None:
    answer = await post(connect(FakeEngine("ab")), enable_response_messages=True)
    (out,) = answer["output_messages"]
    assert (out["message"], out["tokens"][:2]) == ("ab", [97, 98])
    assert answer["input_messages"][0]["message"] == "<user>Hi</user><assistant>"
    assert "input_messages" not in await post(connect(FakeEngine("ab")))


# Items


async def test_items_become_messages(connect: Any) -> None:
    engine = FakeEngine("ok")
    items = [
        {"role": "developer", "content": "Rules."},
        {"role": "user", "content": [{"type": "input_text", "text": "1+1?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Sum."}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "[]"},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {"type": "function_call_output", "call_id": "c2",
         "output": [{"type": "input_text", "text": "3"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "Two.", "annotations": []}]},
        {"role": "user", "content": "Thanks"},
    ]  # fmt: skip
    await post(connect(engine), items, instructions="Be brief.")
    messages = [{k: v for k, v in m.items() if k != "reasoning_content"}
                for m in engine.requests[0].prompt.messages]  # type: ignore[union-attr]  # fmt: skip
    assert messages == [
        {"role": "system", "content": "Be brief.\n\nRules."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": None, "reasoning": "Sum.", "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}},
            {"id": "c2", "type": "function", "function": {"name": "add", "arguments": "[]"}}]},
        {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "2"},
        {"role": "tool", "tool_call_id": "c2", "name": "add", "content": "3"},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "Thanks"},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": []}, "input", "at least 1"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input", "call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": ""}]}, "input",
         "no call of that id"),
        ({"input": [{"type": "computer_call"}]}, "input", "'computer_call' are not supported"),
        ({"input": [{"type": ["message"]}]}, "input", "are not supported"),
        ({"tool_choice": {"type": "allowed_tools", "tools": [{"name": []}], "mode": "required"}},
         "tool_choice", "tool"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input",
         "'input_image' are not supported"),
        ({"prompt": {"id": "p"}}, "prompt", "prompt templates"),
        ({"include": ["everything"]}, "include", "'everything' must be one of"),
        ({"conversation": "c"}, "conversation", "previous_response_id"),
        ({"max_tokens": 5}, "max_tokens", "max_output_tokens"),
        ({"service_tier": "fast"}, "service_tier", "'auto'"),
        ({"background": True}, "background", "--enable-responses-store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "--enable-responses-store"),
        ({"previous_response_id": "x"}, "previous_response_id", "must begin with 'resp_'"),
        ({"text": {"format": {"type": "xml"}}}, "text.format", "json_schema"),
        ({"text": {"verbosity": "least"}}, "text.verbosity", "'low'"),
        ({"stream_options": {}}, "stream_options", "only allowed with stream"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools", "--tool-server"),
        ({"tools": [{"type": "image_creation"}]}, "tools", "'image_creation' are not supported"),
        ({"tools": [{"type": "function"}]}, "tools", "tools[0].name"),
        ({"tool_choice": {"type": "custom"}}, "tool_choice", "must be"),
        ({"max_output_tokens": 100_000}, "input", "context"),
        ({"temperature": -1}, "temperature", "greater than or equal"),
        ({"request_id": "ä"}, "request_id", "letters"),
    ],
)  # fmt: skip
async def test_refusals_name_the_field(connect: Any, body: Any, param: str, words: str) -> None:
    error = await refused(connect(), **body)
    assert words in error["message"]
    assert error["param"].startswith(param)


async def test_reasoning_is_carried_by_clients_that_keep_only_what_is_opaque(connect: Any) -> None:
    engine = FakeEngine("<think>hm</think>Yes.")
    client = connect(engine, **PARSERS)
    answer = await post(client, "a", include=["reasoning.encrypted_content"], store=False)
    thought = answer["output"][0]
    assert thought["encrypted_content"]
    for kept in (
        {"content": None},
        {"summary": [{"type": "summary_text", "text": "x"}], "content": []},
    ):
        await post(
            client, [{**thought, **kept}, answer["output"][1], {"role": "user", "content": "b"}]
        )
        said = engine.requests[-1].prompt.messages[0]  # type: ignore[union-attr]
        assert said["reasoning"] == "hm"
    plain = await post(client, "a")
    assert plain["output"][0]["encrypted_content"] is None
    foreign = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}
    await post(client, [foreign, {"role": "user", "content": "b"}])
    assert [m["role"] for m in engine.requests[-1].prompt.messages] == ["user"]  # type: ignore[union-attr]


async def test_verbosity_reaches_the_template(connect: Any) -> None:
    engine = FakeEngine("x")
    await post(connect(engine), "a", text={"verbosity": "low"})
    assert engine.requests[-1].prompt.chat_template_kwargs["verbosity"] == "low"  # type: ignore[union-attr]


async def test_an_unknown_model(connect: Any) -> None:
    assert (await refused(connect(), 404, model="x"))["param"] == "model"


async def test_truncation_drops_the_oldest_exchanges(connect: Any) -> None:
    engine = FakeEngine("ok", model=fake_served_model(max_model_len=100))
    items = [{"role": "system", "content": "S"}]
    items += [{"role": "user", "content": f"{i}" * 20} for i in range(6)]
    client = connect(engine)
    assert (await refused(client, input=items))["param"] == "input"
    await post(client, items, truncation="auto", max_output_tokens=5)
    kept = [m["content"][0] for m in engine.requests[0].prompt.messages]  # type: ignore[union-attr]
    assert kept == ["S", "4", "5"]


# Stored


async def test_chaining(connect: Any) -> None:
    engine = FakeEngine(["one"])
    client = connect(engine, enable_responses_store=True)
    first = await post(client, "First", instructions="Old.")
    assert first["store"] is True
    second = await post(client, "Second", previous_response_id=first["id"], instructions="New.")
    assert engine.requests[1].prompt_text == (
        "<system>New.</system><user>First</user><assistant>one</assistant><user>Second</user>"
        "<assistant>"
    )
    assert (await client.get(f"{URL}/{second['id']}")).json() == second
    listed = (await client.get(f"{URL}/{first['id']}/input_items")).json()
    assert [i["content"][0]["text"] for i in listed["data"]] == ["First"]
    assert (await client.delete(f"{URL}/{first['id']}")).json()["deleted"] is True
    assert (await client.get(f"{URL}/{first['id']}")).status_code == 404
    gone = await client.post(URL, json={"input": "x", "previous_response_id": first["id"]})
    assert gone.status_code == 404
    assert (await client.get(f"{URL}/other")).status_code == 400


async def test_store_false_and_the_default_keep_nothing(connect: Any) -> None:
    client = connect(enable_responses_store=True)
    assert (await post(client, store=False))["store"] is False
    answer = await post(client, store=False)
    assert (await client.get(f"{URL}/{answer['id']}")).status_code == 404
    assert (await post(connect()))["store"] is False


@pytest.mark.req("SEC-12")
async def test_a_response_belongs_to_its_key(connect: Any) -> None:
    client = connect(api_key=("one", "two"), enable_responses_store=True)
    one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
    made = await client.post(URL, json={"input": "Hi", "request_id": "same"}, headers=one)
    name = made.json()["id"]
    assert name == "resp_same"
    assert (await client.get(f"{URL}/{name}", headers=one)).status_code == 200
    assert (await client.get(f"{URL}/{name}", headers=two)).status_code == 404
    body = {"input": "Hi", "previous_response_id": name}
    assert (await client.post(URL, json=body, headers=two)).status_code == 404
    again = {"input": "Hi", "request_id": "same"}
    assert (await client.post(URL, json=again, headers=two)).status_code == 200
    assert (await client.post(URL, json=again, headers=one)).status_code == 400


async def ended(client: Any, name: str) -> Any:
    answer: Any = None

    async def has_ended() -> bool:
        nonlocal answer
        answer = (await client.get(f"{URL}/{name}")).json()
        return answer["status"] not in ("queued", "in_progress")

    await waiting.until(has_ended)
    return answer


async def test_background(connect: Any) -> None:
    client = connect(FakeEngine("Hello."), enable_responses_store=True)
    begun = await post(client, background=True)
    assert (begun["status"], begun["output"]) == ("queued", [])
    answer = await ended(client, begun["id"])
    assert (answer["status"], said(answer)) == ("completed", "Hello.")
    again = await client.post(f"{URL}/{begun['id']}/cancel")
    assert again.status_code == 400
    assert "it is completed" in again.json()["error"]["message"]
    plain = await post(client)
    assert (await client.post(f"{URL}/{plain['id']}/cancel")).status_code == 400


@pytest.mark.req("REL-05")
async def test_cancelling_ends_the_work(connect: Any, until: Any) -> None:
    engine = FakeEngine("Hello.", delay=30)
    client = connect(engine, enable_responses_store=True)
    begun = await post(client, background=True)
    await until(lambda: engine.num_running == 1)
    answer = await client.post(f"{URL}/{begun['id']}/cancel")
    assert (answer.status_code, answer.json()["status"]) == (200, "cancelled")
    assert engine.num_running == 0
    events = named((await client.get(f"{URL}/{begun['id']}?stream=true")).text)
    assert [e["type"] for e in events][-1] == "response.cancelled"


async def test_a_failed_background_response_says_so(connect: Any) -> None:
    client = connect(FakeEngine("Hello.", fail_after=2), enable_responses_store=True)
    begun = await post(client, background=True, stream=False)
    # without a stream the engine has one output, at its end
    await ended(client, begun["id"])
    engine = FakeEngine("Hello.", reject=EngineDead("secret cause"))
    client = connect(engine, enable_responses_store=True)
    answer = await ended(client, (await post(client, background=True))["id"])
    assert (answer["status"], answer["error"]["code"]) == ("failed", "server_error")
    assert "secret" not in json.dumps(answer)


async def test_a_kept_stream_is_read_again_from_any_number(connect: Any) -> None:
    client = connect(FakeEngine("Hello."), enable_responses_store=True)
    answer = await client.post(URL, json={"input": "Hi", "stream": True})
    events = named(answer.text)
    name = events[0]["response"]["id"]
    assert named((await client.get(f"{URL}/{name}?stream=true")).text) == events
    for after in (0, 4, len(events) - 2):
        got = await client.get(f"{URL}/{name}?stream=true&starting_after={after}")
        assert named(got.text) == events[after + 1 :]
    whole = await post(client)
    assert (await client.get(f"{URL}/{whole['id']}?stream=true")).status_code == 400


async def test_a_background_stream_goes_on_without_its_reader(live: Any, until: Any) -> None:
    engine = FakeEngine("Hello.", delay=0.05)
    server = await live(engine, enable_responses_store=True)
    async with openai.AsyncOpenAI(
        base_url=server.url + "/v1", api_key="x", max_retries=0
    ) as client:
        stream = await client.responses.create(
            model="fake-model", input="Hi", background=True, stream=True
        )
        seen = []
        async for event in stream:
            seen.append(event)
            if event.type == "response.output_text.delta":
                break
        await stream.close()
        name = seen[0].response.id  # type: ignore[union-attr]
        assert [e.type for e in seen][:3] == [
            "response.created", "response.queued", "response.in_progress",
        ]  # fmt: skip
        rest = [
            e async for e in await client.responses.retrieve(
                name, stream=True, starting_after=seen[-1].sequence_number
            )
        ]  # fmt: skip
        numbers = [e.sequence_number for e in (*seen, *rest)]
        assert numbers == list(range(len(numbers)))
        assert rest[-1].type == "response.completed"
        assert (await client.responses.retrieve(name)).output_text == "Hello."
    assert engine.aborted == []


async def test_the_background_is_bounded(connect: Any) -> None:
    engine = FakeEngine("Hello.", delay=30)
    client = connect(engine, enable_responses_store=True, max_background_responses=2)
    begun = [await post(client, background=True) for _ in range(2)]
    answer = await client.post(URL, json={"input": "Hi", "background": True})
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    for one in begun:
        await client.delete(f"{URL}/{one['id']}")
    assert engine.num_running == 0


async def test_the_background_is_bounded_for_those_that_come_at_once(connect: Any) -> None:
    """Each waits while its prompt is counted; none may slip past the bound meanwhile."""
    engine = SlowTokenizer("Hello.", delay=30)
    client = connect(engine, enable_responses_store=True, max_background_responses=2)
    body = {"input": "Hi", "background": True, "truncation": "auto"}
    answers = await asyncio.gather(*(client.post(URL, json=body) for _ in range(6)))
    assert sorted(a.status_code for a in answers) == [200, 200, 429, 429, 429, 429]
    for one in answers:
        if one.status_code == 200:
            await client.delete(f"{URL}/{one.json()['id']}")
    assert engine.num_running == 0


class SlowTokenizer(FakeEngine):
    """So that others come in while a request is prepared."""

    async def tokenize(self, *args: Any, **kwargs: Any) -> Any:
        for _ in range(200):
            await asyncio.sleep(0)
        return await super().tokenize(*args, **kwargs)


@pytest.mark.parametrize("background", [False, True])
async def test_an_id_is_used_once(connect: Any, background: bool) -> None:
    """Also by requests that come at once; a run that failed or was left gives its id back."""
    engine = SlowTokenizer("Hello.")
    client = connect(engine, enable_responses_store=True)
    body = {"input": "Hi", "background": background, "truncation": "auto", "request_id": "mine"}
    answers = await asyncio.gather(*(client.post(URL, json=body) for _ in range(3)))
    assert sorted(a.status_code for a in answers) == [200, 400, 400]
    assert "'resp_mine' is in use" in "".join(a.text for a in answers)
    assert (await client.get(f"{URL}/resp_mine")).status_code == 200
    await client.delete(f"{URL}/resp_mine")
    for _ in range(2):
        assert (await refused(client, request_id="mine", tools=[{"type": "x"}]))[
            "param"
        ] == "tools[0].type"
    engine.reject = GenerateError("x")
    failed = await client.post(URL, json={"input": "Hi", "request_id": "mine"})
    assert failed.status_code == 500
    engine.reject = None
    assert (await post(client, request_id="mine"))["id"] == "resp_mine"


@pytest.mark.req("REL-05")
async def test_what_is_left_leaves_nothing(live: Any, until: Any) -> None:
    """A stored stream whose client goes: no record, no id, no turn."""
    engine = FakeEngine("Hello." * 100, delay=0.02)
    server = await live(engine, enable_responses_store=True)
    async with httpx2.AsyncClient(base_url=server.url) as client:
        body = {"input": "Hi", "stream": True, "request_id": "mine"}
        async with client.stream("POST", URL, json=body) as answer:
            async for _ in answer.aiter_bytes():
                break
        await until(lambda: engine.num_running == 0)
        assert (await client.get(f"{URL}/resp_mine")).status_code == 404
        engine.delay = 0.0
        again = await client.post(URL, json={"input": "Hi", "request_id": "mine"})
        assert again.status_code == 200, again.text


@pytest.mark.req("REL-05")
async def test_a_client_that_goes_ends_the_preparation(
    live: Any, until: Any, echo: EchoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asking tool servers can take long."""
    state = {"asked": 0, "left": 0}

    async def namespaces() -> Mapping[str, Namespace]:
        state["asked"] += 1
        try:
            await asyncio.Event().wait()  # until it is cancelled
        finally:
            state["left"] += 1
        return {}

    monkeypatch.setattr(echo, "namespaces", namespaces)
    server = await live(FakeEngine("Hello."))
    async with httpx2.AsyncClient(base_url=server.url) as client:
        body = {"input": "Hi", "tools": [MCP]}
        asking = asyncio.create_task(client.post(URL, json=body))
        await until(lambda: state["asked"] == 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: state == {"asked": 1, "left": 1})


@pytest.mark.req("REL-09")
async def test_stopping_cancels_the_background(live: Any, until: Any) -> None:
    engine = FakeEngine("Hello.", delay=30)
    server = await live(engine, enable_responses_store=True)
    async with httpx2.AsyncClient(base_url=server.url) as client:
        await post(client, background=True)
        await until(lambda: engine.num_running == 1)
        server.state.lifecycle.stop_all()
        await until(lambda: engine.num_running == 0)
        assert len(engine.aborted) == 1
        assert server.state.lifecycle.num_in_flight == 0


@pytest.mark.req("SEC-16")
async def test_the_store_is_bounded(connect: Any) -> None:
    client = connect(FakeEngine("x"), enable_responses_store=True, responses_store_count=3)
    made = [(await post(client))["id"] for _ in range(5)]
    found = [(await client.get(f"{URL}/{name}")).status_code for name in made]
    assert found == [404, 404, 200, 200, 200]


# Failures


@pytest.mark.req("REL-05")
async def test_a_client_that_goes_ends_the_work(live: Any, until: Any) -> None:
    engine = FakeEngine("Hello." * 100, delay=0.02)
    server = await live(engine)
    async with httpx2.AsyncClient(base_url=server.url) as client:
        body = {"input": "Hi", "stream": True}
        async with client.stream("POST", URL, json=body) as answer:
            async for _ in answer.aiter_bytes():
                break
    await until(lambda: engine.num_running == 0)
    assert len(engine.aborted) == 1


async def test_an_error_in_a_stream_is_its_last_event(connect: Any) -> None:
    events = await streamed(connect(FakeEngine("Hello.", fail_after=3)))
    last = events[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "server_error"
    assert [e["type"] for e in events].count("response.failed") == 1


# Built-in tools


class EchoServer(ToolServer):
    """One tool that repeats its arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.sessions = 0
        self.open = 0
        self.hangs = False

    async def namespaces(self) -> Mapping[str, Namespace]:
        tools = (Tool("echo", "Repeats.", {"type": "object"}), Tool("fail"))
        browser = Namespace("browser", None, (Tool("search"), Tool("open"), Tool("find")))
        python = Namespace("python", "Runs code.", (Tool("python"),))
        return {
            "test": Namespace("test", "For tests.", tools),
            "browser": browser,
            "python": python,
        }

    @asynccontextmanager
    async def session(
        self, label: str, session_id: str, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[ToolSession]:
        if label not in await self.namespaces():
            raise KeyError(label)
        self.sessions, self.open = self.sessions + 1, self.open + 1
        try:
            yield EchoSession(self)
        finally:
            self.open -= 1


class EchoSession(ToolSession):
    def __init__(self, server: EchoServer) -> None:
        self.server = server

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> ToolResult:
        self.server.calls.append((tool, arguments))
        if self.server.hangs:
            await asyncio.Event().wait()  # until it is cancelled
        if tool == "fail":
            return ToolResult("it broke", failed=True)
        return ToolResult(f"echo {json.dumps(arguments)}")


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> EchoServer:
    server = EchoServer()
    monkeypatch.setattr(routes, "load_tool_server", lambda setting: server)
    return server


def write(name: str, arguments: str = '{"x": 1}') -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def turns(*replies: str) -> Any:
    """What the model says in one turn after the other."""
    left = list(replies)
    return lambda text, index: left.pop(0)


MCP = {"type": "mcp", "server_label": "test", "require_approval": "never"}


async def test_a_call_and_a_second_turn(connect: Any, echo: EchoServer) -> None:
    engine = FakeEngine(turns(write("echo"), "Done."))
    answer = await post(connect(engine, **PARSERS), tools=[MCP])
    call, _ = answer["output"]
    assert without_ids([call]) == [
        {"type": "mcp_call", "status": "completed", "name": "echo", "server_label": "test",
         "arguments": '{"x": 1}', "output": 'echo {"x": 1}', "error": None,
         "approval_request_id": None}
    ]  # fmt: skip
    assert said(answer) == "Done."
    assert echo.calls == [("echo", {"x": 1})]
    assert (echo.sessions, echo.open) == (1, 0)
    second = engine.requests[1].prompt.messages  # type: ignore[union-attr]
    assert [m["role"] for m in second] == ["user", "assistant", "tool"]
    assert second[2]["content"] == 'echo {"x": 1}'
    usage = answer["usage"]
    prompts = usage["input_tokens_details"]["input_tokens_per_turn"]
    outputs = usage["output_tokens_details"]["output_tokens_per_turn"]
    tools = usage["output_tokens_details"]["tool_output_tokens_per_turn"]
    assert len(prompts) == len(outputs) == 2
    assert tools == [0, max(0, prompts[1] - prompts[0] - outputs[0])]
    assert usage["input_tokens"] == sum(prompts)


@pytest.mark.parametrize(
    ("cut", "status"),
    [({"stop": ["rest"]}, "completed"), ({"max_output_tokens": 70}, "incomplete")],
)
async def test_a_turn_that_was_cut_in_a_call_calls_nothing(
    connect: Any, echo: EchoServer, cut: Any, status: str
) -> None:
    text = write("echo", '{"x": "some text, and the rest of it, which is long"}')
    engine = FakeEngine(turns(text, text), tokens_per_output=100)
    client = connect(engine, **PARSERS)
    answer = await post(client, tools=[MCP], **cut)
    (call,) = answer["output"]
    assert (answer["status"], call["type"], call["status"]) == (status, "mcp_call", "incomplete")
    assert call["arguments"].startswith('{"x": "some text')
    events = await streamed(client, tools=[MCP], **cut)
    (done,) = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert done["status"] == "incomplete"
    assert echo.calls == []
    assert len(engine.requests) == 2


async def test_the_events_of_a_call(connect: Any, echo: EchoServer) -> None:
    replies = (write("echo"), "ok")
    whole = await post(connect(FakeEngine(turns(*replies)), **PARSERS), tools=[MCP])
    client = connect(FakeEngine(turns(*replies), tokens_per_output=100), **PARSERS)
    events = await streamed(client, tools=[MCP])
    assert [e["type"].removeprefix("response.") for e in events] == [
        "created", "in_progress", "output_item.added", "mcp_call.in_progress",
        "mcp_call_arguments.delta", "mcp_call_arguments.done", "mcp_call.completed",
        "output_item.done", "output_item.added", "content_part.added", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    final = events[-1]["response"]
    assert without_ids(final["output"]) == without_ids(whole["output"])
    assert final["usage"] == whole["usage"]


async def test_errors_are_told_to_the_model(connect: Any, echo: EchoServer) -> None:
    engine = FakeEngine(turns(write("fail"), "Sorry."))
    answer = await post(connect(engine, **PARSERS), tools=[MCP])
    failed, _ = answer["output"]
    assert (failed["status"], failed["output"]) == ("failed", None)
    assert failed["error"]["content"][0]["text"] == "it broke"
    told = [m["content"] for m in engine.requests[1].prompt.messages if m["role"] == "tool"]  # type: ignore[union-attr]
    assert told == ["it broke"]
    assert echo.calls == [("fail", {"x": 1})]


@pytest.mark.req("REL-05")
@pytest.mark.parametrize("background", [False, True])
async def test_leaving_and_cancelling_end_a_call(
    live: Any, until: Any, echo: EchoServer, background: bool
) -> None:
    echo.hangs = True
    engine = FakeEngine(turns(write("echo"), "Done."))
    server = await live(engine, enable_responses_store=True, **PARSERS)
    async with httpx2.AsyncClient(base_url=server.url) as client:
        body = {"input": "Hi", "tools": [MCP]}
        if background:
            begun = await post(client, background=True, tools=[MCP])
            await until(lambda: echo.calls)
            answer = (await client.post(f"{URL}/{begun['id']}/cancel")).json()
            assert answer["status"] == "cancelled"
            assert [i["status"] for i in answer["output"]] == ["incomplete"]
            kept = await client.get(f"{URL}/{begun['id']}?stream=true")
            *_, done, last = named(kept.text)
            assert (done["type"], done["item"]) == (
                "response.output_item.done",
                answer["output"][0],
            )
            assert last["type"] == "response.cancelled"
        else:
            async with client.stream("POST", URL, json={**body, "stream": True}) as stream:
                async for line in stream.aiter_lines():
                    if line == "event: response.mcp_call_arguments.done":
                        break
                await until(lambda: echo.calls)
        await until(lambda: echo.open == 0, 2.0)
        await until(lambda: server.state.lifecycle.num_in_flight == 0)
    assert len(engine.requests) == 1


async def test_calls_are_bounded(connect: Any, echo: EchoServer) -> None:
    engine = FakeEngine(turns(write("echo") * 3, "Done."))
    answer = await post(connect(engine, **PARSERS), tools=[MCP], max_tool_calls=2)
    assert [i["status"] for i in answer["output"]] == ["completed"] * 2 + ["failed", "completed"]
    assert len(echo.calls) == 2
    endless = FakeEngine(
        lambda text, index: write("echo"), model=fake_served_model(max_model_len=10**6)
    )
    answer = await post(connect(endless, **PARSERS), tools=[MCP], max_tool_calls=3)
    assert len(echo.calls) == 2 + 3
    assert answer["status"] == "completed"


async def test_the_clients_function_ends_the_loop(connect: Any, echo: EchoServer) -> None:
    engine = FakeEngine(turns(write("echo") + write("add")))
    answer = await post(connect(engine, **PARSERS), tools=[MCP, ADD])
    assert [i["type"] for i in answer["output"]] == ["mcp_call", "function_call"]
    assert len(engine.requests) == 1


async def test_which_tools_are_offered(connect: Any, echo: EchoServer) -> None:
    engine = FakeEngine("ok")
    client = connect(engine, **PARSERS)
    await post(client, tools=[{**MCP, "allowed_tools": ["echo"]}, {**ADD, "name": "fail"}])
    tools = engine.requests[0].prompt.tools  # type: ignore[union-attr]
    assert [t["function"]["name"] for t in tools] == ["fail", "echo"]
    await post(client, tools=[MCP, {**ADD, "name": "fail"}])
    tools = engine.requests[1].prompt.tools  # type: ignore[union-attr]
    assert [t["function"]["name"] for t in tools] == ["fail", "echo", "test_fail"]
    unknown = await refused(client, tools=[{**MCP, "server_label": "x"}])
    assert "known: browser, python, test" in unknown["message"]
    for name in ("server_url", "headers", "authorization"):
        assert name in (await refused(client, tools=[{**MCP, name: "x"}]))["message"]
    always = await refused(client, tools=[{**MCP, "require_approval": "always"}])
    assert "'never'" in always["message"]


async def test_a_failed_call_that_is_sent_back_tells_why(connect: Any) -> None:
    failed = {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": "it broke"}]}
    item = {"type": "mcp_call", "id": "mcp_1", "server_label": "t", "name": "f", "arguments": "{}"}
    for error, shown in ((failed, "it broke"), ("late", "late"), (None, "")):
        engine = FakeEngine("ok")
        await post(connect(engine), [{**item, "error": error}, {"role": "user", "content": "?"}])
        messages = engine.requests[0].prompt.messages  # type: ignore[union-attr]
        assert [m["content"] for m in messages if m["role"] == "tool"] == [shown]


def harmony(*replies: str) -> FakeEngine:
    return FakeEngine(
        turns(*replies), model=fake_served_model(architecture="GptOssForCausalLM"),
        tokens_per_output=9,
    )  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
async def test_built_in_tools_of_gpt_oss(connect: Any, echo: EchoServer, stream: bool) -> None:
    engine = harmony(
        "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>analysis "
        'to=browser.search<|message|>{"query": "x"}<|call|>',
        "<|channel|>analysis to=python code<|message|>print(1)<|call|>",
        "<|channel|>commentary to=repo.list<|message|>{}<|call|>",
        "<|channel|>final<|message|>Done.",
    )
    client = connect(engine)
    tools = [{"type": "web_search_preview"}, {"type": "code_interpreter", "container": {}}]
    if stream:
        answer = (await streamed(client, tools=tools))[-1]["response"]
    else:
        answer = await post(client, tools=tools)
    kinds = [i["type"] for i in answer["output"]]
    assert kinds == [
        "reasoning", "web_search_call", "code_interpreter_call", "mcp_call", "message",
    ]  # fmt: skip
    assert (
        answer["output"][3]["error"]["content"][0]["text"]
        == "error: there is no tool server 'repo'"
    )
    assert answer["output"][1]["action"] == {"type": "search", "query": "x", "queries": ["x"]}
    assert answer["output"][2]["code"] == "print(1)"
    assert answer["output"][2]["outputs"] == [{"type": "logs", "logs": 'echo {"code": "print(1)"}'}]
    assert echo.calls == [("search", {"query": "x"}), ("python", {"code": "print(1)"})]
    assert engine.requests[0].params.skip_special_tokens is False
    assert "namespace browser" in engine.requests[0].prompt_text
    assert engine.requests[1].prompt_text.endswith(
        "<|start|>browser.search to=assistant<|channel|>analysis<|message|>"
        'echo {"query": "x"}<|end|><|start|>assistant'
    )


# The real client


async def test_the_real_client(live: Any) -> None:
    engine = FakeEngine(f"<think>hm</think>Text.{CALL}", tokens_per_output=3)
    server = await live(engine, enable_responses_store=True, **PARSERS)
    async with openai.AsyncOpenAI(
        base_url=server.url + "/v1", api_key="x", max_retries=0
    ) as client:
        tools: Any = [{**ADD, "strict": False}]
        whole = await client.responses.create(model="fake-model", input="Hi", tools=tools)
        assert whole.output_text == "Text."
        async with client.responses.stream(model="fake-model", input="Hi", tools=tools) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert kinds[0] == "response.created"
        assert kinds[-1] == "response.completed"
        assert [i.type for i in final.output] == [i.type for i in whole.output]
        call: Any = whole.output[-1]
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
        await client.responses.create(
            model="fake-model", previous_response_id=whole.id, input=[result], tools=tools
        )
        assert engine.requests[-1].prompt.messages[-1]["content"] == "2"  # type: ignore[union-attr]
        await client.responses.create(
            model="fake-model",
            input=[{"role": "user", "content": "Hi"}, *whole.output, result],  # type: ignore[list-item]
            tools=tools,
        )
        assert [m["role"] for m in engine.requests[-1].prompt.messages] == [  # type: ignore[union-attr]
            "user", "assistant", "tool",
        ]  # fmt: skip
        items = await client.responses.input_items.list(whole.id)
        assert [i.type for i in items.data] == ["message"]
        await client.responses.delete(whole.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(whole.id)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="fake-model", input="x", conversation="c")
        assert caught.value.param == "conversation"


def test_no_tool_is_served_by_default() -> None:
    assert ServerSettings().tool_server is None
    assert not ServerSettings().enable_responses_store
    create_app(FakeEngine(), ServerSettings())


async def test_the_variable_keeps_responses_too(connect: Any) -> None:
    client = connect(**from_environment({"HEADRACE_ENABLE_RESPONSES_API_STORE": "1"}))
    answer = await post(client)
    assert answer["store"] is True
    assert (await client.get(f"{URL}/{answer['id']}")).status_code == 200

"""Forced calls: any form of any parser, through a real engine, and over real sockets."""

from __future__ import annotations

import asyncio
import functools
import json
import random
import threading
from collections.abc import Iterator
from typing import Any

import constrained
import jsonschema
import numpy as np
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from posted import post, stream
from servers import serving

from headrace import EngineArgs
from headrace.assembly import connect
from headrace_core import plugins
from headrace_core.errors import UnsupportedFeature
from headrace_core.grammar import Grammar, GrammarBackend, GrammarSpec, Vocabulary
from headrace_core.text import ToolCallParser
from headrace_engine.structured.backend_loading import backend_class
from headrace_server import ServerSettings, bind, create_app, serve
from headrace_server.chat.tool_choice import MAX_FORCED_CALLS, calls_schema

NAMES = sorted(plugins.installed("headrace.tool_parsers"))
ONE = {"openai"}
"""Formats in which an answer is one call."""
WORDS = ("</parameter>", "</function>", "</arg_value>", "</｜DSML｜parameter>",
         "</steptml:parameter>", "<escape>", '{"', '": ', '"}', "\n\n", "true")  # fmt: skip
ENDS = WORDS[:6]
MARKS = (
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>", "<|channel|>", "<|message|>", "<|start|>", "<|call|>", "<|end|>",
)  # fmt: skip


def load(name: str) -> type[ToolCallParser]:
    found: type[ToolCallParser] = plugins.load("headrace.tool_parsers", name)
    return found


# Any schema: what its form admits is valid


@functools.cache
def vocabulary(*, special: bool) -> Vocabulary:
    """Bytes and some words; marks of some formats are special tokens, or plain text."""
    words = [bytes([i]) for i in range(256)] + [word.encode() for word in WORDS]
    marks = [mark.encode() for mark in MARKS] if special else []
    return Vocabulary([*words, *marks], frozenset(range(len(words), len(words) + len(marks))))


@functools.cache
def backend(name: str, special: bool) -> GrammarBackend:
    found = backend_class(name)
    pytest.importorskip(found.library)
    return found(vocabulary(special=special))


def compiled(which: GrammarBackend, form: Any) -> Grammar:
    spec = GrammarSpec(which.name, "structural_tag", json.dumps({"format": form}))
    assert which.refuse(spec) == []
    return which.compile(spec)


def walk(grammar: Grammar, words: Vocabulary, seed: int, most: int = 900) -> tuple[str, bool]:
    """A random text that the grammar admits, and whether it came to an end."""
    chance, matcher, ids = random.Random(seed), grammar.matcher(), list[int]()
    mask = np.zeros((1, words.num_words), np.int32)
    space = 0
    for step in range(most):
        matcher.fill_bitmask(mask, 0)
        free = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        allowed = [i for i in free if i > 127 or i == 10 or 32 <= i < 127]
        if matcher.complete and (not free or step > most // 2 or chance.random() < 0.3):
            return _text(words, ids), True
        assert free, f"nothing may follow {_text(words, ids)!r}"
        # Free values end only with a mark, which random text would never write.
        ends = [i for i in allowed if words.tokens[i].decode("utf-8", "replace") in ENDS]
        marks = [i for i in allowed if words.tokens[i][:1] in b'"}])>\n<']
        choice = allowed or free
        if ends and chance.random() < 0.4:
            choice = ends
        elif marks and chance.random() < 0.5:
            choice = marks
        ids.append(chance.choice(choice))
        space = space + 1 if words.tokens[ids[-1]].isspace() else 0
        assert space <= 40, "a run of white space"
        assert matcher.advance(ids[-1:])
    return _text(words, ids), False


def _text(words: Vocabulary, ids: list[int]) -> str:
    return b"".join(words.tokens[i] for i in ids).decode("utf-8", "replace")


SCALARS = st.one_of(
    st.just({"type": "string"}),
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(1, 6)),
    st.just({"type": "integer"}),
    st.builds(lambda n: {"type": "integer", "minimum": 0, "maximum": n}, st.integers(0, 99)),
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.just({"enum": ["C", "F", None]}),
    st.just({"type": "string", "enum": ["on", "off"]}),
    st.just({"const": "x"}),
    st.just({"$ref": "#/$defs/Unit"}),
)
VALUES = st.one_of(
    SCALARS,
    st.builds(lambda one: {"anyOf": [one, {"type": "null"}]}, SCALARS),
    st.builds(lambda one: {"type": "array", "items": one, "maxItems": 2}, SCALARS),
    st.builds(
        lambda one: {"type": "object", "properties": {"k": one}, "additionalProperties": False},
        SCALARS,
    ),
)
UNIT = {"Unit": {"type": "string", "enum": ["mm", "inch"]}}


@st.composite
def schemas(draw: Any) -> dict[str, Any]:
    """Schemas of arguments; not all of them can be written by every format."""
    names = ["city", "days", "a_b", "x"]
    properties = draw(st.dictionaries(st.sampled_from(names), VALUES, max_size=4))
    required = [name for name in properties if draw(st.booleans())]
    return {
        "type": "object", "properties": properties, "required": required, "$defs": UNIT,
        "additionalProperties": False,
    }  # fmt: skip


def check(name: str, form: Any, tools: dict[str, Any], seed: int, special: bool, most: int) -> int:
    """One walk: reads it back; the number of calls that it had."""
    words = vocabulary(special=special)
    text, ended = walk(compiled(backend("guidance", special), form), words, seed)
    given = [{"function": {"name": n, "parameters": schema}} for n, schema in tools.items()]
    content, calls = load(name)(given).parse(text)
    if not ended:
        return 0
    assert content == "", text
    assert 1 <= len(calls) <= most, text
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), tools[call.name])
    return len(calls)


@pytest.mark.keep(12, every_value=False)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_forced_is_read_as_valid_calls(name: str) -> None:
    found = [0]

    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck),
              derandomize=True, database=None)  # fmt: skip
    @given(schemas(), schemas(), st.integers(1, 3), st.integers(0, 10**6), st.booleans())
    def one(first: Any, second: Any, most: int, seed: int, special: bool) -> None:
        tools = {"get_weather": first, "other": second}
        try:
            form = load(name).forced_structural_tag(tools, most=most)
        except UnsupportedFeature:
            return
        assert form is not None, "every format has one"
        found[0] += check(name, form, tools, seed, special, most)

    one()
    assert found[0] >= 2


PLAIN: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}},
    "required": ["unit"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("name", NAMES)
def test_the_last_call_is_the_end(name: str) -> None:
    """Behind it comes at most a little white space: a model that would go on cannot."""
    words = vocabulary(special=False)
    form = load(name).forced_structural_tag({"f": {"type": "object", "properties": {}}}, most=1)
    if name == "openai":
        pytest.skip("a mark may follow, which ends the output")
    for seed in range(3):
        schema = {"f": {"type": "object", "properties": {}, "additionalProperties": False}}
        form = load(name).forced_structural_tag(schema, most=1)
        grammar = compiled(backend("guidance", False), form)
        text, ended = walk(grammar, words, seed)
        assert ended
        matcher = grammar.matcher()
        assert matcher.advance(list(text.rstrip().encode()))
        assert matcher.complete
        for more in (text.encode(), b" " * 9, b"x", b","):
            assert not matcher.advance(list(more)), (text, more)


@pytest.mark.parametrize("name", NAMES)
def test_xgrammar_takes_the_forms(name: str) -> None:
    form = load(name).forced_structural_tag({"get_weather": PLAIN, "other": PLAIN}, most=3)
    which, words = backend("xgrammar", False), vocabulary(special=False)
    found = 0
    given = [{"function": {"name": "get_weather", "parameters": PLAIN}}]
    for seed in range(4):
        text, ended = walk(compiled(which, form), words, seed)
        content, calls = load(name)(given).parse(text)
        if ended:
            found += len(calls)
            assert (content, bool(calls)) == ("", True), text
    assert found


@pytest.mark.parametrize("name", ["guidance", "xgrammar", "outlines"])
def test_calls_in_plain_json_are_bounded(name: str) -> None:
    """Without a format of the model's own: 16 calls, and not the beginning of another."""
    schema = calls_schema([{"type": "function", "function": {"name": "f"}}])
    which, words = backend(name, False), vocabulary(special=False)
    spec = GrammarSpec(name, "json", json.dumps(schema))
    if which.refuse(spec):
        schema = calls_schema(
            [{"type": "function", "function": {"name": "f", "parameters": PLAIN}}]
        )
        spec = GrammarSpec(name, "json", json.dumps(schema))
    arguments = {} if "unit" not in spec.source else {"unit": "C"}
    assert which.refuse(spec) == []
    grammar = which.compile(spec)
    many = json.dumps([{"name": "f", "parameters": arguments}] * MAX_FORCED_CALLS).encode()
    matcher = grammar.matcher()
    assert matcher.advance(list(many[:-1]))
    assert not matcher.advance(list(b", "))
    assert not grammar.matcher().advance(list(b"[" + b" " * 40))
    for seed in range(4):
        text, ended = walk(grammar, words, seed, 3000)
        if ended:
            assert 1 <= len(json.loads(text)) <= MAX_FORCED_CALLS


# A real engine and real sockets: random weights write whatever the constraint lets them


class Servers:
    """One engine of random weights, and a server on a port of its own for each parser."""

    def __init__(self, folder: str) -> None:
        config = EngineArgs(
            model=folder,
            served_model_name=("random",),
            **constrained.UNHURRIED | {"max_model_len": 1024},
        ).create_engine_config()
        self._ready = threading.Event()
        self._config = config
        self._urls: dict[str, str] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(120)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._main())

    async def _main(self) -> None:
        self._stop = asyncio.Event()
        self.engine = connect(self._config)
        tasks = []
        for name in PARSERS:
            settings = ServerSettings(
                port=0, enable_auto_tool_choice=True, tool_call_parser=name, drain_timeout=0,
                uvicorn_log_level="warning",
            )  # fmt: skip
            app, sock = create_app(self.engine, settings), bind(settings)
            self._urls[name] = f"http://127.0.0.1:{sock.getsockname()[1]}"
            tasks.append(asyncio.create_task(serve(app, sock, settings)))
        self._ready.set()
        await self._stop.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.engine.shutdown()

    def url(self, name: str) -> str:
        return self._urls[name]

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)


PARSERS = ("hermes", "llama3_json", "mistral", "qwen3_coder", "pythonic", "deepseek_v3", "xlam",
           "gigachat3", "glm45", "kimi_k2", "openai", "functiongemma")  # fmt: skip


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("forced")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constrained, "SPECIAL", [*constrained.SPECIAL, *MARKS])
        constrained.save(folder)
    config = folder / "config.json"
    found = json.loads(config.read_text())
    config.write_text(json.dumps({**found, "max_position_embeddings": 1024}))
    made = Servers(str(folder))
    yield made
    made.close()


def tool(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


WEATHER = tool("weather", {
    "type": "object",
    "properties": {
        "unit": {"type": "string", "enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "city": {"type": "string", "maxLength": 4},
    },
    "required": ["unit", "city"],
    "additionalProperties": False,
})  # fmt: skip
NOW = tool("now", {"type": "object", "properties": {}, "additionalProperties": False})
TOOLS = [WEATHER, NOW]
SCHEMAS = {one["function"]["name"]: one["function"]["parameters"] for one in TOOLS}
NAMED = {"type": "function", "function": {"name": "weather"}}
HI = [{"role": "user", "content": "Hi"}]


def sampling(seed: int) -> dict[str, Any]:
    """Random text that ends: the end token, and the mark that ends thoughts, are likely."""
    thought_ends = len(constrained.SPECIAL) + MARKS.index("<|end|>")
    bias = {str(constrained.EOS): 3, str(thought_ends): 9}
    return {"seed": seed, "temperature": 1.0, "logit_bias": bias}


def ask(client: openai.OpenAI, seed: int, choice: Any, **options: Any) -> Any:
    """The only choice of a chat."""
    options = {"max_tokens": 500, **sampling(seed), **options}
    return client.chat.completions.create(
        model="random", messages=HI, tools=TOOLS, tool_choice=choice, **options
    )


def checked(calls: Any, *, last_is_cut: bool = False) -> list[str]:
    """Names of calls; fails unless their arguments follow their schemas."""
    for index, call in enumerate(calls or []):
        if last_is_cut and index == len(calls) - 1:
            continue
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    return [call.function.name for call in calls or []]


@pytest.fixture(params=PARSERS)
def client(request: pytest.FixtureRequest, servers: Servers) -> Iterator[openai.OpenAI]:
    url = servers.url(request.param) + "/v1"
    with openai.OpenAI(base_url=url, api_key="x", max_retries=0) as made:
        made.parser = request.param  # type: ignore[attr-defined]
        yield made


def streamed(chunks: Any) -> tuple[list[list[str]], str, Any]:
    """Calls, content and finish reason of a stream."""
    calls: list[list[str]] = []
    content, reason = "", None
    for chunk in chunks:
        (part,) = chunk.choices
        content += part.delta.content or ""
        reason = part.finish_reason or reason
        for piece in part.delta.tool_calls or []:
            if piece.function.name:
                calls.append([piece.function.name, ""])
            calls[piece.index][1] += piece.function.arguments or ""
    return calls, content, reason


@pytest.mark.req("REL-16")
@pytest.mark.keep(5, every_value=False)
def test_a_random_model_calls(client: openai.OpenAI) -> None:
    ended = 0
    for seed in range(3):
        whole = ask(client, seed, "required").choices[0]
        cut = whole.finish_reason == "length"
        assert whole.message.content in (None, "")
        names = checked(whole.message.tool_calls, last_is_cut=cut)
        assert len(names) <= 16
        ended += not cut
        if not cut:
            assert (whole.finish_reason, bool(names)) == ("tool_calls", True)
        again = streamed(ask(client, seed, "required", stream=True))
        found = [[c.function.name, c.function.arguments] for c in whole.message.tool_calls or []]
        assert again == (found, "", whole.finish_reason)
    assert ended
    one = ask(client, 7, "required", parallel_tool_calls=False).choices[0]
    assert (len(checked(one.message.tool_calls)), one.finish_reason) == (1, "tool_calls")
    named = ask(client, 8, NAMED).choices[0]
    found = (checked(named.message.tool_calls), named.finish_reason)
    assert found == (["weather"], "stop"), named
    assert named.message.content is None


@pytest.mark.keep(5, every_value=False)
def test_outputs_that_are_cut(client: openai.OpenAI) -> None:
    """Cut by length or by a stop string: complete calls, perhaps a begun one, and no content."""
    for limit in (1, 30, 60, 90):
        whole = ask(client, limit, "required", max_tokens=limit).choices[0]
        assert whole.message.content in (None, "")
        checked(whole.message.tool_calls, last_is_cut=True)
        found = [[c.function.name, c.function.arguments] for c in whole.message.tool_calls or []]
        again = streamed(ask(client, limit, "required", max_tokens=limit, stream=True))
        assert again == (found, "", whole.finish_reason)
    for stop in ("nit", "weat"):
        choice = ask(client, 3, NAMED, stop=[stop]).choices[0]
        assert (choice.message.content or "", choice.finish_reason) == ("", "stop")
        assert choice.stop_reason == stop
        choice = ask(client, 3, "required", parallel_tool_calls=False, stop=[stop]).choices[0]
        assert choice.finish_reason == ("tool_calls" if choice.stop_reason is None else "stop")


@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder", "mistral"])
@pytest.mark.parametrize("limit", [500, 5])
def test_the_other_protocols(servers: Servers, parser: str, limit: int) -> None:
    """Whole and streamed, complete and cut."""
    flat = [{"type": "function", **one["function"]} for one in TOOLS]
    foreign = [
        {"name": one["function"]["name"], "input_schema": one["function"]["parameters"]}
        for one in TOOLS
    ]
    responses = {"model": "random", "input": "Hi", "tools": flat, "tool_choice": "required",
                 "parallel_tool_calls": False, "max_output_tokens": limit, **sampling(5)}  # fmt: skip
    done = post(servers.url(parser) + "/v1/responses", responses)
    (events,) = [
        e["response"]
        for e in stream(servers.url(parser) + "/v1/responses", responses)
        if e["type"] in ("response.completed", "response.incomplete")
    ]
    assert events["status"] == done["status"] == ("completed" if limit == 500 else "incomplete")
    for found in (done, events):
        assert {item["type"] for item in found["output"]} <= {"function_call"}
        if limit == 500:
            (call,) = found["output"]
            assert call["status"] == "completed"
            jsonschema.validate(json.loads(call["arguments"]), SCHEMAS[call["name"]])
    asked = {"model": "random", "messages": HI, "tools": foreign, "max_tokens": limit,
             "temperature": 1.0,
             "tool_choice": {"type": "tool", "name": "weather"}}  # fmt: skip
    message = post(servers.url(parser) + "/v1/messages", asked)
    assert {block["type"] for block in message["content"]} <= {"tool_use"}
    if message["stop_reason"] == "tool_use":
        (block,) = message["content"]
        jsonschema.validate(block["input"], SCHEMAS["weather"])
    else:
        assert message["stop_reason"] == "max_tokens"
    kinds = [
        event["content_block"]["type"]
        for event in stream(servers.url(parser) + "/v1/messages", asked)
        if event["type"] == "content_block_start"
    ]
    assert set(kinds) <= {"tool_use"}


# The demo model, which was trained to call in the Hermes manner


@pytest.fixture(scope="module")
def trained() -> Iterator[openai.OpenAI]:
    words = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with (
        serving(*words) as running,
        openai.OpenAI(base_url=running.api, api_key="none", max_retries=0) as made,
    ):
        yield made


CITY = tool("get_weather", {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "The city."}},
    "required": ["city"],
})  # fmt: skip
CITY["function"]["description"] = "Get the weather in a city."


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_a_trained_model_calls_once_and_ends(
    trained: openai.OpenAI, choice: Any, streams: bool
) -> None:
    """It writes what it would have written of itself."""
    asked = {
        "model": "headrace-demo", "tools": [CITY], "temperature": 0, "max_tokens": 300,
        "messages": [{"role": "user", "content": "What is the weather in Oslo?"}],
    }  # fmt: skip
    free = trained.chat.completions.create(**asked).choices[0]
    if streams:
        chunks = trained.chat.completions.create(**asked, tool_choice=choice, stream=True)
        calls, content, reason = streamed(chunks)
    else:
        found = trained.chat.completions.create(**asked, tool_choice=choice)
        one = found.choices[0]
        calls = [[c.function.name, c.function.arguments] for c in one.message.tool_calls]
        content, reason = one.message.content or "", one.finish_reason
        used = trained.chat.completions.create(**asked).usage.completion_tokens
        assert found.usage.completion_tokens <= used + 4
    assert calls == [[c.function.name, c.function.arguments] for c in free.message.tool_calls]
    assert (content, reason) == ("", "tool_calls" if choice == "required" else "stop")

"""Details of answers that clients go by: usage from the first chunk, HEAD, empty calls, fingerprints."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2
import jsonschema
import pytest

from headrace_server import ServerSettings, create_app
from headrace_server.observability.fingerprint import fingerprint_of
from headrace_testing.fakes.engine import FakeEngine, fake_served_model

HI = [{"role": "user", "content": "Hi"}]
CLAUDE = {"model": "fake-model", "max_tokens": 9, "messages": HI}
TOOL = {"type": "function", "function": {"name": "f"}}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


class Settled(FakeEngine):
    """A fake with an engine's settings."""

    def __init__(self, settings: dict[str, Any], **model: Any) -> None:
        super().__init__("x", model=fake_served_model(**model))
        self._settings = settings

    @property
    def settings(self) -> dict[str, Any]:
        return self._settings


@pytest.mark.parametrize(
    ("url", "body"),
    [
        (CHAT, {"messages": HI, "n": 2}), (TEXT, {"prompt": "Hi", "echo": True}),
        ("/inference/v1/generate", {"token_ids": [72, 105]}),
    ],
)  # fmt: skip
async def test_usage_is_in_every_chunk_from_the_first(
    connect: Any, events: Any, url: str, body: Any
) -> None:
    client = connect(FakeEngine("Hello", cached_tokens=1), enable_prompt_tokens_details=True)
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = await client.post(url, json={**body, "stream": True, "stream_options": options})
    chunks = events(answer.text)
    counts = [chunk["usage"] for chunk in chunks]
    prompt = counts[-1]["prompt_tokens"]
    assert prompt > 0
    assert {(c["prompt_tokens"], c["prompt_tokens_details"]["cached_tokens"]) for c in counts} == {
        (prompt, 1)
    }
    done = [c["completion_tokens"] for c in counts]
    assert done == sorted(done)
    assert all(c["total_tokens"] == c["prompt_tokens"] + c["completion_tokens"] for c in counts)
    if url == CHAT:
        assert done[:2] == [0, 0]


GET = ["/", "/health", "/ping", "/livez", "/readyz", "/version", "/metrics", "/v1/models", "/openapi.json",
       "/docs", "/v1/models/fake-model", "/v1/models/other", "/nowhere"]  # fmt: skip


@pytest.mark.parametrize("path", GET)
async def test_head_is_get_without_its_body(connect: Any, path: str) -> None:
    client = connect()
    got, head = await client.get(path), await client.head(path)
    assert head.status_code == got.status_code
    assert head.content == b""
    for name in ("content-type", "content-length"):
        if path != "/metrics" or name == "content-type":  # its numbers grow
            assert head.headers.get(name) == got.headers.get(name)


async def test_head_is_get_without_its_body_everywhere() -> None:
    """On every path: those of other protocols' errors too, and where GET is refused."""
    app = create_app(FakeEngine(), ServerSettings(dev_mode=True))
    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for path in [*app.state.headrace.paths, "/v1/messages/nowhere", "/v2/nowhere"]:
            if path in ("/metrics", "/load", "/server_info"):
                continue  # their numbers grow
            got, head = await client.get(path), await client.head(path)
            assert (head.status_code, head.content) == (got.status_code, b""), path
            for name in ("content-type", "content-length", "allow"):
                assert head.headers.get(name) == got.headers.get(name), (path, name)


@pytest.mark.parametrize("path", ["/x", "/x/"])
async def test_the_prefix_itself_is_the_first_page(connect: Any, path: str) -> None:
    client = connect(root_path="/x")
    answer = await client.get(path)
    assert answer.status_code == 200
    assert answer.json() == (await client.get("/")).json()
    assert answer.json()["links"]["models"] == "/x/v1/models"
    assert (await client.get("/xy")).status_code == 404


async def test_no_convertor_of_a_path_is_shown(connect: Any) -> None:
    """Not on the first page, in hints, nor as a label."""
    client = connect(FakeEngine("x"))
    paths = (await client.get("/")).json()["paths"]
    assert "/v1/models/{name}" in paths
    assert not [path for path in paths if ":" in path]
    assert (await client.get("/v1/models/fake-model")).status_code == 200
    near = (await client.get("/v1/model/{name}")).json()["error"]["message"]
    assert near.endswith("did you mean /v1/models/{name}?")
    assert ":path" not in (await client.get("/metrics")).text
    await client.head("/v1/models/fake-model")
    counted = (await client.get("/metrics")).text
    for method in ("GET", "HEAD"):
        assert f'handler="/v1/models/{{name}}",method="{method}"' in counted or (
            f'method="{method}",handler="/v1/models/{{name}}"' in counted
        ), counted


async def test_head_is_refused_where_get_is(connect: Any) -> None:
    answer = await connect().head(TEXT)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    closed = connect(api_key=("secret",))
    assert (await closed.head("/v1/models")).status_code == 401
    assert (await closed.head("/health")).status_code == 200


async def test_no_calls(connect: Any, events: Any) -> None:
    engine = FakeEngine("x")
    client = connect(engine)
    for calls in (None, []):
        history = [*HI, {"role": "assistant", "content": "a", "tool_calls": calls}, *HI]
        answer = await client.post(CHAT, json={"messages": history})
        assert answer.status_code == 200, answer.text
        message = answer.json()["choices"][0]["message"]
        assert "tool_calls" not in message
        assert message["content"] == "x"
        prompt: Any = engine.requests[-1].prompt
        assert (
            "tool_calls" not in prompt["messages"][1]
            if isinstance(prompt, dict)
            else ("tool_calls" not in prompt.messages[1])
        )
    streamed = await client.post(CHAT, json={"messages": HI, "stream": True})
    assert not any("tool_calls" in c["choices"][0]["delta"] for c in events(streamed.text))
    called = connect(FakeEngine('[{"name": "f", "parameters": {}}]'))
    answer = await called.post(
        CHAT, json={"messages": HI, "tools": [TOOL], "tool_choice": "required"}
    )
    assert len(answer.json()["choices"][0]["message"]["tool_calls"]) == 1


async def test_server_info_is_json(connect: Any) -> None:
    client = connect(dev_mode=True)
    answer = await client.get("http://localhost/server_info")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["server"]["port"] == 8000


@pytest.mark.parametrize("reply", ["ab", "ab" * 40])
async def test_log_probabilities_have_ids_and_ranks(connect: Any, events: Any, reply: str) -> None:
    client = connect(FakeEngine(reply))
    body = {"token_ids": [72], "sampling_params": {"logprobs": 2, "max_tokens": 100}}
    whole = (await client.post("/inference/v1/generate", json=body)).json()["choices"][0]
    text = (await client.post("/inference/v1/generate", json={**body, "stream": True})).text
    parts = [p for c in events(text) for p in c["choices"][0]["logprobs"]["content"]]
    assert parts == whole["logprobs"]["content"]
    assert [p["token_id"] for p in parts] == whole["token_ids"]
    for position in parts:
        assert position["token"] == f"token_id:{position['token_id']}"
        assert position["rank"] == 1
        assert [top["rank"] for top in position["top_logprobs"]] == [1, 2]
        assert position["top_logprobs"][0]["token_id"] == position["token_id"]


# What a body leaves out, or says twice


@pytest.mark.parametrize("role", ["user", "system", "developer", "tool", "assistant"])
@pytest.mark.parametrize("content", [{}, {"content": None}])
@pytest.mark.parametrize("url", [CHAT, CHAT + "/render", "/tokenize"])
async def test_a_message_says_something(connect: Any, url: str, role: str, content: Any) -> None:
    body = {"messages": [*HI, {"role": role, **content}]}
    answer = await connect().post(url, json=body)
    assert answer.status_code == 400, answer.text
    told = answer.json()["error"]
    assert told["param"] == "messages[1].content"
    assert f"must be given for role {role!r}" in told["message"]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "tool_calls": [{"id": "a", "type": "function",
                                              "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "assistant", "content": None, "reasoning": "Hm"},
        {"role": "assistant", "content": None, "refusal": "No"},
        {"role": "assistant", "content": ""}, {"role": "user", "content": []}, {"role": "critic"},
    ],
)  # fmt: skip
async def test_a_message_that_says_it_otherwise(connect: Any, message: Any) -> None:
    answer = await connect().post(CHAT, json={"messages": [*HI, message, *HI]})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("url", "body", "where"),
    [
        ("/v1/responses", {"input": [{"role": "user"}]}, "input[0]"),
        ("/v1/responses", {"input": [{"role": "user", "content": None}]}, "input[0]"),
        ("/v1/messages", {**CLAUDE, "messages": [{"role": "user"}]}, "messages[0].content"),
        ("/v1/messages", {**CLAUDE, "messages": [{"role": "user", "content": None}]},
         "messages[0].content"),
    ],
)  # fmt: skip
async def test_other_wires_want_content_too(connect: Any, url: str, body: Any, where: str) -> None:
    answer = await connect().post(url, json=body)
    assert answer.status_code == 400, answer.text
    assert where in answer.json()["error"]["message"]
    assert "content" in answer.json()["error"]["message"]


@pytest.mark.parametrize("strict", [False, True])
async def test_the_last_of_equal_names_counts(connect: Any, strict: bool) -> None:
    engine = FakeEngine("x")
    text = b'{"prompt": "Hi", "max_tokens": 3, "seed": 1, "max_tokens": 5}'
    answer = await connect(engine, strict_requests=strict).post(
        TEXT, content=text, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 200, answer.text
    assert engine.requests[0].params.max_tokens == 5


# Paths, and the model in a query


@pytest.mark.parametrize("root", ["", "/x"])
async def test_links_have_the_prefix(connect: Any, root: str) -> None:
    client = connect(root_path=root)
    links = (await client.get(root + "/")).json()["links"]
    assert links == {
        "models": root + "/v1/models", "health": root + "/health", "docs": root + "/docs",
        "openapi": root + "/openapi.json",
    }  # fmt: skip
    page = (await client.get(root + "/", headers={"Accept": "text/html"})).text
    for link in links.values():
        assert f'href="{link}"' in page
        assert (await client.get(link)).status_code == 200


@pytest.mark.parametrize("root", ["", "/x"])
async def test_docs_with_a_slash(connect: Any, root: str) -> None:
    answer = await connect(root_path=root).get(root + "/docs/", follow_redirects=True)
    assert answer.status_code == 200
    assert answer.url.path == root + "/docs"
    assert (await connect(disable_fastapi_docs=True).get("/docs/")).status_code == 404


NAMING = [
    ("GET", "/v1/system/startup"), ("GET", "/v1/system/determinism"), ("GET", "/tokenizer_info"),
    ("GET", "/is_paused"), ("POST", "/pause"), ("POST", "/resume"), ("POST", "/reset_prefix_cache"),
    ("POST", "/start_profile"), ("GET", "/server_info"), ("GET", "/v1/responses/resp_1"),
    ("GET", "/v1/responses/resp_1/input_items"), ("DELETE", "/v1/responses/resp_1"),
    ("POST", "/v1/responses/resp_1/cancel"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path"), NAMING)
async def test_a_model_in_the_query_must_be_served(connect: Any, method: str, path: str) -> None:
    client = connect(
        dev_mode=True, enable_tokenizer_info_endpoint=True, enable_responses_store=True
    )
    url = "http://localhost:8000" + path
    answer = await client.request(method, url, params={"model": "zz"})
    assert answer.status_code == 404, answer.text
    told = answer.json()["error"]
    assert (told["param"], told["headrace_code"]) == ("model", "HR-REQ-004")
    assert "'zz' is not served" in told["message"]
    served = await client.request(method, url, params={"model": "fake-model"})
    assert served.status_code == (await client.request(method, url)).status_code


STREAMS = [
    (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}),
    (CHAT, {"messages": HI, "tools": [TOOL], "tool_choice": "required"}),
    (TEXT, {"prompt": "Hi", "logprobs": 1, "echo": True}),
    ("/inference/v1/generate", {"token_ids": [72], "sampling_params": {"logprobs": 1}}),
    ("/v1/responses", {"input": "Hi"}), ("/v1/messages", CLAUDE),
]  # fmt: skip


@pytest.mark.keep(3, every_value=False)
@pytest.mark.parametrize(("url", "body"), STREAMS)
async def test_events_of_streams_fit_the_document(connect: Any, url: str, body: Any) -> None:
    reply = '[{"name": "f", "parameters": {}}]' if "tools" in body else "Hello"
    client = connect(FakeEngine(reply))
    options = {} if "messages" in url or "responses" in url else {"stream_options": {}}
    answer = await client.post(url, json={**body, **options, "stream": True})
    document = (await client.get("/openapi.json")).json()
    content = document["paths"][url]["post"]["responses"]["200"]["content"]
    schema = {**content["text/event-stream"]["schema"], "components": document["components"]}
    assert "$ref" in schema
    data = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    assert len(data) > 2
    for event in data:
        jsonschema.validate(json.loads(event), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"no": "event"}, schema)


def test_the_document_refers_to_what_it_has() -> None:
    document = create_app(FakeEngine(), ServerSettings()).openapi()
    text = json.dumps(document)
    names = {part.partition('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert names <= document["components"]["schemas"].keys()


# Facts about the server: its fingerprint, its start, its end


async def test_every_answer_has_the_fingerprint(connect: Any, events: Any) -> None:
    client = connect()
    found = set()
    for url, body in ((CHAT, {"messages": HI}), (TEXT, {"prompt": "Hi"})):
        found.add((await client.post(url, json=body)).json()["system_fingerprint"])
        streamed = await client.post(url, json={**body, "stream": True, "stream_options": {}})
        found |= {chunk["system_fingerprint"] for chunk in events(streamed.text)}
    asked = (await client.get("/v1/system/determinism")).json()
    assert found == {asked["system_fingerprint"]}
    assert len(asked["system_fingerprint"]) == len("fp_") + 16


BASE = {"model": {"revision": "main", "seed": 0, "quantization": None}, "cache": {"kv_cache_dtype": "auto"},
        "scheduler": {"max_num_seqs": 8}}  # fmt: skip


@pytest.mark.req("REL-15")
@pytest.mark.parametrize(
    ("settings", "model", "server", "same"),
    [
        ({}, {}, {}, True),
        ({"scheduler": {"max_num_seqs": 16}}, {}, {"port": 1, "api_key": ("secret",)}, True),
        ({"engine_process": True, "graph": {"enforce_eager": True}}, {"names": ("a", "b")}, {}, True),
        ({"model": {"revision": "other", "seed": 0}}, {}, {}, False),
        ({"model": {"revision": "main", "seed": 1}}, {}, {}, False),
        ({"cache": {"kv_cache_dtype": "fp8"}}, {}, {}, False),
        ({}, {"dtype": "float32"}, {}, False), ({}, {"root": "other"}, {}, False),
        ({}, {"default_sampling_params": {"temperature": 0.5}}, {}, False),
        ({}, {}, {"default_chat_template_kwargs": {"enable_thinking": False}}, False),
    ],
)  # fmt: skip
def test_what_changes_the_fingerprint(settings: Any, model: Any, server: Any, same: bool) -> None:
    first = fingerprint_of(Settled(BASE), ServerSettings(), None)
    other = fingerprint_of(Settled({**BASE, **settings}, **model), ServerSettings(**server), None)
    assert (first.name == other.name) == same
    assert fingerprint_of(Settled(BASE), ServerSettings(), "template").name != first.name
    assert "secret" not in json.dumps(other.facts)


async def test_the_start_is_told_if_it_was_timed() -> None:
    app = create_app(FakeEngine(), ServerSettings())
    transport = httpx2.ASGITransport(app=app)
    phase = {"name": "load model", "seconds": 1.0, "pieces": [{"name": "x", "seconds": 0.5}]}
    facts = {"seconds": 1.0, "accounted": 1.0, "phases": [phase]}
    async with httpx2.AsyncClient(transport=transport, base_url="http://server") as client:
        refused = await client.get("/v1/system/startup")
        assert (refused.status_code, "timed" in refused.text) == (400, True)
        app.state.headrace.startup = facts
        assert (await client.get("/v1/system/startup")).json() == {**facts, "engine": None}


async def test_a_dead_engine_is_asked_nothing(connect: Any) -> None:
    engine = FakeEngine("Hello", die_after=1)
    client = connect(engine)
    await client.post(TEXT, json={"prompt": "a"})
    assert (await client.get("/v1/system/determinism")).status_code == 500


async def test_the_application_hears_of_its_end_after_the_engine_s(live: Any) -> None:
    """Otherwise its task is cancelled with the event loop, and uvicorn logs the stack."""
    server = await live(FakeEngine("Hello", die_after=1))
    async with httpx2.AsyncClient() as client:
        await client.post(server.url + TEXT, json={"prompt": "a"})
    assert await server.task == 1
    left = [task for task in asyncio.all_tasks() if "LifespanOn" in repr(task)]
    assert left == []

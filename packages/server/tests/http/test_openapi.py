"""The OpenAPI document: every route of the application is in it, every answer fits it."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from headrace_server import ServerSettings, create_app
from headrace_testing.fakes.engine import FakeEngine
from headrace_testing.fakes.pooling import fake_pooling_model

CHAT = [{"role": "user", "content": "Hi"}]

ASKED: list[tuple[str, str, Any]] = [
    ("GET", "/health", None), ("GET", "/livez", None), ("GET", "/readyz", None),
    ("GET", "/ping", None), ("POST", "/ping", None), ("GET", "/version", None),
    ("GET", "/load", None), ("GET", "/metrics", None), ("GET", "/v1/models", None),
    ("GET", "/v1/models/fake-model", None), ("GET", "/v1/models/other", None),
    ("GET", "/v1/models/a%0Ab", None),
    ("POST", "/v1/completions", {"prompt": "a"}),
    ("POST", "/v1/completions", {"prompt": "a", "stream": True}),
    ("POST", "/v1/completions", {"prompt": ["a", "b"], "logprobs": 2, "n": 2, "echo": True}),
    ("POST", "/v1/completions", {"prompt": "a", "model": "other"}),
    ("POST", "/v1/completions", {"prompt": "a", "temperature": -1}),
    ("POST", "/v1/completions", {}), ("POST", "/v1/completions", []),
    ("POST", "/v1/chat/completions", {"messages": CHAT}),
    ("POST", "/v1/chat/completions", {"messages": CHAT, "stream": True}),
    ("POST", "/v1/chat/completions", {"messages": CHAT, "logprobs": True, "top_logprobs": 2}),
    ("POST", "/v1/chat/completions", {"messages": "x"}),
    ("POST", "/v1/chat/completions/batch", {"messages": [CHAT, CHAT], "logprobs": True}),
    ("POST", "/v1/chat/completions/batch", {"messages": CHAT}),
    ("POST", "/v1/chat/completions/render", {"messages": CHAT, "logit_bias": {"5": 1}}),
    ("POST", "/v1/chat/completions/render", {"messages": "x"}),
    ("POST", "/v1/completions/render", {"prompt": ["a", "b"]}),
    ("POST", "/tokenize", {"prompt": "a", "return_token_strs": True}),
    ("POST", "/tokenize", {"messages": CHAT}), ("POST", "/tokenize", {}),
    ("POST", "/detokenize", {"tokens": [97]}), ("POST", "/detokenize", {"tokens": [-1]}),
    ("POST", "/invocations", {"prompt": "a"}), ("POST", "/invocations", {}),
    ("POST", "/pause", None), ("GET", "/is_paused", None), ("POST", "/resume", None),
    ("POST", "/reset_prefix_cache", None), ("POST", "/start_profile", None),
    ("POST", "/stop_profile", None), ("POST", "/collective_rpc", {"method": "report"}),
    ("POST", "/collective_rpc", {"method": "other"}), ("GET", "/server_info", None),
    ("GET", "/server_info?config_format=json", None), ("GET", "/server_info?config_format=x", None),
]  # fmt: skip

POOLED: list[tuple[str, Any]] = [
    ("/v1/embeddings", {"input": "a"}), ("/v1/embeddings", {"input": ["a", "b"], "dimensions": 2}),
    ("/v1/embeddings", {"input": [1], "encoding_format": "base64", "return_token_ids": True}),
    ("/v1/embeddings", {"messages": CHAT}), ("/v1/embeddings", {"input": "a", "sparse": True}),
    ("/v1/embeddings", {"input": "a", "encoding_format": "bytes"}), ("/v1/embeddings", {}),
    ("/v1/embeddings", {"input": "a", "model": "other"}),
    ("/pooling", {"input": "a"}), ("/pooling", {"input": "a", "task": "embed"}), ("/pooling", []),
    ("/classify", {"input": "a", "return_token_ids": True}), ("/classify", {"input": {}}),
    ("/score", {"text_1": "a", "text_2": ["a", "b"]}), ("/v1/score", {"text_1": "a"}),
    ("/rerank", {"query": "a", "documents": ["a", {"text": "b"}]}), ("/v1/rerank", {}),
    ("/v2/rerank", {"query": "a", "documents": ["a"], "return_documents": False}),
    ("/invocations", {"input": "a"}), ("/invocations", {"texts": ["a"]}),
    ("/v2/embed", {"texts": ["a"], "embedding_types": ["float", "base64"]}), ("/v2/embed", {}),
    ("/v2/embed", {"texts": ["a"], "model": "other"}),
]  # fmt: skip


@pytest.fixture
def application() -> FastAPI:
    engine = FakeEngine("Hello")
    return create_app(engine, ServerSettings(dev_mode=True, enable_tokenizer_info_endpoint=True))


def routes(app: FastAPI) -> Iterator[APIRoute]:
    return (route for route in _flat(app.routes) if isinstance(route, APIRoute))


def _flat(found: Any) -> Iterator[Any]:
    for route in found:
        inner = getattr(getattr(route, "original_router", None), "routes", None)
        yield from _flat(inner) if inner is not None else [route]


def test_every_route_is_in_the_document(application: FastAPI) -> None:
    paths = application.openapi()["paths"]
    refusing = {r.path for r in routes(application) if not r.include_in_schema}
    for route in routes(application):
        path = route.path.replace(":path}", "}")
        if not route.include_in_schema:
            continue
        for method in route.methods:
            assert method.lower() in paths[path], (method, path)
    served = {r.path.replace(":path}", "}") for r in routes(application) if r.include_in_schema}
    assert set(paths) == served
    assert not refusing & served
    assert application.state.headrace.paths - refusing <= served


def test_bodies_and_errors_are_described(application: FastAPI) -> None:
    document = application.openapi()
    assert "HTTPValidationError" not in document["components"]["schemas"]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            where = (method, path)
            assert "422" not in operation["responses"], where
            assert "200" in operation["responses"], where
            if "requestBody" in operation:
                (kind,) = operation["requestBody"]["content"]
                assert kind == "application/json", where
                assert operation["requestBody"]["content"][kind]["schema"], where
                assert {"400", "413", "415"} <= set(operation["responses"]), where
    for path in ("/v1/completions", "/v1/chat/completions"):
        kinds = document["paths"][path]["post"]["responses"]["200"]["content"]
        assert {"application/json", "text/event-stream"} <= set(kinds)


@pytest.mark.parametrize(("method", "path", "body"), ASKED)
async def test_real_answers_fit(connect: Any, method: str, path: str, body: Any) -> None:
    engine = FakeEngine("Hello")
    engine.profiles = []
    await _fits(connect(engine, dev_mode=True), _everything(), method, path, body)


@pytest.mark.parametrize(("path", "body"), POOLED)
async def test_pooled_answers_fit(connect: Any, path: str, body: Any) -> None:
    tasks = ("embed", "token_embed", "classify", "score")
    model = fake_pooling_model(*tasks, embedding_size=4, matryoshka=(), sparse=True)
    client = connect(FakeEngine(model=model))
    document = (await client.get("/openapi.json")).json()
    await _fits(client, document, "POST", path, body)


async def _fits(client: Any, document: Any, method: str, path: str, body: Any) -> None:
    url = "http://localhost" + path
    answer = await client.request(method, url, **({} if body is None else {"json": body}))
    key = path.partition("?")[0]
    if key.startswith("/v1/models/"):
        key = "/v1/models/{name}"
    described = document["paths"][key][method.lower()]["responses"].get(str(answer.status_code))
    assert described is not None, f"{answer.status_code} is not in the document"
    kind = answer.headers.get("content-type", "").partition(";")[0]
    content = described.get("content", {})
    if not answer.content:
        assert not content or answer.status_code == 200
        return
    assert kind in content, f"{kind} is not in the document, but {list(content)}"
    schema = content[kind].get("schema")
    if kind == "application/json" and schema:
        whole = {**schema, "components": document["components"]}
        jsonschema.validate(json.loads(answer.text), whole)


@pytest.mark.parametrize("path", ["/v1/models", "/load", "/tokenize"])
async def test_keys_are_described(connect: Any, path: str) -> None:
    operation = next(iter(_document(api_key=("k",))["paths"][path].values()))
    assert operation["security"] == [{"key": []}]
    schema = operation["responses"]["401"]["content"]["application/json"]["schema"]
    answer = await connect(api_key=("k",)).get(path)
    assert answer.status_code == 401
    jsonschema.validate(answer.json(), schema)
    assert "security" not in next(iter(_document(api_key=("k",))["paths"]["/health"].values()))
    assert "securitySchemes" not in _document()["components"]


@functools.cache
def _everything() -> dict[str, Any]:
    """The document of the application that :func:`test_real_answers_fit` asks."""
    engine = FakeEngine()
    engine.profiles = []
    return create_app(engine, ServerSettings(dev_mode=True)).openapi()


@functools.cache
def _document(**settings: Any) -> dict[str, Any]:
    return create_app(FakeEngine(), ServerSettings(**settings)).openapi()

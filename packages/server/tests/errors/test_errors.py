"""Errors: statuses, bodies, and what they must not say."""

from __future__ import annotations

import logging
import re
from typing import Any

import httpx2
import pytest

from headrace_core.errors import (
    BY_CODE,
    EngineDead,
    GenerateError,
    PromptTooLong,
    QueueFull,
    RequestError,
)
from headrace_core.reliability.failpoints import CANARY
from headrace_server import ServerSettings, create_app
from headrace_server.protocols import base
from headrace_testing.fakes.engine import FakeEngine

URL = "/v1/completions"


@pytest.mark.parametrize(
    ("error", "status", "kind", "param"),
    [
        (RequestError("n = 0: no", param="n"), 400, "BadRequestError", "n"),
        (PromptTooLong(8, 9), 400, "BadRequestError", "prompt"),
        (QueueFull("full", retry_after=2.3), 429, "RateLimitError", None),
        (GenerateError("canary /secret/x"), 500, "InternalServerError", None),
        (EngineDead("canary /secret/x"), 500, "InternalServerError", None),
        (ValueError("canary /secret/x 0x7f"), 500, "InternalServerError", None),
        (KeyError("canary"), 500, "InternalServerError", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.req("SEC-09")
async def test_engine_errors(
    connect: Any, error: Exception, status: int, kind: str, param: str | None, stream: bool
) -> None:
    client = connect(FakeEngine(reject=error))
    answer = await client.post(URL, json={"prompt": "a", "stream": stream})
    assert answer.status_code == status
    body = answer.json()["error"]
    code = "context_length_exceeded" if isinstance(error, PromptTooLong) else status
    assert (body["type"], body["param"], body["code"]) == (kind, param, code)
    assert BY_CODE[body["headrace_code"]].http == status
    assert "canary" not in answer.text
    assert answer.headers.get("retry-after") == ("3" if status == 429 else None)


@pytest.mark.parametrize("stacks", [False, True])
@pytest.mark.parametrize("middleware", [(), ("Raising",), ("raising",)])
async def test_an_unforeseen_error_is_logged_once(
    live: Any, caplog: pytest.LogCaptureFixture, stacks: bool, middleware: tuple[str, ...]
) -> None:
    """Over a real socket: uvicorn does not add a stack to ours. The answer has what all answers have."""
    engine = FakeEngine() if middleware else FakeEngine(reject=KeyError("canary"))
    caplog.set_level(logging.INFO)
    server = await live(
        engine, log_error_stack=stacks, enable_request_id_headers=True,
        middleware=tuple(f"{__name__}.{name}" for name in middleware),
    )  # fmt: skip
    async with httpx2.AsyncClient(base_url=server.url) as client:
        answer = await client.post(URL, json={"prompt": "a"}, headers={"X-Request-Id": "r-1"})
        claude = await client.post(
            "/v1/messages",
            json={
                "model": "fake-model", "max_tokens": 1,
                "messages": [{"role": "user", "content": "a"}],
            },
        )  # fmt: skip
    assert answer.status_code == claude.status_code == 500
    assert answer.json()["error"]["message"].startswith("internal error")
    assert answer.headers["x-request-id"] == "r-1"
    assert claude.json()["type"] == "error"
    stacks_logged = [record for record in caplog.records if record.exc_info]
    assert [record.name for record in stacks_logged] == ["headrace_server.errors.mapping"] * 2
    assert "r-1" in stacks_logged[0].getMessage()


class Raising:
    """An operator's middleware that fails."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            raise KeyError("canary")
        await self._app(scope, receive, send)


async def raising(request: Any, call_next: Any) -> Any:
    """The same as a function."""
    if request.method == "POST":
        raise KeyError("canary")
    return await call_next(request)


async def test_an_error_behind_the_answers_head_is_logged_once(
    live: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The client sees a broken answer: it ends before its length."""
    server = await live(FakeEngine(), middleware=(f"{__name__}.Halfway",))
    async with httpx2.AsyncClient(base_url=server.url) as client:
        with pytest.raises(httpx2.RemoteProtocolError):
            await client.get("/livez")
    stacks = [record.name for record in caplog.records if record.exc_info]
    assert stacks == ["headrace_server.errors.mapping"]


class Halfway(Raising):
    """Fails within an answer."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] != "/livez":
            await self._app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200,
                    "headers": [(b"content-length", b"10")]})  # fmt: skip
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise KeyError("canary")


@pytest.mark.req("SEC-09")
async def test_no_route_tells_what_it_does_not_know() -> None:
    """Every route of an engine that raises whatever it is asked."""

    class Broken(FakeEngine):
        def __getattribute__(self, name: str) -> Any:
            if name in ("generate", "abort", "tokenize", "detokenize", "stats", "check_health",
                        "reset_prefix_cache"):  # fmt: skip
                raise RuntimeError(CANARY)
            return super().__getattribute__(name)

    app = create_app(Broken(), ServerSettings(enable_tokenizer_info_endpoint=True))
    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
    bodies = ({"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}, {"tokens": [65]},
              {"prompt": "a", "stream": True}, {"input": "a"}, {"token_ids": [65]})  # fmt: skip
    seen = set()
    async with httpx2.AsyncClient(transport=transport, base_url="http://server") as client:
        for path in app.state.headrace.paths:
            for method in ("GET", "POST"):
                for body in bodies if method == "POST" else (None,):
                    answer = await client.request(method, path, json=body)
                    seen.add(answer.status_code)
                    assert "canary" not in answer.text, (method, path, body)
                    assert "RuntimeError" not in answer.text, (method, path, body)
    assert 500 in seen


@pytest.mark.parametrize(
    ("kind", "body", "code"),
    [
        ("application/json", b"{", "HR-REQ-006"),
        ("text/plain", b"{}", "HR-REQ-007"),
        ("application/json", b"{}", "HR-REQ-001"),
        ("application/json", b'{"prompt": "a", "temperature": -1}', "HR-REQ-005"),
        ("application/json", b'{"prompt": "a", "model": "other"}', "HR-REQ-004"),
    ],
)
async def test_stable_codes(connect: Any, kind: str, body: bytes, code: str) -> None:
    answer = await connect().post(URL, content=body, headers={"Content-Type": kind})
    assert answer.json()["error"]["headrace_code"] == code
    assert BY_CODE[code].http == answer.status_code


async def test_errors_inside_a_stream(connect: Any, events: Any) -> None:
    client = connect(FakeEngine("long text", fail_after=3))
    answer = await client.post(URL, json={"prompt": "a", "stream": True})
    assert answer.status_code == 200
    chunks = events(answer.text)
    assert [c["choices"][0]["text"] for c in chunks[:-1]] == ["l", "o", "n"]
    assert chunks[-1]["error"]["code"] == 500


async def test_one_failure_leaves_others_alone(connect: Any) -> None:
    client = connect(FakeEngine("text", fail_after=2))
    answer = await client.post(URL, json={"prompt": ["a", "b"], "stream": False})
    assert answer.status_code in (200, 500)  # a whole answer is one output: below the limit
    assert (await client.get("/health")).status_code == 200


async def test_unknown_model(connect: Any) -> None:
    for url, body in (
        (URL, {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
    ):
        answer = await connect().post(url, json={**body, "model": "other"})
        assert answer.status_code == 404
        assert answer.json()["error"]["param"] == "model"
        assert answer.json()["error"]["type"] == "NotFoundError"


async def test_unknown_routes_and_methods(connect: Any) -> None:
    client = connect()
    for path, near in (
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/models", "/v1/models"),
        ("/v1/health", "/health"),
        ("/v1/chat/completion", "/v1/chat/completions"),
    ):
        answer = await client.get(path)
        error = answer.json()["error"]
        assert answer.status_code == error["code"] == 404
        assert error["message"].endswith(f"did you mean {near}?")
        assert error["headrace_code"] == "HR-REQ-010"
    error = (await client.get("/nothing/like/it")).json()["error"]
    assert "/v1" in error["message"]
    answer = await client.get(URL)
    assert answer.status_code == answer.json()["error"]["code"] == 405
    assert "POST" in answer.json()["error"]["message"]
    assert answer.headers["allow"] == "POST"


async def test_the_root_says_what_this_is(connect: Any) -> None:
    client = connect()
    facts = (await client.get("/")).json()
    assert facts["name"] == "headrace"
    assert facts["models"]
    assert facts["links"]["models"] == "/v1/models"
    assert "/v1/chat/completions" in facts["paths"]
    page = await client.get("/", headers={"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    assert page.headers["content-type"].startswith("text/html")
    assert "/v1/models" in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "application/vnd.api+json", None]
)
async def test_only_json_is_read(connect: Any, kind: str | None) -> None:
    headers = {"content-type": kind} if kind else {}
    answer = await connect().post(URL, content=b'{"prompt": "a"}', headers=headers)
    assert answer.status_code == 400
    assert "application/json" in answer.json()["error"]["message"]
    answer = await connect().post(
        URL, content=b'{"prompt": "a"}', headers={"content-type": "Application/JSON; charset=utf8"}
    )
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"3", b'"x"', b"null", b'{"prompt": NaN}', b"\xff", b"[" * 100_000,
     b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}"],
)  # fmt: skip
@pytest.mark.req("SEC-11")
async def test_bodies_that_are_no_request(connect: Any, body: bytes) -> None:
    answer = await connect().post(URL, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == 400


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0), ("n", 129), ("n", "x"), ("n", 1.5), ("temperature", -1), ("top_p", 0),
        ("top_p", 1.1), ("top_k", -2), ("min_p", 2), ("frequency_penalty", 3),
        ("presence_penalty", -3), ("repetition_penalty", 0), ("logprobs", -1), ("logprobs", 21),
        ("prompt_logprobs", -2), ("prompt_logprobs", -1), ("max_tokens", -1), ("seed", 2**63),
        ("stop", [""]), ("stop", ["x"] * 65), ("stop", 3), ("stop_token_ids", [-1]),
        ("logit_bias", {"x": 1}), ("logit_bias", {"99999999": 1}), ("logit_bias", {"1": "x"}),
        ("truncate_prompt_tokens", -2), ("truncate_prompt_tokens", 0), ("allowed_token_ids", []),
        ("cache_salt", ""), ("prompt", []), ("prompt", [[]]), ("prompt", ["a", 1]),
        ("prompt", [1, "a"]), ("prompt", {"a": 1}), ("prompt", None), ("prompt", [1.5]),
        ("prompt", [-1]), ("prompt", ["a"] * 1025), ("stream", "perhaps"), ("suffix", "x"),
        ("prompt_embeds", "AA=="), ("min_tokens", 17), ("temperature", "hot"),
    ],
)  # fmt: skip
@pytest.mark.req("SEC-13")
async def test_ranges(connect: Any, field: str, value: Any) -> None:
    engine = FakeEngine()
    answer = await connect(engine).post(URL, json={"prompt": "a", field: value})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert re.split(r"[.\[]", error["param"])[0] == field
    assert field in error["message"]
    assert engine.requests == []


async def test_missing_fields(connect: Any) -> None:
    answer = await connect().post(URL, json={})
    assert answer.json()["error"]["param"] == "prompt"
    answer = await connect().post("/v1/chat/completions", json={"messages": []})
    assert answer.json()["error"]["param"] == "messages"


@pytest.mark.req("SEC-13")
async def test_products_are_bounded(connect: Any) -> None:
    body = {"prompt": ["a"] * 64, "n": 128}
    answer = await connect().post(URL, json=body)
    assert answer.status_code == 400
    assert str(base.MAX_SEQUENCES) in answer.json()["error"]["message"]


@pytest.mark.req("SEC-13")
async def test_every_schema_field_has_a_bound() -> None:
    """Walk the schemas: no number without a maximum, no text or list without a length."""
    from headrace_server.protocols.openai.bodies.chat import ChatRequest
    from headrace_server.protocols.openai.bodies.completions import CompletionRequest
    from headrace_server.protocols.openai.bodies.generate import GenerateRequest
    from headrace_server.protocols.openai.bodies.tokenize import (
        DetokenizeRequest,
        TokenizeChatRequest,
        TokenizeTextRequest,
    )

    for model in (
        ChatRequest, CompletionRequest, GenerateRequest, TokenizeTextRequest, TokenizeChatRequest,
        DetokenizeRequest,
    ):  # fmt: skip
        schema = model.model_json_schema()
        parts = [schema, *schema.get("$defs", {}).values()]
        for part in parts:
            for name, field in part.get("properties", {}).items():
                _bounded(f"{model.__name__}.{name}", field)


def _bounded(where: str, field: dict[str, Any]) -> None:
    for option in [*field.get("anyOf", []), *field.get("oneOf", [])]:
        _bounded(where, option)
    match field.get("type"):
        case "string":
            assert field.keys() & {"maxLength", "enum", "const"}, where
        case "integer" | "number":
            assert field.keys() & {"maximum", "exclusiveMaximum", "const"}, where
        case "array":
            assert "maxItems" in field, where
            _bounded(where + "[]", field["items"])
        case "object" if isinstance(field.get("additionalProperties"), dict):
            assert "maxProperties" in field, where
            _bounded(where + "{}", field["additionalProperties"])


@pytest.mark.req("SEC-13")
async def test_deep_free_values_are_refused(connect: Any) -> None:
    deep: Any = 1
    for _ in range(100):
        deep = [deep]
    hi = [{"role": "user", "content": "a"}]
    for field in ("chat_template_kwargs", "headrace_xargs"):
        answer = await connect().post(
            "/v1/chat/completions", json={"messages": hi, field: {"x": deep}}
        )
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].split(".")[0] == field


@pytest.mark.req("SEC-16")
async def test_unknown_fields(connect: Any, caplog: pytest.LogCaptureFixture) -> None:
    client = connect(FakeEngine("x"))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            answer = await client.post(URL, json={"prompt": "a", "temprature": 1})
            assert answer.status_code == 200
    assert len([r for r in caplog.records if "temprature" in r.getMessage()]) == 1
    metrics = (await client.get("/metrics")).text
    assert "headrace:unknown_request_fields_total 3.0" in metrics


async def test_strict_requests(connect: Any) -> None:
    client = connect(strict_requests=True)
    answer = await client.post(URL, json={"prompt": "a", "temprature": 1})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "temprature"
    assert "'temperature'" in answer.json()["error"]["message"]


@pytest.mark.req("SEC-20")
async def test_limits_of_head_and_body(connect: Any) -> None:
    client = connect(h11_max_header_count=20, max_body_bytes=1000)
    headers = {f"x-{i}": "v" for i in range(30)}
    assert (await client.get("/version", headers=headers)).status_code == 431
    assert (await client.post(URL, json={"prompt": "a" * 2000})).status_code == 413

    async def chunks() -> Any:
        for _ in range(20):
            yield b"x" * 100

    answer = await client.post(URL, content=chunks(), headers={"content-type": "application/json"})
    assert answer.status_code == 413
    assert (await client.post(URL, json={"prompt": "a"})).status_code == 200


async def test_other_ranks_are_refused(connect: Any) -> None:
    answer = await connect().post(URL, json={"prompt": "a"}, headers={"X-data-parallel-rank": "1"})
    assert answer.status_code == 400


@pytest.mark.parametrize(
    ("url", "body", "theirs", "ours"),
    [
        (URL, {"prompt": [1]}, "prompt_token_ids", "prompt"),
        ("/v1/chat/completions", {"max_completion_tokens": 9}, "max_tokens", "max_completion_tokens"),
        ("/v1/chat/completions", {"max_tokens": 9}, "max_tokens", "max_tokens"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
async def test_fields_are_named_as_the_client_spelled_them(
    connect: Any, url: str, body: Any, theirs: str, ours: str, stream: bool
) -> None:
    client = connect(FakeEngine(reject=RequestError("no", param=theirs)))
    said = {} if url == URL else {"messages": [{"role": "user", "content": "a"}]}
    answer = await client.post(url, json={**said, "stream": stream, **body})
    assert answer.json()["error"]["param"] == ours


async def test_a_refusal_logs_its_reason_and_not_its_content(connect: Any, caplog: Any) -> None:
    secret = "the-secret-of-the-prompt"
    with caplog.at_level("INFO", "headrace_server.errors.mapping"):
        for body in ({"prompt": secret, "max_tokens": secret}, {"prompt": secret, "model": secret}):
            answer = await connect().post(URL, json=body)
            assert answer.status_code in (400, 404)
    first, second = [record.getMessage() for record in caplog.records]
    assert "400" in first
    assert "max_tokens" in first
    assert "model" in second
    assert secret not in caplog.text


@pytest.mark.parametrize(
    ("status", "said", "body", "headers"),
    [
        (400, "not valid JSON", b'{"prompt": "the-secret", ', {}),
        (400, "names, objects and lists", b"[" + b"{}," * 140_000 + b'"the-secret"]', {}),
        (400, "nested", b'{"the-secret": ' + b"[" * 900 + b"]" * 900 + b"}", {}),
        (400, "Content-Type must be", b"the-secret", {"Content-Type": "text/the-secret"}),
        (413, "larger than", b'{"prompt": "the-secret"}' + b" " * 20_000_000, {}),
        (415, "compressed", b"the-secret", {"Content-Encoding": "the-secret"}),
        (431, "header lines", b"{}", {f"x-{n}": "the-secret" for n in range(300)}),
    ],
)  # fmt: skip
async def test_a_body_that_is_not_read_is_logged_with_its_reason(
    connect: Any, caplog: Any, status: int, said: str, body: bytes, headers: dict[str, str]
) -> None:
    headers = {"Content-Type": "application/json", **headers}
    with caplog.at_level("INFO", "headrace_server"):
        answer = await connect().post(URL, content=body, headers=headers)
    assert answer.status_code == status
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"refused: {status} " in line
    assert "None" not in line
    assert said in line
    assert "the-secret" not in line

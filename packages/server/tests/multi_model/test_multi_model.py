"""Several models behind one port: which one answers, what is asked of all, coming and leaving."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace_core.errors import ConfigError, ModelError, UnknownModel
from headrace_server import ServerSettings, create_app
from headrace_server.multi_model.front import create_front
from headrace_server.multi_model.loading import LoadedModel
from headrace_server.multi_model.models import Models, OneModel
from headrace_server.multi_model.naming import read_name
from headrace_testing.fakes.engine import FakeEngine, fake_served_model
from headrace_testing.fakes.speech import FakeSpeech, wav_file

KEY = {"Authorization": "Bearer key"}


def engine(name: str, *names: str, **changes: Any) -> FakeEngine:
    speech = FakeSpeech() if "transcription" in changes.get("tasks", ()) else None
    model = fake_served_model(name=name, names=(name, *names), **changes)
    return FakeEngine(f"{name} says", model=model, speech=speech)


class FakeLoader:
    """Makes fakes of entries; remembers what was freed."""

    budget: Mapping[str, int]

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.freed: list[str] = []
        self.was_left = False
        self.engines: weakref.WeakValueDictionary[str, FakeEngine] = weakref.WeakValueDictionary()
        self.budget = {"total": 10, "claimed": 4, "free": 6, "resident": 5}
        self.wait = asyncio.Event()
        self.wait.set()

    def name_of(self, entry: Mapping[str, Any]) -> str:
        if "name" not in entry:
            raise ConfigError("name = None: each entry must have one, a text", field="name")
        return str(entry["name"])

    def load(self, entry: Mapping[str, Any]) -> LoadedModel:
        if entry.get("model") == "broken":
            raise ModelError("model 'guest': the file is cut off")
        made = engine(str(entry["name"]), *entry.get("names", ()))
        self.engines[made.model.name] = made
        return LoadedModel(made, self.settings)

    def unloaded(self, name: str) -> None:
        gc.collect()
        self.freed.append(name)
        self.was_left = name in self.engines

    def memory_of(self, name: str) -> Mapping[str, int]:
        return {"weights": 3}


class Server:
    """A front over fakes, and a client of it."""

    def __init__(self, *engines: FakeEngine, **settings: Any) -> None:
        self.settings = ServerSettings(**settings)
        self.loader = FakeLoader(self.settings)
        self.engines = {one.model.name: one for one in engines}
        loaded = [LoadedModel(one, self.settings) for one in engines]
        self.app = create_front(loaded, self.settings, self.loader)
        self.client = client_of(self.app)
        self.whole = self.app.state.headrace


async def states_of(server: Server) -> dict[str, str]:
    found = (await server.client.get("/models")).json()["models"]
    return {one["name"]: one["state"] for one in found}


def client_of(app: Any) -> httpx2.AsyncClient:
    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx2.AsyncClient(transport=transport, base_url="http://server", headers=KEY)


POOLS = ("embed", "token_embed")


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server(
        engine("chat", "chat-alias"),
        engine("small", tasks=POOLS),
        engine("rank", tasks=("score", "classify")),
        engine("ears", tasks=("transcription",)),
        api_key=("key",),
        enable_control_routes=True,
    )
    yield made
    await made.client.aclose()


REQUESTS = {
    "chat": ("/v1/chat/completions", "chat", {"messages": [{"role": "user", "content": "Hi"}]}),
    "stream": ("/v1/completions", "chat", {"prompt": "a", "stream": True}),
    "completion": ("/v1/completions", "chat", {"prompt": ["a", "b"], "logprobs": 1}),
    "anthropic": ("/v1/messages", "chat",
                  {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}),
    "responses": ("/v1/responses", "chat", {"input": "Hi"}),
    "alias": ("/v1/completions", "chat-alias", {"prompt": "a"}),
    "tokens": ("/tokenize", "chat", {"prompt": "abc"}),
    "invocation": ("/invocations", "chat", {"prompt": "abc"}),
    "embeddings": ("/v1/embeddings", "small", {"input": ["one", "two"]}),
    "base64": ("/v1/embeddings", "small", {"input": "one", "encoding_format": "base64"}),
    "pooling": ("/pooling", "small", {"input": "one", "task": "token_embed"}),
    "rerank": ("/v2/rerank", "rank", {"query": "q", "documents": ["a", "b"]}),
    "score": ("/score", "rank", {"text_1": "q", "text_2": ["a", "b"]}),
    "classes": ("/classify", "rank", {"input": "one"}),
    "unserved": ("/v1/embeddings", "chat", {"input": "one"}),
    "wrong field": ("/v1/completions", "chat", {"prompt": "a", "n": 0}),
    "wrong name type": ("/v1/completions", 7, {"prompt": "a"}),
    "anthropic error": ("/v1/messages", "chat", {"messages": [], "max_tokens": -1}),
}  # fmt: skip


@pytest.mark.parametrize("kind", REQUESTS)
async def test_answers_are_those_of_a_server_of_that_model_alone(server: Any, kind: str) -> None:
    path, name, body = REQUESTS[kind]
    alone = client_of(create_app(_engine_of(server, name), server.settings))
    body = {"model": name, **body}
    answers = [await client.post(path, json=body) for client in (server.client, alone)]
    together, single = map(_comparable, answers)
    assert together == single


def _engine_of(server: Any, name: Any) -> Any:
    models = server.whole.engine._models
    return (models.find(name) if isinstance(name, str) else next(iter(models))).state.engine


def _comparable(answer: httpx2.Response) -> Any:
    """What does not depend on when, and on random ids."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: clean(v) for k, v in value.items() if k not in _CHANGING}
        return [clean(item) for item in value] if isinstance(value, list) else value

    texts = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    parsed = [clean(json.loads(t)) if t.startswith("{") else t for t in texts]
    return answer.status_code, answer.headers["content-type"], parsed


_CHANGING = ("id", "created", "created_at", "completed_at", "item_id")


@pytest.mark.parametrize(
    ("method", "path", "content", "kind"),
    [
        ("POST", "/nowhere", b"{}", "application/json"),
        ("DELETE", "/v1/completions", b"", ""),
        ("POST", "/v1/completions", b"{", "application/json"),
        ("POST", "/v1/completions", b"[1]", "application/json"),
        ("POST", "/v1/completions", b"{}", "text/plain"),
        ("POST", "/v1/audio/transcriptions", b"no form", "multipart/form-data; boundary=x"),
    ],
)
async def test_what_no_model_could_answer_is_refused_as_by_one(
    server: Any, method: str, path: str, content: bytes, kind: str
) -> None:
    name = "ears" if "audio" in path else "chat"
    alone = client_of(create_app(_engine_of(server, name), server.settings))
    headers = {"content-type": kind} if kind else {}
    answers = [
        await client.request(method, path, content=content, headers=headers)
        for client in (server.client, alone)
    ]
    assert _comparable(answers[0])[:2] == _comparable(answers[1])[:2]
    assert 400 <= answers[0].status_code < 500


async def test_unknown_and_missing_models(server: Any) -> None:
    unknown = await server.client.post("/v1/completions", json={"model": "x", "prompt": "a"})
    assert unknown.status_code == 404
    assert unknown.json()["error"]["message"] == (
        "model 'x' is not served; served: 'chat', 'chat-alias', 'small', 'rank', 'ears'"
    )
    missing = await server.client.post("/v1/completions", json={"prompt": "a"})
    assert missing.status_code == 400
    assert missing.json()["error"]["param"] == "model"
    assert "'chat', 'chat-alias', 'small'" in missing.json()["error"]["message"]
    anthropic = await server.client.post("/v1/messages", json={"model": "x"})
    assert (anthropic.status_code, anthropic.json()["type"]) == (404, "error")


async def test_a_byte_order_mark_does_not_hide_the_model(server: Any) -> None:
    body = b"\xef\xbb\xbf" + json.dumps({"model": "chat", "prompt": "Hi"}).encode()
    headers = {"content-type": "application/json"}
    answer = await server.client.post("/v1/completions", content=body, headers=headers)
    assert (answer.status_code, answer.json()["model"]) == (200, "chat")


@pytest.mark.parametrize("first", [True, False])
async def test_a_form_names_its_model_before_the_file_or_after(server: Any, first: bool) -> None:
    field = b'--B\r\nContent-Disposition: form-data; name="model"\r\n\r\nears\r\n'
    file = (
        b'--B\r\nContent-Disposition: form-data; name="file"; filename="model"\r\n\r\n'
        + wav_file([0] * 16000)
        + b"\r\n"
    )
    body = (field + file if first else file + field) + b"--B--\r\n"
    answer = await server.client.post(
        "/v1/audio/transcriptions",
        content=body,
        headers={"content-type": "multipart/form-data; boundary=B"},
    )
    assert (answer.status_code, "text" in answer.json()) == (200, True), answer.text


async def test_a_form_is_read_no_further_than_its_model() -> None:
    parts = [
        b'--B\r\nContent-Disposition: form-data; name="model"\r\n\r\nea',
        b'rs\r\n--B\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n',
        b"0" * 100,
    ]
    taken: list[int] = []

    async def receive() -> dict[str, Any]:
        taken.append(len(taken))
        return {"type": "http.request", "body": parts[taken[-1]], "more_body": taken[-1] < 2}

    kind = b"multipart/form-data; boundary=B"
    named = await read_name(
        {"type": "http", "headers": [(b"content-type", kind)], "query_string": b""}, receive
    )
    assert (named.name, taken) == ("ears", [0, 1])
    again = [(await named.receive())["body"] for _ in range(3)]
    assert again == parts


@pytest.mark.req("REL-21")
async def test_a_body_that_holds_too_much_names_nothing(server: Any) -> None:
    """The body is not decoded for its model's name; the model that gets it says what is too much."""
    fields = ",".join(f'"a{number}":1' for number in range(140_000))
    for body in ('{"model": "chat", "prompt": "a"}', f'{{"model": "chat", {fields}}}'):
        answer = await server.client.post(
            "/v1/completions", content=body, headers={"content-type": "application/json"}
        )
        assert answer.status_code == (200 if len(body) < 100 else 400), answer.text[:300]
    assert "131072 names" in answer.json()["error"]["message"]
    large = await server.client.post(
        "/v1/completions", json={"model": "chat", "prompt": "a", "user": "b" * 300_000}
    )
    assert "user" in large.text
    assert large.status_code == 400


async def test_requests_without_a_body_name_their_model_in_the_query(server: Any) -> None:
    pause = await server.client.post("/pause?model=small")
    assert pause.status_code == 200
    assert await states_of(server) == {
        "chat": "ready",
        "small": "paused",
        "rank": "ready",
        "ears": "ready",
    }
    nameless = await server.client.post("/pause")
    assert nameless.status_code == 400
    assert "?model=NAME" in nameless.json()["error"]["message"]


async def test_what_is_asked_of_all(server: Any) -> None:
    listed = (await server.client.get("/v1/models")).json()["data"]
    assert [card["id"] for card in listed] == ["chat", "chat-alias", "small", "rank", "ears"]
    assert (await server.client.get("/v1/models/rank")).json()["id"] == "rank"
    assert (await server.client.get("/v1/models/nope")).status_code == 404
    await server.client.post("/v1/embeddings", json={"model": "small", "input": "one"})
    await server.client.post("/v1/completions", json={"model": "chat", "prompt": "one"})
    text = (await server.client.get("/metrics")).text
    found = {family.name: family for family in text_string_to_metric_families(text)}
    success = found["headrace:request_success"].samples
    counted = {s.labels["model_name"] for s in success if s.value and s.name.endswith("_total")}
    assert counted == {"small", "chat"}
    handlers = {s.labels["handler"] for s in found["headrace:http_requests"].samples}
    assert handlers == {"/v1/models", "/v1/models/{name}", "/v1/embeddings", "/v1/completions"}
    document = (await server.client.get("/openapi.json")).json()
    assert {"/v1/chat/completions", "/v1/embeddings", "/models/load", "/health"} <= set(
        document["paths"]
    )


async def test_health_is_the_worst_of_all(server: Any) -> None:
    assert (await server.client.get("/health")).status_code == 200
    server.engines["rank"].kill("it fell")
    assert (await server.client.get("/health")).status_code == 503
    ready = await server.client.get("/readyz")
    assert ready.json()["reasons"] == ["rank: engine dead: the engine has stopped"]
    alive = await server.client.post("/v1/completions", json={"model": "chat", "prompt": "a"})
    assert alive.status_code == 200
    assert server.whole.engine.dead_error is None
    assert (await server.client.post("/models/unload", json={"name": "rank"})).status_code == 200
    assert (await server.client.get("/health")).status_code == 200


async def test_keys_stand_before_all_models(server: Any) -> None:
    for path in ("/v1/completions", "/models/load", "/models/unload", "/nowhere"):
        answer = await server.client.post(path, json={}, headers={"Authorization": "Bearer x"})
        assert answer.status_code == 401, path


async def test_loading_and_unloading(server: Any) -> None:
    entry = {"name": "guest", "names": ["visitor"]}
    loaded = await server.client.post("/models/load", json=entry)
    assert loaded.status_code == 200
    assert (loaded.json()["state"], loaded.json()["memory"]) == ("ready", {"weights": 3})
    for name in ("guest", "visitor"):
        answer = await server.client.post("/v1/completions", json={"model": name, "prompt": "a"})
        assert answer.json()["choices"][0]["text"] == "guest says"
    again = await server.client.post("/models/load", json=entry)
    assert (again.status_code, again.json()["error"]["param"]) == (409, "name")
    clash = await server.client.post("/models/load", json={"name": "new", "names": ["visitor"]})
    assert clash.status_code == 409
    assert server.loader.freed == ["new"]
    guest = server.loader.engines["guest"]
    assert (await server.client.post("/models/unload", json={"name": "guest"})).status_code == 200
    assert guest.shut_down
    gone = await server.client.post("/v1/completions", json={"model": "visitor", "prompt": "a"})
    assert gone.status_code == 404
    assert server.loader.freed == ["new", "guest"]


async def test_nothing_of_a_model_stays_when_memory_is_given_back(server: Any) -> None:
    await server.client.post("/models/load", json={"name": "guest"})
    await server.client.post("/v1/completions", json={"model": "guest", "prompt": "a"})
    assert "guest" in server.loader.engines
    await server.client.post("/models/unload", json={"name": "guest"})
    assert not server.loader.was_left


@pytest.mark.parametrize(
    ("entry", "param", "text"),
    [
        ({"name": "guest", "model": "broken"}, None, "model 'guest': the file is cut off"),
        ({}, "name", "name = None: each entry must have one, a text"),
    ],
)
async def test_what_cannot_be_loaded_says_why(
    server: Any, entry: Any, param: str | None, text: str
) -> None:
    answer = await server.client.post("/models/load", json=entry)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, text)
    assert answer.json()["error"]["param"] == param
    models = (await server.client.get("/models")).json()
    assert [one["name"] for one in models["models"]] == ["chat", "small", "rank", "ears"]
    assert models["budget"]["total"] == 10


async def test_a_model_drains_before_it_leaves() -> None:
    gate = asyncio.Event()
    slow = FakeEngine("slow", model=fake_served_model(name="slow", names=("slow",)), gate=gate)
    server = Server(slow, engine("other"), api_key=("key",), enable_control_routes=True)
    body = {"model": "slow", "prompt": "a"}
    running = asyncio.create_task(server.client.post("/v1/completions", json=body))
    while not slow.requests:
        await asyncio.sleep(0)
    unloading = asyncio.create_task(server.client.post("/models/unload", json={"name": "slow"}))
    while (states := await states_of(server)) != {"other": "ready", "slow": "draining"}:
        assert states == {"other": "ready", "slow": "ready"}
        await asyncio.sleep(0)
    assert (await server.client.post("/v1/completions", json=body)).status_code == 404
    assert (await server.client.get("/health")).status_code == 200
    gate.set()
    assert (await running).json()["choices"][0]["text"] == "slow"
    assert (await unloading).status_code == 200
    assert slow.shut_down


async def test_what_does_not_end_in_time_is_ended() -> None:
    slow = FakeEngine("slow", model=fake_served_model(name="slow", names=("slow",)),
                      gate=asyncio.Event())  # fmt: skip
    server = Server(slow, engine("other"), api_key=("key",), enable_control_routes=True)
    body = {"model": "slow", "prompt": "a"}
    running = asyncio.create_task(server.client.post("/v1/completions", json=body))
    while not slow.requests:
        await asyncio.sleep(0)
    unload = {"name": "slow", "drain_timeout": 0.0}
    assert (await server.client.post("/models/unload", json=unload)).status_code == 200
    assert (await running).status_code == 503
    other = await server.client.post("/v1/completions", json={"model": "other", "prompt": "a"})
    assert other.status_code == 200


async def test_one_model_takes_everything_and_none_says_so() -> None:
    server = Server(engine("chat"), api_key=("key",), enable_control_routes=True)
    assert (await server.client.post("/v1/completions", json={"prompt": "a"})).status_code == 200
    await server.client.post("/models/unload", json={"name": "chat"})
    answer = await server.client.post("/v1/completions", json={"prompt": "a"})
    assert answer.status_code == 404
    assert "no model is served" in answer.json()["error"]["message"]
    assert (await server.client.get("/health")).status_code == 200


async def test_draining_and_stopping_reach_every_model(server: Any) -> None:
    models = server.whole.engine._models
    server.whole.lifecycle.begin_drain()
    assert all(model.state.lifecycle.draining for model in models)
    refused = await server.client.post("/v1/completions", json={"model": "chat", "prompt": "a"})
    assert refused.status_code == 503
    await server.whole.engine.shutdown()
    assert len(models) == 0


async def test_control_stays_off_without_its_flag() -> None:
    server = Server(engine("a"), engine("b"), api_key=("key",))
    assert (await server.client.post("/models/load", json={})).status_code == 404
    with pytest.raises(ConfigError, match="needs a key"):
        Server(engine("a"), enable_control_routes=True)


async def test_the_admin_port_controls_each_model() -> None:
    server = Server(engine("a"), engine("b"), admin_port=0, admin_api_key=("key",))
    admin = httpx2.AsyncClient(
        transport=httpx2.ASGITransport(app=server.whole.admin), base_url="http://localhost",
        headers=KEY,
    )  # fmt: skip
    assert (await admin.post("/pause?model=b")).status_code == 200
    assert (await admin.get("/is_paused?model=b")).json() == {"is_paused": True}
    assert (await admin.get("/is_paused?model=a")).json() == {"is_paused": False}
    assert (await admin.post("/models/load", json={"name": "c"})).status_code == 200
    assert (await server.client.post("/models/load", json={"name": "d"})).status_code in (401, 404)
    assert (await admin.post("/v1/completions", json={"model": "a"})).status_code == 404


def test_models_by_name() -> None:
    models = Models()
    app = create_app(engine("a", "b"), ServerSettings())
    one = OneModel(app, app.state.headrace)
    models.add(one)
    assert models.find("b") is one
    models.remove(one)
    with pytest.raises(UnknownModel, match="none at present"):
        models.find("a")

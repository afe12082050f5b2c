"""Applications over a fake engine: in memory, and on a real loopback port."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import inspect
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import fastapi.dependencies.models
import fastapi.dependencies.utils
import fastapi.routing
import httpx2
import prometheus_client.metrics
import pytest

from headrace_core.engine import EngineClient
from headrace_server import ServerSettings, bind, create_app, serve
from headrace_server.observability import fingerprint
from headrace_server.run import bind_admin
from headrace_server.state import ServerState
from headrace_testing import waiting
from headrace_testing.fakes.engine import FakeEngine

Connect = Callable[..., httpx2.AsyncClient]


@pytest.fixture(scope="session", autouse=True)
def _fields_are_made_once() -> Iterator[None]:
    """Hundreds of applications are made, with equal models in their routes, whose validators are
    half of the work. And what is there before the first test is no garbage."""
    made = functools.cache(fastapi.routing.create_model_field)

    def field(**values: Any) -> Any:
        return made(**values) if values.keys() <= {"name", "type_", "mode"} else make(**values)

    make = fastapi.routing.create_model_field
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fastapi.routing, "create_model_field", field)
        for module, name in (
            (fastapi.dependencies.utils, "get_typed_signature"),
            (fastapi.routing, "get_typed_return_annotation"),
        ):
            patch.setattr(module, name, _read_once(getattr(module, name)))
        patch.setattr(fastapi.dependencies.utils, "analyze_param", _analyzed_once())
        if hasattr(fastapi.dependencies.models, "_CallIdentity"):  # older versions have none
            patch.setattr(fastapi.dependencies.models, "_CallIdentity", _ByCode)
        numbers = functools.cache(prometheus_client.metrics.floatToGoString)
        patch.setattr(prometheus_client.metrics, "floatToGoString", numbers)
        patch.setattr(fingerprint, "_version", functools.cache(fingerprint._version))
        yield


class _ByCode:
    """A function by its code, which says what kind of function it is; anything else by itself."""

    def __init__(self, call: Callable[..., Any]) -> None:
        is_plain = inspect.isfunction(call) and not hasattr(call, "__wrapped__")
        self.call = call
        self.key: object = call.__code__ if is_plain else id(call)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByCode) and self.key == other.key


def _read_once(make: Callable[[Callable[..., Any]], Any]) -> Callable[[Callable[..., Any]], Any]:
    """What FastAPI reads of a route's signature, shared by those of one code with the same defaults and
    annotations."""
    made: dict[tuple[Any, ...], tuple[object, Any]] = {}

    def signature(call: Callable[..., Any]) -> Any:
        if not inspect.isfunction(call) or hasattr(call, "__wrapped__"):
            return make(call)
        values = (call.__kwdefaults__ or {}, call.__annotations__)
        given = [*(call.__defaults__ or ()), *(v for each in values for v in each.values())]
        key = call.__code__, *map(id, given)
        if key not in made:
            made[key] = given, make(call)  # what the ids are of is kept
        return made[key][1]

    return signature


def _analyzed_once() -> Callable[..., Any]:
    """FastAPI's reading of a route's parameter, shared by those of one name, annotation and default: it makes
    a validator of it. Dependencies are the application's own, and are read each time."""
    make = fastapi.dependencies.utils.analyze_param
    made: dict[tuple[Any, ...], tuple[object, Any]] = {}

    def analyze(*, param_name: str, annotation: Any, value: Any, **place: Any) -> Any:
        # Whether it is part of the path is said as such by older versions, by the path's names by others.
        in_path = place.get("is_path_param") or param_name in place.get("path_param_names", ())
        key = param_name, id(annotation), id(value), in_path
        if key in made:
            return made[key][1]
        found = make(param_name=param_name, annotation=annotation, value=value, **place)
        if found.depends is None:
            made[key] = (annotation, value), found  # what the ids are of is kept
        return found

    return analyze


@pytest.fixture(autouse=True)
def _no_keys_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEADRACE_API_KEY", "HEADRACE_ADMIN_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """``connect(engine, **settings)``: a client of an application in memory."""
    opened: list[httpx2.AsyncClient] = []

    def make(engine: EngineClient | None = None, **settings: Any) -> httpx2.AsyncClient:
        app = create_app(engine or FakeEngine(), ServerSettings(**settings))
        transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
        client = httpx2.AsyncClient(transport=transport, base_url="http://server")
        opened.append(client)
        return client

    yield make
    for client in opened:
        await client.aclose()


class Live:
    """A server on a free port, in this event loop."""

    def __init__(self, engine: Any, **settings: Any) -> None:
        self.engine = engine
        self.settings = ServerSettings(**{"port": 0, "uvicorn_log_level": "warning", **settings})
        self.app = create_app(engine, self.settings)
        self.sock = bind(self.settings)
        self.url = f"http://127.0.0.1:{self.sock.getsockname()[1]}"
        self.admin_sock = bind_admin(self.settings)
        if self.admin_sock is not None:
            self.admin_url = f"http://127.0.0.1:{self.admin_sock.getsockname()[1]}"
        self.task = asyncio.create_task(serve(self.app, self.sock, self.settings, self.admin_sock))

    @property
    def state(self) -> ServerState:
        state: ServerState = self.app.state.headrace
        return state

    async def started(self) -> None:
        async def answers() -> bool:
            with contextlib.suppress(httpx2.TransportError):
                async with httpx2.AsyncClient() as client:
                    return bool(await client.get(self.url + "/version"))
            return False

        await waiting.until(answers, what="the server did not start")


@pytest.fixture
async def live() -> AsyncIterator[Callable[..., Any]]:
    """``await live(engine, **settings)``: a running :class:`Live` server."""
    servers: list[Live] = []

    async def start(engine: Any = None, **settings: Any) -> Live:
        server = Live(engine or FakeEngine(), **settings)
        servers.append(server)
        await server.started()
        return server

    yield start
    for server in servers:
        if not server.task.done():
            server.task.cancel()
        await asyncio.gather(server.task, return_exceptions=True)


def _events(text: str) -> list[dict[str, Any]]:
    """The JSON of a stream's events; checks framing and the single terminal event."""
    blocks = [b for b in text.split("\n\n") if b and not b.startswith(":")]
    assert all(b.startswith("data: ") for b in blocks)
    assert blocks[-1] == "data: [DONE]"
    assert blocks.count("data: [DONE]") == 1
    return [json.loads(b.removeprefix("data: ")) for b in blocks[:-1]]


@pytest.fixture
def events() -> Callable[[str], list[dict[str, Any]]]:
    """``events(text)``: the JSON of a stream's events; checks the framing."""
    return _events


@pytest.fixture
def until() -> Callable[..., Any]:
    """``await until(condition)``: wait for it, at most a minute."""
    return waiting.until

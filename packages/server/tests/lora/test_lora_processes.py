"""Adapters of a server with several HTTP processes: whatever one does holds for all."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest

from headrace_core.lora import LoRARequest
from headrace_server import ServerSettings, create_app
from headrace_server.api_processes.all_processes import answers_of
from headrace_server.api_processes.peers import Peers
from headrace_testing.fakes.engine import FakeEngine, fake_served_model

Adapter = Callable[..., str]
KEY = {"Authorization": "Bearer operator"}


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(dir="/tmp", prefix="hr"))  # socket paths must be short
    yield made
    shutil.rmtree(made)


class Server:
    """What would be two processes of one engine. ``one`` and ``two`` are their clients."""

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        self._folder, self._stack = folder, stack
        self.adapters: dict[int, LoRARequest] = {}
        self.engines: list[FakeEngine] = []

    async def start(self, rank: int, **settings: Any) -> httpx2.AsyncClient:
        """A process takes its place."""
        model = fake_served_model(max_loras=2)
        engine = FakeEngine("hello", model=model, adapters=self.adapters)
        peers = Peers(self._folder, rank, 2)
        given = ServerSettings(
            api_server_count=2, allow_runtime_lora_updating=True, api_key=("operator",), **settings
        )
        app = create_app(engine, given, peers)
        await self._stack.enter_async_context(peers.answering(answers_of(app.state.headrace)))
        await app.state.headrace.adapters.start()
        transport = httpx2.ASGITransport(app)
        client = httpx2.AsyncClient(transport=transport, base_url="http://localhost", headers=KEY)
        self.engines.append(engine)
        return await self._stack.enter_async_context(client)


@pytest.fixture
async def server(folder: Path) -> AsyncIterator[Server]:
    async with AsyncExitStack() as stack:
        yield Server(folder, stack)


async def post(http: httpx2.AsyncClient, path: str, **body: Any) -> int:
    return (await http.post(path, json=body)).status_code


async def complete(http: httpx2.AsyncClient, name: str) -> int:
    return await post(http, "/v1/completions", model=name, prompt="x")


async def names(http: httpx2.AsyncClient) -> list[str]:
    return [card["id"] for card in (await http.get("/v1/models")).json()["data"]]


async def test_all_know_it(server: Server, adapter: Adapter) -> None:
    one, two = await server.start(0), await server.start(1)
    path = {"lora_name": "sql", "lora_path": adapter("one")}
    assert await post(one, "/v1/load_lora_adapter", **path) == 200
    assert await complete(two, "sql") == 200
    assert await names(one) == await names(two) == ["fake-model", "sql"]
    assert await post(two, "/v1/load_lora_adapter", **path) == 400
    path["lora_path"] = adapter("two")
    assert await post(two, "/v1/load_lora_adapter", **path, load_inplace=True) == 200
    assert await complete(one, "sql") == 200
    last = server.engines[0].requests[-1].lora_request
    assert last is not None
    assert (last.lora_int_id, last.lora_path) == (2, path["lora_path"])
    assert [*server.adapters] == [2]
    assert await post(one, "/v1/unload_lora_adapter", lora_int_id=2) == 200
    assert await complete(two, "sql") == 404
    assert await names(two) == ["fake-model"]


async def test_two_loads_of_one_name(server: Server, adapter: Adapter) -> None:
    clients = [await server.start(0), await server.start(1)]
    path = {"lora_name": "sql", "lora_path": adapter("one")}
    loads = [post(client, "/v1/load_lora_adapter", **path) for client in clients]
    assert sorted(await asyncio.gather(*loads)) == [200, 400]
    assert sum(len(engine.adapters_read) for engine in server.engines) == 1


async def test_those_of_the_command_line_are_loaded_once(server: Server, adapter: Adapter) -> None:
    modules = (f"a={adapter('one')}", f"b={adapter('two')}")
    one = await server.start(0, lora_modules=modules)
    assert await post(one, "/v1/unload_lora_adapter", lora_name="a") == 200
    again = await server.start(1, lora_modules=modules)  # in the place of one that fell
    assert await names(again) == ["fake-model", "b"]
    assert [*server.adapters] == [2]


async def test_a_request_that_was_under_way_brings_nothing_back(
    server: Server, adapter: Adapter
) -> None:
    one, two = await server.start(0), await server.start(1)
    path = {"lora_name": "sql", "lora_path": adapter("one")}
    assert await post(one, "/v1/load_lora_adapter", **path) == 200
    (known,) = server.adapters.values()
    assert await post(one, "/v1/unload_lora_adapter", lora_name="sql") == 200
    server.adapters[known.lora_int_id] = known  # as the engine does for a request that names it
    assert await names(two) == ["fake-model"]
    assert await complete(one, "sql") == 404
    assert server.adapters == {}

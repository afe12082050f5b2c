"""Adapters that come and go while the server runs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from headrace_core.errors import ConfigError
from headrace_server import ServerSettings
from headrace_server.settings import from_environment
from headrace_testing.fakes.engine import FakeEngine

Adapter = Callable[..., str]
KEY = {"Authorization": "Bearer operator"}
USER = {"Authorization": "Bearer user"}
ON: dict[str, Any] = {
    "allow_runtime_lora_updating": True, "api_key": ("user",), "admin_api_key": ("operator",),
}  # fmt: skip


@pytest.fixture
async def http(connect: Any, engine: FakeEngine) -> httpx2.AsyncClient:
    """A client of a server that lets adapters come and go."""
    client: httpx2.AsyncClient = connect(engine, **ON)
    return client


async def load(http: httpx2.AsyncClient, name: str, path: str, **more: Any) -> httpx2.Response:
    body = {"lora_name": name, "lora_path": path, **more}
    return await http.post("/v1/load_lora_adapter", json=body, headers=KEY)


async def unload(http: httpx2.AsyncClient, **body: Any) -> httpx2.Response:
    return await http.post("/v1/unload_lora_adapter", json=body, headers=KEY)


async def complete(http: httpx2.AsyncClient, name: str) -> httpx2.Response:
    body = {"model": name, "prompt": "x"}
    return await http.post("/v1/completions", json=body, headers=USER)


async def names(http: httpx2.AsyncClient) -> list[str]:
    return [card["id"] for card in (await http.get("/v1/models", headers=USER)).json()["data"]]


def error_of(answer: httpx2.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error["param"] or "", error["message"]


async def test_load_use_list_unload(
    http: httpx2.AsyncClient, engine: FakeEngine, adapter: Adapter
) -> None:
    answer = await load(http, "sql", adapter("one"))
    assert (answer.status_code, answer.text) == (
        200, "Success: LoRA adapter 'sql' added successfully",
    )  # fmt: skip
    assert answer.headers["content-type"].startswith("text/plain")
    assert await names(http) == ["fake-model", "sql"]
    assert (await complete(http, "sql")).json()["model"] == "sql"
    answer = await unload(http, lora_name="sql")
    assert (answer.status_code, answer.text) == (
        200, "Success: LoRA adapter 'sql' removed successfully",
    )  # fmt: skip
    assert await names(http) == ["fake-model"]
    assert (await complete(http, "sql")).status_code == 404
    assert engine.adapters == {}
    await load(http, "sql", adapter("two"))
    assert [*engine.adapters] == [2], "ids are not used again"
    assert (await unload(http, lora_int_id=2)).text.startswith("Success: LoRA adapter 'sql'")


async def test_what_is_refused(
    http: httpx2.AsyncClient, engine: FakeEngine, adapter: Adapter, tmp_path: Path
) -> None:
    path, large = adapter("one"), adapter("large")
    engine.unusable_adapters[large] = "r = 64: more than max_lora_rank = 16"
    post = http.post
    for body, param in (({"lora_name": "x"}, "lora_path"), ({"lora_path": "x"}, "lora_name"),
                        ({"lora_name": "", "lora_path": path}, "lora_name"),
                        ({"lora_name": "x", "lora_path": path, "rank": 3}, "rank")):  # fmt: skip
        answer = await post("/v1/load_lora_adapter", json=body, headers=KEY)
        assert error_of(answer)[:2] == (400, param)
    assert error_of(await unload(http))[:2] == (400, "lora_name")
    assert error_of(await unload(http, lora_name="x"))[:2] == (404, "lora_name")
    assert error_of(await unload(http, lora_int_id=7))[:2] == (404, "lora_int_id")
    await load(http, "y", path)
    status, _, said = error_of(await unload(http, lora_name="y", lora_int_id=7))
    assert (status, said) == (
        404, "lora_name = 'y', lora_int_id = 7: no adapter of this name and this id is loaded",
    )  # fmt: skip
    await unload(http, lora_name="y")
    assert error_of(await load(http, "x", str(tmp_path / "none")))[:2] == (404, "lora_path")
    assert error_of(await load(http, "x", "a\0b"))[:2] == (404, "lora_path")
    status, param, said = error_of(await load(http, "x", large))
    assert (status, param) == (400, "lora_path")
    assert "max_lora_rank = 16" in said
    assert error_of(await load(http, "fake-model", path))[:2] == (400, "lora_name")
    assert error_of(await load(http, "line\nbreak", path))[:2] == (400, "lora_name")
    await load(http, "x", path)
    status, param, said = error_of(await load(http, "x", path))
    assert (status, param) == (400, "lora_name")
    assert "already" in said
    assert await names(http) == ["fake-model", "x"]
    assert (await complete(http, "fake-model")).status_code == 200


async def test_in_place(http: httpx2.AsyncClient, engine: FakeEngine, adapter: Adapter) -> None:
    one, two = adapter("one"), adapter("two")
    await load(http, "sql", one)
    engine.gate = asyncio.Event()
    under_way = asyncio.create_task(complete(http, "sql"))
    while not engine.requests:
        await asyncio.sleep(0)
    assert (await load(http, "sql", two, load_inplace=True)).status_code == 200
    later = asyncio.create_task(complete(http, "sql"))
    while len(engine.requests) < 2:
        await asyncio.sleep(0)
    engine.gate.set()
    assert {(await task).status_code for task in (under_way, later)} == {200}
    paths = [r.lora_request.lora_path for r in engine.requests if r.lora_request]
    assert paths == [one, two]
    assert [r.lora_path for r in engine.adapters.values()] == [two]
    engine.unusable_adapters[one] = "broken"
    assert (await load(http, "sql", one, load_inplace=True)).status_code == 400
    assert (await complete(http, "sql")).status_code == 200, "the old one stays"


async def test_two_loads_of_one_name(
    http: httpx2.AsyncClient, engine: FakeEngine, adapter: Adapter
) -> None:
    engine.reading = asyncio.Event()
    path = adapter("one")
    both = [asyncio.create_task(load(http, "sql", path)) for _ in range(2)]
    while not engine.adapters_read:
        await asyncio.sleep(0)
    engine.reading.set()
    assert sorted([(await task).status_code for task in both]) == [200, 400]
    assert len(engine.adapters_read) == 1


@pytest.mark.req("SEC-18")
async def test_routes_need_permission_and_key(
    connect: Any, engine: FakeEngine, adapter: Adapter
) -> None:
    body = {"lora_name": "x", "lora_path": adapter("one")}

    async def status(headers: dict[str, str], **settings: Any) -> int:
        client = connect(engine, **settings)
        answer = await client.post("/v1/load_lora_adapter", json=body, headers=headers)
        return int(answer.status_code)

    keyed = {"api_key": ("user",), "enable_control_routes": True}
    assert await status(USER, **keyed) == 404, "the route does not exist"
    assert await status({}, allow_runtime_lora_updating=True) == 404, "there is no key"
    assert await status({}, **ON) == 401
    assert await status(USER, **ON) == 401
    assert await status(KEY, **ON) == 200
    none = connect(FakeEngine(), **ON)
    said = error_of(await none.post("/v1/load_lora_adapter", json=body, headers=KEY))
    assert said[0] == 400
    assert "--enable-lora" in said[2]


@pytest.mark.req("SEC-21")
async def test_folder_that_is_allowed(
    connect: Any, engine: FakeEngine, adapter: Adapter, tmp_path: Path
) -> None:
    inside, outside = adapter("allowed/one"), adapter("other/two")
    root = tmp_path / "allowed"
    os.symlink(outside, root / "link")
    weights = Path(adapter("allowed/weights"), "adapter_model.safetensors")
    weights.unlink()
    weights.symlink_to(Path(outside, weights.name))
    http = connect(engine, allowed_lora_path=str(root), **ON)
    assert (await load(http, "a", inside)).status_code == 200
    for path in (outside, f"{root}/../other/two", f"{root}/link", f"{root}/weights", "/etc"):
        status, param, said = error_of(await load(http, "b", path))
        assert (status, param) == (400, "lora_path")
        assert "--allowed-lora-path" in said


def test_settings(tmp_path: Path) -> None:
    found = from_environment({"HEADRACE_ALLOW_RUNTIME_LORA_UPDATING": "true"})
    assert found == {"allow_runtime_lora_updating": True}
    with pytest.raises(ConfigError, match="allowed_lora_path"):
        ServerSettings(allowed_lora_path=str(tmp_path))
    with pytest.raises(ConfigError, match="an existing folder"):
        ServerSettings(allow_runtime_lora_updating=True, allowed_lora_path="/nowhere")
    with pytest.raises(ConfigError, match="not with --hardened"):
        ServerSettings(hardened=True, allow_runtime_lora_updating=True)


async def test_a_warning_at_start(
    connect: Any, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    connect(engine, **ON)
    assert "allow_runtime_lora_updating: whoever has the key" in caplog.text


async def test_on_the_admin_port(live: Any, engine: FakeEngine, adapter: Adapter) -> None:
    server = await live(engine, admin_port=0, **ON)
    body = {"lora_name": "sql", "lora_path": adapter("one")}
    async with httpx2.AsyncClient(headers=KEY) as http:
        public = await http.post(server.url + "/v1/load_lora_adapter", json=body, headers=USER)
        assert public.status_code == 404
        answer = await http.post(server.admin_url + "/v1/load_lora_adapter", json=body)
        assert answer.status_code == 200
    async with httpx2.AsyncClient(base_url=server.url) as http:
        assert (await complete(http, "sql")).status_code == 200


async def test_within_another_server(connect: Any, engine: FakeEngine, adapter: Adapter) -> None:
    """An application that nobody starts loads its adapters when the first is asked for."""
    http = connect(engine, lora_modules=(f"one={adapter('one')}", f"two={adapter('two')}"))
    answers = await asyncio.gather(*(complete(http, name) for name in ("one", "two", "one")))
    assert [answer.status_code for answer in answers] == [200] * 3
    assert [r.lora_name for r in engine.adapters_read] == ["one", "two"]

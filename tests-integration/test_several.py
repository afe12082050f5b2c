"""A chat model and two embedders behind one port, and a guest that comes and goes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import RunningServer, serving
from several import GUEST, KEY, comparable, models_file, request

MODELS = ("chat", "small", "large")
REQUESTS = [(MODELS[i % 3], i // 3) for i in range(64)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: Any) -> Any:
    file = models_file(tmp_path_factory.mktemp("models"), *MODELS)
    with serving(
        "--models-config", str(file), "--enable-control-routes",
        environment={"HEADRACE_API_KEY": "several"},
    ) as running:  # fmt: skip
        yield running


@pytest.fixture(scope="module")
def alone(server: RunningServer) -> dict[tuple[str, int], Any]:
    """Every request's answer when nothing else runs."""
    with httpx.Client(base_url=server.url, headers=KEY, timeout=240) as client:
        return {key: comparable(ask(client, *key)) for key in REQUESTS}


def ask(client: httpx.Client, name: str, seed: int) -> httpx.Response:
    path, arguments = request(name, seed)
    return client.post(path, **arguments)


async def ask_all(client: httpx.AsyncClient) -> list[Any]:
    async def one(name: str, seed: int) -> Any:
        path, arguments = request(name, seed)
        return comparable(await client.post(path, **arguments))

    return await asyncio.gather(*(one(*key) for key in REQUESTS))


async def test_mixed_requests_get_the_answers_that_they_get_alone(
    server: RunningServer, alone: dict[tuple[str, int], Any]
) -> None:
    async with httpx.AsyncClient(base_url=server.url, headers=KEY, timeout=240) as client:
        assert await ask_all(client) == [alone[key] for key in REQUESTS]
        names = [card["id"] for card in (await client.get("/v1/models")).json()["data"]]
        assert names == list(MODELS)
        wrong = await client.post("/v1/embeddings", json={"model": "none", "input": "a"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (404, "model")
        assert "'chat', 'small', 'large'" in wrong.json()["error"]["message"]
        missing = await client.post("/v1/embeddings", json={"input": "a"})
        assert missing.status_code == 400


async def test_a_guest_disturbs_nobody(
    server: RunningServer, alone: dict[tuple[str, int], Any]
) -> None:
    async with httpx.AsyncClient(base_url=server.url, headers=KEY, timeout=240) as client:
        for _ in range(2):
            loading = asyncio.create_task(client.post("/models/load", json=GUEST))
            assert await ask_all(client) == [alone[key] for key in REQUESTS]
            assert (await loading).json()["state"] == "ready"
            path, arguments = request("guest", 1)
            guest = comparable(await client.post(path, **arguments))
            path, arguments = request("chat", 1)
            assert guest == comparable(await client.post(path, **arguments))
            unloading = asyncio.create_task(client.post("/models/unload", json={"name": "guest"}))
            assert await ask_all(client) == [alone[key] for key in REQUESTS]
            assert (await unloading).status_code == 200


async def test_a_load_that_fails_says_why_and_changes_nothing(server: RunningServer) -> None:
    async with httpx.AsyncClient(base_url=server.url, headers=KEY, timeout=240) as client:
        before = (await client.get("/models")).json()
        for entry, message in (
            ({"name": "guest", "model": "/no/such/folder"}, "no such folder"),
            (GUEST | {"gpu_memory_utilization": 0.9999}, "its share is"),
            (GUEST | {"max_memory_bytes": "1M"}, "max_memory_bytes"),
            (GUEST | {"num_threads": 1}, "num_threads"),
        ):
            answer = await client.post("/models/load", json=entry)
            assert answer.status_code == 400, answer.text
            assert message in answer.json()["error"]["message"]
            assert "guest" in answer.json()["error"]["message"]
        after = (await client.get("/models")).json()
        assert after["models"] == before["models"]
        assert after["budget"]["claimed"] == before["budget"]["claimed"]


def test_a_model_that_cannot_be_loaded_ends_the_start_with_its_name(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("- {name: nothing, model: /no/such/folder}\n")
    message = r"model 'nothing': .*/no/such/folder"
    with pytest.raises(RuntimeError, match=message), serving("--models-config", str(file)):
        pass


def test_shares_beyond_the_whole_end_the_start(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(
        "- {name: a, model: /a, gpu_memory_utilization: 0.7}\n"
        "- {name: b, model: /b, gpu_memory_utilization: 0.7}\n"
    )
    message = r"are 1\.4 of the budget"
    with pytest.raises(RuntimeError, match=message), serving("--models-config", str(file)):
        pass

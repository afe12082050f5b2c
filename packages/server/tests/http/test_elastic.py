"""``/scale_elastic_ep`` and ``/is_scaling_elastic_ep``: bodies, answers, and requests meanwhile."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from headrace_core.engine import EngineStats
from headrace_core.errors import GenerateError, RequestError
from headrace_testing.fakes.engine import FakeEngine
from headrace_testing.waiting import until

PATH = "/scale_elastic_ep"
TO_THREE = {"new_data_parallel_size": 3}


class ElasticEngine(FakeEngine):
    """Scales when the test says so."""

    def __init__(self) -> None:
        super().__init__("x")
        self.go = asyncio.Event()
        self.asked: list[tuple[int, float]] = []
        self.error: Exception | None = None
        self.num_ended = 0
        self.num_engines, self.scaling_to = 1, 0

    async def scale_elastic_ep(self, new_size: int, drain_timeout: float = 300.0) -> int:
        self.asked.append((new_size, drain_timeout))
        self.scaling_to = new_size
        await self.go.wait()
        self.scaling_to = 0
        if self.error is not None:
            raise self.error
        self.num_engines = new_size
        return self.num_ended

    async def stats(self, *, drain: bool = False) -> EngineStats:
        own = await super().stats(drain=drain)
        return replace(own, by_engine=[own] * self.num_engines, scaling_to=self.scaling_to)


def controlled(connect: Any, engine: FakeEngine) -> Any:
    """A client of a server with control routes, on its own machine."""
    client = connect(engine, dev_mode=True)
    client.base_url = "http://localhost"
    return client


async def is_scaling(client: Any) -> bool:
    """As both methods tell it."""
    answers = [await client.request(method, "/is_scaling_elastic_ep") for method in ("GET", "POST")]
    assert [answer.status_code for answer in answers] == [200, 200]
    (told,) = {answer.json()["is_scaling_elastic_ep"] for answer in answers}
    return bool(told)


async def metric(client: Any, name: str) -> float:
    text = (await client.get("/metrics")).text
    (line,) = [one for one in text.splitlines() if one.startswith(f"headrace:{name}{{")]
    return float(line.rpartition(" ")[2])


async def test_answered_once_it_is_done(connect: Any) -> None:
    engine = ElasticEngine()
    client = controlled(connect, engine)
    assert not await is_scaling(client)
    scaled = asyncio.create_task(client.post(PATH, json={**TO_THREE, "drain_timeout": 7}))
    await until(lambda: bool(engine.asked))
    assert engine.asked == [(3, 7.0)]
    assert await is_scaling(client)
    assert (await client.get("/server_info")).json()["is_scaling_elastic_ep"] is True
    assert (await metric(client, "engines_scaling"), await metric(client, "num_engines")) == (1, 1)
    served = await client.post("/v1/completions", json={"prompt": "a"})
    assert served.status_code == 200  # by those that stay
    engine.num_ended = 2
    engine.go.set()
    answer = await scaled
    assert answer.status_code == 200
    assert answer.json() == {
        "message": "Scaled to 3 data parallel engines",
        "data_parallel_size": 3,
        "num_ended_requests": 2,
    }
    assert not await is_scaling(client)
    assert (await metric(client, "engines_scaling"), await metric(client, "num_engines")) == (0, 3)
    await client.post(PATH, json={"new_data_parallel_size": 1})
    assert engine.asked[-1] == (1, 300.0)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"new_data_parallel_size": 0}, "new_data_parallel_size"),
        ({"new_data_parallel_size": -2}, "new_data_parallel_size"),
        ({"new_data_parallel_size": "2"}, "new_data_parallel_size"),
        ({"new_data_parallel_size": 2.5}, "new_data_parallel_size"),
        ({"new_data_parallel_size": True}, "new_data_parallel_size"),
        ({}, "new_data_parallel_size"),
        ({**TO_THREE, "drain_timeout": -1}, "drain_timeout"),
        ({**TO_THREE, "drain_timeout": "soon"}, "drain_timeout"),
        ({**TO_THREE, "drain_timeout": 1e9}, "drain_timeout"),
        ({**TO_THREE, "refuse_requests": "perhaps"}, "refuse_requests"),
        ({**TO_THREE, "size": 1}, "size"),
    ],
)
async def test_bad_bodies(connect: Any, body: dict[str, Any], field: str) -> None:
    engine = ElasticEngine()
    answer = await controlled(connect, engine).post(PATH, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
    assert engine.asked == []


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b'{"new_data_parallel_size": NaN}'])
async def test_what_is_no_body(connect: Any, body: bytes) -> None:
    client = controlled(connect, ElasticEngine())
    answer = await client.post(PATH, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "BadRequestError"


async def test_two_at_once_are_a_conflict(connect: Any) -> None:
    engine = ElasticEngine()
    client = controlled(connect, engine)
    first = asyncio.create_task(client.post(PATH, json=TO_THREE))
    await until(lambda: bool(engine.asked))
    answer = await client.post(PATH, json={"new_data_parallel_size": 2})
    assert answer.status_code == 409
    error = answer.json()["error"]
    assert (error["type"], error["message"]) == (
        "ConflictError", "the engines are being scaled to 3 already",
    )  # fmt: skip
    engine.go.set()
    assert (await first).status_code == 200


@pytest.mark.parametrize(
    ("is_public", "status"), [(True, 503), (False, 500)], ids=["not now", "failed"]
)
async def test_the_cause_of_a_failure_is_told(connect: Any, is_public: bool, status: int) -> None:
    engine = ElasticEngine()
    engine.go.set()
    engine.error = GenerateError("scale_elastic_ep: engine 2 did not start: killed by signal 9")
    engine.error.is_public = is_public
    client = controlled(connect, engine)
    answer = await client.post(PATH, json=TO_THREE)
    assert answer.status_code == status
    assert answer.json()["error"]["message"] == str(engine.error)
    engine.error = RequestError(
        "new_data_parallel_size = 3: must be at most 2: ...", param="new_data_parallel_size"
    )
    answer = await client.post(PATH, json=TO_THREE)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "new_data_parallel_size")


async def test_one_engine_is_not_scaled(connect: Any) -> None:
    answer = await controlled(connect, FakeEngine()).post(PATH, json=TO_THREE)
    assert answer.status_code == 400
    assert "this is one engine" in answer.json()["error"]["message"]


async def test_requests_may_be_refused_meanwhile(connect: Any) -> None:
    engine = ElasticEngine()
    client = controlled(connect, engine)
    scaled = asyncio.create_task(client.post(PATH, json={**TO_THREE, "refuse_requests": True}))
    await until(lambda: bool(engine.asked))
    for path in (
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/messages",
        "/invocations",
        "/v1/embeddings",
    ):
        answer = await client.post(path, json={"prompt": "a"})
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert "being scaled" in str(answer.json()["error"])
    assert (await client.get("/v1/models")).status_code == 200
    assert (await client.get("/health")).status_code == 200
    engine.go.set()
    await scaled
    assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200


async def test_a_client_that_leaves_ends_nothing(live: Any) -> None:
    engine = ElasticEngine()
    server = await live(engine, dev_mode=True)
    async with httpx2.AsyncClient(base_url=server.url) as client:
        asking = asyncio.create_task(client.post(PATH, json=TO_THREE))
        await until(lambda: bool(engine.asked))
        asking.cancel()  # closes the connection
        await asyncio.gather(asking, return_exceptions=True)
        assert await is_scaling(client)
        engine.go.set()

        async def is_done() -> bool:
            return not await is_scaling(client)

        await until(is_done)
        assert engine.num_engines == 3


@pytest.mark.req("SEC-18")
async def test_only_behind_the_admin_key(connect: Any) -> None:
    engine = ElasticEngine()
    engine.go.set()
    user = {"Authorization": "Bearer canary-user"}
    admin = {"Authorization": "Bearer canary-admin"}
    keys: Any = {"api_key": ("canary-user",), "admin_api_key": ("canary-admin",)}
    off = connect(engine, **keys)
    for headers in (user, admin):
        assert (await off.post(PATH, json=TO_THREE, headers=headers)).status_code in (401, 404)
    on = connect(engine, enable_control_routes=True, **keys)
    for headers in ({}, user):
        assert (await on.post(PATH, json=TO_THREE, headers=headers)).status_code == 401
    assert (await on.post(PATH, json=TO_THREE, headers=admin)).status_code == 200

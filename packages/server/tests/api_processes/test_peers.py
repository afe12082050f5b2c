"""HTTP processes of one server: what they ask each other, and what they sum up to."""

from __future__ import annotations

import asyncio
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from headrace_core.errors import ConfigError
from headrace_server import ServerSettings, create_app
from headrace_server.api_processes.all_processes import adopt_pause, answers_of
from headrace_server.api_processes.peers import Peers, PeerSilent
from headrace_server.observability import metric_families as families
from headrace_server.observability.metrics import Metrics
from headrace_server.settings import MAX_API_SERVERS
from headrace_testing.fakes.engine import FakeEngine


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(dir="/tmp", prefix="hr"))  # socket paths must be short
    yield made
    shutil.rmtree(made)


@dataclass
class Process:
    """What would be a process of its own."""

    engine: FakeEngine
    client: httpx2.AsyncClient
    app: Any


@pytest.fixture
async def processes(folder: Path) -> AsyncIterator[list[Process]]:
    """Three that know each other."""
    async with AsyncExitStack() as stack:
        made = []
        for rank in range(3):
            settings = ServerSettings(
                api_server_count=3, dev_mode=True, enable_server_load_tracking=True
            )
            engine, peers = FakeEngine("hello"), Peers(folder, rank, 3)
            app = create_app(engine, settings, peers)
            await stack.enter_async_context(peers.answering(answers_of(app.state.headrace)))
            client = httpx2.AsyncClient(
                transport=httpx2.ASGITransport(app), base_url="http://localhost"
            )
            await stack.enter_async_context(client)
            made.append(Process(engine, client, app))
        yield made


async def complete(process: Process, **body: Any) -> None:
    asked = {"model": process.engine.model.name, "prompt": "x", **body}
    assert (await process.client.post("/v1/completions", json=asked)).status_code == 200


async def test_questions_and_answers(folder: Path) -> None:
    async def double(words: Any) -> int:
        return 2 * int(words["x"])

    async def fail(_: Any) -> None:
        raise ValueError("on purpose")

    async def hang(_: Any) -> None:
        await asyncio.Event().wait()  # until it is cancelled

    answers = {"double": double, "fail": fail, "hang": hang}
    mine, other = Peers(folder, 0, 3), Peers(folder, 1, 3)
    assert await mine.ask("double", x=4) == []  # nobody is there yet
    async with other.answering(answers), Peers(folder, 2, 3).answering(answers):
        assert await mine.ask("double", x=4) == [8, 8]
        for question, seconds in (("fail", 2.0), ("unknown", 2.0), ("hang", 0.05)):
            with pytest.raises(PeerSilent) as caught:
                await mine.ask(question, seconds=seconds)
            assert caught.value.status_code == 503
            assert "purpose" not in caught.value.detail
    assert await mine.ask("double", x=4) == []
    assert list(folder.iterdir()) == []


async def test_one_that_was_killed_leaves_a_name_and_no_trouble(folder: Path) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / "http-1"))
    assert await Peers(folder, 0, 2).ask("load") == []
    async with Peers(folder, 1, 2).answering({}):
        pass


async def test_metrics_add_up_whomever_one_asks(processes: list[Process]) -> None:
    for index, process in enumerate(processes):
        for _ in range(index + 1):
            await complete(process, n=index + 1)
    seen = []
    for process in processes:
        text = (await process.client.get("/metrics")).text
        lines = {
            name: float(value)
            for name, value in re.findall(r"^([^#\s][^ ]*(?:\{.*\})?) ([0-9.e+-]+)$", text, re.M)
            if "params_n" in name or "http_requests_total" in name or name.startswith("cache_con")
        }
        seen.append(lines)
        assert text.count("# TYPE headrace:request_params_n histogram") == 1
    n = {k.split("{")[0]: v for k, v in seen[0].items() if "_sum" in k or "_count" in k}
    assert n == {"headrace:request_params_n_sum": 14.0, "headrace:request_params_n_count": 6.0}
    for lines in seen[1:]:
        assert {k: v for k, v in lines.items() if "params_n" in k and "_created" not in k} == {
            k: v for k, v in seen[0].items() if "params_n" in k and "_created" not in k
        }
    done = [v for k, v in seen[2].items() if 'handler="/v1/completions"' in k]
    assert done == [6.0]


def test_the_engines_own_figures_are_not_added(folder: Path) -> None:
    metrics = Metrics("headrace:", FakeEngine().model)
    names = [family[0] for family in metrics.own_families()]
    assert "headrace:request_params_n" in names
    assert not {"headrace:kv_cache_usage_perc", "headrace:prompt_tokens"} & set(names)


def test_rules_of_sums() -> None:
    from prometheus_client.metrics_core import Metric

    def family(name: str, value: float, **labels: str) -> Metric:
        metric = Metric(name, "x", "gauge")
        metric.add_sample(name, labels, value)
        return metric

    own = [family("load", 2, a="1"), family("x_created", 7), family("process_max_fds", 10)]
    others = [
        families.as_data([family("load", 3, a="1"), family("x_created", 5)]),
        families.as_data([family("load", 4, a="2"), family("process_max_fds", 12)]),
    ]
    summed = {
        (sample.name, tuple(sample.labels.values())): sample.value
        for metric in families.added(own, others)
        for sample in metric.samples
    }
    assert summed == {
        ("load", ("1",)): 5, ("load", ("2",)): 4, ("x_created", ()): 5, ("process_max_fds", ()): 12,
    }  # fmt: skip


async def test_a_silent_peer_makes_metrics_a_503(
    processes: list[Process], monkeypatch: pytest.MonkeyPatch
) -> None:

    monkeypatch.setattr(processes[1].app.state.headrace.metrics, "own_families", lambda: 1 / 0)
    answer = await processes[0].client.get("/metrics")
    assert answer.status_code == 503
    assert "HTTP process 1" in answer.text
    assert "division" not in answer.text
    assert (await processes[0].client.get("/health")).status_code == 200


async def test_load_is_the_servers(processes: list[Process], until: Any) -> None:
    gate = asyncio.Event()
    asked = []
    for process in processes:
        process.engine.gate = gate
        asked.append(asyncio.create_task(complete(process)))
    await until(lambda: all(process.engine.num_running for process in processes))
    for process in processes:
        assert (await process.client.get("/load")).json() == {"server_load": 3}
    gate.set()
    await asyncio.gather(*asked)
    assert (await processes[1].client.get("/load")).json() == {"server_load": 0}


async def test_a_pause_is_everybodys(processes: list[Process]) -> None:
    resets = [p.engine.num_cache_resets for p in processes]
    assert (await processes[1].client.post("/pause")).status_code == 200
    for process in processes:
        assert (await process.client.get("/is_paused")).json() == {"is_paused": True}
    # Emptied once, by the one that was asked.
    assert [p.engine.num_cache_resets - r for p, r in zip(processes, resets, strict=True)] == [
        0,
        1,
        0,
    ]
    state = processes[2].app.state.headrace
    await processes[2].engine.resume_generation()
    await adopt_pause(state, state.peers)  # as one that starts now
    assert await processes[2].engine.is_paused()
    assert (await processes[0].client.post("/resume")).status_code == 200
    for process in processes:
        assert (await process.client.get("/is_paused")).json() == {"is_paused": False}


def test_limits_are_split() -> None:
    settings = ServerSettings(api_server_count=4, max_connections=10, max_connections_per_peer=0)
    app = create_app(FakeEngine(), settings)
    connections = app.state.headrace.connections
    assert (connections.most, connections.most_per_peer) == (3, 0)


@pytest.mark.parametrize("count", [0, -1, MAX_API_SERVERS + 1])
def test_counts_that_are_refused(count: int) -> None:
    with pytest.raises(ConfigError, match=f"api_server_count = {count}: must be in 1..64"):
        ServerSettings(api_server_count=count)


def test_responses_are_kept_in_one_process_only() -> None:
    with pytest.raises(ConfigError, match="another") as caught:
        ServerSettings(api_server_count=2, enable_responses_store=True)
    assert caught.value.field == "enable_responses_store"

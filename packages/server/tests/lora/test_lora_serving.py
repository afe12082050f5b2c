"""Adapters chosen by the name of a request's model, on every wire, over real sockets."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from headrace_core.engine import EngineStats
from headrace_core.errors import ConfigError
from headrace_core.pooling import PoolingInfo
from headrace_server import ServerSettings, bind, create_app, serve
from headrace_server.observability.metrics import Metrics
from headrace_testing.fakes.engine import FakeEngine, fake_served_model

Adapter = Callable[..., str]


async def served(live: Any, engine: FakeEngine, adapter: Adapter, **settings: Any) -> Any:
    """A server with the adapters ``sql`` and ``chat``."""
    chat = {"name": "chat", "path": adapter("two"), "base_model_name": "llama"}
    modules = (f"sql={adapter('one')}", json.dumps(chat))
    return await live(engine, lora_modules=modules, **settings)


def used(engine: FakeEngine) -> list[str | None]:
    """Names of the adapters that requests were run with, since the last look."""
    seen: list[Any] = [*engine.requests, *engine.searched, *engine.pooled]
    for calls in (engine.requests, engine.searched, engine.pooled):
        calls.clear()
    return [None if r.lora_request is None else r.lora_request.lora_name for r in seen]


async def test_openais_client(live: Any, engine: FakeEngine, adapter: Adapter) -> None:
    server = await served(live, engine, adapter)
    async with openai.AsyncOpenAI(
        base_url=server.url + "/v1", api_key="x", max_retries=0
    ) as client:
        for name, expected in (("sql", "sql"), ("chat", "chat"), ("fake-model", None)):
            chat: Any = {"model": name, "messages": [{"role": "user", "content": "x"}]}
            whole = await client.chat.completions.create(**chat)
            stream = await client.chat.completions.create(**chat, stream=True)
            text = await client.completions.create(model=name, prompt="x")
            texts = await client.completions.create(model=name, prompt="x", stream=True)
            response = await client.responses.create(model=name, input="x")
            beams = await client.completions.create(
                model=name, prompt="x", n=2, extra_body={"use_beam_search": True}
            )
            told = [whole.model, text.model, response.model, beams.model]
            told += [chunk.model async for chunk in stream]
            told += [chunk.model async for chunk in texts]
            assert set(told) == {name}
            assert set(used(engine)) == {expected}
        listed = {m.id: m for m in (await client.models.list()).data}
        assert list(listed) == ["fake-model", "sql", "chat"]
        assert listed["sql"].root.endswith("/one")  # type: ignore[attr-defined]
        parents = {name: m.parent for name, m in listed.items()}  # type: ignore[attr-defined]
        assert parents == {"fake-model": None, "sql": "fake-model", "chat": "llama"}
        assert listed["sql"].max_model_len is None  # type: ignore[attr-defined]
        assert (await client.models.retrieve("chat")).id == "chat"
        with pytest.raises(openai.NotFoundError, match=r"'other' is not served.*'sql', 'chat'"):
            await client.completions.create(model="other", prompt="x")
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")


async def test_other_wires(live: Any, engine: FakeEngine, adapter: Adapter) -> None:
    server = await served(live, engine, adapter)
    turn: Any = {"model": "sql", "messages": [{"role": "user", "content": "x"}]}
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="x", max_retries=0) as client:
        message = await client.messages.create(max_tokens=5, **turn)
        assert message.model == "sql"
        assert (await client.messages.count_tokens(**turn)).input_tokens > 0
        async with client.messages.stream(max_tokens=5, **turn) as stream:
            assert (await stream.get_final_message()).model == "sql"
        with pytest.raises(anthropic.NotFoundError, match=r"'other'"):
            await client.messages.count_tokens(**{**turn, "model": "other"})
    assert set(used(engine)) == {"sql"}
    async with httpx2.AsyncClient(base_url=server.url) as http:
        rendered = (await http.post("/v1/chat/completions/render", json=turn)).json()
        assert rendered["model"] == "sql"
        for path, body in (
            ("/inference/v1/generate", rendered),
            ("/v1/chat/completions/batch", {**turn, "messages": [turn["messages"]]}),
            ("/invocations", turn),
        ):
            assert (await http.post(path, json=body)).status_code == 200, path
            assert used(engine) == ["sql"], path
        for path, body in (("/tokenize", turn), ("/detokenize", {"model": "sql", "tokens": [65]})):
            assert (await http.post(path, json=body)).status_code == 200, path
            answer = await http.post(path, json={**body, "model": "other"})
            assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")


async def test_pooling_routes(live: Any, adapter: Adapter) -> None:
    tasks = ("embed", "classify", "score", "token_embed")
    pooling = PoolingInfo(tasks, "LAST", True, embedding_size=4, num_labels=1, scoring="cross")
    model = fake_served_model(max_loras=2, tasks=tasks, runner="pooling", pooling=pooling)
    engine = FakeEngine(model=model)
    server = await served(live, engine, adapter)
    pair = {"text_1": "a", "text_2": "b"}
    bodies: dict[str, Any] = {
        "/v1/embeddings": {"input": "x"},
        "/v2/embed": {"texts": ["x"], "input_type": "search_query", "embedding_types": ["float"]},
        "/pooling": {"input": "x", "task": "embed"},
        "/classify": {"input": "x"},
        "/score": pair,
        "/rerank": {"query": "q", "documents": ["d"]},
    }
    async with httpx2.AsyncClient(base_url=server.url) as http:
        for path, body in bodies.items():
            answer = await http.post(path, json={"model": "chat", **body})
            assert answer.status_code == 200, (path, answer.text)
            assert answer.json().get("model", "chat") == "chat"
            assert used(engine) == ["chat"], path
            assert (await http.post(path, json={"model": "no", **body})).status_code == 404


async def test_a_bad_one_stops_the_server(engine: FakeEngine, adapter: Adapter) -> None:
    path = adapter("one")
    engine.unusable_adapters[path] = "r = 64: more than max_lora_rank = 16"
    for word, said in ((f"a={path}", "max_lora_rank"), ("b=/nowhere", "no adapter found")):
        settings = ServerSettings(port=0, lora_modules=(word,))
        with (
            contextlib.closing(bind(settings)) as sock,
            pytest.raises(ConfigError, match=f"lora_modules: {word[0]}=.*{said}"),
        ):
            await serve(create_app(engine, settings), sock, settings)
        assert engine.shut_down


async def test_log_and_fingerprint(
    live: Any, engine: FakeEngine, adapter: Adapter, caplog: pytest.LogCaptureFixture
) -> None:
    server = await served(live, engine, adapter, enable_log_requests=True)
    caplog.set_level("INFO")
    prints = set()
    async with httpx2.AsyncClient(base_url=server.url) as http:
        for name in ("fake-model", "sql", "chat", "sql"):
            body = {"model": name, "prompt": "x"}
            answer = (await http.post("/v1/completions", json=body)).json()
            prints.add(answer["system_fingerprint"])
    assert len(prints) == 3
    assert "adapter 'sql' (id 1)" in caplog.text


def test_paths_are_not_read_before_start(engine: FakeEngine, tmp_path: Path) -> None:
    create_app(engine, ServerSettings(lora_modules=(f"a={tmp_path}",)))
    assert engine.adapters_read == []


def test_metrics() -> None:
    metrics = Metrics("headrace:", fake_served_model(max_loras=3))
    stats = EngineStats(running_loras={"b": 2, "a": 1}, waiting_loras={"c": 4})
    found = {
        (sample.name.removeprefix("headrace:"), *list(sample.labels.values())[2:]): sample.value
        for family in metrics.snapshot(stats)
        for sample in family.samples
        if "lora" in sample.name
    }
    assert found.pop(("lora_requests_info", "3", "c", "a,b")) > 0
    assert found == {
        ("lora_requests_running", "a"): 1, ("lora_requests_running", "b"): 2,
        ("lora_requests_waiting", "c"): 4,
    }  # fmt: skip
    without = Metrics("headrace:", fake_served_model()).snapshot(EngineStats())
    assert not [family.name for family in without if "lora" in family.name]


async def test_adapters_of_media(live: Any, engine: FakeEngine, adapter: Adapter) -> None:
    """They are read at start under the first ids, and are nobody's name."""
    engine.default_mm_loras = {"video": adapter("v"), "audio": adapter("a")}
    server = await served(live, engine, adapter)
    assert [(r.lora_int_id, r.lora_name) for r in engine.adapters_read] == [
        (1, "audio"), (2, "video"), (3, "sql"), (4, "chat"),
    ]  # fmt: skip
    async with httpx2.AsyncClient(base_url=server.url) as http:
        listed = (await http.get("/v1/models")).json()["data"]
    assert [card["id"] for card in listed] == ["fake-model", "sql", "chat"]
    other = FakeEngine(model=fake_served_model(max_loras=2))
    other.default_mm_loras = {"audio": "/bad"}
    other.unusable_adapters["/bad"] = "r = 64"
    settings = ServerSettings(port=0)
    with (
        contextlib.closing(bind(settings)) as sock,
        pytest.raises(ConfigError, match="default_mm_loras: audio: r = 64"),
    ):
        await serve(create_app(other, settings), sock, settings)

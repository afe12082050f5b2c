"""Adapters that are looked for when a request names them."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from headrace_core import plugins
from headrace_core.errors import ConfigError, PluginError, RequestError
from headrace_core.lora import LoRARequest
from headrace_server.lora import filesystem_resolver
from headrace_server.lora.filesystem_resolver import FilesystemResolver
from headrace_server.lora.hub_resolver import HubResolver
from headrace_server.lora.resolvers import LoRAResolver, LoRAResolverRegistry, resolvers
from headrace_testing.fakes.engine import FakeEngine

Adapter = Callable[..., str]


class Told(LoRAResolver):
    """Finds what a test says.

    Args:
        answer: a path, None, or an error.
    """

    def __init__(self, answer: str | Exception | None) -> None:
        self.answer = answer
        self.asked: list[tuple[str, str]] = []

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        self.asked.append((base_model_name, lora_name))
        if isinstance(self.answer, Exception):
            raise self.answer
        return None if self.answer is None else LoRARequest(lora_name, 77, self.answer)


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in ("HEADRACE_LORA_RESOLVER_CACHE_DIR", "HEADRACE_LORA_RESOLVER_HF_REPO_LIST"):
        monkeypatch.delenv(variable, raising=False)
    plugins.forget()
    yield
    plugins.forget()


@pytest.fixture
def serving(connect: Any, engine: FakeEngine) -> Callable[..., httpx2.AsyncClient]:
    """``serving(resolver, ...)``: a client of a server that asks them in this order."""

    def start(*asked: LoRAResolver) -> httpx2.AsyncClient:
        for number, resolver in enumerate(asked):
            LoRAResolverRegistry.register_resolver(f"{number}", resolver)
        client: httpx2.AsyncClient = connect(engine, allow_runtime_lora_updating=True)
        return client

    return start


async def complete(http: httpx2.AsyncClient, name: str) -> httpx2.Response:
    return await http.post("/v1/completions", json={"model": name, "prompt": "x"})


async def refusal(http: httpx2.AsyncClient, name: str) -> tuple[int, str]:
    answer = await complete(http, name)
    return answer.status_code, answer.json()["error"]["message"]


async def test_the_first_that_finds_it(
    serving: Any, engine: FakeEngine, adapter: Adapter, caplog: pytest.LogCaptureFixture
) -> None:
    nothing, broken = Told(None), Told(ZeroDivisionError())
    found, late = Told(adapter("one")), Told(None)
    http = serving(nothing, broken, found, late)
    for _ in range(2):
        assert (await complete(http, "sql")).json()["model"] == "sql"
    assert [r.asked for r in (nothing, broken, found)] == [[("fake-model", "sql")]] * 3
    assert late.asked == []
    assert "LoRA resolver '1' failed" in caplog.text
    assert [r.lora_int_id for r in engine.adapters.values()] == [1], "the server's own ids"
    listed = (await http.get("/v1/models")).json()["data"]
    assert [card["id"] for card in listed] == ["fake-model", "sql"]


async def test_distinct_failures(serving: Any, engine: FakeEngine, adapter: Adapter) -> None:
    path = adapter("secret")
    engine.unusable_adapters[path] = f"{path}: r = 64: more than max_lora_rank = 16"
    answer = Told(None)
    http = serving(answer)
    assert (await refusal(http, "sql"))[0] == 404
    answer.answer = RequestError("peft_type = 'IA3'")
    assert await refusal(http, "sql") == (400, "peft_type = 'IA3'")
    answer.answer = path
    assert await refusal(http, "sql") == (400, "sql: r = 64: more than max_lora_rank = 16")
    answer.answer = "/nowhere/at/all"
    status, said = await refusal(http, "sql")
    assert status == 404
    assert "nowhere" not in said
    asked = len(answer.asked)
    assert (await refusal(http, "a" * 300))[0] == 404
    assert (await refusal(http, "a\nb"))[0] == 404
    assert len(answer.asked) == asked, "such names are nobody's"
    assert (await complete(http, "fake-model")).status_code == 200


async def test_many_requests_load_it_once(
    serving: Any, engine: FakeEngine, adapter: Adapter
) -> None:
    engine.reading = asyncio.Event()
    http = serving(Told(adapter("one")))
    calls = [asyncio.create_task(complete(http, "sql")) for _ in range(4)]
    while not engine.adapters_read:
        await asyncio.sleep(0)
    calls[0].cancel()  # the client that came first leaves
    engine.reading.set()
    assert {(await call).status_code for call in calls[1:]} == {200}
    assert len(engine.adapters_read) == 1


async def test_only_with_the_operators_permission(
    connect: Any, engine: FakeEngine, adapter: Adapter
) -> None:
    found = Told(adapter("one"))
    LoRAResolverRegistry.register_resolver("found", found)
    assert (await complete(connect(engine), "sql")).status_code == 404
    assert found.asked == []


def test_registry() -> None:
    resolver = Told(None)
    LoRAResolverRegistry.register_resolver("one", resolver)
    assert LoRAResolverRegistry.get_resolver("one") is resolver
    plugins.register("headrace.lora_resolvers", "two", _Nothing)
    assert isinstance(resolvers()["two"], _Nothing)
    with pytest.raises(PluginError, match="must be a LoRAResolver, not str"):
        LoRAResolverRegistry.register_resolver("three", "x")  # type: ignore[arg-type]
    plugins.register("headrace.lora_resolvers", "four", dict)
    with pytest.raises(PluginError, match=r"'four'.*not dict"):
        resolvers()


class _Nothing(LoRAResolver):
    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        return None


async def test_folders(adapter: Adapter, tmp_path: Path) -> None:
    root, outside = tmp_path / "root", adapter("outside")
    good = adapter("root/good")
    adapter("root/other", base_model_name_or_path="another")
    os.symlink(outside, root / "escape")
    os.symlink(root / "loop", root / "loop")
    for name, file in (
        ("settings", "adapter_config.json"),
        ("weights", "adapter_model.safetensors"),
    ):
        linked = Path(adapter(f"root/{name}"), file)
        linked.unlink()
        linked.symlink_to(Path(outside, file))
    (root / "empty").mkdir()
    finder = FilesystemResolver(root)
    found = await finder.resolve_lora("fake-model", "good")
    assert found is not None
    assert (found.lora_name, found.lora_path) == ("good", good)
    for name in ("none", "empty", "other", "escape", "settings", "weights", "loop", "", ".", "..",
                 "../outside", "good/", "good/../good", outside, "a\0b", "x" * 5000, "good\\"):  # fmt: skip
        assert await finder.resolve_lora("fake-model", name) is None, name


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not valid JSON"),
        ("[]", "a JSON object"),
        ('{"peft_type": "IA3"}', "must be 'LORA'"),
        ("[" * 100_000, "not valid JSON"),
        (" " * (1 << 21), "a JSON object"),
    ],
)
async def test_wrong_configurations(adapter: Adapter, tmp_path: Path, text: str, said: str) -> None:
    Path(adapter("root/x"), "adapter_config.json").write_text(text)
    with pytest.raises(RequestError, match=said):
        await FilesystemResolver(tmp_path / "root").resolve_lora("fake-model", "x")


async def test_without_weights(adapter: Adapter, tmp_path: Path) -> None:
    Path(adapter("root/x"), "adapter_model.safetensors").unlink()
    with pytest.raises(RequestError, match=r"holds none of adapter_model\.safetensors"):
        await FilesystemResolver(tmp_path / "root").resolve_lora("fake-model", "x")


def test_the_folder_by_its_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filesystem_resolver.register()
    assert filesystem_resolver.NAME not in LoRAResolverRegistry.get_supported_resolvers()
    monkeypatch.setenv(filesystem_resolver.VARIABLE, str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="must be set to a valid directory"):
        filesystem_resolver.register()
    monkeypatch.setenv(filesystem_resolver.VARIABLE, str(tmp_path))
    filesystem_resolver.register()
    assert isinstance(
        LoRAResolverRegistry.get_resolver(filesystem_resolver.NAME), FilesystemResolver
    )


async def test_repositories_of_the_hub(adapter: Adapter, tmp_path: Path) -> None:
    fetched: list[dict[str, Any]] = []

    def snapshot(**words: Any) -> str:
        fetched.append(words)
        if words["repo_id"] == "me/gone":
            raise OSError("401 with a token in it")
        return str(tmp_path / words["repo_id"])

    finder = HubResolver(["me/one", "me/many", "me/gone"], snapshot)
    one, inside = adapter("me/one"), adapter("me/many/sql")
    adapter("me/many/other", base_model_name_or_path="another")
    for name, path in (("me/one", one), ("me/many/sql", inside), ("me/many/other", None),
                       ("me/many/none", None)):  # fmt: skip
        found = await finder.resolve_lora("fake-model", name)
        assert (None if found is None else found.lora_path) == path, name
    assert fetched[1]["allow_patterns"][0] == "sql/adapter_config.json"
    count = len(fetched)
    for name in ("you/one", "me", "me/one/../../x", "me/many//sql", "me/many/*", ""):
        assert await finder.resolve_lora("fake-model", name) is None
    assert len(fetched) == count, "the hub is not asked"
    with pytest.raises(RequestError, match=r"could not be fetched \(OSError\)"):
        await finder.resolve_lora("fake-model", "me/gone")


async def test_drop_a_directory_in(serving: Any, adapter: Adapter, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    http = serving(FilesystemResolver(root))
    assert (await refusal(http, "sql"))[0] == 404
    shutil.move(adapter("elsewhere"), root / "sql")
    assert (await complete(http, "sql")).status_code == 200
    listed = (await http.get("/v1/models")).json()["data"]
    assert [(card["id"], card["root"]) for card in listed[1:]] == [("sql", str(root / "sql"))]

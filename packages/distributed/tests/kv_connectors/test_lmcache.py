"""The connector ``lmcache``: with the library where it is installed, and with a stand-in for what is used of
it."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace_core.errors import ConfigError, MissingDependency
from headrace_distributed.kv_connectors.lmcache import (
    LMCacheConnector,
    LMCacheLibrary,
    import_lmcache,
)
from headrace_testing.engine.kv_connectors import (
    BLOCK_BYTES,
    KVConnectorConformance,
    content_of,
    key_of,
    load,
)


class Entry:
    """An entry of the stand-in, with its references."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.references = tensor, 1

    def ref_count_down(self) -> None:
        self.references -= 1


class Manager:
    """A storage manager in memory, as LMCache documents it."""

    def __init__(self, room: int = 1 << 20) -> None:
        self.entries: dict[int, Entry] = {}
        self.room, self.closed = room, 0

    def allocate(self, shape: torch.Size, dtype: torch.dtype, *, fmt: Any, busy_loop: bool) -> Any:
        assert (len(shape), dtype, fmt, busy_loop) == (4, torch.uint8, "form", False)
        if shape.numel() > self.room:
            return None
        self.room -= shape.numel()
        return Entry(torch.empty(shape, dtype=dtype))

    def batched_put(self, keys: list[int], entries: list[Entry]) -> None:
        self.entries.update(zip(keys, entries, strict=True))

    def contains(self, key: int) -> str | None:
        return "memory" if key in self.entries else None

    def get(self, key: int) -> Entry | None:
        entry = self.entries.get(key)
        if entry is not None:
            entry.references += 1
        return entry

    def remove(self, key: int) -> int:
        return int(self.entries.pop(key, None) is not None)

    def close(self) -> None:
        self.closed += 1


def made(manager: Manager | None = None, **extra: Any) -> LMCacheConnector:
    library = LMCacheLibrary(
        lambda path: path, lambda config: manager or Manager(), lambda number: number, "form"
    )
    settings = {"kv_role": "kv_both", "kv_connector_extra_config": extra}
    return LMCacheConnector(settings, lambda: library)


@contextmanager
def closing(connector: LMCacheConnector) -> Iterator[LMCacheConnector]:
    try:
        yield connector
    finally:
        connector.close()


class TestStandIn(KVConnectorConformance):
    def connected(self) -> Any:
        return closing(made())


class TestLibrary(KVConnectorConformance):
    @pytest.fixture(autouse=True)
    def configure(self, tmp_path: Path) -> None:
        self.file = tmp_path / "lmcache.yaml"
        self.file.write_text(
            f"local_cpu: true\nmax_local_cpu_size: 0.01\nlocal_disk: {tmp_path / 'disk'}\n"
            "max_local_disk_size: 0.01\n"
        )

    def connected(self) -> Any:
        try:
            import_lmcache()
        except MissingDependency as error:
            pytest.skip(f"LMCache cannot be imported: {error}")
        extra = {"config_file": str(self.file)}
        return closing(LMCacheConnector({"kv_role": "kv_both", "kv_connector_extra_config": extra}))


def test_what_is_loaded_is_let_go_of() -> None:
    manager = Manager()
    with closing(made(manager)) as connector:
        connector.save(key_of("a"), memoryview(content_of(1)))
        assert load(connector, key_of("a")) == content_of(1)
        [entry] = manager.entries.values()
        assert entry.references == 1
    connector.close()
    assert manager.closed == 1


def test_a_damaged_entry_is_not_given_and_is_gone() -> None:
    manager = Manager()
    with closing(made(manager)) as connector:
        connector.save(key_of("a"), memoryview(content_of(1)))
        [entry] = manager.entries.values()
        entry.tensor.view(-1)[-1] ^= 1
        assert load(connector, key_of("a")) is None
        assert not connector.contains(key_of("a"))


def test_what_has_no_room_and_what_fails_is_an_os_error() -> None:
    manager = Manager(room=BLOCK_BYTES)
    with closing(made(manager)) as connector:
        with pytest.raises(OSError, match=r"no room for a block of 544 bytes"):
            connector.save(key_of("a"), memoryview(content_of(1)))
        manager.get = lambda key: 1 // 0  # type: ignore[assignment, method-assign, return-value]
        with pytest.raises(OSError, match=r"LMCache: load: .*zero"):
            load(connector, key_of("a"))


def test_refused_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"use_native = False: must be true"):
        made(use_native=False)
    with pytest.raises(ConfigError, match=r"config_file = 'x': must be a file with LMCache"):
        made(config_file="x")
    with pytest.raises(ConfigError, match=r"chunk_size = 3: must be left out"):
        made(chunk_size=3)

    def refuse(path: str | None) -> Any:
        raise ValueError(f"no such remote_url in {path}")

    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(tmp_path / "a.yaml"))
    library = LMCacheLibrary(refuse, Manager, int, "form")
    settings = {"kv_role": "kv_both", "kv_connector_extra_config": {}}
    with pytest.raises(ConfigError, match=r"refuses the settings of '.*a.yaml': no such remote"):
        LMCacheConnector(settings, lambda: library)


def test_a_missing_library_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = builtins.__import__

    def missing(name: str, *args: Any) -> Any:
        if name.startswith("lmcache"):
            raise ImportError("no module named lmcache", name="lmcache")
        return found(name, *args)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(MissingDependency, match=r"headrace-distributed\[lmcache\]"):
        import_lmcache()

"""The connectors ``file`` and ``offload``, and their folder."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace_core.errors import ConfigError
from headrace_core.kv import KVConnector
from headrace_distributed.kv_connectors.background_writer import BackgroundWriter
from headrace_distributed.kv_connectors.block_folder import HEADER_BYTES, BlockFolder
from headrace_distributed.kv_connectors.decode_bench import DecodeBenchConnector
from headrace_distributed.kv_connectors.file import FileConnector
from headrace_distributed.kv_connectors.offload import OffloadConnector
from headrace_testing.engine.kv_connectors import (
    BLOCK_BYTES,
    KVConnectorConformance,
    content_of,
    key_of,
    load,
)

FILE_BYTES = BLOCK_BYTES + HEADER_BYTES


def settings(role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    return {"kv_role": role, "kv_connector_extra_config": extra}


@contextmanager
def closing(connector: KVConnector) -> Iterator[KVConnector]:
    try:
        yield connector
    finally:
        connector.close()


def save(store: Any, *numbers: int) -> None:
    for n in numbers:
        store.save(key_of(str(n)), memoryview(content_of(n)))


def found(store: Any, count: int = 8) -> list[int]:
    return [n for n in range(count) if load(store, key_of(str(n))) == content_of(n)]


class TestFile(KVConnectorConformance):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.path = tmp_path / "blocks"

    def connected(self) -> Any:
        return closing(FileConnector(settings(shared_storage_path=str(self.path))))

    def test_another_engine_finds_blocks(self) -> None:
        with self.connected() as first:
            save(first, 1, 2)
        reader = FileConnector(settings("kv_consumer", shared_storage_path=str(self.path)))
        assert found(reader) == [1, 2]
        assert not [p for p in self.path.rglob("*") if p.is_file() and p.suffix != ".kv"]


class TestOffload(KVConnectorConformance):
    def connected(self) -> Any:
        return closing(OffloadConnector(settings(cpu_bytes_to_use=32 * BLOCK_BYTES)))

    def test_what_was_used_longest_ago_leaves(self) -> None:
        with closing(OffloadConnector(settings(cpu_bytes_to_use=3 * BLOCK_BYTES))) as made:
            save(made, 0, 1, 2)
            assert made.contains(key_of("0"))
            assert load(made, key_of("1")) == content_of(1)
            save(made, 3)
            assert found(made) == [0, 1, 3]
            made.save(key_of("large"), memoryview(bytes(4 * BLOCK_BYTES)))
            assert found(made) == [0, 1, 3]


class TestOffloadWithDisk(KVConnectorConformance):
    """Memory for four blocks, a folder for the rest."""

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.path = tmp_path

    def connected(self, disk_bytes: int = 32 * FILE_BYTES) -> Any:
        extra = {"disk_path": str(self.path), "disk_bytes_to_use": disk_bytes}
        return closing(OffloadConnector(settings(cpu_bytes_to_use=4 * BLOCK_BYTES, **extra)))

    def test_a_restart_finds_what_was_used_last(self) -> None:
        with self.connected() as first:
            save(first, *range(8))
        with self.connected() as second:
            assert found(second) == [*range(8)]
        for n in range(8):
            [path] = self.path.glob(f"*/{key_of(str(n)).hex()}.kv")
            os.utime(path, (n, n))
        with self.connected(3 * FILE_BYTES) as third:
            assert found(third) == [5, 6, 7]
            save(third, 0)
        with self.connected(3 * FILE_BYTES) as fourth:
            assert len(found(fourth)) == 3
            assert 0 in found(fourth)
        assert sum(p.stat().st_size for p in self.path.rglob("*.kv")) <= 3 * FILE_BYTES


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def _lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _replace_header(path: Path) -> None:
    path.write_bytes(b"\x80\x04pickled" + path.read_bytes()[9:])


@pytest.mark.parametrize("damage", [_cut, _flip, _lengthen, _empty, _replace_header, os.unlink])
@pytest.mark.parametrize("max_bytes", [None, 1 << 20])
def test_a_damaged_file_is_not_given(
    tmp_path: Path, damage: Callable[[Path], None], max_bytes: int | None
) -> None:
    folder = BlockFolder(tmp_path, max_bytes)
    save(folder, 1, 2)
    [path] = tmp_path.glob(f"*/{key_of('1').hex()}.kv")
    damage(path)
    assert found(folder) == [2]
    assert not folder.contains(key_of("1"))
    assert not path.exists()
    save(folder, 1)
    assert found(folder) == [1, 2]


def test_a_swapped_file_is_not_given(tmp_path: Path) -> None:
    folder = BlockFolder(tmp_path)
    save(folder, 1, 2)
    first, second = (next(tmp_path.glob(f"*/{key_of(n).hex()}.kv")) for n in "12")
    os.replace(second, first)
    assert found(folder) == []


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "ab").mkdir()
    others = [tmp_path / "notes.kv", tmp_path / "ab" / "notes.kv", tmp_path / "ab" / "a.txt"]
    for path in others:
        path.write_text("mine")
    folder = BlockFolder(tmp_path, 2 * FILE_BYTES)
    save(folder, *range(5))
    assert all(path.read_text() == "mine" for path in others)


def test_a_block_larger_than_the_folder(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="a block of 560 bytes; the folder holds 100"):
        save(BlockFolder(tmp_path, 100), 1)


def test_what_a_slow_disk_cannot_take_is_left_out(tmp_path: Path) -> None:
    writer = BackgroundWriter(BlockFolder(tmp_path), max_bytes=0)
    writer.write(key_of("1"), content_of(1))
    assert (writer.num_dropped, writer.pending(key_of("1"))) == (1, None)
    writer.close()


def test_a_disk_that_fails_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = BackgroundWriter(BlockFolder(tmp_path / "gone"))
    for n in range(3):
        writer.write(key_of(str(n)), content_of(n))
    writer.close()
    assert [r.levelname for r in caplog.records] == ["WARNING"]


def test_dummy_blocks_are_one_number() -> None:
    made = DecodeBenchConnector(settings("kv_consumer", fill_mean=0.25))
    assert made.contains(key_of("any"))
    content = load(made, key_of("any"), 8)
    assert content is not None
    assert struct.unpack("<2f", content) == pytest.approx((0.25, 0.25), rel=0.01)


def test_memory_and_disk_must_hold_a_block(tmp_path: Path) -> None:
    tiers = {"cpu_bytes_to_use": 512, "disk_path": str(tmp_path), "disk_bytes_to_use": 600}
    with closing(OffloadConnector(settings(**tiers))) as made:
        made.check_block(512)
        with pytest.raises(
            ConfigError, match="cpu_bytes_to_use = 512: must be at least 513, the bytes"
        ):
            made.check_block(513)
    small = {**tiers, "disk_bytes_to_use": 520}
    with (
        closing(OffloadConnector(settings(**small))) as made,
        pytest.raises(ConfigError, match="disk_bytes_to_use = 520: must be at least "),
    ):
        made.check_block(512)


def test_a_second_engine_in_a_folder_is_warned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiers = {"cpu_bytes_to_use": 512, "disk_path": str(tmp_path), "disk_bytes_to_use": 600}
    with closing(OffloadConnector(settings(**tiers))):
        assert not caplog.records
        with closing(OffloadConnector(settings(**tiers))):
            [record] = caplog.records
    assert f"disk_path = {str(tmp_path)!r}: another engine uses this folder" in record.getMessage()
    with closing(OffloadConnector(settings(**tiers))):  # both have let it go
        assert len(caplog.records) == 1


def test_sizes_are_of_all_ranks_in_what_is_refused(tmp_path: Path) -> None:
    tiers = {"cpu_bytes_to_use": 1025, "disk_path": str(tmp_path), "disk_bytes_to_use": 1200}
    ranks = {"rank": 1, "num_ranks": 2}
    with closing(OffloadConnector({**settings(**tiers), **ranks})) as made:
        made.check_block(512)
        with pytest.raises(
            ConfigError, match=r"cpu_bytes_to_use = 1025: must be at least 1026, .* each of 2 ranks"
        ):
            made.check_block(513)
    small = {**tiers, "disk_bytes_to_use": 1000}
    with (
        closing(OffloadConnector({**settings(**small), **ranks})) as made,
        pytest.raises(ConfigError, match="disk_bytes_to_use = 1000: must be at least 1"),
    ):
        made.check_block(512)


def test_wrong_settings_of_dummy_blocks() -> None:
    with pytest.raises(ConfigError, match="kv_role = 'kv_both': must be kv_consumer"):
        DecodeBenchConnector(settings())
    with pytest.raises(ConfigError, match="fill_mean = 0: must be a number above 0"):
        DecodeBenchConnector(settings("kv_consumer", fill_mean=0))


@pytest.mark.parametrize(
    ("make", "extra", "message"),
    [
        (FileConnector, {}, r"shared_storage_path = None: must be a folder"),
        (FileConnector, {"shared_storage_path": 3}, r"= 3: must be a folder"),
        (FileConnector, {"shared_storage_path": "/proc/x"}, r"must be a folder to use: "),
        (FileConnector, {"colour": 1}, r"extra_config.colour = 1: must be left out: there are"),
        (OffloadConnector, {}, r"cpu_bytes_to_use = None: must be bytes of memory"),
        (OffloadConnector, {"cpu_bytes_to_use": 0}, r"= 0: must be bytes, at least 1"),
        (OffloadConnector, {"cpu_bytes_to_use": "1G"}, r"= '1G': must be bytes"),
        (OffloadConnector, {"cpu_bytes_to_use": True}, r"= True: must be bytes"),
        (
            OffloadConnector,
            {"cpu_bytes_to_use": 1e18},
            r"= 1e\+18: must be at most \d+, this machine",
        ),
        (
            OffloadConnector,
            {"cpu_bytes_to_use": 9, "disk_bytes_to_use": 9},
            r"disk_path = None: must be given with disk_bytes_to_use",
        ),
        (
            OffloadConnector,
            {"cpu_bytes_to_use": 9, "disk_path": "."},
            r"disk_bytes_to_use = None: must be given with disk_path",
        ),
    ],
)
def test_wrong_settings(make: type[KVConnector], extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(settings(**extra))

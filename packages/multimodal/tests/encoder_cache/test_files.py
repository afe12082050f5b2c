"""Vectors of media in a shared folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace_core.errors import ConfigError
from headrace_multimodal.encoder_cache.files import FILE, FileConnector
from headrace_multimodal.encoder_cache.vectors_file import from_file, to_file
from headrace_testing.engine.ec_connectors import (
    BUFFER_SIZE,
    ECConnectorConformance,
    Pair,
    key_of,
    vectors_of,
)


def connector(folder: Path, role: str, **changes: Any) -> FileConnector:
    extra = {"shared_storage_path": str(folder)}
    settings = {"ec_role": role, "ec_buffer_size": BUFFER_SIZE, "ec_connector_extra_config": extra}
    return FileConnector({**settings, **changes})


class TestFileConnector(ECConnectorConformance):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.root = tmp_path / "vectors"

    @contextmanager
    def connected(self) -> Iterator[Pair]:
        yield connector(self.root, "ec_producer"), connector(self.root, "ec_consumer")

    def test_nothing_but_items_is_in_the_folder_and_a_lookup_makes_nothing(
        self, pair: Pair
    ) -> None:
        producer, consumer = pair
        producer.save(key_of("a"), vectors_of(1))
        consumer.load(key_of("b"))
        with pytest.raises(OSError, match="ec_buffer_size"):
            producer.save(key_of("c"), vectors_of(1, rows=512))
        found = [str(path.relative_to(self.root)) for path in self.root.rglob("*")]
        assert sorted(found) == [key_of("a"), f"{key_of('a')}/{FILE}"]

    def test_others_files_are_left_alone(self, pair: Pair) -> None:
        other = self.root / "others" / FILE
        other.parent.mkdir()
        other.write_bytes(bytes(BUFFER_SIZE))
        os.utime(other, (0, 0))
        for n in range(12):
            pair[0].save(key_of(str(n)), vectors_of(n, rows=32))
        assert other.exists()

    def test_what_was_loaded_stays_longer(self, pair: Pair) -> None:
        producer, consumer = pair
        for n in range(6):
            producer.save(key_of(str(n)), vectors_of(n, rows=32))
            os.utime(self.root / key_of(str(n)) / FILE, (n, n))
        consumer.load(key_of("0"))
        for n in range(6, 9):
            producer.save(key_of(str(n)), vectors_of(n, rows=32))
        assert consumer.load(key_of("0")) is not None
        assert consumer.load(key_of("1")) is None

    @pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"", lambda data: b"\xff" * 40,
                                        lambda data: data.replace(b'"F32"', b'"F64"'),
                                        lambda data: data.replace(b"[2,4]", b"[2,9]")])  # fmt: skip
    def test_damaged_files_are_errors_of_the_file(self, pair: Pair, damage: Any) -> None:
        producer, consumer = pair
        producer.save(key_of("a"), vectors_of(1))
        file = self.root / key_of("a") / FILE
        file.write_bytes(damage(file.read_bytes()))
        with pytest.raises(OSError, match="no file of vectors"):
            consumer.load(key_of("a"))


def test_the_file_is_one_of_safetensors() -> None:
    load = pytest.importorskip("safetensors").deserialize
    [(name, entry)] = load(to_file(vectors_of(3)))
    assert (name, entry["dtype"], entry["shape"]) == ("ec_cache", "F32", [2, 4])
    assert bytes(entry["data"]) == vectors_of(3).data
    assert from_file(to_file(vectors_of(3, dtype="bfloat16"))).dtype == "bfloat16"


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match=r"shared_storage_path = .*file'.*must be a folder"):
        connector(file, "ec_consumer")
    with pytest.raises(ConfigError, match=r"colour = 1: must be left out"):
        connector(tmp_path, "ec_producer", ec_connector_extra_config={"colour": 1})

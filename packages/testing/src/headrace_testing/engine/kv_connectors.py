"""Conformance suite of KV connectors: a suite to inherit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from hashlib import sha256
from threading import Thread

import pytest

from headrace_core.kv import KVConnector

BLOCK_BYTES = 512
"""Size of the suite's blocks. A connector under test must hold at least 16 of them."""


def key_of(name: str) -> bytes:
    """A key as schedulers make them."""
    return sha256(name.encode()).digest()


def content_of(seed: int, num_bytes: int = BLOCK_BYTES) -> bytes:
    """A block; any bytes are good."""
    return bytes((seed * 31 + i) % 251 for i in range(num_bytes))


def load(connector: KVConnector, key: bytes, num_bytes: int = BLOCK_BYTES) -> bytes | None:
    """A block, or None."""
    into = bytearray(num_bytes)
    return bytes(into) if connector.load(key, memoryview(into)) else None


class KVConnectorConformance:
    """Inherit and override :meth:`connected`."""

    def connected(self) -> AbstractContextManager[KVConnector]:
        """A new connector without blocks, of role ``kv_both``; it is closed at the end."""
        raise NotImplementedError

    @pytest.fixture
    def connector(self) -> Iterator[KVConnector]:
        with self.connected() as made:
            yield made

    def test_what_is_saved_is_there_and_is_loaded(self, connector: KVConnector) -> None:
        blocks = {key_of(str(n)): content_of(n) for n in range(8)}
        for key, content in blocks.items():
            assert not connector.contains(key)
            connector.save(key, memoryview(content))
        for _ in range(2):
            assert all(map(connector.contains, blocks))
            assert {key: load(connector, key) for key in blocks} == blocks

    def test_what_nobody_saved_is_not_there(self, connector: KVConnector) -> None:
        connector.save(key_of("b"), memoryview(content_of(1)))
        assert not connector.contains(key_of("a"))
        assert load(connector, key_of("a")) is None
        assert load(connector, key_of("b")) == content_of(1)

    def test_a_saved_block_is_a_copy(self, connector: KVConnector) -> None:
        content = bytearray(content_of(3))
        connector.save(key_of("a"), memoryview(content))
        content[:] = bytes(BLOCK_BYTES)
        assert load(connector, key_of("a")) == content_of(3)

    def test_the_first_content_of_a_key_stays(self, connector: KVConnector) -> None:
        connector.save(key_of("a"), memoryview(content_of(1)))
        connector.save(key_of("a"), memoryview(content_of(1)))
        assert load(connector, key_of("a")) == content_of(1)

    def test_a_block_of_another_size_is_not_given(self, connector: KVConnector) -> None:
        connector.save(key_of("a"), memoryview(content_of(1)))
        for size in (BLOCK_BYTES - 1, BLOCK_BYTES + 1, 2 * BLOCK_BYTES):
            assert load(connector, key_of("a"), size) is None

    def test_blocks_of_several_sizes(self, connector: KVConnector) -> None:
        sizes = {key_of(str(n)): 64 * n for n in range(1, 6)}
        for key, size in sizes.items():
            connector.save(key, memoryview(content_of(size, size)))
        for key, size in sizes.items():
            assert load(connector, key, size) == content_of(size, size)

    def test_one_thread_looks_while_another_moves(self, connector: KVConnector) -> None:
        keys = [key_of(str(n)) for n in range(12)]
        loaded: list[bytes | None] = []

        def move() -> None:
            for n, key in enumerate(keys):
                connector.save(key, memoryview(content_of(n)))
                loaded.append(load(connector, key))

        mover = Thread(target=move)
        mover.start()
        while mover.is_alive():
            for key in keys:
                connector.contains(key)
        mover.join()
        assert loaded == [content_of(n) for n in range(12)]

    def test_it_is_closed_twice(self, connector: KVConnector) -> None:
        connector.save(key_of("a"), memoryview(content_of(1)))
        connector.close()
        connector.close()

"""Conformance suite of connectors of a disaggregated encoder: a suite to inherit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from hashlib import sha256

import pytest

from headrace_core.arrays import ITEM_BYTES, PackedArray
from headrace_core.multimodal import ECConnector

BUFFER_SIZE = 4096
"""``ec_buffer_size`` of the pairs that the suite asks for."""
Pair = tuple[ECConnector, ECConnector]
"""A producer, and a consumer that takes its vectors."""


def key_of(name: str) -> str:
    """A key as workers make them."""
    return sha256(name.encode()).hexdigest()


def vectors_of(seed: int, rows: int = 2, width: int = 4, dtype: str = "float32") -> PackedArray:
    """Vectors of an item; any bytes are good."""
    size = rows * width * ITEM_BYTES[dtype]
    return PackedArray(dtype, (rows, width), bytes((seed + i) % 120 for i in range(size)))


class ECConnectorConformance:
    """Inherit and override :meth:`connected`."""

    def connected(self) -> AbstractContextManager[Pair]:
        """A new pair with :data:`BUFFER_SIZE`; both are closed at the end."""
        raise NotImplementedError

    @pytest.fixture
    def pair(self) -> Iterator[Pair]:
        with self.connected() as made:
            yield made

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_what_is_saved_is_loaded(self, pair: Pair, dtype: str) -> None:
        producer, consumer = pair
        items = {key_of(str(n)): vectors_of(n, rows=n + 1, dtype=dtype) for n in range(3)}
        for key, vectors in items.items():
            producer.save(key, vectors)
        for _ in range(2):
            assert {key: consumer.load(key) for key in items} == items

    def test_what_nobody_saved_is_not_there(self, pair: Pair) -> None:
        producer, consumer = pair
        assert consumer.load(key_of("a")) is None
        producer.save(key_of("b"), vectors_of(1))
        assert consumer.load(key_of("a")) is None
        assert consumer.load(key_of("b")) == vectors_of(1)

    def test_a_producer_takes_its_own_vectors(self, pair: Pair) -> None:
        producer, _ = pair
        producer.save(key_of("a"), vectors_of(1))
        assert producer.load(key_of("a")) == vectors_of(1)

    def test_the_first_of_two_stays(self, pair: Pair) -> None:
        producer, consumer = pair
        producer.save(key_of("a"), vectors_of(1))
        producer.save(key_of("a"), vectors_of(2))
        assert consumer.load(key_of("a")) == vectors_of(1)

    def test_what_is_beyond_the_size_goes_and_the_newest_stays(self, pair: Pair) -> None:
        producer, consumer = pair
        keys = [key_of(str(n)) for n in range(12)]
        for n, key in enumerate(keys):
            producer.save(key, vectors_of(n, rows=32))  # 512 bytes
        kept = [key for key in keys if consumer.load(key) is not None]
        assert keys[-1] in kept
        assert keys[0] not in kept
        assert 1 <= len(kept) <= BUFFER_SIZE // 512

    def test_what_never_fits_is_refused(self, pair: Pair) -> None:
        producer, consumer = pair
        with pytest.raises(OSError, match="ec_buffer_size"):
            producer.save(key_of("a"), vectors_of(1, rows=512))
        assert consumer.load(key_of("a")) is None

    @pytest.mark.parametrize("key", ["", "../../etc/passwd", "A" * 64, f"{'a' * 62}/b", "a" * 65])
    def test_nothing_else_is_a_key(self, pair: Pair, key: str) -> None:
        producer, consumer = pair
        with pytest.raises(ValueError, match="64 hex digits"):
            producer.save(key, vectors_of(1))
        with pytest.raises(ValueError, match="64 hex digits"):
            consumer.load(key)

    def test_closing_twice_is_once(self, pair: Pair) -> None:
        for one in (*pair, *pair):
            one.close()

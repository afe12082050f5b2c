"""Requests that wait while a connector brings their blocks near."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace_core.kv import KVConnector
from headrace_engine.kv_transfer.fetches import BlockFetches


class Slow(KVConnector):
    """Fetches until it is told that it has."""

    def __init__(self) -> None:
        super().__init__({})
        self.asked: list[tuple[str, set[bytes]]] = []
        self.ready: set[str] = set()
        self.forgotten: list[str] = []

    def contains(self, key: bytes) -> bool:
        return False

    def load(self, key: bytes, into: memoryview) -> bool:
        return False

    def save(self, key: bytes, content: memoryview) -> None: ...

    def fetch(
        self, request_id: str, blocks: Mapping[bytes, int], params: Mapping[str, Any]
    ) -> bool:
        self.asked.append((request_id, set(blocks)))
        return request_id not in self.ready

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)


def test_a_request_waits_until_its_blocks_have_come() -> None:
    connector = Slow()
    fetches = BlockFetches(connector)
    asked = iter([{b"a": 1, b"b": 1}])  # once: hashing a long prompt in every step would cost
    for _ in range(3):
        assert fetches.waits("r", {}, lambda: next(asked))
    connector.ready.add("r")
    assert not fetches.waits("r", {}, lambda: next(asked))
    assert fetches.is_done("r")
    assert len(connector.asked) == 4
    assert not fetches.waits("r", {}, lambda: next(asked))
    assert len(connector.asked) == 4, "once for each time in the queue"
    fetches.forget("r")
    assert not fetches.is_done("r")
    assert connector.forgotten == []


def test_one_of_two_requests_fetches_their_prefix() -> None:
    connector = Slow()
    fetches = BlockFetches(connector)
    assert fetches.waits("r", {}, lambda: {b"a": 1, b"b": 1})
    assert fetches.waits("s", {}, lambda: {b"b": 1, b"c": 1})
    assert fetches.waits("t", {}, lambda: {b"d": 1})
    assert {request_id for request_id, _ in connector.asked} == {"r", "t"}
    connector.ready.add("r")
    assert not fetches.waits("r", {}, dict)
    assert fetches.waits("s", {}, lambda: {b"c": 1})
    assert connector.asked[-1] == ("s", {b"c"})


def test_who_needs_nothing_waits_for_nothing() -> None:
    connector = Slow()
    assert not BlockFetches(connector).waits("r", {}, dict)
    assert connector.asked == []


def test_a_request_that_leaves_ends_its_fetch() -> None:
    connector = Slow()
    fetches = BlockFetches(connector)
    assert fetches.waits("r", {}, lambda: {b"a": 1})
    fetches.forget("r")
    assert connector.forgotten == ["r"]
    assert fetches.waits("s", {}, lambda: {b"a": 1}), "its keys are free for others"
    assert connector.asked[-1][0] == "s"

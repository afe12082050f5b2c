"""Kept responses: bounds, owners, logs."""

from __future__ import annotations

import pytest

from headrace_core.errors import RequestError
from headrace_server.protocols.responses import store as module
from headrace_server.protocols.responses.store import ResponseStore, StoredResponse


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(clock: Clock | None = None, **bounds: float) -> ResponseStore:
    values: dict[str, float] = {"max_count": 10, "max_bytes": 10**6, "max_age": 100.0, **bounds}
    return ResponseStore(
        max_count=int(values["max_count"]), max_bytes=int(values["max_bytes"]),
        max_age=values["max_age"], clock=clock or Clock(),
    )  # fmt: skip


def done(name: str, size: int = 0, owner: str = "o") -> StoredResponse:
    record = StoredResponse(name, owner, response={"text": "x" * size})
    record.end()
    return record


@pytest.mark.req("SEC-16")
def test_thousands_leave_it_as_small_as_few() -> None:
    store = make(max_count=5, max_bytes=10_000)
    for index in range(2000):
        store.add(done(f"resp_{index}", 100, owner=f"owner {index}"))
        assert len(store) <= 5
    assert store.num_bytes == sum(r.num_bytes for r in store._records.values()) < 10_000


def test_bytes_are_bounded() -> None:
    store = make(max_bytes=1000)
    store.add(done("a", 400))
    store.add(done("b", 400))
    assert store.get("o", "a") is not None
    store.add(done("c", 400))
    assert store.get("o", "b") is None, "the least recently used goes"
    assert store.get("o", "a") is not None
    store.add(done("large", 2000))
    assert (len(store), store.num_bytes) == (0, 0)


def test_age() -> None:
    clock = Clock()
    store = make(clock)
    store.add(done("a"))
    clock.now = 99
    assert store.get("o", "a") is not None
    clock.now = 198
    assert store.get("o", "a") is not None, "counted from the last use"
    clock.now = 299
    assert store.get("o", "a") is None


def test_owners() -> None:
    store = make()
    store.add(done("a", owner="one"))
    assert store.get("two", "a") is None
    store.add(done("a", owner="two"))
    assert len(store) == 2


def test_what_runs_is_kept() -> None:
    clock = Clock()
    store = make(clock, max_count=1)
    running = StoredResponse("run", "o", background=True)
    store.add(running)
    store.add(done("a"))
    clock.now = 1000
    assert store.get("o", "run") is running
    assert store.get("o", "a") is None
    running.end()
    clock.now = 2000
    assert store.get("o", "run") is None


async def test_a_log_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LOG_BYTES", 100)
    record = StoredResponse("a", "o")
    for index in range(20):
        record.append(b"%010d" % index)
    record.end()
    assert [data async for data in record.follow(9)] == [b"%010d" % i for i in range(10, 20)]
    with pytest.raises(RequestError, match="no longer kept"):
        record.check_number(5)
    with pytest.raises(RequestError):
        [data async for data in record.follow(5)]

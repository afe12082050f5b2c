"""A block is there if all ranks have their parts of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from headrace_core.errors import ConfigError
from headrace_core.kv import FullAttentionSpec, KVCacheConfig, KVCacheGroup, KVConnector, MLASpec
from headrace_engine.kv_transfer.finding import BlockFinder
from headrace_engine.kv_transfer.parts import GroupParts, parts_of_groups, whole_spec
from headrace_engine.kv_transfer.rank_blocks import RankBlocks
from headrace_engine.kv_transfer.whole_blocks import WholeBlocks

A, B, C = (bytes([n]) * 32 for n in range(3))


class Store(KVConnector):
    """Has keys; fetches until it is told that it has."""

    def __init__(self, *keys: bytes) -> None:
        super().__init__({})
        self.keys, self.fetched, self.forgotten = set(keys), {}, []  # type: ignore[var-annotated]
        self.slow = False

    def contains(self, key: bytes) -> bool:
        return key in self.keys

    def load(self, key: bytes, into: memoryview) -> bool:
        return False

    def save(self, key: bytes, content: memoryview) -> None: ...

    def fetch(
        self, request_id: str, blocks: Mapping[bytes, int], params: Mapping[str, Any]
    ) -> bool:
        self.fetched[request_id] = dict(blocks)
        return self.slow

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)

    def address(self) -> Mapping[str, Any]:
        return {"remote_port": 1}


class Ranks:
    """Other ranks, which answer when the test says so."""

    def __init__(self, *stores: Store) -> None:
        self.finders = [BlockFinder(blocks_of(store)) for store in stores]
        self.asked: list[tuple[str, Sequence[Any], list[Future[Any]]]] = []

    def ask(self, method: str, args: Sequence[Any]) -> list[Future[Any]]:
        answers: list[Future[Any]] = [Future() for _ in self.finders]
        self.asked.append((method, args, answers))
        return answers

    def answer(self, *ranks: int) -> None:
        """Have ranks answer all that they were asked."""
        for method, args, answers in self.asked:
            for rank in ranks:
                if answers[rank].done():
                    continue
                call = {"find_blocks": self.finders[rank].find,
                        "forget_blocks": self.finders[rank].forget}[method]  # fmt: skip
                answers[rank].set_result(call(*args))  # type: ignore[operator]


def blocks_of(store: Store, parts: GroupParts | None = None) -> RankBlocks:
    return RankBlocks(store, [parts or GroupParts()], [64])


def test_a_block_is_there_once_all_ranks_have_said_so() -> None:
    own, ranks = Store(A, B), Ranks(Store(A, C), Store(A, B))
    whole = WholeBlocks(blocks_of(own), ranks.ask)
    blocks = {A: 0, B: 0, C: 0}
    assert not whole.contains(A, 0, "r"), "nobody was asked"
    assert whole.fetch("r", blocks, {})
    ranks.answer(0)
    assert whole.fetch("r", blocks, {})
    ranks.answer(1)
    assert not whole.fetch("r", blocks, {})
    assert [whole.contains(key, 0, "r") for key in (A, B, C)] == [True, False, False]
    assert not whole.contains(A, 0, "other")
    own.keys.discard(A)
    assert not whole.contains(A, 0, "r")


def test_ranks_fetch_at_the_same_time_and_who_is_slow_is_asked_again() -> None:
    own, slow, quick = Store(), Store(), Store(A)
    slow.slow = True
    ranks = Ranks(slow, quick)
    whole = WholeBlocks(blocks_of(own), ranks.ask)
    assert whole.fetch("r", {A: 0}, {"remote_port": 1})
    ranks.answer(0, 1)
    for _ in range(3):
        assert whole.fetch("r", {A: 0}, {"remote_port": 1})
        ranks.answer(0, 1)
    slow.slow = False
    own.keys.add(A)
    slow.keys.add(A)
    while whole.fetch("r", {A: 0}, {"remote_port": 1}):
        ranks.answer(0, 1)
    assert whole.contains(A, 0, "r")
    assert own.fetched == {"r": {A: 64}}
    assert not quick.fetched, "it has everything"


def test_ranks_are_told_when_a_request_leaves() -> None:
    own, other = Store(), Store()
    ranks = Ranks(other)
    whole = WholeBlocks(blocks_of(own), ranks.ask)
    whole.left("never asked for")
    assert not ranks.asked
    whole.fetch("r", {A: 0}, {})
    ranks.answer(0)
    assert not whole.fetch("r", {A: 0}, {})
    whole.left("r")
    ranks.answer(0)
    assert other.forgotten == ["r"]
    assert not whole.contains(A, 0, "r")
    other.fetched.clear()
    assert whole.fetch("r", {A: 0}, {}), "in the queue again, it is fetched again"
    ranks.answer(0)
    assert other.fetched == {"r": {A: 64}}


def test_a_rank_that_cannot_look_has_nothing(caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks(Store(A))
    whole = WholeBlocks(blocks_of(Store(A)), ranks.ask)
    whole.fetch("r", {A: 0}, {})
    ranks.asked[0][2][0].set_exception(OSError("no disk"))
    assert not whole.fetch("r", {A: 0}, {})
    assert not whole.contains(A, 0, "r")
    assert "a rank could not look for blocks: no disk" in caplog.text


def test_a_rank_has_a_block_if_it_has_all_of_its_parts() -> None:
    parts = GroupParts(4, 2, 2)
    keys = parts.keys(A)
    assert len(set(keys) | set(GroupParts(4, 0, 2).keys(A)) | {A}) == 5
    store = Store(keys[0])
    own = blocks_of(store, parts)
    assert not own.contains(A, 0)
    assert not own.fetch("r", {A: 0}, {})
    assert store.fetched == {"r": {keys[1]: 32}}
    store.keys.add(keys[1])
    assert own.contains(A, 0)


class Layer:
    def __init__(self, spec: Any, copies: int | None) -> None:
        self.kv_spec = spec
        if copies is not None:
            self.kv_copies = copies


def full(heads: int) -> FullAttentionSpec:
    return FullAttentionSpec(8, heads, 16, "float32")


@pytest.mark.parametrize(
    ("spec", "copies", "stated", "ranks", "found"),
    [
        (full(4), 1, None, 1, [(1, 0, 1)]),
        (full(4), 1, 4, 1, [(4, 0, 4)]),
        (full(4), 1, 9, 1, [(4, 0, 4)]),
        (full(2), 1, None, 2, [(2, 0, 1), (2, 1, 1)]),
        (full(2), 1, 4, 2, [(4, 0, 2), (4, 2, 2)]),
        (full(1), 2, None, 4, [(2, 0, 1), (2, 0, 1), (2, 1, 1), (2, 1, 1)]),
        (MLASpec(8, 1, 64, "float32"), 4, None, 4, [(1, 0, 1)] * 4),
        (MLASpec(8, 1, 64, "float32"), None, 2, 2, [(1, 0, 1)] * 2),
    ],
)
def test_parts_of_ranks(
    spec: Any, copies: int | None, stated: int | None, ranks: int, found: list[tuple[int, ...]]
) -> None:
    layers: Any = {"a": Layer(spec, copies)}
    config = KVCacheConfig((8,), (KVCacheGroup(("a",), spec),))
    every = [parts_of_groups(layers, config, stated, rank, ranks) for rank in range(ranks)]
    assert [tuple(one) for [one] in every] == found
    heads = (
        spec.num_kv_heads
        if isinstance(spec, MLASpec)
        else spec.num_kv_heads * ranks // (copies or 1)
    )
    assert {whole_spec(spec, one).num_kv_heads for [one] in every} == {heads}


def test_parts_that_cannot_be() -> None:
    layers: Any = {"a": Layer(full(3), 1)}
    config = KVCacheConfig((8,), (KVCacheGroup(("a",), full(3)),))
    with pytest.raises(
        ConfigError,
        match=r"kv_head_parts = 4: .* 6 key-value heads on 2 ranks: must be one of 2, 6",
    ):
        parts_of_groups(layers, config, 4, 0, 2)
    with pytest.raises(ConfigError, match="does not say which ranks keep the same heads"):
        parts_of_groups({"a": Layer(full(3), None)}, config, None, 0, 2)  # type: ignore[dict-item]

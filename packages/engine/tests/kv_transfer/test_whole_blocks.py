"""A block is there if all ranks have their parts of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from headrace_core.errors import ConfigError
from headrace_core.kv import FullAttentionSpec, KVCacheConfig, KVCacheGroup, KVConnector, MLASpec
from headrace_engine.kv_transfer.finding import BlockFinder
from headrace_engine.kv_transfer.layout import layouts_of_groups, merged_layout
from headrace_engine.kv_transfer.parts import Division, LayerParts, parts_of_groups, whole_spec
from headrace_engine.kv_transfer.rank_blocks import PartSize, RankBlocks, part_key
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


def blocks_of(store: Store, *parts: PartSize) -> RankBlocks:
    return RankBlocks(store, [parts or [("", 64)]])


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
    marks = ["part 2 of 4", "part 3 of 4"]
    keys = [part_key(A, mark) for mark in marks]
    assert len({*keys, A, part_key(B, marks[0])}) == 4
    store = Store(keys[0])
    own = blocks_of(store, *((mark, 32) for mark in marks))
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
    every = [
        parts_of_groups(layers, config, Division(stated, rank, ranks)) for rank in range(ranks)
    ]
    for [one], (total, first, here) in zip(every, found, strict=True):
        marks = [f"part {n} of {total}" if total > 1 else "" for n in range(first, first + here)]
        assert [part.mark for part in one.parts] == marks
        assert [part[2:] for part in one.parts] == [(n, here) for n in range(here)]
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
        parts_of_groups(layers, config, Division(4, 0, 2))
    bare: Any = {"a": Layer(full(3), None)}
    with pytest.raises(ConfigError, match="does not say which ranks keep the same heads"):
        parts_of_groups(bare, config, Division(None, 0, 2))


def marks_of(names: tuple[str, ...], **division: Any) -> list[tuple[tuple[str, ...], str]]:
    layers: Any = {name: Layer(full(2), 1) for name in names}
    config = KVCacheConfig((8,), (KVCacheGroup(names, full(2)),))
    [one] = parts_of_groups(layers, config, Division(**division))
    return [(part.layers, part.mark) for part in one.parts]


def test_parts_of_stages_name_their_layers() -> None:
    own = ("a", "b")
    assert marks_of(own) == [(own, "")]
    assert marks_of(own, layers=LayerParts.STAGE) == [(own, "layers a,b")]
    each = [(("a",), "layers a"), (("b",), "layers b")]
    assert marks_of(own, layers=LayerParts.EACH) == each
    assert marks_of(("b",), layers=LayerParts.EACH) == each[1:], "whichever layers a stage has"
    assert marks_of(own, layers=LayerParts.STAGE, rank=1, num_ranks=2) == [
        (own, "layers a,b part 1 of 2")
    ]
    assert marks_of(()) == [], "of a group whose layers are on another stage"
    store = Store()
    assert RankBlocks(store, [[]]).contains(A, 0)


def test_layers_of_a_head_are_a_part_of_their_own_and_those_of_a_draft_model_none() -> None:
    names = ("a", "draft.x", "draft.y")
    assert marks_of(names) == [(("a",), "")]
    head = ("draft.x", "draft.y")
    mark = "guesses eagle: draft.x,draft.y"
    assert marks_of(names, guesses="eagle") == [(("a",), ""), (head, mark)]
    assert marks_of(names, guesses="eagle", rank=1, num_ranks=2) == [
        (("a",), "part 1 of 2"), (head, mark)
    ], "it is whole on the one rank that has it"  # fmt: skip
    assert marks_of(head) == []


def test_stages_describe_their_layout_as_one_rank_does() -> None:
    """Of the second group the first stage has none, and one rank has layers that guess."""
    other = FullAttentionSpec(8, 2, 32, "float32")

    def report(*names: tuple[str, ...]) -> dict[str, Any]:
        groups = tuple(map(KVCacheGroup, names, (full(2), other, full(4))))
        config = KVCacheConfig((8,) * 3, groups)
        layers: Any = {n: Layer(group.spec, 1) for group in groups for n in group.layer_names}
        parts = parts_of_groups(layers, config)
        backends = [None] * 3
        return {"kv_group_layouts": layouts_of_groups(backends, config, parts, ("cpu",))}

    whole = merged_layout([report(("a", "b"), ("c",), ("draft.x",))])
    stages = merged_layout([report(("a",), (), ()), report(("b",), ("c",), ())])
    assert stages == whole
    assert whole.count("cpu") == 2

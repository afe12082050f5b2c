"""Parts of blocks between a cache's memory and a connector: equal bytes for any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace_core.kv import FullAttentionSpec, KVCacheConfig, KVCacheGroup, KVConnector
from headrace_core.step import StepResult
from headrace_engine.kv_transfer.moves import KVMove, KVMoves
from headrace_engine.kv_transfer.parts import (
    BlockPart,
    Division,
    GroupParts,
    LayerParts,
    parts_of_groups,
)
from headrace_engine.kv_transfer.worker import BlockMover

KEY, OTHER = bytes(32), bytes([1]) * 32
BLOCKS, TOKENS, WIDTH, LAYERS = 5, 8, 16, ("a", "b")


class Memory(KVConnector):
    def __init__(self) -> None:
        super().__init__({})
        self.blocks: dict[bytes, bytes] = {}

    def contains(self, key: bytes) -> bool:
        return key in self.blocks

    def load(self, key: bytes, into: memoryview) -> bool:
        found = self.blocks.get(key)
        if found is None or len(found) != into.nbytes:
            return False
        into[:] = found
        return True

    def save(self, key: bytes, content: memoryview) -> None:
        self.blocks[key] = bytes(content)


def whole(seed: int) -> Tensor:
    """[layers, 2, heads, tokens, width] of one block: four heads."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(LAYERS), 2, 4, TOKENS, WIDTH, generator=generator)


class Rank:
    """A rank's cache: heads ``first`` to ``first + heads`` of 4."""

    def __init__(
        self, store: Memory, rank: int, ranks: int, parts: int, *, splits: bool = False,
        others: Any = None,
    ) -> None:  # fmt: skip
        self.heads, self.splits = 4 // ranks, splits
        self.mine = slice(rank * self.heads, (rank + 1) * self.heads)
        spec = FullAttentionSpec(TOKENS, self.heads, WIDTH, "float32")
        config = KVCacheConfig((BLOCKS,), (KVCacheGroup(LAYERS, spec),))
        shape = (2, BLOCKS) if splits else (BLOCKS, 2)
        self.caches = [torch.zeros(*shape, self.heads, TOKENS, WIDTH) for _ in LAYERS]
        buffers = [[cache.view(-1).view(torch.uint8) for cache in self.caches]]
        here = parts // ranks
        own = GroupParts(
            tuple(
                BlockPart(
                    LAYERS, f"part {rank * here + n} of {parts}" if parts > 1 else "", n, here
                )
                for n in range(here)
            )
        )
        self.mover = BlockMover(store, buffers, config, [splits], [own], others)

    def block(self, number: int) -> Tensor:
        """[layers, 2, heads, tokens, width]."""
        views = [cache[:, number] if self.splits else cache[number] for cache in self.caches]
        return torch.stack(views)

    def fill(self, number: int, block: Tensor) -> None:
        for cache, content in zip(self.caches, block[:, :, self.mine], strict=True):
            target = cache[:, number] if self.splits else cache[number]
            target.copy_(content)


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize(
    ("writers", "readers", "parts"), [(1, 1, 1), (2, 2, 2), (2, 1, 2), (1, 4, 4), (4, 2, 4)]
)
def test_any_number_of_ranks_reads_what_any_other_wrote(
    writers: int, readers: int, parts: int, splits: bool
) -> None:
    store, content = Memory(), whole(1)
    for number in range(writers):
        rank = Rank(store, number, writers, parts, splits=splits)
        rank.fill(3, content)
        rank.mover.save([KVMove(0, 3, KEY)])
    assert len(store.blocks) == parts
    for number in range(readers):
        rank = Rank(store, number, readers, parts, splits=splits)
        assert rank.mover.load([KVMove(0, 2, KEY), KVMove(0, 1, OTHER)]) == [OTHER]
        assert torch.equal(rank.block(2), content[:, :, rank.mine])


def test_a_missing_part_fails_the_block() -> None:
    store = Memory()
    rank = Rank(store, 0, 1, 4)
    rank.mover.save([KVMove(0, 3, KEY)])
    del store.blocks[sorted(store.blocks)[2]]
    assert rank.mover.load([KVMove(0, 2, KEY)]) == [KEY]


def step(epoch: int = 0, **moves: list[KVMove]) -> KVMoves:
    return KVMoves(epoch, *(moves.get(name, []) for name in ("saved_first", "loaded", "saved")))


def result() -> StepResult:
    return StepResult(step_id=1, requests={})


class Other:
    """Another rank that answers at once."""

    def __init__(self, failed: list[bytes]) -> None:
        self.failed = failed
        self.told: list[tuple[str, Sequence[Any]]] = []

    def call(self, method: str, args: Sequence[Any]) -> list[Future[Any]]:
        self.told.append((method, args))
        answer: Future[Any] = Future()
        answer.set_result(list(self.failed) if method == "load_blocks" else None)
        return [answer]


def test_what_one_rank_could_not_load_is_not_loaded() -> None:
    other = Other([KEY])
    rank = Rank(Memory(), 0, 2, 2, others=other.call)
    rank.mover.save([KVMove(0, 3, KEY)])
    moves = step(loaded=[KVMove(0, 1, KEY), KVMove(0, 2, OTHER)], saved=[KVMove(0, 4, OTHER)])
    order: list[str] = []

    def execute() -> StepResult:
        order.append(str([method for method, _ in other.told]))
        return result()

    found = rank.mover.run(moves, execute)
    assert sorted(found.failed_loads) == [KEY, OTHER]
    assert order == ["['load_blocks']"], "saves follow the pass of the whole model"
    assert other.told == [
        ("load_blocks", ([], [(0, 1, KEY), (0, 2, OTHER)])),
        ("save_blocks", ([(0, 4, OTHER)],)),
    ]


def test_ranks_save_nothing_of_steps_that_failed() -> None:
    other = Other([])
    rank = Rank(Memory(), 0, 2, 2, others=other.call)

    def fail() -> StepResult:
        raise RuntimeError("no step")

    with pytest.raises(RuntimeError, match="no step"):
        rank.mover.run(step(saved=[KVMove(0, 1, KEY)]), fail)
    rank.mover.run(step(saved=[KVMove(0, 1, KEY)], saved_first=[KVMove(0, 2, KEY)]), result)
    assert not other.told, "of the epoch that failed"
    rank.mover.run(step(1, saved=[KVMove(0, 1, KEY)]), result)
    assert other.told == [("save_blocks", ([(0, 1, KEY)],))]


def test_a_rank_that_cannot_save_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    answers: list[Future[Any]] = []

    def call(method: str, args: Sequence[Any]) -> list[Future[Any]]:
        answers.append(Future())
        return answers[-1:]

    rank = Rank(Memory(), 0, 2, 2, others=call)
    rank.mover.run(step(saved=[KVMove(0, 1, KEY)]), result)
    answers[0].set_exception(ValueError("no such folder"))
    assert "a block could not be saved: no such folder" in caplog.text


class Stage:
    """The cache of a rank with some layers, whole; others' are on other stages."""

    def __init__(self, store: Memory, names: Sequence[str], kind: LayerParts, **own: Any) -> None:
        spec = FullAttentionSpec(TOKENS, 4, WIDTH, "float32")
        config = KVCacheConfig((BLOCKS,), (KVCacheGroup(tuple(names), spec),))
        self.caches = {name: torch.zeros(BLOCKS, 2, 4, TOKENS, WIDTH) for name in names}
        buffers = [[cache.view(-1).view(torch.uint8) for cache in self.caches.values()]]
        layers: Any = {name: Layer(spec) for name in names}
        parts = parts_of_groups(layers, config, Division(layers=kind, **own))
        self.mover = BlockMover(store, buffers, config, [False], parts)


class Layer:
    def __init__(self, spec: FullAttentionSpec) -> None:
        self.kv_spec = spec


def test_stages_read_what_other_stages_wrote() -> None:
    """Two write, three, two others and one read; the content of a layer is its own."""
    store, names = Memory(), ("a", "b", "c")
    content = {name: torch.randn(2, 4, TOKENS, WIDTH) for name in names}
    for some in ("a", "bc"):
        stage = Stage(store, some, LayerParts.EACH)
        for name in some:
            stage.caches[name][3] = content[name]
        stage.mover.save([KVMove(0, 3, KEY)])
    for stages in (("a", "b", "c"), ("ab", "c"), ("abc",)):
        for some in stages:
            stage = Stage(store, some, LayerParts.EACH)
            assert stage.mover.load([KVMove(0, 2, KEY), KVMove(0, 1, OTHER)]) == [OTHER]
            for name in some:
                assert torch.equal(stage.caches[name][2], content[name])
    assert Stage(store, "a", LayerParts.STAGE).mover.load([KVMove(0, 2, KEY)]) == [], "one layer"
    assert Stage(store, "bc", LayerParts.STAGE).mover.load([KVMove(0, 2, KEY)]) == [KEY]
    assert Stage(store, (), LayerParts.EACH).mover.load([KVMove(0, 2, KEY)]) == []


def test_what_a_head_has_moves_with_a_block_and_what_a_draft_model_has_stays() -> None:
    names = ("a", "draft.x")
    for guesses in (None, "eagle"):
        store = Memory()
        stage = Stage(store, names, LayerParts.ALL, guesses=guesses)
        for cache in stage.caches.values():
            cache[3] = 1.0
        stage.mover.save([KVMove(0, 3, KEY)])
        assert stage.mover.load([KVMove(0, 2, KEY)]) == []
        assert bool(stage.caches["a"][2].all())
        assert bool(stage.caches["draft.x"][2].any()) == (guesses is not None)
        plain = Stage(store, "a", LayerParts.ALL)
        assert plain.mover.load([KVMove(0, 2, KEY)]) == [], "without guesses it is read, too"


def test_a_step_of_stages_saves_at_once_and_says_later_what_was_not_loaded() -> None:
    """Later steps may overwrite what it saves; other stages answer when they have come to it."""
    answers: list[Future[Any]] = []
    told: list[str] = []

    def call(method: str, args: Sequence[Any]) -> list[Future[Any]]:
        told.append(method)
        answers.append(Future())
        return answers[-1:]

    rank = Rank(Memory(), 0, 2, 2, others=call)
    rank.mover.save([KVMove(0, 3, KEY)])
    finished: list[str] = []

    def execute() -> StepResult:
        begun = result()
        begun.remaining = lambda: finished.append("it")
        return begun

    moves = step(loaded=[KVMove(0, 1, KEY), KVMove(0, 2, OTHER)], saved=[KVMove(0, 4, OTHER)])
    found = rank.mover.run(moves, execute)
    assert told == ["load_blocks", "save_blocks"]
    assert not finished
    answers[0].set_result([KEY])
    found.finish()
    assert finished == ["it"]
    assert sorted(found.failed_loads) == [KEY, OTHER]

"""Weights that change on two ranks in this process: passes and calls of rank 0 reach the other at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace_core.errors import RequestError, UnsupportedFeature, WeightsError
from headrace_core.kv import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from headrace_core.model import LoadProgress
from headrace_core.ops import KernelNeed, bind_ops
from headrace_core.step import ScheduledStep
from headrace_engine.execution import ModelWorker
from headrace_engine.multiproc.following import FollowingWorker
from headrace_engine.multiproc.leader import PassLeader
from headrace_engine.multiproc.messages import ModelPass
from headrace_engine.weights.holder import WeightHolder
from headrace_engine.weights.messages import WeightsMessage
from headrace_engine.weights.order import Probe
from headrace_engine.worker.settings import (
    RankSettings,
    WeightSettings,
    WorkerLimits,
    WorkerSettings,
)

PROBE = Probe(list(range(1, 21)), [])
SIZE = 10


class TwoRanks:
    """Rank 0 and rank 1, each with a whole model."""

    def __init__(self, tiny: Any) -> None:
        self.passes: list[tuple[str, Any]] = []
        """Passes of rank 1, and the model that ran them."""
        self.steps: list[str] = []
        """What rank 1 has been told to do."""
        self.built: dict[int, Any] = {}
        self.ended: list[tuple[int, bool]] = []
        self.fails: dict[str, Exception] = {}
        """Errors of rank 1, by step; ``build``, of its reading."""
        self.leader = PassLeader(self._run_pass, lambda error: error, self._call)
        self.ranks: list[Any] = [
            ModelWorker(self._settings(tiny, RankSettings(leader=self.leader, memory_share=2))),
            FollowingWorker(self._settings(tiny, RankSettings(rank=1, memory_share=2))),
        ]
        spec = FullAttentionSpec(tiny.BLOCK_SIZE, 2, 4, "float32")
        config = KVCacheConfig((50,), (KVCacheGroup(("layers.0", "layers.1"), spec),))
        for rank in self.ranks:
            rank.load()
            rank.allocate_cache(config)
        for rank in self.ranks:
            rank.warm_up()
        self.old = [rank.get_model() for rank in self.ranks]
        self.passes.clear()

    @property
    def worker(self) -> ModelWorker:
        worker: ModelWorker = self.ranks[0]
        return worker

    @property
    def models(self) -> list[Any]:
        return [rank.get_model() for rank in self.ranks]

    def _settings(self, tiny: Any, ranks: RankSettings) -> WorkerSettings:
        number = ranks.rank

        def build(path: str, slots: Any, admit: Any, progress: Any, told: Any) -> Any:
            model = self.built[number] = tiny.LM()
            admit(model, SIZE)
            if number and "build" in self.fails:
                raise self.fails["build"]
            progress(LoadProgress("reading", 1, 2))
            return model

        return WorkerSettings(
            build_model=tiny.LM,
            ops=bind_ops(KernelNeed("cpu", "float32"), choose={"*": "reference"}),
            device="cpu",
            dtype="float32",
            limits=WorkerLimits(
                vocab_size=tiny.VOCAB, max_model_len=96, max_num_batched_tokens=16, max_num_seqs=4
            ),
            ranks=ranks,
            weights=WeightSettings(
                rebuild_model=lambda changes: tiny.LM(),
                build_beside=build,
                beside_ended=lambda serves: self.ended.append((number, serves)),
                holder=WeightHolder(),
            ),
        )

    def _run_pass(self, message: ModelPass) -> None:
        self.passes.append((message.method, self.ranks[1].get_model()))
        self.ranks[1].run_pass(message.method, message.args)

    def _call(self, method: str, args: Sequence[Any]) -> list[Future[Any]]:
        answer: Future[Any] = Future()
        step = args[0] if method == "change_weights" else method
        self.steps.append(step)
        try:
            result = getattr(self.ranks[1], method)(*args)
            if step in self.fails:
                raise self.fails[step]
            answer.set_result(result)
        except Exception as error:
            answer.set_exception(error)
        return [answer]


@pytest.fixture
def two(tiny: Any) -> TwoRanks:
    return TwoRanks(tiny)


def test_a_swap_is_one_of_all_ranks(two: TwoRanks) -> None:
    told = two.worker.build_beside("/new", (PROBE,), None)
    assert told == {"bytes": 2 * SIZE, "perplexity": None, "tried": False}
    num_slices = 1
    while (found := two.worker.probe_beside()) is None:
        assert two.models == two.old, "a step may come now"
        num_slices += 1
    assert num_slices > 3, "the probe's prompt is longer than a step"
    assert found["perplexity"] > 1
    assert {model for _, model in two.passes} == {two.built[1]}
    two.passes.clear()
    two.worker.adopt_beside()
    assert two.models == [two.built[0], two.built[1]]
    assert {model for _, model in two.passes} == {two.built[1]}, "dummy steps"
    assert two.ended == [(1, True), (0, True)]
    two.worker.drop_beside()
    assert two.models == [two.built[0], two.built[1]]
    assert two.worker.execute(ScheduledStep(1, {})).requests == {}


def test_a_probe_that_fails_leaves_no_cache_behind(two: TwoRanks) -> None:
    two.worker.build_beside("/new", (PROBE,), 1.0)
    with pytest.raises(RequestError, match=r"perplexity on the probes is .*max_perplexity = 1"):
        next(found for found in iter(two.worker.probe_beside, 0) if found)
    two.worker.drop_beside()
    assert [layer.cache for one in two.built.values() for layer in one.layers] == [None] * 4
    assert two.models == two.old
    assert two.ended == [(1, False), (0, False)]


def test_a_rank_that_cannot_build_stops_the_others(two: TwoRanks) -> None:
    two.fails["build"] = WeightsError("model.safetensors: it is torn")
    with pytest.raises(RequestError, match=r"rank 1: path = '/new': model.safetensors: it is torn"):
        two.worker.build_beside("/new", (), None)
    assert two.steps == ["build_share", "stop_building"]
    two.worker.drop_beside()
    del two.fails["build"]
    two.worker.build_beside("/new", (), None)  # what stopped one reading stops no other


@pytest.mark.parametrize("step", ["take_place", "record_again"])
def test_a_rank_that_does_not_change_leaves_all_as_they_were(two: TwoRanks, step: str) -> None:
    runners = [rank._runner for rank in two.ranks]
    two.worker.build_beside("/new", (), None)
    two.fails[step] = MemoryError("no room for recordings")
    with pytest.raises(MemoryError, match="rank 1: no room for recordings"):
        two.worker.adopt_beside()
    two.worker.drop_beside()
    assert two.models == two.old
    assert [rank._runner for rank in two.ranks] == runners
    assert two.worker.execute(ScheduledStep(1, {})).requests == {}
    del two.fails[step]
    two.worker.build_beside("/new", (), None)
    two.worker.adopt_beside()
    assert two.models == [two.built[0], two.built[1]]


class Experts:
    """Experts that ranks have whole."""

    def __init__(self, meets_engines: bool, may_move: bool) -> None:
        self.meets_engines, self.may_move = meets_engines, may_move


@pytest.mark.parametrize(
    ("experts", "why"),
    [(Experts(True, False), "engines share experts"), (Experts(False, True), "enable_eplb")],
)
def test_experts_that_are_shared_or_move_are_named(
    two: TwoRanks, experts: Experts, why: str
) -> None:
    two.worker._ranks = dataclasses.replace(two.worker._ranks, experts=experts)
    for call in (
        lambda: two.worker.build_beside("/new", (), None),
        lambda: two.worker.stage_weights(part("a")),
    ):
        with pytest.raises(UnsupportedFeature, match=f"{why}.*reload_weights works"):
            call()


class Loaded:
    """A model whose head may be replaced, with tensors of any names but those that begin with ``no``."""

    max_bytes, max_tensors = 1 << 20, 100

    def __init__(self, model: Any, only: str = "") -> None:
        self.model, self.only = model, only

    def update(self) -> Update:
        return Update(self)


class Update:
    """Notes what comes; the head is put in as it is."""

    def __init__(self, loaded: Loaded) -> None:
        self.loaded, self.taken = loaded, dict[str, Tensor]()

    @property
    def num_tensors(self) -> int:
        return len(self.taken)

    def check(self, name: str, shape: tuple[int, ...], dtype: str) -> None: ...

    def check_values(self, name: str, tensor: Tensor) -> None: ...

    def checkpoint(self) -> Callable[[], None]:
        before = dict(self.taken)
        return lambda: setattr(self, "taken", before)

    def checked(self, tensors: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        part = list(tensors)
        for name, _ in part:
            if name.startswith("no") and name.endswith(self.loaded.only):
                raise WeightsError(f"tensor {name!r}: belongs to no layer")
        return part

    def take_checked(self, part: Any, *, keep: bool = True) -> None:
        self.taken |= dict(part)

    def check_whole(self) -> None: ...

    def keep_waiting(self) -> None: ...

    def seal(self) -> None: ...

    def apply(self) -> Callable[[], None]:
        model, before = self.loaded.model, self.loaded.model.head
        model.head = torch.nn.Parameter(self.taken["head"].clone())
        return lambda: setattr(model, "head", before)


def part(*names: str, finish: bool = True) -> WeightsMessage:
    given = [(name, torch.full((16, 37), 2.0)) for name in names]
    return WeightsMessage("process", given=given, finish=finish)


@pytest.fixture
def updated(two: TwoRanks) -> TwoRanks:
    """Rank 1 takes no names that end with 1."""
    for number, rank in enumerate(two.ranks):
        rank._new_weights.loaded(Loaded(rank.get_model(), "1" * number or "0"))
    return two


def heads(two: TwoRanks) -> list[float]:
    return [float(model.head[0, 0].detach()) for model in two.models]


def test_an_update_is_one_of_all_ranks(updated: TwoRanks) -> None:
    worker = updated.worker
    assert worker.stage_weights(part("bias", finish=False)) == 1
    assert worker.stage_weights(part("head")) == 2
    worker.seal_weights()
    assert heads(updated)[0] != 2
    updated.passes.clear()
    worker.apply_weights(False)
    assert heads(updated) == [2, 2]
    assert updated.passes, "dummy steps"
    assert [rank._new_weights.held.staged for rank in updated.ranks] == [0, 0]
    assert updated.steps[-1] == "keep_share"


@pytest.mark.parametrize(
    ("name", "who"), [("no such 0", "tensor"), ("no such 1", "rank 1: tensor")]
)
def test_a_part_that_one_rank_refuses_is_taken_by_none(
    updated: TwoRanks, name: str, who: str
) -> None:
    worker = updated.worker
    worker.stage_weights(part("bias", finish=False))
    with pytest.raises(WeightsError, match=rf"^{who} '{name}': belongs to no layer"):
        worker.stage_weights(part("head", name))
    assert [rank._new_weights.held.staged for rank in updated.ranks] == [1, 1]
    worker.refuse_weights()
    assert [rank._new_weights.held.staged for rank in updated.ranks] == [0, 0]


@pytest.mark.parametrize("step", ["put_share", "record_again"])
def test_weights_that_one_rank_cannot_put_in_are_put_in_by_none(
    updated: TwoRanks, step: str
) -> None:
    worker, before = updated.worker, heads(updated)
    worker.stage_weights(part("head"))
    worker.seal_weights()
    updated.fails[step] = WeightsError("not enough memory")
    with pytest.raises(WeightsError, match="rank 1: not enough memory"):
        worker.apply_weights(False)
    assert heads(updated) == before
    assert [rank._new_weights.held.staged for rank in updated.ranks] == [1, 1], "it is not over"
    del updated.fails[step]
    worker.apply_weights(False)
    assert heads(updated) == [2, 2]

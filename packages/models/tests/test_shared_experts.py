"""Experts that several engines share: each gets its own rows' sums, whatever rows the others bring."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pytest
import test_families as families
import test_latent_families as latent
import torch
from test_expert_division import layer
from test_experts import EXPERTS, HIDDEN
from torch import Tensor

from headrace_core.errors import ModelError, UnsupportedModel
from headrace_core.parallel import Communicator, SingleProcess
from headrace_models.layers.moe.division import ExpertDivision
from headrace_models.layers.moe.exchange import LEAVING, RowExchange
from headrace_models.layers.moe.experts import Experts
from headrace_models.loading.loader import load_model
from headrace_testing.model.decoders import PagedDriver, ThreadRank, build_context, run_ranks


def run_engines(
    engines: int, ranks: int, work: Callable[[int, Communicator, Communicator], Any]
) -> list[Any]:
    """Results of ``work``, given the engine, the group of its ranks and that of all, on each rank."""
    boards: list[list[Tensor | None]] = [[None] * ranks for _ in range(engines)]
    barriers = [threading.Barrier(ranks) for _ in range(engines)]

    def one(group: Communicator) -> Any:
        engine, rank = divmod(group.rank, ranks)
        own = ThreadRank(rank, boards[engine], barriers[engine]) if ranks > 1 else SingleProcess()
        try:
            return work(engine, own, group)
        except BaseException:
            barriers[engine].abort()
            raise

    return run_ranks(engines * ranks, one)


def shared(
    engine: int, engines: int, own: Communicator, group: Communicator, **options: Any
) -> tuple[Experts, RowExchange]:
    """A mixture of an engine whose rows meet those of others."""
    division = ExpertDivision(engine=engine, num_engines=engines)
    made = layer(own, division, **options)
    assert division.exchange is not None
    measure(made, division.exchange)
    division.exchange.start(group)
    return made, division.exchange


def measure(made: Experts, exchange: RowExchange) -> None:
    """The pass before engines meet, which shows what one is."""
    with exchange.one_pass(4):
        made(*inputs(4, 0))


def inputs(rows: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, HIDDEN, generator=generator)
    weights = torch.rand(rows, 2, generator=generator)
    ids = torch.rand(rows, EXPERTS, generator=generator).topk(2).indices
    return x, weights, ids


@pytest.mark.parametrize(("engines", "ranks"), [(2, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize("counts", [(3, 5, 1, 2), (1, 0, 0, 7), (4, 4, 4, 4), (0, 1, 3, 0)])
def test_rows_come_back_as_sums(engines: int, ranks: int, counts: tuple[int, ...]) -> None:
    whole = layer(None, None)

    def work(engine: int, own: Communicator, group: Communicator) -> Tensor:
        made, exchange = shared(engine, engines, own, group)
        rows = counts[engine]
        with exchange.one_pass(rows) as told:
            assert list(told) == list(counts[:engines])
            if not rows:
                exchange.take_part()
                return torch.empty(0, HIDDEN)
            return made.summed(made(*inputs(rows, engine)))

    found = run_engines(engines, ranks, work)
    for index, out in enumerate(found):
        engine = index // ranks
        if counts[engine]:
            expected = whole(*inputs(counts[engine], engine))
            torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(out, found[engine * ranks]), "all ranks of an engine have the same bits"


def test_rows_of_others_change_nothing() -> None:
    """Engine 0's row beside nothing, few and many rows of engine 1; with native kernels no bit."""

    def work(engine: int, own: Communicator, group: Communicator) -> list[Tensor]:
        made, exchange = shared(engine, 2, own, group)
        found = []
        for others in (0, 1, 6):
            rows = others if engine else 1
            with exchange.one_pass(rows):
                if rows:
                    found.append(made(*inputs(rows, 3)))
                else:
                    exchange.take_part()
        return found

    alone, *beside = run_engines(2, 1, work)[0]
    for one in beside:
        torch.testing.assert_close(alone, one, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    "recorded", [(True, True, False), (True, False, False), (True, True, True)]
)
def test_passes_of_recordings_have_as_many_rows_in_each_engine(
    recorded: tuple[bool, ...],
) -> None:
    """They are even if all engines with rows say so; the last one has none. An engine's own rows get the same
    sums."""
    rows = (2, 5, 0)
    whole = layer(None, None)

    def work(engine: int, own: Communicator, group: Communicator) -> Tensor | None:
        made, exchange = shared(engine, 3, own, group)
        count = rows[engine]
        with exchange.one_pass(count, has_recording=recorded[engine] and count > 0) as told:
            assert exchange.is_even == all(recorded[:2])
            assert list(told) == ([5] * 3 if exchange.is_even else list(rows))
            if not count:
                exchange.take_part()
                return None
            parts = [
                torch.cat([part, part.new_zeros(told[engine] - count, part.shape[1])])
                for part in inputs(count, engine)
            ]
            return made(*parts)[:count]

    for engine, found in enumerate(run_engines(3, 1, work)[:2]):
        torch.testing.assert_close(
            found, whole(*inputs(rows[engine], engine)), atol=1e-5, rtol=1e-5
        )


def test_engines_that_are_to_end_leave_together() -> None:
    """The second one is told later, in the middle of its work."""

    def work(engine: int, own: Communicator, group: Communicator) -> list[bool]:
        made, exchange = shared(engine, 2, own, group)
        found = []
        for rows in ((LEAVING, LEAVING, LEAVING), (3, 0, LEAVING))[engine]:
            with exchange.one_pass(rows) as told:
                found.append(exchange.all_leave)
                if rows > 0:
                    assert torch.isfinite(made(*inputs(rows, 3))).all()
                elif any(told):
                    exchange.take_part()
        return found

    assert run_engines(2, 1, work) == [[False, False, True]] * 2


@pytest.mark.parametrize(("engines", "ranks"), [(2, 2), (3, 1)])
def test_all_ranks_do_something_between_two_passes(engines: int, ranks: int) -> None:
    """When those of engine 0 say so: what others have told is told again after it."""

    def work(engine: int, own: Communicator, group: Communicator) -> list[Any]:
        _, exchange = shared(engine, engines, own, group)
        found: list[Any] = []
        exchange.between = lambda: found.append("between")
        for number in (1, 2):
            if engine == 0 and number == 2:
                exchange.call_all()
                exchange.between()
            with exchange.one_pass(number * (engine + 1)) as told:
                found.append(list(told))
                exchange._num_called = len(exchange.calls)
        return found

    told = [[number * (engine + 1) for engine in range(engines)] for number in (1, 2)]
    assert run_engines(engines, ranks, work) == [[told[0], "between", told[1]]] * engines * ranks


def test_calls_out_of_turn_are_errors() -> None:
    def work(engine: int, own: Communicator, group: Communicator) -> None:
        made, exchange = shared(engine, 2, own, group)
        with pytest.raises(ModelError, match="outside a pass"):
            made(*inputs(2, 0))
        with exchange.one_pass(3), pytest.raises(ModelError, match="not those of the first pass"):
            made(*inputs(2, 0))
        with pytest.raises(ModelError, match="called 0 mixtures"), exchange.one_pass(3):
            pass

    run_engines(2, 1, work)


def test_measuring_takes_as_many_rows_as_all_engines_may_have() -> None:
    division = ExpertDivision(engine=1, num_engines=3)
    made = layer(None, division)
    seen: list[int] = []
    assert division.exchange is not None
    divided = made._divided
    made._divided = lambda place, x, *rest: seen.append(len(x)) or divided(place, x, *rest)  # type: ignore
    measure(made, division.exchange)
    assert seen == [12]


def test_more_engines_than_experts_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"data_parallel_size = 5 times.*= 1: .*at most"):
        layer(None, ExpertDivision(num_engines=5))


FAMILIES = [
    families.TestQwen3Moe(),
    latent.TestDeepseekV3(),
    latent.TestLlama4(),
    latent.TestLongcatFlash(),
]


@pytest.mark.parametrize("suite", FAMILIES, ids=lambda suite: type(suite).__name__)
def test_models_say_the_same(suite: Any, tmp_path: Any) -> None:
    """Engines with prompts of different lengths, of which one has nothing in the second pass."""
    checkpoint = suite.make_checkpoint(tmp_path)
    info = suite.resolve(checkpoint.path, max_model_len=64)
    prompts = [suite.prompt(20), suite.prompt(9)]

    def work(engine: int, own: Communicator, group: Communicator) -> Tensor:
        division = ExpertDivision(engine=engine, num_engines=2)
        context = dataclasses.replace(build_context(info, communicator=own), experts=division)
        model = load_model(info, context)
        exchange = division.exchange
        assert exchange is not None
        with exchange.one_pass(3):
            PagedDriver(model).step({"measure": suite.prompt(3)})
        exchange.start(group)
        with exchange.one_pass(len(prompts[engine])):
            found = PagedDriver(model).step({"a": prompts[engine]})
        with exchange.one_pass(0 if engine else 9):
            if engine:
                exchange.take_part()
            else:
                PagedDriver(model).step({"b": prompts[1]})
        return found

    found = run_engines(2, 1, work)
    for prompt, logits in zip(prompts, found, strict=True):
        suite.assert_close(logits, checkpoint.logprobs(prompt))

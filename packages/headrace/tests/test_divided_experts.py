"""What is said where experts cannot be divided whole, and what is made where they can."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.assembly.parallel.agreed_moves import AfterPasses, AfterSteps
from headrace.assembly.parallel.experts import DividedMixtures, divided_experts
from headrace.assembly.parallel.ranks import Ranks
from headrace_core.errors import ConfigError, UnsupportedModel
from headrace_core.parallel import SingleProcess
from headrace_engine.multiproc.config import ParallelConfig
from headrace_engine.multiproc.places import RankPlace
from headrace_models.layers.moe.division import ExpertDivision
from headrace_models.layers.moe.exchange import RowExchange

ON = ParallelConfig(
    tensor_parallel_size=2,
    enable_expert_parallel=True,
    enable_eplb=True,
    eplb_config={"num_redundant_experts": 3},
)


def ranks(rank: int) -> Ranks:
    return Ranks(RankPlace(rank, 2, "gloo", ""))


def test_a_model_without_mixtures_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"enable_expert_parallel.*LlamaForCausalLM.*no mixtures"):
        DividedMixtures(ExpertDivision(), ranks(0)).check_found("LlamaForCausalLM")


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_counts(rank: int) -> None:
    made = divided_experts(ON, ranks(rank), 64)
    assert made is not None
    assert (made.division.redundant, made.division.may_move) == (3, True)
    assert made.division.counts == (64 if rank == 0 else 0)


@pytest.mark.parametrize(("engine", "counts"), [(0, 128), (1, 0)])
def test_engine_0_counts_the_rows_of_all(engine: int, counts: int) -> None:
    shared = ParallelConfig(data_parallel_size=2, enable_expert_parallel=True, enable_eplb=True)
    made = divided_experts(shared, Ranks(RankPlace(0, 1, "gloo", engine=engine, num_engines=2)), 64)
    assert made is not None
    assert made.division.counts == counts
    assert isinstance(made.balancer(), AfterPasses if engine == 0 else type(None))


@pytest.mark.parametrize(("rank", "counts"), [(0, 64), (1, 0), (2, 64), (3, 0)])
def test_the_first_rank_of_each_stage_counts(rank: int, counts: int) -> None:
    """And rank 0 tells all of them of steps."""
    staged = replace(ON, pipeline_parallel_size=2)
    made = divided_experts(staged, Ranks(RankPlace(rank, 4, "gloo", stages=2)), 64)
    assert made is not None
    assert made.division.counts == counts
    assert isinstance(made.balancer(), AfterSteps)
    made.balance_experts()  # of a stage without mixtures


def test_nothing_is_divided_otherwise() -> None:
    assert divided_experts(ParallelConfig(tensor_parallel_size=2), ranks(0), 64) is None
    assert divided_experts(ON, Ranks(), 64) is None, "a draft model, or one rank"
    still = ParallelConfig(tensor_parallel_size=2, enable_expert_parallel=True)
    made = divided_experts(still, ranks(0), 64)
    assert made is not None
    assert made.balancer() is None


def test_engines_with_one_rank_divide_experts() -> None:
    place = RankPlace(0, 1, "gloo", engine=1, num_engines=2)
    shared = ParallelConfig(data_parallel_size=2, enable_expert_parallel=True)
    made = divided_experts(shared, Ranks(place), 64)
    assert made is not None
    assert (made.division.engine, made.division.num_engines) == (1, 2)
    assert made.meets_engines is False, "before a model is built"
    assert not Ranks(place).can_record(pools=False), "before the engines have met"
    assert not Ranks(place, experts_move=True).can_record(pools=False)


def test_a_mixture_that_not_every_token_goes_to_is_refused() -> None:
    """As that for images of ERNIE 4.5 VL: other engines could not know when it is called."""
    division: Any = ExpertDivision(engine=1, num_engines=2)
    division.exchange = RowExchange(SingleProcess(), 1, 2)
    division.mixtures = [SimpleNamespace(name="mlp.vision_moe")]
    with pytest.raises(
        UnsupportedModel, match=r"mlp.vision_moe: called 0 times.*data_parallel_size"
    ):
        DividedMixtures(division, Ranks(RankPlace(engine=1, num_engines=2))).begin_serving()


def test_engines_without_a_model_leave_at_once() -> None:
    """All sleep, so that none would come to a further pass."""
    assert DividedMixtures(
        ExpertDivision(num_engines=2), Ranks(RankPlace(num_engines=2))
    ).take_leave()

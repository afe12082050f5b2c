"""Settings of expert parallelism are refused by name where they have no effect or another value."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_core.errors import ConfigError
from headrace_engine.multiproc.config import ParallelConfig
from headrace_engine.multiproc.expert_settings import EPLBSettings, eplb_settings

SHARED: dict[str, Any] = {"data_parallel_size": 2, "enable_expert_parallel": True}
ON: dict[str, Any] = {"tensor_parallel_size": 2, "enable_expert_parallel": True}


def test_defaults_and_what_is_stated() -> None:
    assert eplb_settings({}) == EPLBSettings()
    stated = {"window_size": 5, "log_balancedness": True, "use_async": True}
    wanted = EPLBSettings(window_size=5, log_balancedness=True, use_async=True)
    assert eplb_settings(stated) == wanted
    assert ParallelConfig(**ON, enable_eplb=True, eplb_config=stated).eplb_config == stated


def test_engines_that_share_experts() -> None:
    alone = ParallelConfig(data_parallel_size=2)
    assert (alone.shares_experts, alone.executor) == (False, "uni")
    shared = ParallelConfig(**SHARED)
    assert (shared.shares_experts, shared.executor, shared.num_ranks) == (True, "mp", 1)
    assert shared.describe_ranks() == "data_parallel_size = 2 with enable_expert_parallel"
    placed = ParallelConfig(
        **SHARED, expert_placement_strategy="round_robin", tensor_parallel_size=2
    )
    assert placed.num_ranks == 2


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"tensor_parallel_size": 2, "decode_context_parallel_size": 2}, "decode_context_parallel_size"),
        ({"tensor_parallel_size": 2, "nnodes": 2}, "nnodes"),
        ({"distributed_executor_backend": "ray"}, "distributed_executor_backend"),
        ({"distributed_executor_backend": "uni"}, "distributed_executor_backend"),
        ({"distributed_executor_backend": "external_launcher"}, "distributed_executor_backend"),
        ({"tensor_parallel_size": 8, "data_parallel_size": 9}, "data_parallel_size"),
    ],
)  # fmt: skip
def test_what_shared_experts_are_not_combined_with(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ParallelConfig(**{**SHARED, **settings})
    assert caught.value.field == f"parallel.{field}"


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"enable_expert_parallel": True}, "parallel.enable_expert_parallel"),
        ({**ON, "expert_placement_strategy": "random"}, "parallel.expert_placement_strategy"),
        ({"expert_placement_strategy": "round_robin"}, "parallel.expert_placement_strategy"),
        ({**ON, "all2all_backend": "pplx"}, "parallel.all2all_backend"),
        ({"all2all_backend": "naive"}, "parallel.all2all_backend"),
        ({"tensor_parallel_size": 2, "enable_eplb": True}, "parallel.enable_eplb"),
        ({**ON, "eplb_config": {"window_size": 5}}, "parallel.eplb_config"),
        ({**ON, "enable_eplb": True, "eplb_config": 5}, "parallel.eplb_config"),
    ],
)
def test_refused_settings(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ParallelConfig(**settings)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("window_size", 0), ("window_size", 2.5), ("step_interval", True), ("step_interval", "9"),
        ("num_redundant_experts", -1), ("log_balancedness", 1), ("policy", 3), ("use_async", 1),
        ("window", 5),
    ],
)  # fmt: skip
def test_refused_fields(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        eplb_settings({name: value})
    assert caught.value.field == f"parallel.eplb_config.{name}"

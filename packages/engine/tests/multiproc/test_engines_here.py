"""Servers that have some of the engines among which something in front of them divides a load."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_core.errors import ConfigError
from headrace_engine.multiproc.config import ParallelConfig


@pytest.mark.parametrize(
    ("settings", "count", "first"),
    [
        ({"data_parallel_size": 4}, 4, 0),
        ({"data_parallel_size": 4, "data_parallel_size_local": 4}, 4, 0),
        ({"data_parallel_size": 4, "data_parallel_rank": 3}, 1, 3),
        ({"data_parallel_size": 4, "data_parallel_rank": 0, "data_parallel_external_lb": True}, 1, 0),
        ({"data_parallel_size": 4, "data_parallel_size_local": 3, "data_parallel_start_rank": 1,
          "data_parallel_hybrid_lb": True}, 3, 1),
        ({"data_parallel_size": 4, "data_parallel_size_local": 1, "data_parallel_start_rank": 3}, 1, 3),
    ],
)  # fmt: skip
def test_engines_of_a_server(settings: dict[str, Any], count: int, first: int) -> None:
    config = ParallelConfig(**settings)
    assert (config.num_engines_here, config.first_engine) == (count, first)
    assert config.is_replicated == (count > 1)
    assert config.is_elastic == (count == 4), "numbers of other servers' engines would be taken"


@pytest.mark.parametrize(
    ("settings", "field", "accepted"),
    [
        ({"data_parallel_rank": 4}, "data_parallel_rank", "in 0..3 with data_parallel_size = 4"),
        ({"data_parallel_rank": -1}, "data_parallel_rank", "in 0..3"),
        ({"data_parallel_size_local": 0}, "data_parallel_size_local", "in 1..4"),
        ({"data_parallel_size_local": 5}, "data_parallel_size_local", "in 1..4"),
        ({"data_parallel_size_local": 2}, "data_parallel_size_local", "used with data_parallel_start_rank"),
        ({"data_parallel_size_local": 2, "data_parallel_rank": 1}, "data_parallel_size_local",
         "1, or left out"),
        ({"data_parallel_start_rank": 1}, "data_parallel_start_rank", "used with data_parallel_size_local"),
        ({"data_parallel_start_rank": 3, "data_parallel_size_local": 2}, "data_parallel_start_rank",
         "in 0..2"),
        ({"data_parallel_start_rank": 1, "data_parallel_size_local": 1, "data_parallel_rank": 1},
         "data_parallel_start_rank", "left out with data_parallel_rank"),
        ({"data_parallel_external_lb": True}, "data_parallel_external_lb", "used with data_parallel_rank"),
        ({"data_parallel_hybrid_lb": True}, "data_parallel_hybrid_lb", "used with data_parallel_start_rank"),
        ({"data_parallel_rank": 1, "enable_expert_parallel": True}, "data_parallel_rank",
         "left out with enable_expert_parallel"),
        ({"data_parallel_rank": 1, "enable_elastic_ep": True}, "data_parallel_rank",
         "left out with enable_elastic_ep"),
        ({"data_parallel_start_rank": 0, "data_parallel_size_local": 2, "enable_elastic_ep": True},
         "data_parallel_start_rank", "left out with enable_elastic_ep"),
        ({"data_parallel_rank": 1, "distributed_executor_backend": "external_launcher"},
         "data_parallel_rank", "external_launcher"),
    ],
)  # fmt: skip
def test_what_is_refused(settings: dict[str, Any], field: str, accepted: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ParallelConfig(data_parallel_size=4, **settings)
    assert caught.value.field == f"parallel.{field}"
    assert accepted in str(caught.value)
    assert f"{settings[field]!r}" in str(caught.value)

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.assembly.parallel.context_parallel import check_context_parallel
from headrace.assembly.parallel.ranks import Ranks, group_names, open_rendezvous
from headrace.assembly.transfer.kv import check_ranks_transfer, kv_connector
from headrace_core.errors import ConfigError
from headrace_core.platform import CpuPlatform
from headrace_engine.config import CacheConfig, EngineConfig, ModelConfig
from headrace_engine.cores import CpuThreads
from headrace_engine.multiproc.config import ParallelConfig
from headrace_engine.multiproc.places import RankPlace


def test_ranks_share_threads_and_cores_in_order() -> None:
    whole = CpuThreads(5, (8, 9, 10, 11, 12))
    shares = [Ranks(RankPlace(rank, 2)).threads(whole) for rank in range(2)]
    assert shares == [CpuThreads(2, (8, 9)), CpuThreads(2, (10, 11))]


@pytest.mark.parametrize("rank", [0, 2])
def test_fewer_cores_than_ranks_are_refused(rank: int) -> None:
    """A rank without a core would not be bound at all."""
    with pytest.raises(ConfigError, match=r"cpu_bind: it binds 2 .*3 ranks need one each"):
        Ranks(RankPlace(rank, 3)).threads(CpuThreads(2, (0, 1)))


def test_fewer_threads_than_ranks_need_no_cores() -> None:
    assert Ranks(RankPlace(2, 3)).threads(CpuThreads(1)) == CpuThreads(1)


def test_tokens_in_turn_divide_the_default_block() -> None:
    """Before ranks start: one of them would refuse it, which ends the engine as a fault of its own."""
    turns = ParallelConfig(
        tensor_parallel_size=2, decode_context_parallel_size=2, cp_kv_cache_interleave_size=3
    )
    with pytest.raises(ConfigError, match=r"size = 3: must divide cache.block_size = 16"):
        check_context_parallel(EngineConfig(parallel=turns), CpuPlatform())


def test_ranks_meet_at_an_address_of_this_host() -> None:
    with pytest.raises(
        ConfigError, match=r"parallel.master_addr = '192.0.2.1': cannot be listened on"
    ):
        open_rendezvous("192.0.2.1")  # of documentation (RFC 5737)


def names(tensor: int, stages: int, context: int = 1) -> tuple[str, ...]:
    return group_names(
        ParallelConfig(
            tensor_parallel_size=tensor,
            pipeline_parallel_size=stages,
            decode_context_parallel_size=context,
        )
    )


def test_groups_of_stages_of_ranks() -> None:
    """Every rank has a way to the next stage; only rank 0 needs the result."""
    assert names(2, 1) == ("tp:0",)
    assert names(1, 3) == ("pp:0:0", "pp:0:1", "pp:0:2")
    assert names(4, 1, 2) == ("tp:0", "dcp:0", "dcp:1")
    assert names(2, 1, 2) == ("tp:0",), "the same ranks"
    assert names(2, 2) == ("tp:0", "tp:1", "pp:0:0", "pp:0:1", "pp:1:0")
    assert names(2, 2, 2) == names(2, 2)
    assert names(4, 2, 2)[:6] == ("tp:0", "tp:1", "dcp:0", "dcp:1", "dcp:2", "dcp:3")
    of = [Ranks(RankPlace(rank, 4, stages=2)) for rank in range(4)]
    assert [ranks.stage for ranks in of] == [0, 0, 1, 1]
    assert [ranks.tensor_size for ranks in of] == [2] * 4


def test_groups_of_ranks_that_divide_prompts() -> None:
    """Neighbours divide layers; those with the same weights divide prompts."""
    assert group_names(ParallelConfig(prefill_context_parallel_size=3)) == ("pcp:0",)
    both = ParallelConfig(prefill_context_parallel_size=2, tensor_parallel_size=2)
    assert group_names(both) == ("tp:0", "tp:1", "pcp:0", "pcp:1")
    assert both.num_ranks == 4
    of = [Ranks(RankPlace(rank, 4, prefill_context=2)) for rank in range(4)]
    assert [ranks.tensor_size for ranks in of] == [2] * 4
    assert [ranks.stage for ranks in of] == [0] * 4
    alone = Ranks(RankPlace(1, 2, prefill_context=2))
    assert alone.can_record(pools=False), "short steps exchange nothing"


def test_stages_of_one_rank_record_what_they_exchange_or_nothing() -> None:
    """They have no group that layers are divided over, and hand on hidden states all the same."""
    ranks = Ranks(RankPlace(1, 3, "gloo", stages=3))
    assert ranks.recorders() == ()
    assert not ranks.can_record(pools=False)


def test_experts_that_move_beside_steps_have_a_group_of_their_own() -> None:
    parallel = ParallelConfig(
        tensor_parallel_size=2,
        enable_expert_parallel=True,
        enable_eplb=True,
        eplb_config={"use_async": True},
    )
    assert group_names(parallel) == ("tp:0", "eplb:0")


TRANSFER = CacheConfig(
    kv_transfer_config={
        "kv_connector": "file", "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": "blocks"},
    }
)  # fmt: skip


@pytest.mark.parametrize(
    ("parallel", "text"),
    [
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size above 1"),
        ({"nnodes": 2}, "nnodes above 1"),
        ({"distributed_executor_backend": "ray"}, "distributed_executor_backend 'ray'"),
    ],
)
def test_what_does_not_go_with_connectors_of_ranks(parallel: dict[str, Any], text: str) -> None:
    config = EngineConfig(
        model=ModelConfig(model="m"),
        cache=TRANSFER,
        parallel=ParallelConfig(tensor_parallel_size=2, **parallel),
    )
    with pytest.raises(ConfigError, match=rf"must be left out with {text}") as caught:
        check_ranks_transfer(config)
    assert caught.value.field == "cache.kv_transfer_config"


def test_connectors_of_ranks_know_their_place(tmp_path: Path) -> None:
    stated = {"shared_storage_path": str(tmp_path)}
    cache = replace(
        TRANSFER,
        block_size=16,
        kv_transfer_config={**TRANSFER.kv_transfer_config, "kv_connector_extra_config": stated},
    )
    config = EngineConfig(
        model=ModelConfig(model="m"), cache=cache, parallel=ParallelConfig(tensor_parallel_size=2)
    )
    made = kv_connector(config, 1)
    assert made is not None
    own = ("rank", "num_ranks", "num_stages", "block_size")
    assert [made.settings[name] for name in own] == [1, 2, 1, 16]
    made.close()

"""Settings of a server that has some of the engines that share a load: external and hybrid load balancing.

Such engines know nothing of each other: something in front of the servers divides the load. So a server is
told its engines' numbers only, which KV events bear.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_core.config import require

if TYPE_CHECKING:
    from headrace_engine.multiproc.config import ParallelConfig

_SIZE, _RANK = "parallel.data_parallel_size_local", "parallel.data_parallel_rank"
_START = "parallel.data_parallel_start_rank"


def check_engines_here(config: ParallelConfig) -> None:
    """Check the settings among themselves.

    Raises:
        ConfigError: one is not accepted, or has no effect; names it.
    """
    total, here = config.data_parallel_size, config.data_parallel_size_local
    rank, start = config.data_parallel_rank, config.data_parallel_start_rank
    require(rank is None or 0 <= rank < total, _RANK, rank,
            f"in 0..{total - 1} with data_parallel_size = {total}, the number of engines in all")  # fmt: skip
    require(here is None or 1 <= here <= total, _SIZE, here,
            f"in 1..{total}, at most data_parallel_size")  # fmt: skip
    require(
        rank is None or here in (None, 1), _SIZE, here, "1, or left out, with data_parallel_rank"
    )
    require(rank is None or start is None, _START, start,
            "left out with data_parallel_rank, which says the number of the one engine")  # fmt: skip
    require(start is None or here is not None, _START, start, "used with data_parallel_size_local")
    last = total - (here or 0)
    require(start is None or 0 <= start <= last, _START, start,
            f"in 0..{last}: {here} of {total} engines are here")  # fmt: skip
    require(here in (None, total) or start is not None or rank is not None, _SIZE, here,
            f"{total}, or used with data_parallel_start_rank: engines of one server are on one host. Start a "
            "server on each host, and `headrace route` in front of them")  # fmt: skip
    require(not config.data_parallel_external_lb or rank is not None, "parallel.data_parallel_external_lb",
            True, "used with data_parallel_rank")  # fmt: skip
    require(not config.data_parallel_hybrid_lb or start is not None, "parallel.data_parallel_hybrid_lb",
            True, "used with data_parallel_start_rank and data_parallel_size_local")  # fmt: skip
    if rank is None and start is None:
        return
    field, value = (_START, start) if rank is None else (_RANK, rank)
    for name, others in (
        ("enable_expert_parallel", config.enable_expert_parallel and total > 1),
        ("enable_elastic_ep", config.enable_elastic_ep),
        (
            "distributed_executor_backend = 'external_launcher'",
            config.executor == "external_launcher",
        ),
    ):
        require(not others, field, value, f"left out with {name}: such engines are one server's")

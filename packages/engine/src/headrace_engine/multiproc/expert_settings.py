"""Settings of expert parallelism and of its load balancing: those of ``parallel`` that name experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace_core.config import require

if TYPE_CHECKING:
    from headrace_engine.multiproc.config import ParallelConfig

DEFAULT_ALL2ALL = "allgather_reducescatter"
_EPLB = "parallel.eplb_config"
_NEEDS_GPUS = (
    "pplx", "deepep_high_throughput", "deepep_low_latency", "flashinfer_all2allv",
    "flashinfer_nvlink_one_sided", "flashinfer_nvlink_two_sided", "mori", "nixl_ep",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class EPLBSettings:
    """``parallel.eplb_config``."""

    window_size: int = 1000
    """Steps whose tokens are counted, the last ones."""
    step_interval: int = 3000
    """Steps from one arrangement of experts to the next."""
    num_redundant_experts: int = 0
    """Copies of experts that each mixture has beside its experts."""
    log_balancedness: bool = False
    """Log after each step how evenly ranks were used."""
    use_async: bool = False
    """Weights of experts come beside the steps, and take their places at a step's end. Costs memory for the
    experts that a rank gets of one mixture, and computing time of the steps beside it."""
    policy: str = "default"
    """Entry of ``headrace.eplb_policies``."""


def check_expert_parallel(config: ParallelConfig) -> None:
    """Check the settings among themselves.

    Raises:
        ConfigError: one is not accepted, or has no effect; names it.
    """
    size, engines = config.tensor_parallel_size, config.data_parallel_size
    is_on = config.enable_expert_parallel
    require(not is_on or size * engines > 1, "parallel.enable_expert_parallel", is_on,
           "left out with tensor_parallel_size = 1 and data_parallel_size = 1: that is one rank"
           )  # fmt: skip
    if config.shares_experts:
        _check_shared(config)
    strategy = config.expert_placement_strategy
    require(strategy in ("linear", "round_robin"), "parallel.expert_placement_strategy", strategy,
           "one of linear, round_robin")  # fmt: skip
    require(is_on or strategy == "linear", "parallel.expert_placement_strategy", strategy,
           "used with enable_expert_parallel")  # fmt: skip
    _check_all2all(config.all2all_backend)
    require(is_on or not config.enable_eplb, "parallel.enable_eplb", config.enable_eplb,
           "used with enable_expert_parallel")  # fmt: skip
    require(strategy == "linear" or not config.enable_eplb, "parallel.expert_placement_strategy", strategy,
           "linear with enable_eplb, which places experts by their load")  # fmt: skip
    require(config.enable_eplb or not config.eplb_config, _EPLB, config.eplb_config,
           "used with enable_eplb")  # fmt: skip
    eplb_settings(config.eplb_config)


def _check_shared(config: ParallelConfig) -> None:
    """What several engines with experts in common have not been combined with."""
    executor = config.distributed_executor_backend
    for name, value, wanted in (
        ("pipeline_parallel_size", config.pipeline_parallel_size, 1),
        ("decode_context_parallel_size", config.decode_context_parallel_size, 1),
        ("nnodes", config.nnodes, 1),
        ("distributed_executor_backend", executor, executor if executor == "mp" else None),
    ):
        accepted = "'mp', or left out," if name == "distributed_executor_backend" else repr(wanted)
        require(value == wanted, f"parallel.{name}", value,
               f"{accepted} with enable_expert_parallel and data_parallel_size = "
               f"{config.data_parallel_size}: the ranks of all engines share the experts")  # fmt: skip


def _check_all2all(backend: str) -> None:
    field = "parallel.all2all_backend"
    why = ""
    if backend == "naive":
        why = ": with it each rank would send its tokens to all others; here all have them"
    elif backend in _NEEDS_GPUS:
        why = f": {backend} is a library for GPUs, and ranks are processes on a CPU"
    require(backend == DEFAULT_ALL2ALL, field, backend, f"{DEFAULT_ALL2ALL}{why}")


def eplb_settings(stated: Mapping[str, Any]) -> EPLBSettings:
    """``parallel.eplb_config`` with what it leaves out.

    Raises:
        ConfigError: a field is unknown, or its value is not accepted; names it.
    """
    require(isinstance(stated, Mapping), _EPLB, stated, "an object")
    fields = EPLBSettings.__dataclass_fields__
    for name, value in stated.items():
        where = f"{_EPLB}.{name}"
        require(name in fields, where, value, f"left out: fields are {', '.join(fields)}")
        kind = type(getattr(EPLBSettings, name))
        least = 0 if name == "num_redundant_experts" else 1
        good = type(value) is kind and (kind is not int or value >= least)
        accepted = {
            int: f"a whole number of at least {least}",
            bool: "true or false",
            str: "a name",
        }
        require(good, where, value, accepted[kind])
    return EPLBSettings(**stated)

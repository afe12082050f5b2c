"""A model's layouts on given devices, each with its memory, its traffic and the bound of its speed."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from headrace.assembly.resolved import ResolvedConfig, resolve_engine
from headrace.planning.decoding import Bound, Traffic, bound_of, traffic_of
from headrace.planning.devices import Devices
from headrace.planning.layouts import Layout, layouts_of
from headrace.planning.memory import RankMemory, Workload, rank_memory, token_bytes
from headrace.planning.parallelism import check_plannable, refusal, steps_beside
from headrace.planning.rank_model import RankModels
from headrace_core.errors import ConfigError, HeadraceError
from headrace_engine.config import EngineConfig


class LayoutPlan(NamedTuple):
    """One layout."""

    layout: Layout
    refused: str
    """Why the engine refuses it; empty: it does not."""
    memory: tuple[RankMemory, ...] = ()
    """Of each stage's ranks; empty: the model cannot be divided so."""
    cache_per_token: int = 0
    """Bytes of cache that a rank takes for each token of a request; of the stage with the most."""
    traffic: Traffic | None = None
    bound: Bound | None = None

    @property
    def fullest(self) -> RankMemory:
        """Of the stage that needs the most."""
        return max(self.memory, key=lambda one: one.needed)

    @property
    def missing(self) -> int:
        """Bytes that each device of the fullest stage lacks."""
        return max((one.missing for one in self.memory), default=0)

    @property
    def cache_flag(self) -> int:
        """``kv_cache_memory_bytes`` to start with; 0: none is needed. All ranks have as many blocks."""
        return max((one.cache_flag for one in self.memory), default=0)

    @property
    def runs(self) -> bool:
        return bool(self.memory) and not self.refused and not self.missing

    def facts(self) -> dict[str, Any]:
        """Plain data."""
        facts: dict[str, Any] = {
            "layout": self.layout._asdict(),
            "flags": self.layout.flags(),
            "runs": self.runs,
            "refused": self.refused or None,
            "missing_bytes": self.missing,
        }
        if self.memory:
            facts["stages"] = [
                {**one._asdict(), "needed": one.needed, "missing": one.missing}
                for one in self.memory
            ]
            facts["cache_bytes_per_token"] = self.cache_per_token
        if self.traffic and self.bound:
            facts |= {
                "traffic_per_token": self.traffic._asdict(),
                "bound": self.bound._asdict(),
            }
        return facts


class Planner:
    """Plans one checkpoint with one set of settings; models are built once.

    Args:
        config: the engine's settings. Its sizes of parallelism, where above 1, are those that layouts must
            have; its ``max_model_len`` is the workload's context.
        concurrency: requests at once, over all engines.

    Raises:
        HeadraceError: the model cannot be planned, or not be served with these settings.
    """

    def __init__(self, config: EngineConfig, concurrency: int) -> None:
        if concurrency < 1:
            raise ConfigError(
                f"concurrency = {concurrency}: must be at least 1", field="concurrency"
            )
        check_plannable(config)
        self._wanted = config.parallel
        alone = dataclasses.replace(
            config,
            parallel=dataclasses.replace(config.parallel, tensor_parallel_size=1, data_parallel_size=1,
                                         pipeline_parallel_size=1, enable_expert_parallel=False),
            scheduler=dataclasses.replace(config.scheduler, max_num_seqs=concurrency),
        )  # fmt: skip
        self.resolved = resolve_engine(alone)
        self.workload = Workload(self.resolved.info.max_model_len, concurrency)
        self.models = RankModels(self.resolved)
        self._hidden = int(self.models.item_bytes * self.models.of(1).parts.hidden_size)

    def layouts(self, devices: Devices) -> list[LayoutPlan]:
        """Every layout of all the devices, with the sizes that the settings name."""
        wanted = (
            self._wanted.tensor_parallel_size, self._wanted.pipeline_parallel_size,
            self._wanted.data_parallel_size,
        )  # fmt: skip
        found = [
            self.plan(layout, devices)
            for layout in layouts_of(devices.number, has_experts=self.models.has_experts)
            if all(size in (1, own) for size, own in zip(wanted, layout))
            and layout.experts >= self._wanted.enable_expert_parallel
        ]
        if not found:
            sizes = ", ".join(f"{f} {n}" for f, n in zip(("-tp", "-pp", "-dp"), wanted) if n > 1)
            raise ConfigError(
                f"devices: {devices.number} of them cannot be divided so: {sizes}; leave these out, or name "
                "a multiple of their product",
                field="devices",
            )
        return found

    def plan(
        self, layout: Layout, devices: Devices, workload: Workload | None = None
    ) -> LayoutPlan:
        """One layout.

        Args:
            workload: default: the planner's own.
        """
        refused = refusal(self.resolved, layout)
        try:
            stages = self.models.stages(layout)
        except HeadraceError as error:  # the model's own reason says more
            return LayoutPlan(layout, str(error))
        context, concurrency = workload or self.workload
        requests = -(-concurrency // layout.data)
        own = self._of_one_rank(layout)
        memory = [rank_memory(own, stage, devices.memory, requests, context) for stage in stages]
        return LayoutPlan(
            layout,
            refused,
            tuple(memory),
            max(token_bytes(stage.specs) for stage in stages),
            traffic_of(stages, layout, self._hidden),
            bound_of(
                stages,
                layout,
                devices,
                Workload(context, concurrency),
                self._hidden,
                steps_beside(self.resolved.config, layout),
            ),
        )

    def _of_one_rank(self, layout: Layout) -> ResolvedConfig:
        """``max_memory_bytes`` is of all ranks and engines together."""
        limit = self.resolved.config.cache.max_memory_bytes
        if limit is None:
            return self.resolved
        cache = dataclasses.replace(
            self.resolved.config.cache, max_memory_bytes=max(1, limit // layout.devices)
        )
        return self.resolved._replace(config=dataclasses.replace(self.resolved.config, cache=cache))

"""The executor ``ray``: rank 0 in this process, every other rank in a Ray actor.

Ray chooses hosts and starts processes. What ranks say to each other goes over their own connections, as
between hosts without Ray (:mod:`headrace_engine.multiproc.nodes`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import time
from functools import partial
from typing import Any

import msgspec

import headrace_core
from headrace_core.errors import ConfigError, MissingDependency
from headrace_engine.multiproc.executor import MultiProcExecutor
from headrace_engine.multiproc.nodes.plan import NodePlan
from headrace_engine.multiproc.places import RankedWorkers
from headrace_engine.multiproc.ray.actor import RankActor

logger = logging.getLogger(__name__)

PLACED_SECONDS = 60.0
"""Longest wait for Ray to have room for the actors."""
COPIED = ("HEADRACE_", "HF_", "OMP_", "PYTHONPATH", "LD_LIBRARY_PATH")
"""Beginnings of names of variables that actors get from this process's environment."""


class RayExecutor(MultiProcExecutor):
    """As :class:`MultiProcExecutor`, but Ray starts the other ranks.

    Raises (:meth:`start`):
        MissingDependency: Ray is not installed.
        ConfigError: the cluster has no room for the ranks.
    """

    _ranks: _RayRanks | None = None

    def start(self) -> None:
        ranked = self.worker_factory
        if isinstance(ranked, RankedWorkers) and ranked.world_size > 1:
            self._ranks = _RayRanks(ranked)
            meet = None if ranked.meet is None else partial(ranked.meet, self._ranks.plan.host)
            self.worker_factory = dataclasses.replace(ranked, nodes=self._ranks.plan, meet=meet)
        try:
            super().start()
        except BaseException:
            self._close_ranks()
            raise

    def shutdown(self) -> None:
        super().shutdown()
        self._close_ranks()

    def _close_ranks(self) -> None:
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.close()


class _RayRanks:
    """The actors of one engine, and the resources that Ray keeps for them."""

    def __init__(self, ranked: RankedWorkers) -> None:
        try:
            import ray
        except ImportError as error:
            raise MissingDependency(
                "ray", needed_for="distributed_executor_backend = 'ray'",
                install="pip install 'headrace-engine[ray]'",
            ) from error  # fmt: skip
        self._ray: Any = ray
        self._ranked = ranked
        self._actors: list[Any] = []
        self._running: list[Any] = []
        self._group: Any = None
        self._is_our_group = False
        self._is_our_ray = not ray.is_initialized()
        if self._is_our_ray:  # the cluster that RAY_ADDRESS names, else one on this host
            ray.init(logging_level=logging.WARNING, include_dashboard=False)
        self.plan = NodePlan(
            ranked.world_size, ray.util.get_node_ip_address(), 0, secrets.token_bytes(32),
            {"headrace-core": headrace_core.__version__}, opened=self._start, trouble=self._trouble,
        )  # fmt: skip

    def close(self) -> None:
        """End the actors, and give their resources back. What has ended is not ended again."""
        ray = self._ray
        for actor in self._actors:
            with contextlib.suppress(Exception):  # Ray has many for an actor that is gone
                ray.kill(actor)
        if self._is_our_group:
            with contextlib.suppress(Exception):
                ray.util.remove_placement_group(self._group)
        if self._is_our_ray:
            ray.shutdown()

    def _start(self, port: int) -> None:
        """Rank 0 listens: have one actor for each other rank."""
        ray, ranked, plan = self._ray, self._ranked, self.plan
        cpus = max(1, ranked.config.device.num_threads)
        self._place(cpus, ranked.world_size - 1)
        variables = {name: value for name, value in os.environ.items() if name.startswith(COPIED)}
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        for rank in range(1, ranked.world_size):
            actor = (
                ray.remote(RankActor)
                .options(
                    num_cpus=cpus,
                    max_restarts=0,
                    scheduling_strategy=strategy(self._group, self._bundle(rank)),
                    runtime_env={"env_vars": variables},
                )
                .remote()
            )
            place = {"count": plan.count, "host": plan.host, "port": port, "node": rank}
            self._actors.append(actor)
            self._running.append(
                actor.run.remote(
                    place, plan.secret, dict(plan.settings), ranked.factory,
                    msgspec.json.encode(ranked.config),
                )
            )  # fmt: skip

    def _place(self, cpus: int, count: int) -> None:
        """Have Ray keep ``cpus`` for each of so many actors; a group that this code runs in serves."""
        ray = self._ray
        current = ray.util.get_current_placement_group()
        if current is not None and current.bundle_count > count:
            self._group = current
            return
        self._is_our_group = True
        self._group = ray.util.placement_group([{"CPU": cpus}] * count, strategy="PACK")
        begin = time.monotonic()
        if not self._group.wait(PLACED_SECONDS):
            raise ConfigError(
                f"parallel.distributed_executor_backend = 'ray': Ray had no room for {count} actors of "
                f"{cpus} CPUs within {time.monotonic() - begin:.0f} s; it has {ray.available_resources()}",
                field="parallel.distributed_executor_backend",
            )

    def _bundle(self, rank: int) -> int:
        """Of a group that was there, the first bundle is the caller's."""
        return rank - 1 if self._is_our_group else rank

    def _trouble(self) -> str | None:
        """Why an actor does not come; None: they may."""
        ended, _ = self._ray.wait(self._running, num_returns=1, timeout=0)
        if not ended:
            return None
        try:
            self._ray.get(ended[0])
        except Exception as error:
            return f"a Ray actor failed: {error}"
        return "a Ray actor ended before it had joined"

"""What an actor runs: one rank, until rank 0 says to stop. Ray imports this module by name."""

from __future__ import annotations

import importlib
from typing import Any

import msgspec

from headrace_core.errors import EngineDead
from headrace_engine.config import EngineConfig
from headrace_engine.multiproc.nodes.guest import GuestRank
from headrace_engine.multiproc.nodes.joining import join_rank_0
from headrace_engine.multiproc.nodes.plan import NodePlan


class RankActor:
    """One rank; becomes an actor by ``ray.remote``. All arguments are plain data."""

    def run(
        self,
        place: dict[str, Any],
        secret: bytes,
        settings: dict[str, str],
        factory: str,
        config: bytes,
    ) -> None:
        """Join rank 0 and follow it to its end.

        Args:
            place: ``count``, ``host``, ``port`` and ``node`` of the plan.
            factory: ``module:function`` that makes the worker, given (config, place).
            config: an :class:`EngineConfig` as JSON.

        Raises: what making the worker, or a pass, raises.
        """
        plan = NodePlan(
            place["count"], place["host"], place["port"], secret, settings, place["node"]
        )
        module, _, name = factory.partition(":")
        build = getattr(importlib.import_module(module), name)
        decoded = msgspec.json.decode(config, type=EngineConfig)
        rank = GuestRank(join_rank_0(plan), lambda own: build(decoded, own))
        rank.start()
        rank.ended.wait()
        rank.close()
        if rank.failure is not None and not isinstance(rank.failure, EngineDead):
            raise rank.failure

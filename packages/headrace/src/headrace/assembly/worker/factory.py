"""Makes workers: of one rank, of all ranks, or a platform's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, cast

from headrace.assembly.hosts.nodes import node_plan
from headrace.assembly.parallel.communicators import communicator_name
from headrace.assembly.parallel.ranks import (
    FOLLOWER_FACTORY,
    Ranks,
    group_names,
    open_rendezvous,
)
from headrace.assembly.resolved import ResolvedConfig
from headrace.assembly.worker.settings import RankSetup
from headrace_core.platform import BringsWorker

if TYPE_CHECKING:
    from headrace_core.executor import Worker, WorkerFactory
    from headrace_core.kv import KVConnector
    from headrace_engine.lockstep.peers import PeerEngines
    from headrace_engine.lora.store import AdapterStore
    from headrace_engine.multiproc.nodes.plan import NodePlan
    from headrace_engine.multiproc.places import RankPlace
    from headrace_engine.startup import StartupTimeline
    from headrace_engine.structured.store import GrammarStore
    from headrace_engine.worker.serving import ServingWorker
    from headrace_engine.worker.settings import LeadsPasses
    from headrace_models.loading.ahead.weights import WeightsAhead


def platforms_worker(resolved: ResolvedConfig) -> WorkerFactory:
    """Makes the worker of a platform that brings its own."""
    platform = resolved.platform
    assert isinstance(platform, BringsWorker)
    return lambda: platform.make_worker(resolved.config, resolved.info)


def worker_factory(
    resolved: ResolvedConfig,
    timeline: StartupTimeline,
    grammars: GrammarStore | None = None,
    adapters: AdapterStore | None = None,
    place: RankPlace | None = None,
    leader: LeadsPasses | None = None,
    connector: KVConnector | None = None,
    peers: PeerEngines | None = None,
    ahead: WeightsAhead | None = None,
) -> Callable[[], ServingWorker]:
    """Makes the worker of the resolved model, which loads it when asked to.

    Args:
        adapters: of requests; None: they have none.
        place: its rank; None: there is one.
        leader: makes the model's passes run on the other ranks; None: there are none, or this one follows.
        connector: of blocks outside the cache; None: there are none.
        peers: engines with which this one shares experts; None: there are none, or the rank is not 0.
        ahead: weights that are packed already, for the model that is built first; None: the loader packs all.
    """
    from headrace_engine.multiproc.following import FollowingWorker
    from headrace_engine.weights.extension import extended, load_extension
    from headrace_engine.weights.worker import ModelWorker

    parallel = resolved.config.parallel
    ranks = Ranks(place, parallel.decode_context_parallel_size, experts_move=parallel.enable_eplb)
    setup = RankSetup(resolved, timeline, ranks, ahead)
    worker_class = extended(ModelWorker, load_extension(parallel.worker_extension_cls))

    def make_worker() -> ServingWorker:
        parts = setup.make(peers)
        if ranks.rank:
            return FollowingWorker(parts.following(connector))
        return worker_class(parts.serving(connector, leader, grammars, adapters))

    return make_worker


def ranked_workers(
    resolved: ResolvedConfig,
    timeline: StartupTimeline,
    grammars: GrammarStore | None = None,
    adapters: AdapterStore | None = None,
    connector: KVConnector | None = None,
    nodes: NodePlan | None = None,
    peers: PeerEngines | None = None,
    ahead: WeightsAhead | None = None,
) -> WorkerFactory:
    """Makes the workers of all ranks of the resolved model; arguments as :func:`worker_factory`'s.

    Args:
        nodes: processes that have the other ranks, if somebody else starts them.
        peers: engines with which this one shares experts; None: there are none.
    """
    from headrace_engine.multiproc.places import RankedWorkers
    from headrace_engine.step_timer import timed_workers

    config = resolved.config
    parallel = config.parallel

    def make(place: RankPlace, leader: LeadsPasses | None) -> Worker:
        made = worker_factory(
            resolved, timeline, grammars, adapters, place, leader, connector, peers, ahead
        )
        # Rank 0's is a ModelWorker.
        return timed_workers(cast("WorkerFactory", made), config.observability)()

    if parallel.num_ranks == 1 and peers is None:
        return RankedWorkers(make, FOLLOWER_FACTORY, config)
    plan = nodes or node_plan(resolved)
    meet = open_rendezvous if plan is None else partial(open_rendezvous, plan.host)
    return RankedWorkers(
        make,
        FOLLOWER_FACTORY,
        config,
        parallel.num_ranks,
        communicator_name(config, resolved.platform.device),
        meet,
        group_names(parallel),
        parallel.pipeline_parallel_size,
        plan,
        peers,
        parallel.prefill_context_parallel_size,
    )

"""Ranks over which a model's layers are divided: their threads, their memory, and how they meet."""

from __future__ import annotations

import copy
import logging
import os
from typing import TYPE_CHECKING

from headrace.assembly.parallel.communicators import (
    COMMUNICATORS,
    check_device,
    check_gpus,
    communicator_name,
)
from headrace.assembly.parallel.context_parallel import check_context_parallel
from headrace.assembly.parallel.prefill_context import check_prefill_context
from headrace.assembly.transfer.kv import check_ranks_transfer, kv_connector
from headrace_core import plugins
from headrace_core.errors import ConfigError
from headrace_core.graph import RecordsCalls
from headrace_core.parallel import Communicator, SingleProcess
from headrace_core.platform import BringsWorker, Platform
from headrace_engine.config import EngineConfig
from headrace_engine.cores import BIND_FIELD, CpuThreads, format_cores
from headrace_engine.lockstep.peers import EXPERT_GROUP, EXPERT_MOVES
from headrace_engine.multiproc.config import ParallelConfig
from headrace_engine.multiproc.expert_settings import eplb_settings

if TYPE_CHECKING:
    from headrace_attention.prefill_context import DividedPass
    from headrace_core.model import ModelInfo
    from headrace_engine.multiproc.following import FollowingWorker
    from headrace_engine.multiproc.places import RankPlace, Rendezvous
    from headrace_models.sequence_parallel import TokenShares
    from headrace_models.stages.stage import Link, Stage

logger = logging.getLogger(__name__)

FOLLOWER_FACTORY = "headrace.assembly.parallel.ranks:build_follower"
"""Dotted name by which another rank's process finds :func:`build_follower`."""
_SIZES = "tensor_parallel_size times pipeline_parallel_size times prefill_context_parallel_size"
"""Sizes that make several ranks, for messages."""


class Ranks:
    """One rank's place among them, and its share of the machine.

    Args:
        place: None: there is one rank.
        context_size: ranks that share the keys of what would be copies (decode context parallelism).
        experts_move: they do while the model serves.
    """

    def __init__(
        self, place: RankPlace | None = None, context_size: int = 1, *, experts_move: bool = False
    ) -> None:
        self._place = place
        self._context_size, self._experts_move = context_size, experts_move
        self._groups: dict[str, Communicator] = {}
        """Those that this rank has joined, by name."""
        self._links: list[Link] = []
        self.rank = 0 if place is None else place.rank
        self.world_size = 1 if place is None else place.world_size
        self.num_stages = 1 if place is None else place.stages
        self.num_parts = 1 if place is None else place.prefill_context
        """Groups of ranks that divide prompts (prefill context parallelism)."""
        self.divided: DividedPass | None = None
        """Divides this rank's passes, once its model is built."""
        self.shares: TokenShares | None = None
        """The tokens that ranks share between layers (sequence parallelism), once its model is built."""
        self.tensor_size = self.world_size // (self.num_stages * self.num_parts)
        self.size_here = 1 if place is None else place.size_here
        """Ranks that share this host."""
        self.rank_here = 0 if place is None else place.rank_here
        self.engine = 0 if place is None else place.engine
        self.num_engines = 1 if place is None else place.num_engines
        """Engines whose ranks share the experts."""

    @property
    def are_several(self) -> bool:
        """True if layers are divided, or are on several stages."""
        return self.world_size > 1

    @property
    def share_keys(self) -> bool:
        """True if ranks keep a part of the tokens each."""
        return self.are_several and self._context_size > 1

    @property
    def divide_prompts(self) -> bool:
        """True if ranks compute a part of each long prompt's tokens."""
        return self.num_parts > 1

    def recorders(self) -> tuple[RecordsCalls, ...]:
        """What makes calls in steps beside kernels: groups of ranks, if their calls can be recorded."""
        shared = self._groups.get(EXPERT_GROUP) if self.num_engines > 1 else None
        groups = [shared or self.communicator(), *(link.pair for link in self._links)]
        if self.share_keys and self._context_size < self.tensor_size:
            groups.append(self.context_group())
        return tuple(group for group in groups if isinstance(group, RecordsCalls))

    def can_record(self, *, pools: bool) -> bool:
        """True if exchanges between ranks can be part of recorded steps; if not, logs why.

        Args:
            pools: the model pools.
        """
        whose = (
            "of several stages of a model that pools"
            if self.num_stages > 1 and pools
            else "of engines of several ranks that share experts"
            if self.num_engines > 1 and self.are_several
            else "of engines that share experts which move"
            if self.num_engines > 1 and self._experts_move
            else ""
        )
        if whose:
            if self.rank == 0:
                logger.info("steps %s are not recorded: they run eagerly", whose)
            return False
        exchanges = self.tensor_size > 1 or self.num_stages > 1 or self.num_engines > 1
        if not exchanges or self.recorders():
            return True
        if self.rank == 0 and self._place is not None:
            logger.info(
                "communicator %r: its exchanges cannot be recorded", self._place.communicator
            )
        return False

    @property
    def stage(self) -> int:
        """Index of this rank's stage."""
        return self.rank // (self.tensor_size * self.num_parts)

    @property
    def lane(self) -> int:
        """This rank's place among those that its layers are divided over."""
        return self.rank % self.tensor_size

    @property
    def _tensor_group(self) -> str:
        return tensor_group(self.rank // self.tensor_size)

    def communicator(self) -> Communicator:
        """The group of the ranks that layers of this one are divided over, which it joins when it is first
        asked for."""
        if self.tensor_size == 1:
            return SingleProcess()
        return self._join(self._tensor_group, self.lane, self.tensor_size)

    def prompt_group(self) -> Communicator:
        """The group of the ranks with this one's weights, which divide prompts; joined when first asked
        for."""
        part, lane = divmod(self.rank, self.tensor_size)
        return self._join(prompt_group_name(lane), part, self.num_parts)

    def expert_group(self) -> Communicator:
        """The group of all ranks of all engines that share experts, which this one joins when it is first
        asked for; those of an engine are neighbours."""
        return self._join_engines(EXPERT_GROUP)

    def _join_engines(self, name: str) -> Communicator:
        rank, is_new = self.engine * self.world_size + self.rank, name not in self._groups
        group = self._join(name, rank, self.num_engines * self.world_size)
        if is_new:
            group.barrier()  # then nobody needs the place where they meet any longer
        return group

    def stages(self, partition: str | None) -> Stage | None:
        """This rank's stage, whose ways to others are joined; None: there is one stage.

        Args:
            partition: numbers of layers by stage, as text; None: chosen.

        Raises:
            ConfigError: ``partition`` is something else.
        """
        if self.num_stages == 1:
            return None
        from headrace_models.stages.division import partition_of
        from headrace_models.stages.stage import Link, Stage

        index, last = self.stage, self.num_stages - 1
        self.leave_stages()  # those of a model that has gone
        numbers = () if partition is None else partition_of(partition, self.num_stages)
        lane = self.rank % self.tensor_size

        def link(start: int) -> Link:
            """The way from a stage to the next one; from the last one, to the first."""
            made = Link(self._join(link_group(lane, start), int(start != index), 2))
            self._links.append(made)
            return made

        # In this order: a rank waits for one whose earlier groups wait for none of its later ones.
        before = link(index - 1) if index else None
        after = link(index) if index < last else None
        # The streams of a stage's ranks are equal, and rank 0 is who uses what comes out.
        result = link(last) if lane == 0 and index in (0, last) else None
        return Stage(index, self.num_stages, numbers, before, after, result, lane)

    def context_group(self) -> Communicator:
        """The neighbouring ranks that share keys, this one among them, which joins when first asked for."""
        if self._place is None or not self.share_keys or self._context_size == self.tensor_size:
            return self.communicator()
        number, rank = divmod(self.rank, self._context_size)
        return self._join(context_group_name(number), rank, self._context_size)

    def report(self) -> dict[str, str]:
        """How this stage's ranks exchange tensors: ``communicator``, and ``all_reduce`` of one that chooses
        by size; ``divided_passes`` and ``shared_passes``: number of those until now, where ranks divide
        prompts, and where they share tokens between layers."""
        if self._place is None or not self.are_several:
            return {}
        found = {"communicator": self._place.communicator}
        if self.divided is not None:
            found["divided_passes"] = str(self.divided.num_divided)
        if self.shares is not None:
            found["shared_passes"] = str(self.shares.num_shared)
        group = self._groups.get(self._tensor_group)
        describe = getattr(group, "describe", None)
        return found if describe is None else {**found, "all_reduce": describe()}

    def moving_group(self) -> Communicator:
        """The ranks that divide the experts once more, for exchanges of these beside steps; joined when first
        asked for."""
        if self.num_engines > 1:
            return self._join_engines(EXPERT_MOVES)
        return self._join(moving_group_name(self.stage), self.lane, self.tensor_size)

    def beside(self) -> Ranks:
        """The same place, for a model that is built while another one serves: with ways of its own between
        the stages, through the same groups."""
        made = copy.copy(self)
        made._links, made.shares = [], None
        return made

    def take_over(self, other: Ranks) -> None:
        """The model that was built with :meth:`beside`'s serves now; the one before has gone."""
        self.leave_stages()
        self._links, self.shares = other._links, other.shares

    def leave_stages(self) -> None:
        """Close the ways between the stages of a model that has gone. Idempotent."""
        links, self._links = self._links, []
        for link in links:
            link.close()

    def leave(self) -> None:
        """Leave the groups that this rank has joined. Idempotent."""
        self.leave_stages()
        groups, self._groups = self._groups, {}
        for group in groups.values():
            group.close()

    def _join(self, name: str, rank: int, world_size: int) -> Communicator:
        if name not in self._groups:
            assert self._place is not None
            create = plugins.load(COMMUNICATORS, self._place.communicator)
            self._groups[name] = create(rank, world_size, self._place.rendezvous[name])
        return self._groups[name]

    def threads(self, whole: CpuThreads) -> CpuThreads:
        """This rank's share of the engine's threads, and of the cores that they are bound to.

        Raises:
            ConfigError: threads are bound to fewer cores than there are ranks.
        """
        if not self.are_several:
            return whole
        if whole.cores and len(whole.cores) < self.size_here:
            raise ConfigError(
                f"{BIND_FIELD}: it binds {len(whole.cores)} threads (cores {format_cores(whole.cores)}), and "
                f"{self.size_here} ranks need one each ({_SIZES}); name more of them, leave "
                "num_threads out, or set it to 'none'",
                field=BIND_FIELD,
            )
        count = max(1, whole.num_threads // self.size_here)
        if whole.num_threads < self.size_here and self.rank_here == 0:
            logger.warning(
                "the engine has %d CPU threads for %d ranks (%s), each of which takes one: they wait for "
                "each other. Use as many ranks as cores at most",
                whole.num_threads,
                self.size_here,
                _SIZES,
            )
        start = self.rank_here * count
        return CpuThreads(count, whole.cores[start : start + count])

    def use_device(self, device: str) -> None:
        """Have this thread compute on the rank's own GPU: that of its number on this host."""
        if device == "cuda" and self.are_several:
            import torch

            torch.cuda.set_device(self.rank_here)

    def memory_share(self, device: str) -> int:
        """Ranks that share this one's memory."""
        return self.size_here if device == "cpu" else 1


def tensor_group(number: int) -> str:
    """Name of a group of neighbouring ranks that layers are divided over: of a stage, or of those that
    compute a part of prompts."""
    return f"tp:{number}"


def prompt_group_name(lane: int) -> str:
    """Name of a group of ranks that divide prompts.

    Args:
        lane: their place among the ranks that layers are divided over.
    """
    return f"pcp:{lane}"


def link_group(lane: int, start: int) -> str:
    """Name of the group of two ranks that a stream goes through.

    Args:
        lane: their place among the ranks of their stages.
        start: the stage that sends; the next one receives, or the first if it is the last.
    """
    return f"pp:{lane}:{start}"


def moving_group_name(stage: int) -> str:
    """Name of the group of a stage's ranks in which experts move beside steps."""
    return f"eplb:{stage}"


def context_group_name(number: int) -> str:
    """Name of the group of neighbouring ranks that share keys."""
    return f"dcp:{number}"


def group_names(parallel: ParallelConfig) -> tuple[str, ...]:
    """All groups of an engine's ranks."""
    tensor_size, num_stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    shared = parallel.decode_context_parallel_size
    context = range(parallel.num_ranks // shared) if 1 < shared < tensor_size else ()
    parts = parallel.prefill_context_parallel_size
    tensor = [*map(tensor_group, range(num_stages * parts))] if tensor_size > 1 else []
    prompts = [*map(prompt_group_name, range(tensor_size))] if parts > 1 else []
    links = [
        link_group(lane, start)
        for lane in range(tensor_size)
        for start in range(num_stages if lane == 0 else num_stages - 1)
    ]
    moving = (
        parallel.enable_eplb
        and not parallel.shares_experts
        and eplb_settings(parallel.eplb_config).use_async
    )
    return (
        *tensor,
        *prompts,
        *map(context_group_name, context),
        *(links if num_stages > 1 else ()),
        *(map(moving_group_name, range(num_stages)) if moving else ()),
    )


def check_ranks(config: EngineConfig, info: ModelInfo, platform: Platform) -> None:
    """Refuse what does not work yet while layers are divided over several ranks.

    Raises:
        ConfigError: naming the setting.
        PluginNotFound: the communicator is not installed.
    """
    parallel = config.parallel
    from headrace_models.stages.division import PARTITION, partition_of

    check_device(parallel.communicator, platform.device)
    if parallel.num_ranks == 1 and not parallel.shares_experts:
        return
    if platform.device not in ("cpu", "cuda") or isinstance(platform, BringsWorker):
        kind = (
            "tensor"
            if parallel.tensor_parallel_size > 1
            else "pipeline"
            if parallel.pipeline_parallel_size > 1
            else "prefill_context"
            if parallel.prefill_context_parallel_size > 1
            else "data"
        )
        field = f"parallel.{kind}_parallel_size"
        device = config.device.device if isinstance(platform, BringsWorker) else platform.device
        raise ConfigError(
            f"parallel.{parallel.describe_ranks()}: must be 1 on device {device!r}: ranks are "
            "processes on a CPU, or on a GPU each",
            field=field,
        )
    if platform.device == "cuda":
        check_gpus(parallel)
    for field, value, why in _single_rank_settings(config):
        if value:
            raise ConfigError(
                f"{field} = {value!r:.200}: must be left out while {parallel.describe_ranks()}: {why}",
                field=field,
            )
    check_context_parallel(config, platform)
    check_prefill_context(config, info)
    check_ranks_transfer(config)
    partition = os.environ.get(PARTITION)
    if partition is not None and parallel.pipeline_parallel_size > 1:
        partition_of(partition, parallel.pipeline_parallel_size)
    communicator_name(config, platform.device)


def _single_rank_settings(config: EngineConfig) -> tuple[tuple[str, object, str], ...]:
    """Settings that need one rank: name, value (false: it is off), and why."""
    return (
        ("cache.calculate_kv_scales", config.cache.calculate_kv_scales,
         "each rank would measure other scales"),
        ("parallel.worker_extension_cls", config.parallel.worker_extension_cls,
         "its methods would run on one rank only"),
        ("multimodal.ec_transfer_config", config.multimodal.ec_transfer_config,
         "engines that share an encoder have one rank"),
    )  # fmt: skip


def open_rendezvous(host: str = "127.0.0.1") -> Rendezvous:
    """A place where the ranks meet, at an address of this host.

    Raises:
        ConfigError: it is not an address of this host.
    """
    from headrace_distributed.rendezvous import RendezvousServer

    try:
        return RendezvousServer(host)
    except OSError as error:
        raise ConfigError(
            f"parallel.master_addr = {host!r}: cannot be listened on: {error.strerror}; must be an address "
            "of this host, which has node_rank 0",
            field="parallel.master_addr",
        ) from error


def build_follower(config: EngineConfig, place: RankPlace) -> FollowingWorker:
    """The worker of a rank other than 0, from a configuration alone: the entry point of its process."""
    from headrace.assembly.resolved import resolve_engine
    from headrace.assembly.worker.factory import worker_factory
    from headrace.logs import RESOLUTION, leave_to_another
    from headrace_engine.startup import StartupTimeline

    leave_to_another(*RESOLUTION)
    resolved = resolve_engine(config)
    connector = kv_connector(resolved.config, place.rank)
    make = worker_factory(resolved, StartupTimeline(), place=place, connector=connector)
    worker: FollowingWorker = make()  # type: ignore[assignment] # as its rank is not 0
    return worker

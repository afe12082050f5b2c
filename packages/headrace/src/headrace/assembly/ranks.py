"""Ranks over which a model's layers are divided: their threads, their memory, and how they meet."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from headrace.assembly.context_parallel import check_context_parallel
from headrace_core import plugins
from headrace_core.errors import ConfigError
from headrace_core.graph import RecordsCalls
from headrace_core.parallel import Communicator, SingleProcess
from headrace_core.platform import BringsWorker, Platform
from headrace_engine.config import EngineConfig
from headrace_engine.cores import BIND_FIELD, CpuThreads, format_cores

if TYPE_CHECKING:
    from headrace_core.model import ModelInfo
    from headrace_engine.multiproc.following import FollowingWorker
    from headrace_engine.multiproc.places import RankPlace, Rendezvous

logger = logging.getLogger(__name__)

FOLLOWER_FACTORY = "headrace.assembly.ranks:build_follower"
"""Dotted name by which another rank's process finds :func:`build_follower`."""
COMMUNICATORS = "headrace.communicators"


class Ranks:
    """One rank's place among them, and its share of the machine.

    Args:
        place: None: there is one rank.
        context_size: ranks that share the keys of what would be copies (decode context parallelism).
    """

    def __init__(self, place: RankPlace | None = None, context_size: int = 1) -> None:
        self._place = place
        self._context_size = context_size
        self._communicator: Communicator | None = None
        self._context_group: Communicator | None = None
        self.rank = 0 if place is None else place.rank
        self.world_size = 1 if place is None else place.world_size
        self.size_here = 1 if place is None else place.size_here
        """Ranks that share this host."""
        self.rank_here = 0 if place is None else place.rank_here

    @property
    def are_several(self) -> bool:
        """True if layers are divided."""
        return self.world_size > 1

    @property
    def share_keys(self) -> bool:
        """True if ranks keep a part of the tokens each."""
        return self.are_several and self._context_size > 1

    def recorders(self) -> tuple[RecordsCalls, ...]:
        """What makes calls in steps beside kernels: the communicator, if its calls can be recorded."""
        group = self.communicator()
        return (group,) if self.are_several and isinstance(group, RecordsCalls) else ()

    def can_record(self) -> bool:
        """True if exchanges between ranks can be part of recorded steps; if not, logs why."""
        if self.share_keys:
            if self.rank == 0:
                logger.info("steps are not recorded while ranks share keys")
            return False
        if not self.are_several or self.recorders():
            return True
        if self.rank == 0 and self._place is not None:
            logger.info(
                "communicator %r: its exchanges cannot be recorded", self._place.communicator
            )
        return False

    def communicator(self) -> Communicator:
        """The group of all ranks, which this one joins when it is first asked for."""
        if self._place is None or not self.are_several:
            return SingleProcess()
        if self._communicator is None:
            create = plugins.load(COMMUNICATORS, self._place.communicator)
            self._communicator = create(self.rank, self.world_size, self._place.rendezvous)
        return self._communicator

    def context_group(self) -> Communicator:
        """The neighbouring ranks that share keys, this one among them, which joins when first asked for."""
        if self._place is None or not self.share_keys or self._context_size == self.world_size:
            return self.communicator()
        if self._context_group is None:
            number, rank = divmod(self.rank, self._context_size)
            meeting = self._place.rendezvous.rpartition("/")[0]
            create = plugins.load(COMMUNICATORS, self._place.communicator)
            self._context_group = create(rank, self._context_size, f"{meeting}/dcp{number}")
        return self._context_group

    def leave(self) -> None:
        """Leave the groups that this rank is in. Idempotent."""
        groups = (self._context_group, self._communicator)
        self._context_group = self._communicator = None
        for group in groups:
            if group is not None:
                group.close()

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
                f"tensor_parallel_size = {self.world_size}: each rank needs a core; name more of them, leave "
                "num_threads out, or set it to 'none'",
                field=BIND_FIELD,
            )
        count = max(1, whole.num_threads // self.size_here)
        if whole.num_threads < self.size_here and self.rank_here == 0:
            logger.warning(
                "tensor_parallel_size = %d: the engine has %d CPU threads for as many ranks, each of which "
                "takes one: they wait for each other. Use as many ranks as cores at most",
                self.size_here,
                whole.num_threads,
            )
        start = self.rank_here * count
        return CpuThreads(count, whole.cores[start : start + count])

    def memory_share(self, device: str) -> int:
        """Ranks that share this one's memory."""
        return self.size_here if device == "cpu" else 1


def check_ranks(config: EngineConfig, info: ModelInfo, platform: Platform) -> None:
    """Refuse what does not work yet while layers are divided over several ranks.

    Raises:
        ConfigError: naming the setting.
        PluginNotFound: the communicator is not installed.
    """
    size = config.parallel.tensor_parallel_size
    if size == 1:
        return
    if platform.device != "cpu" or isinstance(platform, BringsWorker):
        raise ConfigError(
            f"parallel.tensor_parallel_size = {size}: must be 1 on device {platform.device!r}: ranks are "
            "processes on a CPU for now",
            field="parallel.tensor_parallel_size",
        )
    for field, value, why in _single_rank_settings(config):
        if value:
            raise ConfigError(
                f"{field} = {value!r:.200}: must be left out while parallel.tensor_parallel_size = {size}: "
                f"{why}",
                field=field,
            )
    check_context_parallel(config)
    communicator_name(config)


def _single_rank_settings(config: EngineConfig) -> tuple[tuple[str, object, str], ...]:
    """Settings that need one rank: name, value (false: it is off), and why."""
    return (
        ("device.enable_sleep_mode", config.device.enable_sleep_mode, "ranks do not sleep yet"),
        ("cache.calculate_kv_scales", config.cache.calculate_kv_scales,
         "each rank would measure other scales"),
        ("parallel.worker_extension_cls", config.parallel.worker_extension_cls,
         "its methods would run on one rank only"),
        ("cache.kv_transfer_config", config.cache.kv_transfer_config,
         "blocks of divided layers do not travel yet"),
        ("multimodal.ec_transfer_config", config.multimodal.ec_transfer_config,
         "engines that share an encoder have one rank"),
    )  # fmt: skip


def communicator_name(config: EngineConfig) -> str:
    """The communicator of an engine's ranks, chosen if that was left open.

    Raises:
        ConfigError: it is of one rank.
        PluginNotFound: it is not installed.
    """
    wanted = config.parallel.communicator
    if wanted == "auto":
        on_this_host = config.parallel.nnodes == 1 and config.parallel.executor != "ray"
        wanted = "shm" if on_this_host and _shares_memory() else "gloo"
        logger.info("communicator: auto -> %s", wanted)
    if wanted == "single":
        others = ", ".join(name for name in plugins.installed(COMMUNICATORS) if name != "single")
        raise ConfigError(
            f"parallel.communicator = 'single': it has one rank, and tensor_parallel_size = "
            f"{config.parallel.tensor_parallel_size}; must be 'auto' or one of {others}",
            field="parallel.communicator",
        )
    plugins.find(COMMUNICATORS, wanted)
    return wanted


def _shares_memory() -> bool:
    """True if ranks of this host can exchange tensors through memory."""
    try:
        from headrace_distributed.shm import library
    except ImportError:  # plugins.find says how to install what is missing
        return False
    return "shm" in plugins.installed(COMMUNICATORS) and library.available()


def open_rendezvous(host: str = "127.0.0.1") -> Rendezvous:
    """A place where the ranks meet, at an address of this host."""
    from headrace_distributed.rendezvous import RendezvousServer

    return RendezvousServer(host)


def build_follower(config: EngineConfig, place: RankPlace) -> FollowingWorker:
    """The worker of a rank other than 0, from a configuration alone: the entry point of its process."""
    from headrace.assembly.resolved import resolve_engine
    from headrace.assembly.worker import worker_factory
    from headrace.logs import RESOLUTION, leave_to_another
    from headrace_engine.startup import StartupTimeline

    leave_to_another(*RESOLUTION)
    make = worker_factory(resolve_engine(config), StartupTimeline(), place=place)
    worker: FollowingWorker = make()  # type: ignore[assignment] # as its rank is not 0
    return worker

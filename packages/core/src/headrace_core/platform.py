"""Platforms: defaults and facts of a device that do not depend on the model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from headrace_core.executor import Worker
    from headrace_core.model import ModelInfo
    from headrace_core.sampling.params import SamplingParams


class Platform(Protocol):
    """Facts about a device. An entry point of ``headrace.platforms`` is a callable that makes one;
    its name is what ``--device`` takes."""

    @property
    def device(self) -> str:
        """Torch's device type: ``cpu``, ``cuda``, ..."""

    @property
    def attention_order(self) -> Sequence[str]:
        """Attention backends, best first."""

    @property
    def default_block_size(self) -> int: ...
    @property
    def default_max_num_seqs(self) -> int: ...
    @property
    def default_max_num_batched_tokens(self) -> int: ...
    @property
    def default_max_num_shared_tokens(self) -> int: ...

    def dtype_for(self, checkpoint_dtype: str) -> str:
        """Type that ``dtype="auto"`` means for weights of that dtype."""

    def available_memory(self) -> int:
        """Bytes that could be allocated now."""


@runtime_checkable
class BringsWorker(Protocol):
    """A platform that computes steps by itself: neither torch nor a model class is imported."""

    def make_worker(self, config: Any, info: ModelInfo) -> Worker:
        """The worker, called in the thread or process that runs it.

        Args:
            config: the engine's ``headrace_engine.config.EngineConfig``, resolved.
            info: what the checkpoint's files say.

        Raises:
            ConfigError: a setting that this platform cannot honour.
        """

    def check_params(self, params: SamplingParams) -> None:
        """Refuse what its worker cannot honour, before a request is taken in.

        Raises:
            UnsupportedFeature: naming the field.
        """


@dataclass(frozen=True, slots=True)
class CpuPlatform:
    """The host's processor."""

    device: str = "cpu"
    attention_order: Sequence[str] = ("paged", "varlen", "sdpa")
    default_block_size: int = 16
    default_max_num_seqs: int = 128
    default_max_num_batched_tokens: int = 2048
    default_max_num_shared_tokens: int = 512

    def dtype_for(self, checkpoint_dtype: str) -> str:
        """As stored: float32 stays exact; 16-bit weights are multiplied with float32 sums."""
        return checkpoint_dtype

    def available_memory(self) -> int:
        """Free memory, or what the container's limit leaves if that is less."""
        return min(_free_physical(), _free_in_cgroup())


def _free_physical() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _free_in_cgroup() -> int:
    """Free bytes under a container's memory limit; unlimited if there is none."""
    unlimited = 1 << 62
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            limit = file.read().strip()
        if limit == "max":
            return unlimited
        with open("/sys/fs/cgroup/memory.current", encoding="ascii") as file:
            return max(0, int(limit) - int(file.read()))
    except (OSError, ValueError):
        return unlimited

"""The next model of a worker, built while the one before serves: :class:`ModelsBeside`."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from headrace_core.errors import EngineError, HeadraceError, RequestError, UnsupportedFeature
from headrace_core.kv import CacheSpec, KVCacheConfig
from headrace_core.lora import AdapterSlots
from headrace_core.model import (
    CausalLM,
    LoadProgress,
    ProgressCallback,
    SupportsEncoderDecoder,
    SupportsRecurrence,
)
from headrace_engine.execution.cache import cache_specs
from headrace_engine.execution.measuring.measure import MemoryMeter
from headrace_engine.execution.memory import readable
from headrace_engine.execution.refusal import memory_errors
from headrace_engine.execution.runner import ModelRunner
from headrace_engine.sampling.sampler import Sampler
from headrace_engine.speculation.draft_head import BuildHead, DraftHead
from headrace_engine.weights.order import Probe
from headrace_engine.weights.probe import Limits, ModelProbe, ProbeCache
from headrace_engine.weights.update_set import LoadedModel

logger = logging.getLogger(__name__)

LOG_SECONDS = 5.0
"""Between two log lines of a reading."""


class BuildBeside(Protocol):
    """Builds a model of another checkpoint, as the running one was built."""

    def __call__(
        self,
        path: str,
        slots: AdapterSlots | None,
        admit: Callable[[CausalLM, int], None],
        progress: ProgressCallback,
        told: Callable[[LoadedModel], None],
    ) -> CausalLM:
        """Read a checkpoint.

        Args:
            path: on this machine.
            slots: of the new model's adapters; None: requests have none.
            admit: gets the model before a weight is read, and the bytes that it will keep.
            progress: told the bytes that are done; what it raises ends the reading.
            told: is told how the model was loaded, if its weights can be replaced.

        Raises:
            RequestError: the checkpoint is of another model.
            HeadraceError: it cannot be read.
        """
        ...


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model that is read and checked, and serves nobody."""

    model: CausalLM
    slots: AdapterSlots | None
    num_bytes: int
    path: str
    loaded: LoadedModel | None
    """How it was loaded, if its weights can be replaced."""
    head: DraftHead | None = None
    """Layers of its checkpoint that guess."""
    loaded_head: LoadedModel | None = None


@dataclass(frozen=True, slots=True)
class Running:
    """What a candidate must agree with, and what is there beside it."""

    specs: Mapping[str, CacheSpec]
    """Of the running model's layers, a draft model's left out."""
    num_bytes: int
    """Weights, cache and activations."""
    generates: bool


class ModelsBeside:
    """Builds candidates, one at a time, beside the worker's thread.

    Args:
        build: builds the model.
        sampler: of raw log-probabilities.
        max_bytes: what this rank may hold in all; None: what is free.
        build_head: builds the layers of a model's checkpoint that guess; None: nothing there does.
        memory_share: ranks that take of the device's free memory, each as much.
    """

    def __init__(
        self,
        build: BuildBeside,
        sampler: Sampler,
        limits: Limits,
        meter: MemoryMeter,
        device: torch.device,
        max_bytes: int | None = None,
        *,
        build_head: BuildHead | None = None,
        memory_share: int = 1,
    ) -> None:
        self._build_head, self._memory_share = build_head, memory_share
        self._build, self._sampler, self._limits = build, sampler, limits
        self._meter, self._device, self._max_bytes = meter, device, max_bytes
        self._unwanted = threading.Event()
        """Nobody wants what is being read any more."""
        self._closed = False
        self._candidate: Candidate | None = None

    def build(
        self,
        path: str,
        slots: AdapterSlots | None,
        running: Running,
        admitted: Callable[[], None] = lambda: None,
    ) -> int:
        """Build the next :attr:`candidate`: bytes that it keeps.

        Args:
            slots: of its adapters; None: requests have none.
            admitted: called before a weight is read, once it is known that the model fits.

        Raises:
            RequestError: the checkpoint does not fit, or there is no memory for it; says why.
            EngineError: it is not wanted any more.
        """
        num_bytes, loaded, loaded_head = 0, list[LoadedModel](), list[LoadedModel]()
        head: DraftHead | None = None
        free = self._meter.available() // self._memory_share  # before other ranks take of it

        def admit(model: CausalLM, kept: int) -> None:
            nonlocal num_bytes
            num_bytes = kept + (0 if slots is None else slots.num_bytes)
            self._check_room(num_bytes, running, free)
            if _specs(model):  # others know only when they are filled
                _check_specs(_specs(model), running.specs)
            admitted()

        with self._telling(path):
            progress = _ReadingLog(self._unwanted)
            model = self._build(path, slots, admit, progress, loaded.append)
            _check_specs(_specs(model), running.specs)
            for layer in _states(model).values():
                layer.bind_states(None, 0)
            if self._build_head is not None:
                head = self._build_head(model, path, told=loaded_head.append)
        how, how_head = (one[0] if one else None for one in (loaded, loaded_head))
        self._candidate = Candidate(model, slots, num_bytes, path, how, head, how_head)
        return num_bytes

    def probe(
        self, running: Running, probes: tuple[Probe, ...], max_perplexity: float | None
    ) -> float | None:
        """Try the candidate: its perplexity on the probes, None if there is none.

        Raises:
            RequestError: it fails; says where.
        """
        trial = self.trial(running, probes)
        if trial is None:
            return None
        with self.telling():
            return trial.run(probes, max_perplexity)

    def trial(self, running: Running, probes: tuple[Probe, ...]) -> ModelProbe | None:
        """What tries the candidate; None: it cannot be tried.

        Raises:
            UnsupportedFeature: it cannot, and there are probes.
        """
        model = self.candidate.model
        if not running.generates or isinstance(model, SupportsEncoderDecoder):
            if probes:
                raise UnsupportedFeature(
                    "probe: must be left out for models that do not continue a text", param="probe"
                )
            return None
        return ModelProbe(model, self._sampler, self._limits, self._device)

    def own_part_of_trial(self, length: int, like: KVCacheConfig) -> PartOfProbe:
        """The part of a trial on a rank other than 0; see :class:`ProbeCache`."""
        model = self.candidate.model
        cache = ProbeCache(model, self._device, length, like)
        runner = cache.make_runner(model, self._sampler, self._limits, self._device)
        return PartOfProbe(cache, runner)

    def telling(self) -> AbstractContextManager[None]:
        """Has what a block raises because of the candidate be a RequestError, with its path."""
        return self._telling(self.candidate.path)

    @contextmanager
    def _telling(self, path: str) -> Iterator[None]:
        try:
            with memory_errors("the new weights"):
                yield
        except RequestError:
            raise
        except (HeadraceError, OSError, MemoryError) as error:
            if self._unwanted.is_set():
                raise
            raise RequestError(f"path = {path!r:.300}: {error}", param="path") from error

    @property
    def candidate(self) -> Candidate:
        """The one that was built last.

        Raises:
            EngineError: there is none.
        """
        if self._candidate is None:
            raise EngineError("no weights were built beside the running ones")
        return self._candidate

    def stop(self) -> None:
        """End a reading that is under way, or begins before :meth:`drop`. Any thread."""
        self._unwanted.set()

    def drop(self) -> None:
        """Let go of the candidate, and return the memory that nobody holds any more. No reading is under way.
        Idempotent."""
        self._candidate = None
        if not self._closed:
            self._unwanted.clear()
        gc.collect()
        self._meter.trim()

    def close(self) -> None:
        """End a reading that is under way, and let go of the candidate."""
        self._closed = True
        self._unwanted.set()
        self._candidate = None

    def _check_room(self, num_bytes: int, running: Running, free: int) -> None:
        if num_bytes > free:
            raise RequestError(
                f"path: the new weights take {readable(num_bytes)}{self._of_each} beside the running "
                f"ones, and {readable(free)} of memory are free: must fit (update or reload the weights "
                "instead, which need no second copy)",
                param="path",
            )
        if self._max_bytes is not None and running.num_bytes + num_bytes > self._max_bytes:
            raise RequestError(
                f"path: the new weights take {readable(num_bytes)} beside {readable(running.num_bytes)} that "
                f"the engine holds{self._of_each}, and {readable(self._max_bytes)} are allowed "
                "(max_memory_bytes)",
                param="path",
            )

    @property
    def _of_each(self) -> str:
        """Said behind numbers of one rank."""
        return "" if self._memory_share == 1 else f" on each of {self._memory_share} ranks"


class PartOfProbe(NamedTuple):
    """The part of a trial on a rank other than 0, which runs the passes that rank 0 leads."""

    cache: ProbeCache
    runner: ModelRunner


class _ReadingLog:
    """A progress callback: a log line now and then; raises once nobody wants the weights any more."""

    def __init__(self, unwanted: threading.Event) -> None:
        self._unwanted = unwanted
        self._next = time.monotonic() + LOG_SECONDS

    def __call__(self, progress: LoadProgress) -> None:
        if self._unwanted.is_set():
            raise EngineError("the new weights are not wanted any more")
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + LOG_SECONDS
            share = 100 * progress.done / max(1, progress.total)
            logger.info("swap_weights: %s: %.0f %%", progress.phase, share)


def _specs(model: CausalLM) -> dict[str, CacheSpec]:
    return cache_specs(model.attention_layers(), _states(model))


def _states(model: CausalLM) -> Mapping[str, Any]:
    return model.state_layers() if isinstance(model, SupportsRecurrence) else {}


def _check_specs(new: Mapping[str, CacheSpec], running: Mapping[str, CacheSpec]) -> None:
    """Raises: RequestError, the cache is not laid out for the new model."""
    names = [*dict.fromkeys([*running, *new])]
    wrong = next((name for name in names if new.get(name) != running.get(name)), None)
    if wrong is not None or [*new] != [*running]:
        name = wrong or names[0]
        raise RequestError(
            f"path: layer {name!r} caches {new.get(name, 'nothing')} in the new model and "
            f"{running.get(name, 'nothing')} in the running one: must be the same, as the cache is kept",
            param="path",
        )

"""A worker whose weights may change: it sleeps, reads others, takes those of a trainer, and changes models
between two steps."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_core.model import SupportsRecurrence
from headrace_engine.execution.cache import (
    bind_buffers,
    cache_specs,
    group_backends,
)
from headrace_engine.execution.runner import ModelRunner
from headrace_engine.lora.step_adapters import StepAdapters
from headrace_engine.sampling.sampler import Sampler
from headrace_engine.sleep.engine_sleep import WEIGHTS
from headrace_engine.speculation.draft_head import DraftHead
from headrace_engine.weights.beside import Candidate, ModelsBeside, Running
from headrace_engine.weights.holder import HeldWeights, WeightHolder
from headrace_engine.weights.messages import WeightsMessage
from headrace_engine.weights.order import Probe
from headrace_engine.weights.probe import Limits
from headrace_engine.weights.rereading import RereadingWorker
from headrace_engine.weights.updates import keeps_no_weights
from headrace_engine.worker.serving import close_runner
from headrace_engine.worker.settings import WorkerSettings

_OF_MODEL = (
    "_model", "_runner", "_head", "_draft_proposer", "_adapters", "_layers", "_states", "_weights",
    "_path",
)  # fmt: skip
"""Attributes of a worker that change with its model, while its cache stays."""


class WorkerModelConfig(NamedTuple):
    """Facts about a worker's model."""

    dtype: torch.dtype
    """Of the activations."""
    vocab_size: int
    max_model_len: int


class ModelWorker(RereadingWorker):
    """Implements :class:`headrace_core.executor.Worker` for one device. One thread only.

    Args:
        settings: everything that it is told; ``weights`` is read here only.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        super().__init__(settings)
        weights, drafts, limits = settings.weights, settings.drafts, settings.limits
        self._new_weights = weights.holder or WeightHolder()
        self._beside: ModelsBeside | None = None
        if weights.build_beside is not None:
            raw = Sampler(settings.ops.sample, settings.ops.top_logprobs)
            of_probes = Limits(
                limits.vocab_size, limits.max_model_len, limits.max_num_batched_tokens
            )
            self._beside = ModelsBeside(
                weights.build_beside, raw, of_probes, self._meter, self._device, weights.max_bytes,
                build_head=drafts.build_head if drafts.head_within else None,
            )  # fmt: skip

    def reload_weights(self) -> None:
        """Build the model again under the same cache plan, and capture its steps again.

        The old model goes first, so that memory for one is enough: where the new weights cannot be
        read there is none until a later call reads some. No request may run, and what is cached is
        lost.

        Raises:
            UnsupportedFeature: this worker cannot. WeightsError: see the loader.
        """
        self.read_weights(True)
        if self.restore_cache():
            self.warm_up()

    def give_back_memory(self, keep: bool = False) -> None:
        """See :meth:`RereadingWorker.give_back_memory`.

        Raises:
            RequestError: what guesses has weights that are nowhere else.
        """
        self._check_rereads("sleep")
        if keep and self._new_weights.draft_is_from_outside:
            raise keeps_no_weights()
        super().give_back_memory(keep)

    def build_beside(
        self, path: str, probes: tuple[Probe, ...], max_perplexity: float | None
    ) -> dict[str, Any]:
        """See :meth:`headrace_engine.weights.swap.SwappingWorker.build_beside`. Reads of the worker what
        changes only while nothing is built."""
        self._check_rereads("swap_weights")
        beside, model = self._models_beside(), self._loaded()
        make_slots = self._settings.adapters.make_slots
        slots = None if make_slots is None else make_slots()
        states = model.state_layers() if isinstance(model, SupportsRecurrence) else {}
        cache = 0 if self._cache is None else self._cache.num_bytes
        running = Running(
            cache_specs(model.attention_layers(), states),
            self._weights + self._activations + cache,
            generates=self._settings.pooling is None,
        )
        with self._memory.region(WEIGHTS):
            return beside.build(path, slots, running, probes, max_perplexity)

    @torch.inference_mode()
    def adopt_beside(self) -> None:
        """See :meth:`headrace_engine.weights.swap.SwappingWorker.adopt_beside`. What guesses stays, but for
        layers of the model's checkpoint, and so do the cache's memory and what compiles constraints."""
        candidate, cache = self._models_beside().candidate, self._cache
        assert cache is not None
        if self._new_weights.held.staged:  # by an extension's load_weights
            raise RequestError(
                "swap_weights: tensors of an update came meanwhile (load_weights): must be put in before, or "
                "cancelled",
                param="method",
            )
        before = {name: getattr(self, name) for name in _OF_MODEL}
        old, model = (self._runner, self._draft_proposer), self._loaded()
        self._binding.widen()
        try:
            if candidate.slots is not None:
                assert self._settings.adapters.store is not None
                content = self._settings.adapters.store.content
                self._adapters = StepAdapters(candidate.slots, content, self._device)
            self._path = candidate.path
            self._hold(candidate.model, self._draft, self._head_for(candidate))
            bind_buffers(self._buffers, self._layers, self._states, cache)
            self._make_runner(cache, group_backends(self._layers, cache))
            self._try_and_capture()
        except BaseException:
            close_runner(self._runner, self._draft_proposer)
            for name, value in before.items():
                setattr(self, name, value)
            if self._head is not None:
                self._head.retarget(model)
            raise
        finally:
            self._binding.narrow()
        self._weights = candidate.num_bytes
        self._new_weights.loaded(candidate.loaded)
        if self._settings.drafts.head_within:
            self._new_weights.draft_loaded(candidate.loaded_head)
        if self._settings.adapters.store is not None:
            self._settings.adapters.store.bind(candidate.slots)
        close_runner(*old)
        before.clear()
        del old, model, candidate
        self._models_beside().drop()

    def _head_for(self, candidate: Candidate) -> DraftHead | None:
        """The head that guesses for a candidate; None: none does."""
        if self._settings.drafts.head_within or self._head is None:
            return candidate.head
        self._head.retarget(candidate.model)
        return self._head

    def drop_beside(self) -> None:
        """See :meth:`headrace_engine.weights.swap.SwappingWorker.drop_beside`."""
        if self._beside is not None:
            self._beside.drop()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> int:
        """Take a part of an update, by the checkpoint's names; for worker extensions. The model changes when
        whoever steers the engine calls ``update_weights()``, so that no cached key stays behind.

        Args:
            weights: name and tensor. Parts of fused layers may come in any order.

        Returns:
            Tensors of the update that have come.

        Raises:
            WeightsError: see :meth:`headrace_engine.weights.holder.WeightHolder.stage`.
        """
        return self.stage_weights(WeightsMessage("process", given=list(weights), finish=False))

    def stage_weights(self, message: WeightsMessage) -> int:
        """See :meth:`headrace_engine.weights.holder.WeightHolder.stage`."""
        self._expect_tensors()
        return self._new_weights.stage(message)

    def expect_weights(self, message: WeightsMessage) -> None:
        """See :meth:`headrace_engine.weights.holder.WeightHolder.expect`."""
        self._expect_tensors()
        self._new_weights.expect(message)

    def receive_weights(self, message: WeightsMessage) -> None:
        """See :meth:`headrace_engine.weights.holder.WeightHolder.receive`."""
        self._new_weights.receive(message)

    def weights_woke(self) -> None:
        """There is memory for new weights again, after level 2 of sleep: a stream that is open needs a model
        to check what comes by."""
        if self._new_weights.listens:
            self._expect_tensors()

    def _expect_tensors(self) -> None:
        """Have a model that can get new weights.

        Raises:
            UnsupportedFeature: there is none.
        """
        self._check_rereads("update_weights")
        if self._new_weights.needs_model():  # given up at level 2 of sleep
            self._free_all_but_plan()
            self._memory.wake(WEIGHTS)
            with self._memory.region(WEIGHTS):
                self._new_weights.begin_blank(*self._make_slots())
                if self._draft is None and self._settings.drafts.build_model is not None:
                    self._draft = self._settings.drafts.build_model()
                if self._settings.drafts.build_head is not None:
                    self._head = self._settings.drafts.build_head(
                        self._new_weights.model, self._path
                    )
        if self._model is not None and self._new_weights.model is not self._model:
            raise UnsupportedFeature(
                "update_weights: it is not known how the model was loaded that serves now",
                param="weights",
            )

    def seal_weights(self) -> None:
        """See :meth:`headrace_engine.weights.holder.WeightHolder.seal`."""
        self._new_weights.seal()

    def update_changes_model(self) -> bool:
        """False if an update is only of what guesses, so that outputs stay what they are."""
        return self._new_weights.changes_model

    def apply_weights(self, keep_requests: bool) -> None:
        """Put new weights into the model, and get ready for steps with them. No step is in flight.

        A model that had none has no cache after it, either: :meth:`restore_cache` comes next.

        Args:
            keep_requests: blocks of the cache are in use: its scales stay as they are.

        Raises:
            RequestError: the model computes vectors of media, of which requests that run have a part.
            WeightsError, CapacityError: the old weights are in their place again.
        """
        if self._runner is None:  # no model, or no cache, for which there was no memory behind it
            self._new_weights.apply()
            self._hold(self._new_weights.model, self._draft, self._head)
            return
        largest = self._settings.media.largest
        takes_media = largest is not None and bool(largest())
        if keep_requests and takes_media and self._new_weights.changes_model:
            raise RequestError(
                "update_weights: mode = 'keep': must be 'wait' or 'abort' for a model that takes media: "
                "vectors of requests that run are of the old weights",
                param="mode",
            )
        undo = self._new_weights.apply()
        try:
            self._use_weights(measure=not keep_requests)
        except BaseException:
            undo()
            self._use_weights(measure=not keep_requests, record=False)
            raise
        del undo  # and the old weights with it
        gc.collect()
        self._meter.trim()

    def refuse_weights(self) -> None:
        """See :meth:`headrace_engine.weights.holder.WeightHolder.refuse`."""
        self._new_weights.refuse()

    def drop_weights(self) -> None:
        """See :meth:`headrace_engine.weights.holder.WeightHolder.drop`."""
        self._new_weights.drop()

    def held_weights(self) -> HeldWeights:
        """Tensors that have come of an update that is not over."""
        return self._new_weights.held

    def init_weight_update_group(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int
    ) -> None:
        """Join a trainer's group, which is rank 0, by rank ``rank_offset`` plus this worker's. Not in the
        worker's thread: it may take a minute.

        Raises:
            RequestError: it cannot be joined.
        """
        if not isinstance(rank_offset, bool) and isinstance(rank_offset, int):
            rank_offset += self.rank
        self._new_weights.join_group(master_address, master_port, rank_offset, world_size)

    def open_weight_stream(self) -> dict[str, Any]:
        """Listen for parts of an update: ``host``, ``port`` and ``token`` of the listener.

        Raises:
            UnsupportedFeature: the model cannot be updated.
        """
        self._expect_tensors()
        return self._new_weights.open_stream()

    def close_weight_transfer(self) -> None:
        """Leave a trainer's group, and close the stream."""
        self._new_weights.close_ways()

    @property
    def model_runner(self) -> ModelRunner:
        """Runs steps on the model, which is its ``model``; for worker extensions."""
        return self._ready()

    @property
    def model_config(self) -> WorkerModelConfig:
        """Facts about the model; for worker extensions."""
        dtype = getattr(torch, self._settings.dtype)
        return WorkerModelConfig(dtype, self._limits.vocab_size, self._limits.max_model_len)

    def close(self) -> None:
        """Free model, cache and requests. Idempotent."""
        self._new_weights.close_ways()
        if self._beside is not None:
            self._beside.close()
        super().close()
        self._new_weights.close_ways()

    def _free(self) -> None:
        super()._free()
        self._new_weights.loaded(None)
        if self._draft is None:
            self._new_weights.draft_loaded(None)

    def _forget_draft(self) -> None:
        super()._forget_draft()
        self._new_weights.draft_loaded(None)

    def _forget_weights_from_outside(self) -> None:
        if self._new_weights.draft_is_from_outside:  # those of the checkpoint are wanted
            self._forget_draft()

    def _models_beside(self) -> ModelsBeside:
        if self._beside is None:
            raise UnsupportedFeature("swap_weights: this worker reads its weights once")
        return self._beside

    @torch.inference_mode()
    def _use_weights(self, *, measure: bool, record: bool = True) -> None:
        """Let go of what was made of other weights, and make it of those that there are."""
        assert self._cache is not None
        self._close_graphs()
        runner = self._ready()
        runner.media_vectors.clear()
        bind_buffers(self._buffers, self._layers, self._states, self._cache)
        if measure and self._settings.kv_scales is not None:
            self._measure_kv_scales(self._settings.kv_scales)
        if record:
            self._settle_and_record()

    def _close_graphs(self) -> None:
        """Free recordings, which hold the addresses of weights."""
        for owner, name in (
            (self._runner, "graph"), (self._runner, "adapter_graph"), (self._draft_proposer, "graph"),
        ):  # fmt: skip
            graph = getattr(owner, name, None)
            if graph is not None:
                graph.close()
                setattr(owner, name, None)

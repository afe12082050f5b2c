"""A worker that gives its memory back while its engine sleeps, and reads its weights again."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping

from headrace_core.errors import UnsupportedFeature
from headrace_core.model import CausalLM
from headrace_engine.execution.reloading import load_changes
from headrace_engine.sleep.engine_sleep import KV_CACHE, WEIGHTS
from headrace_engine.worker.serving import ServingWorker
from headrace_engine.worker.settings import WorkerSettings


class RereadingWorker(ServingWorker):
    """On each rank. One thread only. Implements
    :class:`~headrace_engine.sleep.engine_sleep.SleepingWorker`.

    Args:
        settings: everything that it is told; ``weights.rebuild_model`` is read here.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        super().__init__(settings)
        self._load_changes: Mapping[str, str] = {}
        self._loaded_with: Mapping[str, str] = {}
        """Changes with which the weights were read that it has, or had last."""

    def update_config(self, changes: object) -> None:
        """Change what :meth:`read_weights` reads: ``{"load_config": {"load_format": "auto"}}``.

        Raises:
            RequestError: something else is to change.
        """
        self._load_changes = load_changes(changes)

    def give_back_memory(self, keep: bool = False) -> None:
        """See :meth:`headrace_engine.sleep.engine_sleep.SleepingWorker.give_back_memory`.

        Raises:
            UnsupportedFeature: this worker cannot read its weights again.
            CapacityError: the host has no memory for what is kept.
        """
        self._check_rereads("sleep")
        if keep and self._memory.keeps and self._runner is not None:
            self._runner.media_vectors.clear()
            self._memory.sleep(keep=True)
            self._meter.trim()
            return
        self._forget_draft()
        self._free_all_but_plan()
        if self._ranks.experts is not None:
            self._ranks.experts.forget()
        if self._settings.adapters.store is not None:
            self._settings.adapters.store.bind(None)
        gc.collect()
        self._memory.sleep(keep=False)
        self._meter.trim()

    def read_weights(self, changed: bool) -> None:
        """See :meth:`headrace_engine.sleep.engine_sleep.SleepingWorker.read_weights`."""
        rebuild = self._check_rereads("reload_weights")
        changes = self._load_changes if changed else self._loaded_with
        if self._memory.wake(WEIGHTS) and not changed:
            return
        self._forget_weights_from_outside()
        self._free_all_but_plan()
        self._binding.widen()
        leader = self._ranks.leader
        with self._memory.region(WEIGHTS):
            other = {} if self._path is None else {"path": self._path}
            model, draft = rebuild(changes, *self._make_slots(), **other), self._draft
            if draft is None and self._settings.drafts.build_model is not None:
                draft = self._settings.drafts.build_model()
        if leader is not None:
            leader.lead(model)
        self._hold(model, draft)
        self._loaded_with = changes

    def restore_cache(self) -> bool:
        """See :meth:`headrace_engine.sleep.engine_sleep.SleepingWorker.restore_cache`."""
        assert self._cache is not None
        if self._memory.wake(KV_CACHE):
            return False
        self.allocate_cache(self._cache)
        return True

    def _forget_draft(self) -> None:
        """Let go of what guesses, which is read again with the model's weights."""
        self._draft = self._head = None

    def _forget_weights_from_outside(self) -> None:
        """Let go of what has other weights than a checkpoint's, before weights are read."""

    def _check_rereads(self, call: str) -> Callable[..., CausalLM]:
        if self._settings.weights.rebuild_model is None or self._cache is None:
            raise UnsupportedFeature(f"{call}: this worker reads its weights once")
        if self._transfer is not None:
            raise UnsupportedFeature(
                f"{call}: engines of a disaggregated encoder read their weights once, as they know "
                "vectors by the model (ec_transfer_config)"
            )
        return self._settings.weights.rebuild_model

    def _free_all_but_plan(self) -> None:
        cache = self._cache
        self._free()
        self._cache = cache

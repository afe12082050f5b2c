"""A worker whose weights may change: it sleeps, reads others, takes those of a trainer, and changes models
between two steps. It has the requests; where there are several ranks, it leads the others."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headrace_core.errors import RequestError
from headrace_core.model import CausalLM
from headrace_engine.execution.runner import ModelRunner
from headrace_engine.speculation.draft_head import DraftHead
from headrace_engine.weights.beside import Candidate
from headrace_engine.weights.changing import ChangingWorker
from headrace_engine.weights.holder import HeldWeights
from headrace_engine.weights.messages import MODEL, WeightsMessage
from headrace_engine.weights.order import Probe
from headrace_engine.weights.other_ranks import FirstError, OtherRanks
from headrace_engine.weights.probe import ModelProbe
from headrace_engine.weights.rank_parts import spread
from headrace_engine.weights.update_set import UpdateSet
from headrace_engine.weights.updates import keeps_no_weights
from headrace_engine.worker.settings import WorkerSettings


class WorkerModelConfig(NamedTuple):
    """Facts about a worker's model."""

    dtype: torch.dtype
    """Of the activations."""
    vocab_size: int
    max_model_len: int


class ModelWorker(ChangingWorker):
    """Implements :class:`headrace_core.executor.Worker` for one device: the only rank, or rank 0. One thread
    only.

    Args:
        settings: everything that it is told.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        super().__init__(settings)
        leader = settings.ranks.leader
        self._others = OtherRanks(None if leader is None else leader.call)
        self._trial: ModelProbe | None = None
        """Tries the candidate on all ranks, a pass at a time."""
        self._trial_is_open = False
        self._max_perplexity: float | None = None
        self._probes: tuple[Probe, ...] = ()

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
        """See :meth:`headrace_engine.weights.swap.SwappingWorker.build_beside`."""
        if self._others.are_there:
            num_bytes = self._build_on_all(path)
            self._probes, self._max_perplexity = probes, max_perplexity
            return {"bytes": num_bytes, "perplexity": None, "tried": False}
        num_bytes = self._build_candidate(path)
        perplexity = self._models_beside().probe(self._running(), probes, max_perplexity)
        return {"bytes": num_bytes, "perplexity": perplexity, "tried": True}

    def _build_on_all(self, path: str) -> int:
        """Build the candidate of every rank, or of none: bytes of all shares. The others begin once it is
        known that the checkpoint is of this model; where one fails, the rest stop."""
        others, beside = self._others, self._models_beside()

        def stop() -> None:
            beside.stop()
            others.begin("stop_building")

        failed, answers, num_bytes = FirstError(stop), list[Future[Any]](), 0
        try:
            num_bytes = self._build_candidate(
                path, lambda: answers.extend(others.build(path, failed))
            )
        except BaseException as error:
            if not answers:
                raise
            failed.note(0, error)
        wait(answers)
        failed.check()
        assert self._ranks.leader is not None
        self._ranks.leader.lead(beside.candidate.model)
        of_others: int = sum(answer.result() for answer in answers)
        return num_bytes + of_others

    @torch.inference_mode()
    def probe_beside(self) -> dict[str, Any] | None:
        """See :meth:`headrace_engine.weights.swap.SwappingWorker.probe_beside`."""
        if self._trial is None:
            trial = self._models_beside().trial(self._running(), self._probes)
            length = 0 if trial is None else trial.begin(self._probes, self._max_perplexity)
            if trial is None or not length:
                return {"perplexity": None}
            self._trial, self._trial_is_open = trial, True
            with self._models_beside().telling():
                self._others.change("open_probe", length)
                trial.bind(self._cache)
        self._others.change("follow_probe", True)
        try:
            goes_on = self._trial.advance()
        finally:
            self._others.change("follow_probe", False)
        if goes_on:
            return None
        trial = self._trial
        self._close_trial()
        return {"perplexity": trial.perplexity()}

    def _close_trial(self) -> None:
        trial, self._trial = self._trial, None
        if trial is not None:
            trial.close()
        if self._trial_is_open:
            self._trial_is_open = False
            self._others.undo("close_probe")

    @torch.inference_mode()
    def adopt_beside(self) -> None:
        """See :meth:`headrace_engine.weights.swap.SwappingWorker.adopt_beside`. What guesses stays, but for
        layers of the model's checkpoint, and so do the cache's memory and what compiles constraints."""
        if self._new_weights.held.staged:  # by an extension's load_weights
            raise RequestError(
                "swap_weights: tensors of an update came meanwhile (load_weights): must be put in before, or "
                "cancelled",
                param="method",
            )
        try:
            self._others.change("take_place")
            self.take_place()
            self._try_and_capture()
            self._others.change("record_again")
        except BaseException:
            self._others.undo("return_place")
            self.return_place()
            raise
        self._others.change("keep_place")
        self.keep_place()

    def return_place(self) -> None:
        """See :meth:`ChangingWorker.return_place`."""
        was_taken = self._before is not None
        super().return_place()
        if was_taken and self._head is not None:
            self._head.retarget(self._loaded())

    def keep_place(self) -> None:
        """See :meth:`ChangingWorker.keep_place`."""
        candidate, slots = self._models_beside().candidate, self._slots
        if self._settings.drafts.head_within:
            self._new_weights.draft_loaded(candidate.loaded_head)
        if self._settings.adapters.store is not None:
            self._settings.adapters.store.bind(slots)
        del candidate
        super().keep_place()

    def _head_for(self, candidate: Candidate) -> DraftHead | None:
        if self._settings.drafts.head_within or self._head is None:
            return candidate.head
        self._head.retarget(candidate.model)
        return self._head

    def drop_beside(self) -> None:
        """See :meth:`headrace_engine.weights.swap.SwappingWorker.drop_beside`."""
        self._close_trial()
        self._others.undo("drop_share")
        self._drop_candidate()

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
        return self._new_weights.stage(
            message, self._take_on_all if self._others.are_there else None
        )

    def _take_on_all(
        self, update: UpdateSet, tensors: Iterable[tuple[str, Tensor]], keep: bool
    ) -> None:
        """Take a part on every rank, or on none (:data:`headrace_engine.weights.holder.Spread`)."""
        with spread(tensors, shares_memory=self._ranks.shares_memory) as (part, told):
            undo = update.checkpoint()
            update.take(MODEL, part, keep=keep)
            try:
                self._others.change("stage_share", told, keep)
            except BaseException:
                undo()
                self._others.undo("unstage_share")
                raise

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
        """Have a model on every rank that can get new weights.

        Raises:
            UnsupportedFeature: there is none.
        """
        self._make_blank()
        self._others.change("expect_tensors")

    def _made_blank(self, model: CausalLM) -> None:
        if self._ranks.leader is not None:
            self._ranks.leader.lead(model)
        if self._draft is None and self._settings.drafts.build_model is not None:
            self._draft = self._settings.drafts.build_model()
        if self._settings.drafts.build_head is not None:
            self._head = self._settings.drafts.build_head(model, self._path)

    def seal_weights(self) -> None:
        """See :meth:`headrace_engine.weights.holder.WeightHolder.seal`."""
        self._new_weights.seal()
        self._others.change("seal_share")

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
        changes = self._new_weights.changes_model
        has_cache = self._runner is not None  # or no model, or no memory for a cache behind it
        if has_cache and keep_requests and changes:
            self._check_keeps_requests()
        undo = self._new_weights.apply()
        try:
            self._others.change("put_share")
            if has_cache:
                self._use_weights(measure=not keep_requests, on_all=changes)
            else:
                self._hold(self._new_weights.model, self._draft, self._head)
        except BaseException:
            self._others.undo("take_share_out")
            undo()
            if has_cache:
                self._use_weights(measure=not keep_requests, record=False)
            else:
                self._hold_nothing()
            raise
        del undo  # and the old weights with it
        self._return_memory()
        self._others.change("keep_share")

    def _check_keeps_requests(self) -> None:
        largest = self._settings.media.largest
        if largest is not None and largest():
            raise RequestError(
                "update_weights: mode = 'keep': must be 'wait' or 'abort' for a model that takes media: "
                "vectors of requests that run are of the old weights",
                param="mode",
            )

    def refuse_weights(self) -> None:
        """See :meth:`headrace_engine.weights.holder.WeightHolder.refuse`."""
        self._new_weights.refuse()
        self._others.undo("drop_shares")

    def drop_weights(self) -> None:
        """See :meth:`headrace_engine.weights.holder.WeightHolder.drop`."""
        self._new_weights.drop()
        self._others.undo("drop_shares")

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
        super().close()
        self._new_weights.close_ways()

    def _free(self) -> None:
        super()._free()
        if self._draft is None:
            self._new_weights.draft_loaded(None)

    def _forget_draft(self) -> None:
        super()._forget_draft()
        self._new_weights.draft_loaded(None)

    def _forget_weights_from_outside(self) -> None:
        if self._new_weights.draft_is_from_outside:  # those of the checkpoint are wanted
            self._forget_draft()

    @torch.inference_mode()
    def _use_weights(self, *, measure: bool, record: bool = True, on_all: bool = False) -> None:
        """Let go of what was made of other weights, and make it of those that there are.

        Args:
            on_all: the other ranks have other weights, too.
        """
        self._weights_are_others()
        self._ready().media_vectors.clear()
        if measure and self._settings.kv_scales is not None:
            self._measure_kv_scales(self._settings.kv_scales)
        if record:
            self._settle_and_record()
            if on_all:
                self._others.change("record_again")

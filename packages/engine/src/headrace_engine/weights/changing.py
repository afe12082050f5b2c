"""What a worker of any rank does while weights change: it builds other ones beside its passes and changes
models between two, or takes tensors and puts them in.

Nothing here runs a pass, so that each step can be done on every rank, and undone if one of them fails.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, ClassVar

from headrace_core.errors import UnsupportedFeature
from headrace_core.lora import AdapterSlots
from headrace_core.model import CausalLM, SupportsRecurrence
from headrace_engine.execution.cache import bind_buffers, cache_specs, group_backends
from headrace_engine.sampling.sampler import Sampler
from headrace_engine.sleep.engine_sleep import WEIGHTS
from headrace_engine.speculation.draft_head import DraftHead
from headrace_engine.weights.beside import Candidate, ModelsBeside, Running
from headrace_engine.weights.holder import WeightHolder
from headrace_engine.weights.probe import Limits
from headrace_engine.weights.rereading import RereadingWorker
from headrace_engine.worker.serving import close_runner
from headrace_engine.worker.settings import WorkerSettings


class ChangingWorker(RereadingWorker):
    """On each rank. One thread only, but for :meth:`_build_candidate`.

    Args:
        settings: everything that it is told; ``weights`` is read here.
    """

    of_model: ClassVar[tuple[str, ...]] = (
        "_model", "_runner", "_head", "_draft_proposer", "_adapters", "_layers", "_states", "_weights",
        "_path", "_mover", "_parts",
    )  # fmt: skip
    """Attributes that change with the model, while its cache stays."""

    def __init__(self, settings: WorkerSettings) -> None:
        super().__init__(settings)
        weights, drafts, limits = settings.weights, settings.drafts, settings.limits
        self._new_weights = weights.holder or WeightHolder()
        self._before: dict[str, Any] | None = None
        """State of the model whose place another one has taken, until that is kept."""
        self._slots: AdapterSlots | None = None
        """Adapter slots of the model that has taken that place."""
        self._beside: ModelsBeside | None = None
        if weights.build_beside is not None:
            raw = Sampler(settings.ops.sample, settings.ops.top_logprobs)
            of_probes = Limits(
                limits.vocab_size, limits.max_model_len, limits.max_num_batched_tokens
            )
            self._beside = ModelsBeside(
                weights.build_beside, raw, of_probes, self._meter, self._device, weights.max_bytes,
                build_head=drafts.build_head if drafts.head_within else None,
                memory_share=settings.ranks.memory_share,
            )  # fmt: skip

    # A swap: build, take place, then keep or return.

    def _build_candidate(self, path: str, admitted: Callable[[], None] = lambda: None) -> int:
        """Build this rank's share of another model; see :meth:`ModelsBeside.build`. Not in the worker's
        thread; it reads of the worker what changes only while nothing is built."""
        self._check_changes("swap_weights")
        make_slots = self._settings.adapters.make_slots
        slots = None if make_slots is None else make_slots()
        with self._memory.region(WEIGHTS):
            return self._models_beside().build(path, slots, self._running(), admitted)

    def _running(self) -> Running:
        """What a candidate must agree with."""
        model = self._loaded()
        states = model.state_layers() if isinstance(model, SupportsRecurrence) else {}
        cache = 0 if self._cache is None else self._cache.num_bytes
        return Running(
            cache_specs(model.attention_layers(), states),
            self._weights + self._activations + cache,
            generates=self._settings.pooling is None,
        )

    def take_place(self) -> None:
        """Hold the candidate in the place of the model that serves, on the same cache. Whatever this raises,
        :meth:`return_place` undoes what it did."""
        candidate, cache = self._models_beside().candidate, self._cache
        assert cache is not None
        self._before = {name: getattr(self, name) for name in self.of_model}
        self._binding.widen()
        if candidate.slots is not None:
            self._slots = self._use_slots(candidate.slots)
        self._path = candidate.path
        self._hold(candidate.model, self._draft, self._head_for(candidate))
        bind_buffers(self._buffers, self._layers, self._states, cache)
        self._make_runner(cache, group_backends(self._layers, cache))

    def return_place(self) -> None:
        """Give the place back to the model that had it, recorded as it was. Idempotent."""
        before, self._before = self._before, None
        if before is None:
            return
        if self._runner is not before["_runner"]:
            close_runner(self._runner, self._draft_proposer)
        for name, value in before.items():
            setattr(self, name, value)
        self._binding.narrow()

    def keep_place(self) -> None:
        """Let go of the model that served before."""
        candidate, before = self._models_beside().candidate, self._before
        assert before is not None
        self._before = None
        self._binding.narrow()
        self._weights = candidate.num_bytes
        self._new_weights.loaded(candidate.loaded)
        close_runner(before["_runner"], before["_draft_proposer"])
        before.clear()
        self._slots = None
        del candidate
        self._settings.weights.beside_ended(True)
        self._models_beside().drop()

    def _drop_candidate(self) -> None:
        """Forget what was built beside, if something was. Idempotent."""
        self.return_place()
        if self._beside is not None:
            self._settings.weights.beside_ended(False)
            self._beside.drop()

    def _head_for(self, candidate: Candidate) -> DraftHead | None:
        """What guesses for the candidate by its hidden states; None: nothing does."""
        return None

    def _models_beside(self) -> ModelsBeside:
        if self._beside is None:
            raise UnsupportedFeature("swap_weights: this worker reads its weights once")
        return self._beside

    # An update.

    def _make_blank(self) -> None:
        """Build a model without weights, if the one before was given up at level 2 of sleep.

        Raises:
            UnsupportedFeature: no model that is there, or could be built, takes new weights.
        """
        self._check_changes("update_weights")
        if self._new_weights.needs_model():
            self._free_all_but_plan()
            self._memory.wake(WEIGHTS)
            with self._memory.region(WEIGHTS):
                self._new_weights.begin_blank(*self._make_slots())
                self._made_blank(self._new_weights.model)
        if self._model is not None and self._new_weights.model is not self._model:
            raise UnsupportedFeature(
                "update_weights: it is not known how the model was loaded that serves now",
                param="weights",
            )

    def _made_blank(self, model: CausalLM) -> None:
        """There is a model that waits for its weights."""

    def _weights_are_others(self) -> None:
        """Let go of what was made of other weights: recordings hold their addresses, and layers beside their
        cache what they computed of them."""
        assert self._cache is not None
        self._close_graphs()
        bind_buffers(self._buffers, self._layers, self._states, self._cache)

    def _close_graphs(self) -> None:
        for owner, name in (
            (self._runner, "graph"), (self._runner, "adapter_graph"), (self._draft_proposer, "graph"),
        ):  # fmt: skip
            graph = getattr(owner, name, None)
            if graph is not None:
                graph.close()
                setattr(owner, name, None)

    def _hold_nothing(self) -> None:
        """Let go of a model that waits for its weights after all."""
        self._model = None
        self._layers, self._states = {}, {}

    def _return_memory(self) -> None:
        gc.collect()
        self._meter.trim()

    def _check_changes(self, call: str) -> None:
        """Raises: UnsupportedFeature, the weights of this worker stay, or are read again only."""
        self._check_rereads(call)
        experts = self._ranks.experts
        why = (
            ""
            if experts is None
            else "engines share experts (data_parallel_size with enable_expert_parallel)"
            if experts.meets_engines
            else "experts move between ranks (enable_eplb)"
            if experts.may_move
            else ""
        )
        if why:
            raise UnsupportedFeature(
                f"{call}: not while {why}: reload_weights works, from the files of the checkpoint",
                param="method",
            )

    def close(self) -> None:
        """Free model, cache and requests. Idempotent."""
        if self._beside is not None:
            self._beside.close()
        super().close()

    def _free(self) -> None:
        super()._free()
        self._new_weights.loaded(None)

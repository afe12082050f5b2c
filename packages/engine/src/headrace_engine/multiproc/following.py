"""The worker of a rank that follows: a shard of the model and of its cache, and no requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from headrace_core.batch import ForwardBatch
from headrace_core.errors import ModelError
from headrace_core.executor import MemoryProfile
from headrace_core.kv import KVCacheConfig
from headrace_core.lora import AdapterSlots
from headrace_core.model import DividesVocabulary, RunsParts, SupportsPooling
from headrace_engine.execution.measuring.measure import Peak
from headrace_engine.execution.pooling import needs_all_rows
from headrace_engine.kv_transfer.finding import BlockFinder
from headrace_engine.kv_transfer.moves import KVMove
from headrace_engine.kv_transfer.rank_blocks import RankBlocks
from headrace_engine.kv_transfer.worker import BlockMover
from headrace_engine.lora.step_adapters import NONE
from headrace_engine.multiproc.adapters import FollowingAdapters
from headrace_engine.multiproc.leader import (
    LOGITS,
    LOGITS_OF_ROWS,
    OF_EXPERTS,
    OF_LAYERS,
    PASSES,
    REPLAY,
    VOCABULARY,
)
from headrace_engine.multiproc.staged import record_part
from headrace_engine.weights.followed_changes import FollowsChanges
from headrace_engine.worker.recording import step_recorder
from headrace_engine.worker.settings import WorkerSettings


class FollowingWorker(FollowsChanges):
    """Runs the passes that rank 0 runs. One thread only.

    Args:
        settings: everything that it is told; what belongs to requests is rank 0's, and is left out.
    """

    of_model = (*FollowsChanges.of_model, "_following", "_hidden")

    def __init__(self, settings: WorkerSettings) -> None:
        super().__init__(settings)
        self._hidden: Tensor | None = None
        """What the last pass ``forward`` returned, if logits may be made of it."""
        self._measuring = ExitStack()
        self._peak = Peak()
        self._following: FollowingAdapters | None = None
        self._finder: BlockFinder | None = None

    @torch.inference_mode()
    def run_pass(self, method: str, args: Sequence[Any]) -> None:
        """Run a pass of the model; what it returns is rank 0's to use.

        Args:
            method: one of :data:`~headrace_engine.multiproc.leader.PASSES`, or what is told of adapters
                between passes.
            args: as the method takes them; a batch without attention metadata.

        Raises:
            ModelError: there is no such pass.
        """
        if method == REPLAY:
            self._replay(*args)
            return
        if self._following is not None and self._following.follow(method, args):
            return
        if method not in (*PASSES, *VOCABULARY, LOGITS_OF_ROWS):
            raise ModelError(f"{method!r} is not a pass of a model")
        if method not in (*OF_LAYERS, *OF_EXPERTS) and not self._ranks.has_inputs:
            return  # of what makes inputs and logits, which the first stage has
        if method == LOGITS_OF_ROWS:
            self._compute_logits(*args)
            return
        runs = self._ranks.experts if method in OF_EXPERTS else self._loaded()
        result = getattr(runs, method)(*(self._prepared(arg) for arg in args))
        if method == "forward" and self._divides_head:
            self._hidden = result

    @property
    def _divides_head(self) -> bool:
        """True if this rank's head computes some of the logits of states that each rank has."""
        model = self._loaded()
        if isinstance(model, RunsParts):
            return False  # rank 0 gets them, and sends them
        return isinstance(model, DividesVocabulary) and LOGITS in model.vocabulary_passes

    def _compute_logits(self, start: int, count: int) -> None:
        """Compute this rank's logits of rows of the last pass's hidden states."""
        assert self._hidden is not None
        self._loaded().compute_logits(self._hidden[start : start + count])

    def _replay(self, batch: ForwardBatch, num_logits: int | None = None) -> None:
        """The exchanges of a step are the same whether it is replayed or not.

        Args:
            num_logits: rows of logits; None: the step ends with hidden states.
        """
        runner = self._ready()
        adapters = self._following
        graph = runner.graph
        if adapters is not None and adapters.chosen:
            graph = None if adapters.slots.runs_eagerly else runner.adapter_graph
        has_logits = self._divides_head and num_logits is not None
        if (
            graph is not None
            and has_logits == self._records_logits
            and graph.fits(batch, num_logits)
        ):
            graph.replay(batch, num_logits)
            return
        if isinstance(runner.model, RunsParts):
            runner.model.run_part(runner.with_metadata(batch))
            return
        states = runner.model.forward(runner.with_metadata(batch))
        if has_logits and num_logits:
            runner.model.compute_logits(states[:num_logits])

    @property
    def _reads_parts(self) -> bool:
        """True if something reads the states of several stages: such steps run eagerly."""
        return self._settings.drafts.reads_states and isinstance(self._loaded(), RunsParts)

    @property
    def _records_logits(self) -> bool:
        """True if this rank computes logits in recorded steps, as rank 0 does."""
        reads_states = self._settings.drafts.reads_states
        return self._divides_head and self._settings.pooling is None and not reads_states

    def _recorded(self, batch: ForwardBatch) -> Tensor:
        """The step that is recorded (:data:`headrace_core.graph.Step`)."""
        runner = self._ready()
        if isinstance(runner.model, RunsParts):
            return runner.model.run_part(runner.with_metadata(batch))
        states = runner.model.forward(runner.with_metadata(batch))
        return runner.model.compute_logits(states) if self._records_logits else states

    def _prepared(self, arg: Any) -> Any:
        if not isinstance(arg, ForwardBatch) or self._runner is None:
            return arg  # without a cache nothing is prepared
        return self._runner.with_metadata(arg)

    def allocate_cache(self, config: KVCacheConfig) -> None:
        """See :meth:`ServingWorker.allocate_cache`."""
        super().allocate_cache(config)
        connector = self._settings.transfer.connector
        if connector is not None and self._mover is not None:
            self._finder = BlockFinder(RankBlocks(connector, self._mover.part_sizes))

    def load_blocks(
        self,
        saved_first: Sequence[tuple[int, int, bytes]],
        loaded: Sequence[tuple[int, int, bytes]],
    ) -> list[bytes]:
        """This rank's parts of what a step begins with; keys of blocks that could not be loaded."""
        mover = self._moving()
        mover.save([KVMove(*move) for move in saved_first])
        return mover.load([KVMove(*move) for move in loaded])

    def save_blocks(self, saved: Sequence[tuple[int, int, bytes]]) -> None:
        """This rank's parts of blocks that a step has filled."""
        self._moving().save([KVMove(*move) for move in saved])

    def find_blocks(
        self, request_id: str, blocks: Mapping[bytes, int], params: Mapping[str, Any]
    ) -> list[bytes] | None:
        """See :meth:`BlockFinder.find`. One thread, beside the passes."""
        if self._finder is None:
            raise ModelError("there is no connector: allocate_cache() has not been called")
        return self._finder.find(request_id, blocks, params)

    def forget_blocks(self, request_id: str) -> None:
        """See :meth:`BlockFinder.forget`. The same thread."""
        if self._finder is not None:
            self._finder.forget(request_id)

    def _free(self) -> None:
        super()._free()
        self._hidden = self._finder = self._following = None

    def _moving(self) -> BlockMover:
        if self._mover is None:
            raise ModelError("there is no connector: allocate_cache() has not been called")
        return self._mover

    def read_adapter(self, number: int, path: str, dropped: Sequence[int]) -> str:
        """See :meth:`~headrace_engine.multiproc.adapters.FollowingAdapters.read`. Any thread."""
        if self._following is None:
            raise ModelError("there are no slots for adapters: load() has not been called")
        return self._following.read(number, path, dropped)

    def report(self) -> dict[str, Any]:
        """See :meth:`ServingWorker.report`; with the number of adapters that are kept, if any may be."""
        kept = {} if self._following is None else {"adapters_kept": self._following.num_kept}
        return {**super().report(), **kept}

    def _make_slots(self) -> tuple[AdapterSlots, ...]:
        """Slots that do what rank 0 tells."""
        if self._settings.adapters.make_slots is None:
            return ()
        return (self._use_slots(self._settings.adapters.make_slots()),)

    def _use_slots(self, own: AdapterSlots) -> AdapterSlots:
        self._following = FollowingAdapters(own)
        return own

    def _gives_all_rows(self) -> bool:
        """True if rank 0's recorded steps give hidden states of all rows."""
        if self._settings.pooling is None:
            return self._settings.drafts.reads_states
        if isinstance(self._ready().model, RunsParts):
            return False  # steps of its stages are not recorded; what pools may be on another one
        return needs_all_rows(cast(SupportsPooling, self._loaded()), self._settings.pooling)

    def begin_profile(self) -> None:
        """Measure from now until :meth:`profile`."""
        self._measuring.close()
        self._peak = self._measuring.enter_context(self._meter.peak())

    def profile(self) -> MemoryProfile:
        """Memory since :meth:`begin_profile`, in which rank 0 ran its largest step."""
        self._measuring.close()
        self._meter.trim()
        self._activations = self._peak.bytes
        return MemoryProfile(self._weights, self._activations, self._available)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Record steps, and begin to make the cache's memory resident; rank 0 has run dummy steps by now."""
        self.record_again()
        for populator in self._populators:
            populator.start()
        self._binding.narrow()
        if self._ranks.experts is not None:
            self._ranks.experts.begin_serving()

    @torch.inference_mode()
    def record_again(self) -> None:
        """Record steps of the model as it is now; rank 0 has run dummy steps by now."""
        if self._settings.capture is not None and not self._reads_parts:
            runner, cache = self._ready(), self._cache
            assert cache is not None
            model = runner.model
            record = partial(
                record_part,
                step_recorder(self._settings, runner, cache, self._gives_all_rows()),
                self._recorded,
                is_last=not isinstance(model, RunsParts) or model.ends_pass,
            )
            runner.graph = record()
            if self._following is not None:
                slots = torch.full((self._limits.max_num_batched_tokens,), NONE, dtype=torch.int32)
                self._following.slots.choose(slots, slots)
                runner.adapter_graph = record(kind="steps with adapters")
                self._following.slots.choose(None)

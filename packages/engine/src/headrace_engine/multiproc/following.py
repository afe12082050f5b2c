"""The worker of a rank that follows: a shard of the model and of its cache, and no requests."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import torch

from headrace_core.batch import ForwardBatch
from headrace_core.errors import ModelError
from headrace_core.executor import MemoryProfile
from headrace_core.lora import AdapterSlots
from headrace_core.model import SupportsPooling
from headrace_engine.execution.cache import cross_groups
from headrace_engine.execution.capture import capture_steps
from headrace_engine.execution.measure import Peak
from headrace_engine.execution.pooling import needs_all_rows
from headrace_engine.execution.worker import ServingWorker
from headrace_engine.kv.states import state_groups
from headrace_engine.lora.step_adapters import NONE
from headrace_engine.multiproc.adapters import FollowingAdapters
from headrace_engine.multiproc.leader import OF_EXPERTS, PASSES, REPLAY


class FollowingWorker(ServingWorker):
    """Runs the passes that rank 0 runs. One thread only. Arguments as :class:`ServingWorker`'s.

    Args:
        has_inputs: False: it is on a later stage, and runs nothing of what makes inputs.
    """

    def __init__(self, *args: Any, has_inputs: bool = True, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._has_inputs = has_inputs
        self._measuring = ExitStack()
        self._peak = Peak()
        self._following: FollowingAdapters | None = None

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
        if method not in PASSES:
            raise ModelError(f"{method!r} is not a pass of a model")
        if method not in ("forward", *OF_EXPERTS) and not self._has_inputs:
            return  # of what makes inputs, which the first stage has
        runs = self._experts if method in OF_EXPERTS else self._loaded()
        getattr(runs, method)(*(self._prepared(arg) for arg in args))

    def _replay(self, batch: ForwardBatch, num_logits: int | None = None) -> None:
        """The exchanges of a step are the same whether it is replayed or not."""
        runner = self._ready()
        adapters = self._following
        graph = runner.graph
        if adapters is not None and adapters.chosen:
            graph = None if adapters.slots.runs_eagerly else runner.adapter_graph
        if graph is not None and graph.fits(batch, num_logits):
            graph.replay(batch, num_logits)
        else:
            runner.model.forward(runner.with_metadata(batch))

    def _prepared(self, arg: Any) -> Any:
        if not isinstance(arg, ForwardBatch) or self._runner is None:
            return arg  # without a cache nothing is prepared
        return self._runner.with_metadata(arg)

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
        if self._make_adapters is None:
            return ()
        self._following = FollowingAdapters(self._make_adapters())
        return (self._following.slots,)

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
        if self._capture is not None and self._has_inputs:  # steps of stages are not recorded
            runner, cache = self._ready(), self._cache
            assert cache is not None
            record = partial(
                capture_steps,
                self._capture,
                lambda batch: runner.model.forward(runner.with_metadata(batch)),
                max_num_seqs=self._max_num_seqs,
                num_groups=len(runner.backends),
                device=self._device.type,
                all_rows=self._pooling is not None
                and needs_all_rows(cast(SupportsPooling, runner.model), self._pooling),
                token_types=self._takes_token_types,
                cross_groups=tuple(cross_groups(cache)),
                state_groups=tuple(state_groups(cache)),
            )
            runner.graph = record()
            if self._following is not None:
                slots = torch.full((self._max_num_batched_tokens,), NONE, dtype=torch.int32)
                self._following.slots.choose(slots, slots)
                runner.adapter_graph = record(kind="steps with adapters")
                self._following.slots.choose(None)
        for populator in self._populators:
            populator.start()
        self._binding.narrow()
        if self._experts is not None:
            self._experts.begin_serving()

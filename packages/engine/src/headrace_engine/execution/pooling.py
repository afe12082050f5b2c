"""Steps of a pooling model: hidden states of prompts, and one result for each prompt that is complete.

Which rows a request needs is its pooler's to say (:meth:`headrace_core.model.Pooler.rows`). Those of
earlier chunks are kept until the prompt is complete; only then is it pooled. Pooling itself is no part
of a captured step: what it does depends on what requests ask.

Letters: T tokens in this step, B requests in it, R rows of hidden states, H hidden size.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace_core import failpoints
from headrace_core.batch import ForwardBatch
from headrace_core.errors import ReplayFailed
from headrace_core.graph import StepGraph
from headrace_core.model import PoolingBatch, Rows, SupportsPooling
from headrace_core.packed import PackedArray
from headrace_core.pooling import PoolingInfo, PoolingParams
from headrace_core.step import NewRequest, RequestStepResult, ScheduledStep, StepResult
from headrace_engine.execution.inputs import StepInputs
from headrace_engine.execution.parts import divide, longest_first
from headrace_engine.execution.requests import Ints
from headrace_engine.execution.runner import ModelRunner, pass_failpoint

logger = logging.getLogger(__name__)


class _Asked(NamedTuple):
    """What a request that is held wants."""

    params: PoolingParams
    rows: Rows
    token_ids: list[int]

    @property
    def num_rows(self) -> int:
        """Rows that its result is made of."""
        return len(self.token_ids) if self.rows == "all" else 1


class _Span(NamedTuple):
    """Rows of the step's tokens that a request needs: ``start`` to ``end``."""

    b: int
    """The request's place in the batch."""
    start: int
    end: int


class _States(NamedTuple):
    """Hidden states of a step."""

    hidden: Tensor
    """[R, H]."""
    lasting: bool
    """Whether they outlast the next step's pass, so that pooling may wait for it to begin."""


class _Due(NamedTuple):
    """Prompts of a step that are complete."""

    request_ids: list[str]
    batch: PoolingBatch


class PoolingRunner(ModelRunner):
    """Runs steps of a :class:`~headrace_core.model.SupportsPooling` model; see
    :class:`ModelRunner` for its arguments."""

    model: Any
    """Has a pooler."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._asked: dict[str, _Asked] = {}
        self.all_rows = True
        """Whether captured steps give the states of all rows, else those of ``logits_rows``."""
        self._kept: dict[str, list[Tensor]] = {}
        """Rows of earlier chunks, of prompts that are not complete."""

    @torch.inference_mode()
    def execute(self, step: ScheduledStep) -> StepResult:
        """Run one step. A request that fails alone gets an error; an exception fails the step."""
        if failpoints.PLAN is not None:
            pass_failpoint("engine.step.prepare", step)
        self.apply_changes(step)
        self._embed_media(step)
        inputs = self.inputs.build(self._in_order(step.num_scheduled_tokens))
        result = StepResult(
            step.step_id,
            {i: RequestStepResult(error=inputs.errors.get(i)) for i in step.num_scheduled_tokens},
        )
        if inputs.batch is None:
            return result
        if failpoints.PLAN is not None:
            pass_failpoint("engine.step.forward", step)
        spans = self._spans(inputs, [step.num_scheduled_tokens[i] for i in inputs.request_ids])
        start = time.perf_counter()
        states = self._states(inputs.batch, spans)
        result.forward_seconds = time.perf_counter() - start
        self.requests.num_computed_tokens[inputs.rows] = inputs.seq_lens
        due = self._due(inputs, states.hidden, spans)
        if due is not None:
            result.remaining = partial(self._pool, due, result.requests)
            if not states.lasting:
                result.finish()
        return result

    def apply_changes(self, step: ScheduledStep) -> None:
        """As of any step; and what new requests ask for, while those that are gone keep nothing."""
        for request_id in step.gone_request_ids:
            self._forget(request_id)
        super().apply_changes(step)
        for new in step.new_requests:
            self._forget(new.request_id)
            row = self.requests.row_of[new.request_id]
            try:
                self._asked[new.request_id] = self._read(new)
            except Exception as error:
                logger.warning("request %s cannot run", new.request_id, exc_info=True)
                self.requests.fail(row, f"{type(error).__name__}: {error}")

    def whole_step(self, batch: ForwardBatch) -> Tensor:
        """Final hidden states [T, H] (:data:`headrace_core.graph.Step`)."""
        hidden: Tensor = self.model.forward(self.with_metadata(batch))
        return hidden

    def _read(self, new: NewRequest) -> _Asked:
        if new.pooling is None:
            raise ValueError("the model pools, and the request says nothing of pooling")
        rows = self.model.pooler.rows(new.pooling)
        if rows != "last" and new.num_computed_tokens:
            raise ValueError(
                f"task {new.pooling.task!r} needs rows of the {new.num_computed_tokens} tokens that "
                "are cached already"
            )
        return _Asked(new.pooling, rows, new.token_ids)

    def _forget(self, request_id: str) -> None:
        self._asked.pop(request_id, None)
        self._kept.pop(request_id, None)

    def _spans(self, inputs: StepInputs, counts: Sequence[int]) -> list[_Span]:
        """Whose hidden states are needed, in batch order."""
        complete = set(inputs.sampled.tolist())
        spans, end = [], 0
        for b, (request_id, count) in enumerate(zip(inputs.request_ids, counts)):
            start, end = end, end + count
            if request_id in inputs.errors:
                continue
            rows = self._asked[request_id].rows
            if rows == "all":
                spans.append(_Span(b, start, end))
            elif rows == "last" and b in complete:
                spans.append(_Span(b, end - 1, end))
            elif rows == "first" and inputs.seq_lens[b] == count:
                spans.append(_Span(b, start, start + 1))
        return spans

    def _states(self, batch: ForwardBatch, spans: Sequence[_Span]) -> _States:
        """[R, H]: the spans' rows, one span after the other; one row of no use without any."""
        rows = _row_index(spans, batch.num_tokens, self.device)
        wanted = dataclasses.replace(batch, logits_rows=rows)
        captured = dataclasses.replace(batch, logits_rows=None) if self.all_rows else wanted
        if self.graph is not None and self.graph.fits(captured):
            try:
                states = self._run_captured(self.graph, captured)
            except ReplayFailed as error:
                self.run_again(error)
            else:
                if rows is None or not self.all_rows:
                    return states
                return _States(states.hidden.index_select(0, rows), states.lasting)
        else:
            self.launching()
        return _States(self.whole_step(wanted), lasting=False)

    def _in_order(self, scheduled: Mapping[str, int]) -> Mapping[str, int]:
        """What is scheduled, in the order in which it is best computed."""
        divides = self.graph is not None and self.graph.lanes > 1
        return longest_first(scheduled) if divides else scheduled

    def _run_captured(self, graph: StepGraph, batch: ForwardBatch) -> _States:
        """The captured step, in parts where that keeps all threads busy."""
        cuts = self._cuts(graph, batch)
        if cuts:
            return _States(graph.replay_parts(batch, cuts, self.launching), lasting=True)
        self.launching()
        return _States(graph.replay(batch), lasting=False)

    def _cuts(self, graph: StepGraph, batch: ForwardBatch) -> list[int]:
        """Where the parts of a step begin and end; [] if it is better not divided, or cannot be."""
        if graph.lanes < 2:
            return []
        bounds = batch.cu_seqlens_q.numpy()
        if not self.all_rows and not _one_of_each(batch.logits_rows, bounds):
            return []
        cuts = divide(np.diff(bounds).tolist(), graph.lanes, graph.part_tokens)
        return cuts if len(cuts) > 2 else []

    def _due(self, inputs: StepInputs, hidden: Tensor, spans: Sequence[_Span]) -> _Due | None:
        """The prompts that are complete, None if there are none; rows of the others are kept."""
        complete = [inputs.request_ids[b] for b in inputs.sampled.tolist()]
        if self._kept or len(spans) != len(complete) or len(complete) < len(inputs.request_ids):
            hidden = self._with_kept(inputs, hidden, spans, complete)
        if not complete:
            return None
        asked = [self._asked[request_id] for request_id in complete]
        cu_rows = np.cumsum([0, *(one.num_rows for one in asked)])
        batch = PoolingBatch(
            hidden=hidden,
            cu_rows=torch.from_numpy(cu_rows),
            params=[one.params for one in asked],
            token_ids=[one.token_ids for one in asked],
        )
        return _Due(complete, batch)

    @torch.inference_mode()
    def _pool(self, due: _Due, results: dict[str, RequestStepResult]) -> None:
        """Fill in the results of prompts that are complete."""
        with _one_torch_thread(self.device):
            pooled = self.model.pooler(due.batch)
        for request_id, tensor in zip(due.request_ids, pooled, strict=True):
            results[request_id] = self._result(request_id, tensor)

    def _with_kept(
        self, inputs: StepInputs, hidden: Tensor, spans: Sequence[_Span], complete: Sequence[str]
    ) -> Tensor:
        """Rows of the complete prompts, those of their earlier chunks included."""
        end = 0
        for span in spans:
            start, end = end, end + span.end - span.start
            # Copies: the step's states are overwritten by the next one, or are much larger.
            rows = hidden[start:end].clone()
            self._kept.setdefault(inputs.request_ids[span.b], []).append(rows)
        parts = [rows for request_id in complete for rows in self._kept.pop(request_id)]
        return torch.cat(parts) if parts else hidden[:0]

    def _result(self, request_id: str, tensor: Tensor) -> RequestStepResult:
        values = np.ascontiguousarray(tensor.float().cpu().numpy())
        if failpoints.PLAN is not None and failpoints.hit("engine.step.sample", request_id):
            values = np.full_like(values, math.nan)
        if not np.isfinite(values).all():
            return RequestStepResult(error="the model's result for the prompt is not finite")
        return RequestStepResult(pooled=PackedArray("float32", values.shape, values.tobytes()))


@contextmanager
def _one_torch_thread(device: torch.device) -> Iterator[None]:
    """On a CPU torch computes alone meanwhile.

    Pooling is small, and the threads of torch's own pool spin for milliseconds after each piece of
    work: on cores that the kernels' threads need for the next step.
    """
    num_threads = torch.get_num_threads()
    if device.type != "cpu" or num_threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _row_index(spans: Sequence[_Span], num_tokens: int, device: torch.device) -> Tensor | None:
    """[R] int64; None = all rows, in order."""
    if sum(span.end - span.start for span in spans) == num_tokens:
        return None
    if not spans:  # one row anyway, as no kernel need accept zero rows
        return torch.tensor([num_tokens - 1], device=device)
    rows: Ints = np.concatenate([np.arange(span.start, span.end) for span in spans])
    return torch.from_numpy(rows).to(device)


def _one_of_each(rows: Tensor | None, bounds: npt.NDArray[np.int32]) -> bool:
    """Whether one row of each request is wanted, in order, where requests begin and end at ``bounds``
    [B + 1]. There may be as many rows as requests and two of one: where another one has failed."""
    if rows is None or len(rows) != len(bounds) - 1:
        return False
    wanted = rows.numpy()
    return bool(np.all((bounds[:-1] <= wanted) & (wanted < bounds[1:])))


def needs_all_rows(model: SupportsPooling, info: PoolingInfo) -> bool:
    """Whether the model's first task, which most requests will ask for, is made of all tokens."""
    task = next((task for task in info.tasks if task != "plugin"), None)
    if task is None:
        return True
    params = PoolingParams()
    params.verify(task, info)
    return model.pooler.rows(params) == "all"


def pool_once(model: SupportsPooling, batch: ForwardBatch, info: PoolingInfo) -> None:
    """The largest that a step can ask: every task, for all requests of a batch.

    Args:
        batch: with attention metadata, if there is any.
    """
    hidden = model.forward(dataclasses.replace(batch, logits_rows=None))
    ends = batch.cu_seqlens_q.cpu().long()
    for task in info.tasks:
        if task == "plugin":
            continue
        params = PoolingParams()
        params.verify(task, info)
        rows = model.pooler.rows(params)
        one = torch.arange(len(ends))
        model.pooler(
            PoolingBatch(
                hidden=hidden
                if rows == "all"
                else hidden.index_select(0, _edge(ends, rows, hidden)),
                cu_rows=ends if rows == "all" else one,
                params=[params] * (len(ends) - 1),
                token_ids=[[0] * length for length in ends.diff().tolist()],
            )
        )


def _edge(ends: Tensor, rows: Rows, hidden: Tensor) -> Tensor:
    """[B]; each request's first or last row."""
    return (ends[:-1] if rows == "first" else ends[1:] - 1).to(hidden.device)

"""Steps of a pooling model: hidden states of prompts, and one result for each prompt that is complete.

Which rows a request needs is its pooler's to say (:meth:`headrace_core.model.Pooler.rows`). Those of
earlier chunks are kept until the prompt is complete; only then is it pooled. Pooling itself is no part
of a captured step: what it does depends on what requests ask.

Letters: T tokens in this step, B requests in it, R rows of hidden states, H hidden size.
"""

from __future__ import annotations

import dataclasses
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

from headrace_core.arrays import PackedArray
from headrace_core.batch import ForwardBatch
from headrace_core.errors import ReplayFailed
from headrace_core.graph import StepGraph
from headrace_core.model import Pooler, PoolingBatch, Rows, SupportsPooling
from headrace_core.pooling import PoolingInfo, PoolingParams
from headrace_core.reliability import failpoints
from headrace_core.step import NewRequest, RequestStepResult, ScheduledStep, StepResult
from headrace_engine.execution.inputs import StepInputs
from headrace_engine.execution.requests import Ints
from headrace_engine.execution.runner import ModelRunner, pass_failpoint


class _Asked(NamedTuple):
    """The wish of a request that is held."""

    params: PoolingParams
    rows: Rows
    token_ids: list[int]

    @property
    def num_rows(self) -> int:
        """Rows that its result is made of."""
        return len(self.token_ids) if self.rows == "all" else 1


class _RowSpan(NamedTuple):
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
    """True if they outlast the next step's pass, so that pooling may wait for it to begin."""


class _Due(NamedTuple):
    """Prompts of a step that are complete."""

    request_ids: list[str]
    batch: PoolingBatch


class PooledRows:
    """Pooling requests of a worker, with the rows of hidden states that are kept of them.

    Args:
        pooler: says which rows a request needs.
    """

    def __init__(self, pooler: Pooler) -> None:
        self._pooler = pooler
        self.asked: dict[str, _Asked] = {}
        """By request id."""
        self.kept: dict[str, list[Tensor]] = {}
        """By request id: rows of earlier chunks, of prompts that are not complete."""

    def add(self, row: int, new: NewRequest) -> None:
        """Read what a request asks for.

        Raises:
            ValueError: it does not ask for pooling, or needs rows of tokens that are cached.
        """
        pooling = new.request.pooling
        if pooling is None:
            raise ValueError("the model pools, and the request asks for no pooling")
        rows = self._pooler.rows(pooling)
        if rows != "last" and new.num_computed_tokens:
            raise ValueError(
                f"task {pooling.task!r} needs rows of the {new.num_computed_tokens} tokens that are "
                "cached already"
            )
        self.asked[new.request_id] = _Asked(pooling, rows, new.token_ids)

    def remove(self, row: int, request_id: str) -> None:
        """Forget a request."""
        self.asked.pop(request_id, None)
        self.kept.pop(request_id, None)


class PoolingRunner(ModelRunner):
    """Runs steps of a :class:`~headrace_core.model.SupportsPooling` model; see
    :class:`ModelRunner` for its arguments."""

    model: Any
    """Has a pooler."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.all_rows = True
        """True if captured steps give the states of all rows, else those of ``logits_rows``."""
        self._pooled = PooledRows(self.model.pooler)
        self.requests.follow(self._pooled)

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
        for request_id in inputs.errors:
            result.requests[request_id].not_computed = request_id not in inputs.request_ids
        if inputs.batch is None:
            return result
        if failpoints.PLAN is not None:
            pass_failpoint("engine.step.forward", step)
        spans = self._spans(inputs, [step.num_scheduled_tokens[i] for i in inputs.request_ids])
        start = time.perf_counter()
        states = self._states(inputs, inputs.batch, spans)
        result.forward_seconds = time.perf_counter() - start
        self.requests.num_computed_tokens[inputs.rows] = inputs.seq_lens
        due = self._due(inputs, states.hidden, spans)
        if due is not None:
            result.remaining = partial(self._pool, due, result.requests)
            if not states.lasting:
                result.finish()
        return result

    def whole_step(self, batch: ForwardBatch) -> Tensor:
        """Final hidden states [T, H] (:data:`headrace_core.graph.Step`)."""
        hidden: Tensor = self.model.forward(self.with_metadata(batch))
        return hidden

    def _spans(self, inputs: StepInputs, counts: Sequence[int]) -> list[_RowSpan]:
        """Rows of hidden states that requests need, in batch order."""
        complete = set(inputs.sampled.tolist())
        spans, end = [], 0
        for b, (request_id, count) in enumerate(zip(inputs.request_ids, counts)):
            start, end = end, end + count
            if request_id in inputs.errors:
                continue
            rows = self._pooled.asked[request_id].rows
            if rows == "all":
                spans.append(_RowSpan(b, start, end))
            elif rows == "last" and b in complete:
                spans.append(_RowSpan(b, end - 1, end))
            elif rows == "first" and inputs.seq_lens[b] == count:
                spans.append(_RowSpan(b, start, start + 1))
        return spans

    def _states(
        self, inputs: StepInputs, batch: ForwardBatch, spans: Sequence[_RowSpan]
    ) -> _States:
        """[R, H]: the spans' rows, one span after the other; one row of no use without any."""
        rows = _row_index(spans, batch.num_tokens, self.device)
        self._choose_adapters(inputs, None if rows is None else rows.cpu().numpy())
        wanted = dataclasses.replace(batch, logits_rows=rows)
        captured = dataclasses.replace(batch, logits_rows=None) if self.all_rows else wanted
        graph = self.fitting_graph
        if graph is not None and graph.fits(captured):
            try:
                states = self._run_captured(graph, captured)
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
        """The scheduled requests, in the order in which they are best computed."""
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
        """The bounds of a step's parts; [] if it is better not divided, or cannot be."""
        if graph.lanes < 2 or graph is self.adapter_graph:
            return []
        bounds = batch.cu_seqlens_q.numpy()
        if not self.all_rows and not _one_of_each(batch.logits_rows, bounds):
            return []
        cuts = divide(np.diff(bounds).tolist(), graph.lanes, graph.part_tokens)
        return cuts if len(cuts) > 2 else []

    def _due(self, inputs: StepInputs, hidden: Tensor, spans: Sequence[_RowSpan]) -> _Due | None:
        """The prompts that are complete, None if there are none; rows of the others are kept."""
        complete = [inputs.request_ids[b] for b in inputs.sampled.tolist()]
        if (
            self._pooled.kept
            or len(spans) != len(complete)
            or len(complete) < len(inputs.request_ids)
        ):
            hidden = self._with_kept(inputs, hidden, spans, complete)
        if not complete:
            return None
        asked = [self._pooled.asked[request_id] for request_id in complete]
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
        self, inputs: StepInputs, hidden: Tensor, spans: Sequence[_RowSpan], complete: Sequence[str]
    ) -> Tensor:
        """Rows of the complete prompts, those of their earlier chunks included."""
        end = 0
        for span in spans:
            start, end = end, end + span.end - span.start
            # Copies: the step's states are overwritten by the next one, or are much larger.
            rows = hidden[start:end].clone()
            self._pooled.kept.setdefault(inputs.request_ids[span.b], []).append(rows)
        parts = [rows for request_id in complete for rows in self._pooled.kept.pop(request_id)]
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


def _row_index(spans: Sequence[_RowSpan], num_tokens: int, device: torch.device) -> Tensor | None:
    """[R] int64; None = all rows, in order."""
    if sum(span.end - span.start for span in spans) == num_tokens:
        return None
    if not spans:  # one row anyway, as no kernel need accept zero rows
        return torch.tensor([num_tokens - 1], device=device)
    rows: Ints = np.concatenate([np.arange(span.start, span.end) for span in spans])
    return torch.from_numpy(rows).to(device)


def _one_of_each(rows: Tensor | None, bounds: npt.NDArray[np.int32]) -> bool:
    """True if one row of each request is wanted, in order, where requests begin and end at ``bounds``
    [B + 1]. There may be as many rows as requests and two of one: where another one has failed."""
    if rows is None or len(rows) != len(bounds) - 1:
        return False
    wanted = rows.numpy()
    return bool(np.all((bounds[:-1] <= wanted) & (wanted < bounds[1:])))


def needs_all_rows(model: SupportsPooling, info: PoolingInfo) -> bool:
    """True if the model's first task, which most requests will ask for, is made of all tokens."""
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


LEAST_TOKENS = 128
"""Least tokens of a part, where there are several: products of fewer rows wait for weights."""


def longest_first(scheduled: Mapping[str, int]) -> dict[str, int]:
    """Numbers of tokens by request, largest first."""
    return dict(sorted(scheduled.items(), key=lambda item: -item[1]))


def divide(counts: Sequence[int], lanes: int, most_tokens: int) -> list[int]:
    """The bounds of a step's parts, as indices of its requests: 0, ..., their number.

    Guided self-scheduling (Polychronopoulos and Kuck, 1987): a part is a fixed share of what is left, so
    the first ones are large, which is efficient, and the last ones small, so that threads end together.
    For the same reason long requests come first.

    One part, where more would not keep all lanes busy: threads do better then to share each kernel.

    Args:
        counts: tokens by request, largest first.
        lanes: parts that run at the same time.
        most_tokens: of a part.
    """
    left, whole = sum(counts), [0, len(counts)]
    if lanes < 2 or left < 2 * lanes * LEAST_TOKENS or counts[0] > min(most_tokens, left // lanes):
        return whole
    cuts, held = [0], 0
    share = _share(left, lanes, most_tokens)
    for index, count in enumerate(counts):
        if held and held + count > share:
            cuts.append(index)
            left -= held
            held, share = 0, _share(left, lanes, most_tokens)
        held += count
    return [*cuts, len(counts)]


def _share(left: int, lanes: int, most_tokens: int) -> int:
    return min(max(LEAST_TOKENS, left // (2 * lanes)), most_tokens)

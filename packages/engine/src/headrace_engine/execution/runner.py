"""One step: apply what changed, build inputs, run the model, sample, remember what was sampled."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from headrace_core import failpoints
from headrace_core.attention import AttentionBackend
from headrace_core.batch import ForwardBatch
from headrace_core.errors import ReplayFailed
from headrace_core.graph import StepGraph
from headrace_core.kv import KVCacheConfig
from headrace_core.model import CausalLM, SupportsEncoderDecoder, SupportsMRoPE, SupportsMultiModal
from headrace_core.multimodal import MediaInput
from headrace_core.step import RequestStepResult, ScheduledStep, StepResult, TokenLogprobs
from headrace_engine.encoder.transfer import EncoderTransfer
from headrace_engine.encoder.vectors_ahead import VectorsAhead
from headrace_engine.execution.alignment import Alignments
from headrace_engine.execution.cache import cross_groups, state_groups
from headrace_engine.execution.inputs import InputBuilder, PromptRows, StepInputs
from headrace_engine.execution.late import LateRow, LateRows
from headrace_engine.execution.media import embed, encode, given_vectors
from headrace_engine.execution.media_vectors import MediaVectors
from headrace_engine.execution.populate import CachePopulator
from headrace_engine.execution.requests import Ints, RequestTable
from headrace_engine.sampling.processors import ProcessorStage
from headrace_engine.sampling.sampler import Sampler, SamplerOutput
from headrace_engine.structured.matching import ConstraintMaker, RowConstraint

logger = logging.getLogger(__name__)

_PROMPT_LOGITS = 1 << 24
"""Most logits (float32: 64 MiB) that prompt log-probabilities are computed from at once."""


class ModelRunner:
    """Runs steps on a loaded model with its cache bound.

    Args:
        model: loaded, caches bound.
        backends: by cache group; whose ``prepare`` makes the group's attention metadata. None of a
            group of recurrent layers, which needs none.
        cache: the allocated cache.
        device: where the model is.
        vocab_size: width of the logits.
        sampler: chooses tokens.
        seed: of requests that bring none.
        populators: by pool; are told which blocks come into use.
        constraints: makes requests' constraints on the form of their outputs; None: a request that
            brings one fails.
        processors: users' logits processors; None: there are none.
        token_types: True if the model takes segments of its tokens.
        max_media_vectors: vectors of media that are kept for items that come again.
        transfer: other engines that make vectors of media, or take them; None: there are none.
        make_ahead: see :class:`~headrace_engine.execution.media_vectors.MediaVectors`.
    """

    def __init__(
        self,
        model: CausalLM,
        backends: Sequence[AttentionBackend | None],
        cache: KVCacheConfig,
        *,
        device: torch.device,
        vocab_size: int,
        sampler: Sampler,
        seed: int,
        populators: Sequence[CachePopulator] = (),
        constraints: ConstraintMaker | None = None,
        processors: ProcessorStage | None = None,
        token_types: bool = False,
        max_media_vectors: int = 0,
        transfer: EncoderTransfer | None = None,
        make_ahead: Callable[[Callable[[MediaInput], Tensor]], VectorsAhead] | None = None,
    ) -> None:
        self.model = model
        self.backends = tuple(backends)
        self.block_size = cache.block_size
        self.device = device
        self.vocab_size = vocab_size
        self.sampler = sampler
        self.populators = tuple(populators)
        self.processors = processors
        self.graph: StepGraph | None = None
        """Runs the steps that fit it; None: all run eagerly."""
        self.launching: Callable[[], None] = lambda: None
        """Called before the model runs; see :meth:`headrace_core.executor.Worker.when_launching`."""
        self.requests = RequestTable(
            [group.pool for group in cache.groups],
            vocab_size=vocab_size,
            seed=seed,
            constraints=constraints,
            cross_groups=cross_groups(cache),
            state_groups=state_groups(cache),
        )
        self.inputs = InputBuilder(
            self.requests,
            block_size=cache.block_size,
            device=device,
            token_types=token_types,
            mrope=model if isinstance(model, SupportsMRoPE) else None,
        )
        self.media_vectors = MediaVectors(
            lambda items: embed(cast("SupportsMultiModal", model), items, device),
            max_media_vectors,
            lambda item: given_vectors(item, device),
            transfer,
            make_ahead,
        )
        self.late = LateRows()
        """Rows whose tokens earlier steps left open."""
        self.alignments = Alignments(model, self.inputs, self._whole_batch, self._count_computed)
        self.requests.follow(self.alignments, self.late)
        if processors is not None:
            self.requests.follow(processors)
        self._highest_blocks: list[int] = []
        """By pool: as the populators were last told."""

    @torch.inference_mode()
    def execute(self, step: ScheduledStep) -> StepResult:
        """Run one step. A request that fails alone gets an error; an exception fails the step."""
        if failpoints.PLAN is not None:
            pass_failpoint("engine.step.prepare", step)
        self.apply_changes(step)
        late: dict[str, RequestStepResult] = {}
        if self.late.rows:
            self._sample_late(self.late.overdue(step.num_scheduled_tokens), late)
        if self.inputs.media.to_embed:
            self._embed_media(step)
        scheduled = step.num_scheduled_tokens
        results = self.alignments.run(scheduled) if self.alignments.wanted else {}
        if results:
            scheduled = {i: count for i, count in scheduled.items() if i not in results}
        inputs = self.inputs.build(scheduled)
        for request_id, reason in inputs.errors.items():
            row = self.requests.row_of.get(request_id)
            results[request_id] = (
                RequestStepResult(dead_end=reason)
                if row in self.requests.dead_ends
                else RequestStepResult(error=reason)
            )
        seconds = 0.0
        if inputs.batch is None and self.late.rows:
            self._sample_late(self.late.matched(scheduled, wait_for_one=not late), late)
        if inputs.batch is not None:
            if self.processors is not None:
                self.processors.begin_step(inputs.sampled_ids)
            self.launching()
            if failpoints.PLAN is not None:
                pass_failpoint("engine.step.forward", step)
            hidden, logits, unknown, seconds = self._forward(inputs, allows_late=step.allows_late)
            if hidden is not None:
                self._collect_prompt_logprobs(inputs, hidden, results)
            self._count_computed(inputs)
            if logits is not None:
                rows, sampled_ids = inputs.sampled_rows, inputs.sampled_ids
                late_rows = self._keep_late(unknown, rows, sampled_ids, logits)
                self._sample(rows, sampled_ids, logits, results, late_rows)
            if self.late.rows:
                self._sample_late(self.late.matched(step.num_scheduled_tokens), late)
        ids = step.num_scheduled_tokens
        if len(inputs.sampled) < len(ids) or inputs.prompt_rows:  # some have other results, or none
            results = {i: results.get(i) or RequestStepResult() for i in ids}
        return StepResult(step.step_id, results, forward_seconds=seconds, late=late)

    def apply_changes(self, step: ScheduledStep) -> None:
        """First who is gone, then who is new, then further blocks."""
        for request_id in step.gone_request_ids:
            self.requests.remove(request_id)
        for new in step.new_requests:
            self.requests.add(new)
        for request_id, block_ids in step.new_block_ids.items():
            self.requests.append_blocks(request_id, block_ids)
        if self.populators and self.requests.highest_blocks != self._highest_blocks:
            self._highest_blocks = self.requests.highest_blocks[:]
            for populator, block_id in zip(self.populators, self._highest_blocks):
                populator.used(block_id)

    def with_metadata(self, batch: ForwardBatch) -> ForwardBatch:
        """The batch with each cache group's attention metadata."""
        metadata = tuple(
            None if backend is None else backend.prepare(batch, group)
            for group, backend in enumerate(self.backends)
        )
        return dataclasses.replace(batch, attention=metadata)

    def whole_step(self, batch: ForwardBatch) -> Tensor:
        """A whole step but for sampling (:data:`headrace_core.graph.Step`)."""
        return self.model.compute_logits(self.model.forward(self.with_metadata(batch)))

    def _forward(
        self, inputs: StepInputs, *, allows_late: bool
    ) -> tuple[Tensor | None, Tensor | None, Sequence[RowConstraint], float]:
        """Hidden states of the wanted rows if prompt rows are among them, the sampled requests'
        logits if there are any, constraints that are not matched yet, seconds for all of it."""
        assert inputs.batch is not None
        start = time.perf_counter()
        batch = self._with_encoder_states(inputs, inputs.batch)
        hidden, logits = None, self._replay(inputs, batch)
        if logits is None:
            hidden, logits = self._run_eagerly(inputs, batch)
        unknown: Sequence[RowConstraint] = ()
        if self.requests.sampling.constraints:  # here, as a GPU is still computing
            unknown = self.requests.sampling.fill_masks(
                inputs.sampled_rows, allows_late=allows_late
            )
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        sampled = logits if len(inputs.sampled) else None
        wanted = hidden if inputs.prompt_rows else None
        return wanted, sampled, unknown, time.perf_counter() - start

    def _count_computed(self, inputs: StepInputs) -> None:
        self.requests.num_computed_tokens[inputs.rows] = inputs.seq_lens

    def _whole_batch(self, inputs: StepInputs) -> ForwardBatch:
        """A batch with everything that an eager forward needs."""
        assert inputs.batch is not None
        return self.with_metadata(self._with_encoder_states(inputs, inputs.batch))

    def _embed_media(self, step: ScheduledStep) -> None:
        """Have the media embedded whose placeholders the step reaches."""
        self.inputs.media.embed_due(
            step.num_scheduled_tokens,
            self.media_vectors,
            self.inputs.prompts,
        )

    def _with_encoder_states(self, inputs: StepInputs, batch: ForwardBatch) -> ForwardBatch:
        """The batch with what the encoder makes of the media of requests that begin in it."""
        if not inputs.encodes:
            return batch
        media = self.inputs.media.take_encoder(inputs.rows[inputs.encodes].tolist())
        states = encode(cast("SupportsEncoderDecoder", self.model), media, self.device)
        return dataclasses.replace(batch, encoder_states=states)

    def _replay(self, inputs: StepInputs, batch: ForwardBatch) -> Tensor | None:
        """The sampled requests' logits by a captured step; None if the step must run eagerly.

        Raises:
            ReplayFailed: see :meth:`run_again`.
        """
        num_sampled = len(inputs.sampled)
        if self.graph is None or inputs.prompt_rows or not self.graph.fits(batch, num_sampled):
            return None
        try:
            return self.graph.replay(batch, num_sampled)
        except ReplayFailed as error:
            self.run_again(error)
            return None

    def run_again(self, error: ReplayFailed) -> None:
        """Say that a step whose replay has failed runs eagerly.

        Raises:
            ReplayFailed: the error, if layers are recurrent: their states may have moved on.
        """
        if self.requests.state_groups:
            raise error
        logger.warning("replay failed (%s); the step runs eagerly, which tells more", error)

    def _run_eagerly(self, inputs: StepInputs, batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        hidden = self.model.forward(self.with_metadata(batch))
        num_sampled = len(inputs.sampled)
        if not num_sampled:
            return hidden, None
        rows = hidden if num_sampled == hidden.shape[0] else hidden[:num_sampled]
        return hidden, self.model.compute_logits(rows)

    def _keep_late(
        self, unknown: Sequence[RowConstraint], rows: Ints, ids: Sequence[str], logits: Tensor
    ) -> Collection[int]:
        """Keep the logits of rows whose constraint is not matched yet; returns their indices."""
        if not unknown:
            return ()
        found, constraints = set(), self.requests.sampling.constraints
        for r, row in enumerate(rows.tolist()):
            constraint = constraints.get(row)
            if constraint is not None and constraint in unknown:
                self.late.keep(LateRow(ids[r], row, logits[r : r + 1].clone(), constraint))
                found.add(r)
        return found

    def _sample_late(
        self, late_rows: Sequence[LateRow], results: dict[str, RequestStepResult]
    ) -> None:
        """Choose the tokens of rows that earlier steps left open. One by one: what raises is that
        request's failure, which computing this step's requests again would not find."""
        for request_id, row, logits, _ in late_rows:
            try:
                self._sample(np.array([row], np.int64), [request_id], logits, results)
            except Exception as error:
                logger.exception("the late token of request %s could not be chosen", request_id)
                results[request_id] = RequestStepResult(error=f"{type(error).__name__}: {error}")
                self.requests.fail(row, f"{type(error).__name__}: {error}")

    def _sample(
        self,
        rows: Ints,
        ids: list[str],
        logits: Tensor,
        results: dict[str, RequestStepResult],
        late_rows: Collection[int] = (),
    ) -> None:
        """Choose tokens, append them to the requests' lists, fill in the results.

        Args:
            rows: [R]; of the request table.
            ids: R request ids.
            logits: [R, V]; changed.
            results: gains what was chosen.
            late_rows: indices (0..R-1) of rows whose tokens are left open.
        """
        if failpoints.PLAN is not None:
            _spoil(logits, ids, late_rows)
        batch = self.requests.sampling.batch(rows, self.requests)
        if self.processors is not None:
            batch = self.processors.bind(batch, ids)
        output = self.sampler(logits, batch)
        tokens, all_ids = output.token_ids, ids
        if output.errors or output.dead_ends or late_rows:
            self._record_errors(output, rows, ids, results, late_rows)
            bad = {*output.errors, *output.dead_ends, *late_rows}
            good = [r for r in range(len(ids)) if r not in bad]
            ids, rows, tokens = [ids[r] for r in good], rows[good], tokens[good]
        self.requests.append_tokens(rows, tokens)
        if self.processors is not None:
            self.processors.observe(ids, tokens.tolist())
        if not results:  # nothing but tokens, as nearly always
            results.update(zip(ids, [RequestStepResult([token]) for token in tokens.tolist()]))
        else:
            for request_id, token in zip(ids, tokens.tolist()):
                result = results.setdefault(request_id, RequestStepResult())
                if result.error is None and result.dead_end is None:
                    result.token_ids = [token]
        for r, logprobs in output.logprobs.items():
            result = results[all_ids[r]]
            if result.error is None and result.dead_end is None and r not in late_rows:
                result.logprobs = [logprobs]
        constraints = self.requests.sampling.constraints
        if constraints:
            for request_id, row in zip(ids, rows.tolist()):
                if row in constraints and constraints[row].is_slow:
                    results[request_id].is_slow = True

    def _record_errors(
        self,
        output: SamplerOutput,
        rows: Ints,
        ids: list[str],
        results: dict[str, RequestStepResult],
        late_rows: Collection[int],
    ) -> None:
        """Report the rows that have no token, and keep those that failed from running again."""
        errors, dead_ends = dict(output.errors), dict(output.dead_ends)
        for r in late_rows:
            results.setdefault(ids[r], RequestStepResult()).is_slow = True
            errors.pop(r, None)  # seen again when its token is chosen, with its mask
            dead_ends.pop(r, None)
        for r, reason in errors.items():
            results.setdefault(ids[r], RequestStepResult()).error = reason
            self.requests.fail(int(rows[r]), reason)
        for r, reason in dead_ends.items():
            constraint = self.requests.sampling.constraints.get(int(rows[r]))
            result = results.setdefault(ids[r], RequestStepResult())
            if constraint is not None and constraint.error is not None:
                reason = result.error = constraint.error
            else:
                reason = result.dead_end = (constraint and constraint.failure) or reason
            self.requests.fail(int(rows[r]), reason)

    def _collect_prompt_logprobs(
        self, inputs: StepInputs, hidden: Tensor, results: dict[str, RequestStepResult]
    ) -> None:
        start = len(inputs.sampled)
        for part in inputs.prompt_rows:
            end = start + len(part.targets)
            entries = list(self._prompt_logprobs(hidden[start:end], part, inputs))
            result = results.setdefault(inputs.request_ids[part.index], RequestStepResult())
            if any(math.isnan(entry.logprobs[0]) for entry in entries):
                # The cache holds what they came from: the request cannot go on.
                result.error = "the model's logits for the prompt are not finite"
                self.requests.fail(int(inputs.rows[part.index]), result.error)
            else:
                result.prompt_logprobs = entries
            start = end

    def _prompt_logprobs(
        self, hidden: Tensor, part: PromptRows, inputs: StepInputs
    ) -> Iterator[TokenLogprobs]:
        """In slices: a whole prompt's logits would be gigabytes."""
        wanted = int(self.requests.sampling.num_prompt_logprobs[inputs.rows[part.index]])
        size = max(1, _PROMPT_LOGITS // self.vocab_size)
        for first in range(0, len(part.targets), size):
            logits = self.model.compute_logits(hidden[first : first + size])
            yield from self.sampler.prompt_logprobs(
                logits, part.targets[first : first + size], wanted
            )


def pass_failpoint(point: str, step: ScheduledStep) -> None:
    """Pass a failpoint for each request of a step."""
    for request_id in step.num_scheduled_tokens:
        failpoints.hit(point, request_id)


def _spoil(logits: Tensor, request_ids: Sequence[str], late_rows: Collection[int]) -> None:
    """Pass ``engine.step.sample`` for each row that gets a token; NaN for those whose failpoint says
    so."""
    for row, request_id in enumerate(request_ids):
        if row in late_rows:
            continue
        if failpoints.hit("engine.step.sample", request_id):
            logits[row] = math.nan

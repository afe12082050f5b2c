"""One step: apply what changed, build inputs, run the model, sample, remember what was sampled."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from headrace_core.attention import AttentionBackend
from headrace_core.batch import ForwardBatch
from headrace_core.errors import ReplayFailed
from headrace_core.graph import StepGraph
from headrace_core.kv import KVCacheConfig
from headrace_core.model import CausalLM, SupportsEncoderDecoder, SupportsMRoPE, SupportsMultiModal
from headrace_core.multimodal import MediaInput
from headrace_core.reliability import failpoints
from headrace_core.speculation import DraftProposer, ReadsStates
from headrace_core.step import RequestStepResult, ScheduledStep, StepResult, TokenLogprobs
from headrace_engine.encoder.transfer import EncoderTransfer
from headrace_engine.encoder.vectors_ahead import VectorsAhead
from headrace_engine.execution.alignment import Alignments
from headrace_engine.execution.cache import cross_groups
from headrace_engine.execution.inputs import (
    NO_DRAFTS,
    NOBODY,
    InputBuilder,
    PromptRows,
    StepInputs,
)
from headrace_engine.execution.late import LateRow, LateRows
from headrace_engine.execution.media import embed, encode, given_vectors
from headrace_engine.execution.media_vectors import MediaVectors
from headrace_engine.execution.populate import CachePopulator
from headrace_engine.execution.requests import Ints, RequestTable
from headrace_engine.kv.states import state_groups
from headrace_engine.lora.step_adapters import StepAdapters
from headrace_engine.sampling.processors import ProcessorStage
from headrace_engine.sampling.sampler import Sampler, SamplerOutput
from headrace_engine.speculation.drafter import Drafter
from headrace_engine.speculation.state_turns import StateTurns
from headrace_engine.speculation.states import StateTap
from headrace_engine.speculation.verification import DraftRun
from headrace_engine.structured.matching import ConstraintMaker, RowConstraint

logger = logging.getLogger(__name__)

_PROMPT_LOGITS = 1 << 24
"""Most logits (float32: 64 MiB) that prompt log-probabilities are computed from at once."""


class PreparedStep(NamedTuple):
    """A step whose pass may run."""

    step: ScheduledStep
    scheduled: Mapping[str, int]
    """Tokens of each request, of those that the pass is for."""
    inputs: StepInputs
    results: dict[str, RequestStepResult]
    """What is known before the pass."""
    late: dict[str, RequestStepResult]
    drafts: Mapping[str, Sequence[int]]
    behind: Mapping[str, int]


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
        adapters: the slots of the model's adapters; None: requests have none.
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
        adapters: StepAdapters | None = None,
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
        self.adapter_graph: StepGraph | None = None
        """The same for steps in which a request has an adapter."""
        self.adapters = adapters
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
        if adapters is not None:
            self.requests.follow(adapters)
        if processors is not None:
            self.requests.follow(processors)
        self.drafter: Drafter | None = None
        """Guesses tokens that steps check besides; None: nobody does."""
        self.tap: StateTap | None = None
        """Takes hidden states out of steps; None: nobody reads them."""
        self._highest_blocks: list[int] = []
        """By pool: as the populators were last told."""

    def guess_by(
        self,
        proposer: DraftProposer,
        *,
        adapts: bool,
        takes_time: bool = False,
        turns: StateTurns | None = None,
    ) -> None:
        """Have guesses checked from now on; before there are requests. Arguments as
        :class:`~headrace_engine.speculation.drafter.Drafter`'s, and where states are, if layers have
        any."""
        self.inputs.turns = turns
        if turns is not None:
            self.requests.follow(turns)
        self.drafter = Drafter(
            proposer,
            self.requests,
            adapts=adapts,
            takes_time=takes_time,
            allows=None if turns is None else turns.may_guess,
        )
        self.requests.follow(self.drafter)
        if isinstance(proposer, ReadsStates):
            self.tap = StateTap(proposer, self.model, self.requests)

    @torch.inference_mode()
    def execute(self, step: ScheduledStep) -> StepResult:
        """Run one step. A request that fails alone gets an error; an exception fails the step."""
        return self._complete(self._prepare(step))

    def _prepare(self, step: ScheduledStep) -> PreparedStep:
        """What comes before a step's pass."""
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
        drafts = self._draft(step)
        behind = self._behind(step, scheduled)
        inputs = self.inputs.build(scheduled, drafts, behind)
        for request_id, reason in inputs.errors.items():
            row = self.requests.row_of.get(request_id)
            results[request_id] = (
                RequestStepResult(dead_end=reason)
                if row in self.requests.dead_ends
                else RequestStepResult(error=reason)
            )
            results[request_id].not_computed = request_id not in inputs.request_ids
        return PreparedStep(step, scheduled, inputs, results, late, drafts, behind)

    def _complete(
        self, prepared: PreparedStep, states: Callable[[], Tensor] | None = None
    ) -> StepResult:
        """A step's pass, and what comes after it.

        Args:
            states: the hidden states of a pass that was launched, whose tokens are counted; None: it is
                still to run.
        """
        step, scheduled, inputs, results, late, drafts, behind = prepared
        seconds = 0.0
        if inputs.batch is None and self.late.rows:
            self._sample_late(self.late.matched(scheduled, wait_for_one=not late), late)
        if inputs.batch is not None:
            if self.processors is not None:
                self.processors.begin_step(inputs.sampled_ids)
            if states is None:
                self.launching()
                if failpoints.PLAN is not None:
                    pass_failpoint("engine.step.forward", step)
            hidden, logits, unknown, seconds = self._forward(inputs, step, states)
            if hidden is not None:
                self._collect_prompt_logprobs(inputs, hidden, results)
            if states is None:
                self._count_computed(inputs)
            if logits is not None:
                if drafts:
                    self._sample_runs(inputs, drafts, logits, results, unknown)
                else:
                    rows, sampled_ids = inputs.sampled_rows, inputs.sampled_ids
                    late_rows = self._keep_late(unknown, rows, sampled_ids, logits)
                    self._sample(rows, sampled_ids, logits, results, late_rows)
            if self.late.rows:
                self._sample_late(self.late.matched(step.num_scheduled_tokens), late)
            if self.tap is not None:
                self._tell_states(self.tap, inputs)
        if self.drafter is not None and step.num_tokens == len(step.num_scheduled_tokens):
            self.drafter.record(
                drafts, results, step.num_tokens, seconds, num_again=sum(behind.values())
            )
        ids = step.num_scheduled_tokens
        if len(inputs.sampled) < len(ids) or inputs.prompt_rows:  # some have other results, or none
            results = {i: results.get(i) or RequestStepResult() for i in ids}
        return StepResult(step.step_id, results, forward_seconds=seconds, late=late)

    def apply_changes(self, step: ScheduledStep) -> None:
        """First who is gone, then adapters, then who is new, then further blocks."""
        for request_id in step.gone_request_ids:
            self.requests.remove(request_id)
        if self.adapters is not None:
            self.adapters.choose_none()  # of the step's tokens; media have slots of their own
            self.adapters.place(step.placed_adapters)
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
        """A whole step but for sampling (:data:`headrace_core.graph.Step`): hidden states of all rows, where
        they are read."""
        if self.tap is not None:
            return self.tap.forward(self.with_metadata(batch))
        return self.model.compute_logits(self.model.forward(self.with_metadata(batch)))

    def record(self, record: Callable[..., StepGraph | None], **need: Any) -> StepGraph | None:
        """A graph of :meth:`whole_step`; None: steps run eagerly.

        Args:
            record: makes one of a step, with these fields of :class:`headrace_core.graph.GraphNeed`.
        """
        return record(self.whole_step, **need)

    def _forward(
        self, inputs: StepInputs, step: ScheduledStep, states: Callable[[], Tensor] | None
    ) -> tuple[Tensor | None, Tensor | None, Sequence[RowConstraint], float]:
        """Hidden states of the wanted rows if prompt rows are among them, the sampled requests'
        logits if there are any, constraints that are not matched yet, seconds for all of it."""
        assert inputs.batch is not None
        start = time.perf_counter()
        batch = self._with_encoder_states(inputs, inputs.batch)
        self._choose_adapters(inputs, inputs.logits_rows)
        hidden, logits = None, None if states is not None else self._replay(inputs, batch)
        if states is not None:
            hidden, logits = self._with_logits(inputs, states())
        elif self.tap is not None:
            hidden, logits = self._tapped(self.tap, logits, inputs, batch)
        elif logits is None:
            hidden, logits = self._run_eagerly(inputs, batch)
        unknown: Sequence[RowConstraint] = ()
        if self.requests.sampling.constraints:  # here, as a GPU is still computing
            unknown = self.requests.sampling.fill_masks(
                inputs.sampled_rows, allows_late=step.allows_late
            )
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        sampled = logits if len(inputs.sampled) else None
        wanted = hidden if inputs.prompt_rows else None
        return wanted, sampled, unknown, time.perf_counter() - start

    def _count_computed(self, inputs: StepInputs) -> None:
        self.requests.num_computed_tokens[inputs.rows] = inputs.seq_lens
        if self.inputs.turns is not None:
            self.inputs.turns.land(inputs.rows)

    def _whole_batch(self, inputs: StepInputs) -> ForwardBatch:
        """A batch with everything that an eager forward needs."""
        assert inputs.batch is not None
        batch = self._with_encoder_states(inputs, inputs.batch)
        self._choose_adapters(inputs, inputs.logits_rows)
        return self.with_metadata(batch)

    def _choose_adapters(self, inputs: StepInputs, logits_rows: Ints | None) -> None:
        """Choose slots for the rows of a pass.

        Args:
            logits_rows: [R]; tokens whose hidden states it gives. None: all.
        """
        if self.adapters is not None:
            self.adapters.choose(inputs.rows, inputs.token_rows, logits_rows)

    @property
    def fitting_graph(self) -> StepGraph | None:
        """The recording of steps such as the coming one; None: it runs eagerly."""
        if self.adapters is None or not self.adapters.chosen:
            return self.graph
        return None if self.adapters.runs_eagerly else self.adapter_graph

    def _embed_media(self, step: ScheduledStep) -> None:
        """Have the media embedded whose placeholders the step reaches."""
        self.inputs.media.embed_due(
            step.num_scheduled_tokens, self._vectors_of, self.inputs.prompts
        )

    def _vectors_of(self, due: Sequence[tuple[int, MediaInput]]) -> Sequence[Tensor]:
        """Vectors of items of rows, each with its request's adapter."""
        if self.adapters is None:
            return self.media_vectors([item for _, item in due])
        return self.adapters.embed(due, self.media_vectors)

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
        num_sampled: int | None = inputs.num_logits
        graph = self.fitting_graph
        if self.tap is not None:  # such steps give all rows
            batch, num_sampled = dataclasses.replace(batch, logits_rows=None), None
        elif inputs.prompt_rows:
            return None
        if graph is None or not graph.fits(batch, num_sampled):
            return None
        try:
            return graph.replay(batch, num_sampled)
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
        return self._with_logits(inputs, self.model.forward(self.with_metadata(batch)))

    def _tapped(
        self, tap: StateTap, states: Tensor | None, inputs: StepInputs, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor | None]:
        """As :meth:`_run_eagerly`, by hidden states of all rows; None: they are still to be computed."""
        if states is None:
            states = tap.forward(self.with_metadata(batch))
        return self._with_logits(inputs, tap.take(states, batch.logits_rows))

    def _tell_states(self, tap: StateTap, inputs: StepInputs) -> None:
        if self.adapters is not None:
            self.adapters.choose_none()  # whoever reads states has none
        try:
            tap.tell(inputs)
        except Exception:
            logger.exception("the draft proposer failed: nothing is guessed any more")
            self.drafter = None

    def _with_logits(self, inputs: StepInputs, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Hidden states of the wanted rows, and logits of those that get a token."""
        num_sampled = inputs.num_logits
        if not num_sampled:
            return hidden, None
        rows = hidden if num_sampled == hidden.shape[0] else hidden[:num_sampled]
        if inputs.prompt_rows:
            self._choose_logits(inputs, 0, num_sampled)
        return hidden, self.model.compute_logits(rows)

    def _choose_logits(self, inputs: StepInputs, start: int, end: int) -> None:
        """Choose slots for logits of rows ``start`` to ``end`` of the pass's hidden states."""
        if self.adapters is not None and inputs.logits_rows is not None:
            self.adapters.choose_logits(inputs.logits_rows[start:end])

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

    def _draft(self, step: ScheduledStep) -> Mapping[str, Sequence[int]]:
        """Guesses for this step, which stand behind the requests' tokens in the table from now on."""
        if self.drafter is None:
            return NO_DRAFTS
        drafts = (
            self.drafter.drafts(step.num_drafts, step.num_tokens) if step.num_drafts else NO_DRAFTS
        )
        self.requests.place_drafts(drafts)
        return drafts

    def _behind(self, step: ScheduledStep, scheduled: Mapping[str, int]) -> Mapping[str, int]:
        """Tokens to compute again in this step, by request, as its state is behind them. Where the step
        has no room for a request's, they are computed now, by themselves."""
        turns = self.inputs.turns
        behind = NOBODY if turns is None else turns.behind(list(scheduled))
        alone = {i: count for i, count in behind.items() if count > step.num_drafts.get(i, 0)}
        if not alone:
            return behind
        inputs = self.inputs.build(alone)
        batch = self._whole_batch(inputs)
        if self.tap is None:
            self.model.forward(batch)
        else:
            self.tap.take(self.tap.forward(batch), None)
        self._count_computed(inputs)
        if self.tap is not None:
            self._tell_states(self.tap, inputs)
        return {i: count for i, count in behind.items() if i not in alone}

    def _sample_runs(
        self,
        inputs: StepInputs,
        drafts: Mapping[str, Sequence[int]],
        logits: Tensor,
        results: dict[str, RequestStepResult],
        unknown: Sequence[RowConstraint],
    ) -> None:
        """Choose tokens position after position, as long as guesses are what is chosen
        (:mod:`~headrace_engine.speculation.verification`)."""
        run = DraftRun(inputs.sampled_ids, inputs.sampled_rows, drafts)
        while run.request_ids:
            rows, ids, part = run.rows, run.request_ids, _picked(logits, run.logits_rows)
            late_rows = () if run.depth else self._keep_late(unknown, rows, ids, part)
            self._sample(rows, ids, part, results, late_rows, further=run.depth > 0)
            run.advance(results)
            self._prepare_further(run)
        for request_id, draft in drafts.items():
            result = results.get(request_id)
            if result is not None:
                result.num_drafted = len(draft)
        guessed = self.requests.num_drafts[inputs.rows] > 0
        self._settle(inputs.rows[guessed], inputs.seq_lens[guessed])

    def _settle(self, rows: Ints, planned: Ints) -> None:
        """Count as computed what was right of the tokens and guesses of these rows.

        Args:
            planned: [B]; the rows' computed tokens if all were.
        """
        table, turns = self.requests, self.inputs.turns
        known, first = table.num_tokens[rows], planned - table.num_drafts[rows]
        # The token before the guesses is right, also where what follows it is chosen later.
        table.num_computed_tokens[rows] = np.maximum(known - 1, first)
        if turns is None:
            return
        for row, count, end, start in zip(
            *(part.tolist() for part in (rows, known, planned, first))
        ):
            if count - 1 != end:
                table.num_computed_tokens[row] = start - 1
            turns.settle(row, count - 1 == end)

    def _prepare_further(self, run: DraftRun) -> None:
        """Find out what the tokens so far allow at the next position; who would have to wait for that goes
        on in the next step."""
        if self.requests.sampling.constraints and run.request_ids:
            unknown = self.requests.sampling.fill_masks(run.rows, allows_late=True)
            if unknown:
                known = self.requests.sampling.constraints
                run.keep([known.get(row) not in unknown for row in run.rows.tolist()])
        if self.processors is not None and run.request_ids:
            self.processors.begin_step(run.request_ids)

    def _sample(
        self,
        rows: Ints,
        ids: list[str],
        logits: Tensor,
        results: dict[str, RequestStepResult],
        late_rows: Collection[int] = (),
        *,
        further: bool = False,
    ) -> None:
        """Choose tokens, append them to the requests' lists, fill in the results.

        Args:
            rows: [R]; of the request table.
            ids: R request ids.
            logits: [R, V]; changed.
            results: gains what was chosen.
            late_rows: indices (0..R-1) of rows whose tokens are left open.
            further: the requests have tokens of this step. What is wrong with one is left to the next
                step, where this position comes first.
        """
        if failpoints.PLAN is not None:
            _spoil(logits, ids, late_rows)
        batch = self.requests.sampling.batch(rows, self.requests)
        if self.processors is not None:
            batch = self.processors.bind(batch, ids)
        output = self.sampler(logits, batch)
        tokens, all_ids = output.token_ids, ids
        if output.errors or output.dead_ends or late_rows:
            if not further:
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
                    result.token_ids.append(token)
        for r, logprobs in output.logprobs.items():
            if further and (r in output.errors or r in output.dead_ends):
                continue
            result = results[all_ids[r]]
            if result.error is None and result.dead_end is None and r not in late_rows:
                result.logprobs = [*(result.logprobs or ()), logprobs]
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
        start = inputs.num_logits
        for part in inputs.prompt_rows:
            end = start + len(part.targets)
            entries = list(self._prompt_logprobs(hidden, start, part, inputs))
            result = results.setdefault(inputs.request_ids[part.index], RequestStepResult())
            if any(math.isnan(entry.logprobs[0]) for entry in entries):
                # The cache holds what they came from: the request cannot go on.
                result.error = "the model's logits for the prompt are not finite"
                self.requests.fail(int(inputs.rows[part.index]), result.error)
            else:
                result.prompt_logprobs = entries
            start = end

    def _prompt_logprobs(
        self, hidden: Tensor, start: int, part: PromptRows, inputs: StepInputs
    ) -> Iterator[TokenLogprobs]:
        """In slices: a whole prompt's logits would be gigabytes. Its rows begin at ``start``."""
        wanted = int(self.requests.sampling.num_prompt_logprobs[inputs.rows[part.index]])
        size = max(1, _PROMPT_LOGITS // self.vocab_size)
        for first in range(0, len(part.targets), size):
            targets = part.targets[first : first + size]
            begin = start + first
            end = begin + len(targets)
            self._choose_logits(inputs, begin, end)
            logits = self.model.compute_logits(hidden[begin:end])
            yield from self.sampler.prompt_logprobs(logits, targets, wanted)


def pass_failpoint(point: str, step: ScheduledStep) -> None:
    """Pass a failpoint for each request of a step."""
    for request_id in step.num_scheduled_tokens:
        failpoints.hit(point, request_id)


def _picked(logits: Tensor, rows: Ints) -> Tensor:
    """Those rows of the logits: a view if they follow each other, else a copy."""
    first, count = int(rows[0]), len(rows)
    if int(rows[-1]) - first == count - 1:
        return logits[first : first + count]
    return logits[torch.from_numpy(rows).to(logits.device)]


def _spoil(logits: Tensor, request_ids: Sequence[str], late_rows: Collection[int]) -> None:
    """Pass ``engine.step.sample`` for each row that gets a token; NaN for those whose failpoint says
    so."""
    for row, request_id in enumerate(request_ids):
        if row in late_rows:
            continue
        if failpoints.hit("engine.step.sample", request_id):
            logits[row] = math.nan

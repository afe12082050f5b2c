"""From logits to tokens, as a list of steps.

1. constraints, allowed and bad words 5. penalties; the end of reasoning, where it is due
2. min_tokens                         6. greedy rows end here: the largest logit
3. logit bias                         7. temperature, min_p, top_k and top_p
4. users' logits processors           8. draw by the request's own random number

Steps 1 to 5 change single logits, in float32, of the rows that ask for it. The rest is the op
:class:`~headrace_core.ops.SampleOp`, which reads logits in any dtype and gives a row the same bits
in any batch if the kernels are row-invariant. Processors that never change which logit is the
largest work between min_p and top_k instead, on rows that are not greedy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace_core.errors import ConfigError
from headrace_core.ops import SampleOp, TopLogprobsOp
from headrace_core.sampling.params import GREEDY_BELOW
from headrace_core.step import TokenLogprobs
from headrace_engine.sampling.logprobs import MODES, describe, describe_tokens, joined
from headrace_engine.sampling.masks import (
    apply_allowed_tokens,
    apply_bad_words,
    apply_constraints,
    apply_logit_bias,
    apply_min_tokens,
    apply_thinking,
)
from headrace_engine.sampling.penalties import apply_penalties
from headrace_engine.sampling.processors import BoundStage
from headrace_engine.sampling.state import SamplingBatch

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """The choice for R rows."""

    token_ids: npt.NDArray[np.int64]
    """[R]; meaningless for rows in ``errors``."""
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    """Row -> log-probabilities, for requests that asked for them."""
    errors: Mapping[int, str] = field(default_factory=dict)
    """Row -> why no token could be chosen."""
    dead_ends: Mapping[int, str] = field(default_factory=dict)
    """Row -> the request's parameters that together leave no token. Nothing has failed."""


class _Choice(NamedTuple):
    token_ids: Tensor
    """[R] int64."""
    largest: Tensor
    """[R] float32; the largest logit."""


class Sampler:
    """Chooses tokens. Holds no request state. One thread only.

    Args:
        sample: chooses a token from processed logits.
        top_logprobs: describes it and the best ones.
        logprobs_mode: ``raw_logprobs``, ``raw_logits`` (before any processing),
            ``processed_logprobs`` or ``processed_logits`` (after all of it).

    Raises:
        ConfigError: another mode.
    """

    def __init__(
        self,
        sample: SampleOp,
        top_logprobs: TopLogprobsOp,
        *,
        logprobs_mode: str = "raw_logprobs",
    ) -> None:
        if logprobs_mode not in MODES:
            raise ConfigError(
                f"model.logprobs_mode = {logprobs_mode!r}: must be one of {list(MODES)}",
                field="model.logprobs_mode",
            )
        self.logprobs_mode = logprobs_mode
        self._sample = sample
        self._top_logprobs = top_logprobs
        self._room: Tensor | None = None

    def __call__(self, logits: Tensor, batch: SamplingBatch) -> SamplerOutput:
        """Choose one token per row.

        Args:
            logits: [R, V], any floating dtype; changed.
            batch: the rows' settings.
        """
        asked = batch.asked
        if not asked.size:
            choice = self._choose(logits, batch, keep_filtered=False)
            return _output(choice, {}, batch)
        if self.logprobs_mode.startswith("raw"):
            values = _rows(logits, asked)
            if values is logits and _changes(logits, batch):
                values = logits.clone()
            choice = self._choose(logits, batch, keep_filtered=False)
        else:
            logits = logits.float()
            choice = self._choose(logits, batch, keep_filtered=True)
            values = _rows(logits, asked)
        chosen = _rows(choice.token_ids, asked)
        wanted = batch.num_logprobs[asked]
        entries = describe(self._top_logprobs, values, chosen, wanted, self.logprobs_mode)
        for i, row in enumerate(asked.tolist() if batch.logprob_ids else ()):
            ids = batch.logprob_ids.get(row)
            if ids:
                further = describe_tokens(self._top_logprobs, values[i], ids, self.logprobs_mode)
                entries[i] = joined(entries[i], further)
        return _output(choice, dict(zip(asked.tolist(), entries)), batch)

    def _choose(self, logits: Tensor, batch: SamplingBatch, *, keep_filtered: bool) -> _Choice:
        if batch.processors is not None:
            return self._choose_processed(logits, batch, batch.processors, keep_filtered)
        if not batch.rules:
            return self._draw(logits, batch, keep_filtered)
        if _changes(logits, batch):
            _apply_rules(logits, batch)
            return self._draw(logits, batch, keep_filtered)
        # Half precision has no room for small biases: rows with rules go on in float32.
        rows = np.array([r for r, _, _ in batch.rules], np.int64)
        settings = batch.select(rows)
        part = self._widened(logits, rows)
        _apply_rules(part, settings)
        ruled = self._draw(part, settings, keep_filtered=False)
        if len(rows) == logits.shape[0]:
            return ruled
        temperature = batch.temperature.copy()
        temperature[rows] = 0.0  # the least work: what these rows get is replaced
        choice = self._draw(logits, replace(batch, temperature=temperature), keep_filtered=False)
        index = torch.from_numpy(rows).to(logits.device)
        choice.token_ids[index], choice.largest[index] = ruled
        return choice

    def _choose_processed(
        self, logits: Tensor, batch: SamplingBatch, processors: BoundStage, keep_filtered: bool
    ) -> _Choice:
        """With users' logits processors, which get every row in float32."""
        values = logits
        if logits.dtype != torch.float32:
            values = self._widened(logits, np.arange(logits.shape[0]))
        _apply_masks(values, batch)
        processors.apply_changing(values)
        apply_penalties(values, batch)
        apply_thinking(values, batch)
        if processors.has_invariant and not batch.greedy:
            batch = _apply_invariant(values, batch, processors)
        return self._draw(values, batch, keep_filtered)

    def _widened(self, logits: Tensor, rows: Rows) -> Tensor:
        """Those rows as float32 [n, V], in memory that the next call overwrites: to ask the system
        for tens of megabytes in every step takes longer than to choose the tokens."""
        shape = (len(rows), logits.shape[1])
        room = self._room
        if room is None or room.shape[0] < shape[0] or room.shape[1] != shape[1]:
            room = self._room = torch.empty(shape, dtype=torch.float32, device=logits.device)
        part = room[: shape[0]]
        if shape[0] == logits.shape[0]:
            return part.copy_(logits)
        for i, row in enumerate(rows.tolist()):
            part[i].copy_(logits[row])
        return part

    def _draw(self, logits: Tensor, batch: SamplingBatch, keep_filtered: bool) -> _Choice:
        settings = (*batch.tensors, batch.uniform)
        return _Choice(*self._sample(logits, *settings, keep_filtered=keep_filtered))

    def prompt_logprobs(
        self, logits: Tensor, targets: npt.NDArray[Any], wanted: int
    ) -> list[TokenLogprobs]:
        """Entries for prompt tokens: raw values in every mode, as nothing was sampled.

        Args:
            logits: [n, V], any floating dtype.
            targets: [n]; the prompt token after each row.
            wanted: how many best tokens; -1 = all.
        """
        chosen = torch.from_numpy(np.ascontiguousarray(targets, np.int64)).to(logits.device)
        counts = np.full(len(targets), wanted, np.int64)
        return describe(self._top_logprobs, logits, chosen, counts, self.logprobs_mode)


def _changes(logits: Tensor, batch: SamplingBatch) -> bool:
    """True if rules are applied to the logits themselves."""
    changes = bool(batch.rules) or batch.processors is not None
    return changes and logits.dtype == torch.float32


def _apply_rules(logits: Tensor, batch: SamplingBatch) -> None:
    _apply_masks(logits, batch)
    apply_penalties(logits, batch)
    apply_thinking(logits, batch)


def _apply_masks(logits: Tensor, batch: SamplingBatch) -> None:
    apply_constraints(logits, batch)
    apply_allowed_tokens(logits, batch)
    apply_bad_words(logits, batch)
    apply_min_tokens(logits, batch)
    apply_logit_bias(logits, batch)


def _apply_invariant(values: Tensor, batch: SamplingBatch, processors: BoundStage) -> SamplingBatch:
    """Let processors work on the rows that are drawn from, after temperature and min_p.

    Rows that they leave alone keep their logits and settings, and so their bits; the others hold
    the result, and the settings say that temperature and min_p are done.

    Args:
        values: [R, V] float32; changed.
    """
    random = batch.temperature >= GREEDY_BELOW
    temperature, min_p = batch.temperature.copy(), batch.min_p.copy()
    temperature[~random], min_p[~random] = 1.0, 0.0
    before = values.clone()
    before.mul_(torch.from_numpy(temperature).to(values.device).reciprocal()[:, None])
    before = _apply_min_p(before, torch.from_numpy(min_p).to(values.device))
    after = before.clone()
    processors.apply_invariant(after)
    changed = (after != before).any(dim=1).cpu().numpy() & random
    rows = torch.from_numpy(np.flatnonzero(changed)).to(values.device)
    values[rows] = after[rows]
    temperature, min_p = batch.temperature.copy(), batch.min_p.copy()
    temperature[changed], min_p[changed] = 1.0, 0.0
    return replace(batch, temperature=temperature, min_p=min_p)


def _apply_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """-inf for tokens less likely than ``min_p`` [R] times the likeliest of logits [R, V].

    The bound is rounded once, as by the op ``sample``: both keep the same tokens, bit for bit.
    """
    least = logits.amax(dim=-1) + min_p.double().log().to(logits.dtype)
    return logits.masked_fill(logits < least[:, None], -torch.inf)


def _rows(values: Tensor, rows: Rows) -> Tensor:
    """Those rows: the tensor itself if they are all, else a copy."""
    if len(rows) == values.shape[0]:
        return values
    return values[torch.from_numpy(rows).to(values.device)]


def _output(
    choice: _Choice, logprobs: Mapping[int, TokenLogprobs], batch: SamplingBatch
) -> SamplerOutput:
    token_ids, largest = choice
    if largest.device.type != "cpu":
        token_ids, largest = token_ids.cpu(), largest.cpu()
    return SamplerOutput(token_ids.numpy(), logprobs, *_unusable(largest.numpy(), batch))


def _unusable(
    largest: npt.NDArray[np.float32], batch: SamplingBatch
) -> tuple[dict[int, str], dict[int, str]]:
    """Rows from which nothing can be chosen: errors, and dead ends."""
    errors: dict[int, str] = {}
    dead_ends: dict[int, str] = {}
    if math.isfinite(largest.sum()):
        return errors, dead_ends  # one look at all: hardly ever is one not finite
    rules = {r: one.fields(len(output)) for r, one, output in batch.rules}
    for r in np.flatnonzero(~np.isfinite(largest)).tolist():
        fields = rules.get(r, [])
        if largest[r] == -np.inf and fields:
            dead_ends[r] = f"no token is possible with {_listed(fields)}"
        elif largest[r] == -np.inf:
            errors[r] = (
                "no token is possible: the model, or a logits processor, excludes all of them"
            )
        else:
            errors[r] = f"the model's logits are not finite ({float(largest[r])})"
    return errors, dead_ends


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"

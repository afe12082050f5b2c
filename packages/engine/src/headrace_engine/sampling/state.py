"""Sampling settings of the requests that a worker holds: columns by row, rules for the few.

Numbers that every sampled row needs (temperature, top_p, ...) are columns. What only some requests
ask for (penalties, biases, forbidden tokens) is a :class:`LogitsConstraints` object of that row, so that
the others cost nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace_core.sampling.params import GREEDY_BELOW
from headrace_core.step import NewRequest
from headrace_engine.sampling.logits_constraints import LogitsConstraints, make_constraints
from headrace_engine.structured.matching import RowConstraint, fill_masks

if TYPE_CHECKING:
    from headrace_engine.execution.requests import RequestTable
    from headrace_engine.sampling.processors import BoundStage

Ints = npt.NDArray[np.int64]

NOT_WANTED = -2
"""In columns of log-probability counts: the request asked for none."""

_COLUMNS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "keys",
    "num_logprobs",
    "num_prompt_logprobs",
)


@dataclass(frozen=True)
class SamplingBatch:
    """Settings of the R rows of one step that get a token. All arrays are [R]."""

    temperature: npt.NDArray[np.float32]
    """Below ``GREEDY_BELOW``: greedy."""
    top_p: npt.NDArray[np.float64]
    top_k: Ints
    """0 = all."""
    min_p: npt.NDArray[np.float32]
    keys: npt.NDArray[np.uint64]
    num_logprobs: Ints
    """-1 = whole vocabulary, :data:`NOT_WANTED` = none."""
    num_output_tokens: Ints
    """Index of the token that is being chosen, within its request's output."""
    rules: Sequence[tuple[int, LogitsConstraints, npt.NDArray[Any]]]
    """(r, rules, output tokens so far) of the rows that have rules."""
    logprob_ids: Mapping[int, list[int]] = field(default_factory=dict)
    """By index: further tokens to describe, of the few rows that have some."""
    processors: BoundStage | None = None
    """Users' logits processors; None if there are none."""

    # What follows from the settings is found out once: a batch serves many steps.

    @cached_property
    def asked(self) -> Ints:
        """Indices of the rows that want log-probabilities."""
        return np.flatnonzero(self.num_logprobs != NOT_WANTED)

    @cached_property
    def greedy(self) -> bool:
        """True if all rows are."""
        return bool(is_greedy(self.temperature).all())

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """temperature, min_p, top_k and top_p, as :class:`~headrace_core.ops.SampleOp` takes them."""
        columns = (self.temperature, self.min_p, self.top_k, self.top_p)
        return tuple(torch.from_numpy(column) for column in columns)

    @property
    def uniform(self) -> Tensor:
        """Every row's own random number; zeros if nobody draws."""
        if self.greedy:
            return self._zeros
        return torch.from_numpy(uniforms(self.keys, self.num_output_tokens))

    @cached_property
    def _zeros(self) -> Tensor:
        return torch.zeros(len(self.temperature), dtype=torch.float64)

    def select(self, rows: Ints) -> SamplingBatch:
        """The settings of ``rows``, which must hold all that have rules and ascend."""
        return SamplingBatch(
            temperature=self.temperature[rows],
            top_p=self.top_p[rows],
            top_k=self.top_k[rows],
            min_p=self.min_p[rows],
            keys=self.keys[rows],
            num_logprobs=self.num_logprobs[rows],
            num_output_tokens=self.num_output_tokens[rows],
            rules=[(i, rules, output) for i, (_, rules, output) in enumerate(self.rules)],
        )


class SamplingTable:
    """Columns by request row; see the module's docstring.

    Args:
        num_rows: rows to begin with.
        vocab_size: for checking token ids.
        seed: of requests that bring none.
    """

    def __init__(self, num_rows: int, *, vocab_size: int, seed: int) -> None:
        self.vocab_size = vocab_size
        self.seed = seed
        self.temperature = np.zeros(num_rows, np.float32)
        self.top_p = np.ones(num_rows, np.float64)
        self.top_k = np.zeros(num_rows, np.int64)
        self.min_p = np.zeros(num_rows, np.float32)
        self.keys = np.zeros(num_rows, np.uint64)
        self.num_logprobs = np.full(num_rows, NOT_WANTED, np.int64)
        self.num_prompt_logprobs = np.full(num_rows, NOT_WANTED, np.int64)
        self.logprob_ids: dict[int, list[int]] = {}
        """By row: further tokens whose log-probabilities are wanted."""
        self.rules: dict[int, LogitsConstraints] = {}
        self.constraints: dict[int, RowConstraint] = {}
        """Those of ``rules`` that have one."""
        self._last: tuple[Ints, SamplingBatch] | None = None
        """Rows and their batch, as long as nothing of it has changed."""

    def add(self, row: int, new: NewRequest, constraint: RowConstraint | None = None) -> None:
        """Take a request's settings."""
        self._last = None
        params = new.request.params
        self.temperature[row] = params.temperature
        self.top_p[row] = params.top_p
        self.top_k[row] = max(params.top_k, 0)
        self.min_p[row] = params.min_p
        self.keys[row] = request_key(params.seed, engine_seed=self.seed, request_id=new.request_id)
        least = 0 if params.wants_logprobs else NOT_WANTED
        self.num_logprobs[row] = least if params.logprobs is None else params.logprobs
        if params.logprob_token_ids:
            self.logprob_ids[row] = params.logprob_token_ids
        self.num_prompt_logprobs[row] = (
            NOT_WANTED if params.prompt_logprobs is None else params.prompt_logprobs
        )
        rules = make_constraints(new, self.vocab_size, constraint)
        if rules is not None:
            self.rules[row] = rules
        if constraint is not None:
            self.constraints[row] = constraint

    def remove(self, row: int) -> None:
        """Forget a row's request."""
        self._last = None
        self.logprob_ids.pop(row, None)
        self.rules.pop(row, None)
        constraint = self.constraints.pop(row, None)
        if constraint is not None:
            constraint.drop()
        self.num_prompt_logprobs[row] = NOT_WANTED

    def observe(self, rows: Ints, token_ids: Ints) -> None:
        """The rows' outputs have grown by one token each."""
        if not self.rules:
            return
        for row, token in zip(rows.tolist(), token_ids.tolist()):
            rules = self.rules.get(row)
            if rules is not None:
                rules.observe(token)

    def fill_masks(self, rows: Ints, *, allows_late: bool = False) -> list[RowConstraint]:
        """Find out which tokens the constraints of these rows allow next; see
        :func:`~headrace_engine.structured.matching.fill_masks`."""
        constraints = self.constraints
        found = [constraints[row] for row in rows.tolist() if row in constraints]
        return fill_masks(found, allows_late=allows_late)

    def wants_prompt_logprobs(self, rows: Ints) -> list[int]:
        """Indices into ``rows`` of the requests that asked for prompt log-probabilities."""
        wanted: list[int] = np.flatnonzero(self.num_prompt_logprobs[rows] != NOT_WANTED).tolist()
        return wanted

    def batch(self, rows: Ints, requests: RequestTable) -> SamplingBatch:
        """The settings of the rows that are sampled in this step.

        Good until the next call: asked for the same array of rows again, it gives the same object,
        with other ``num_output_tokens``, unless all are greedy, so that nobody reads them.
        """
        last = self._last
        if last is not None and last[0] is rows and last[1].greedy:
            return last[1]
        done = requests.num_tokens[rows] - requests.num_prompt_tokens[rows]
        if last is not None and last[0] is rows:
            last[1].num_output_tokens[:] = done
            return last[1]
        rules: list[tuple[int, LogitsConstraints, npt.NDArray[Any]]] = []
        if self.rules:
            rules = [
                (r, self.rules[row], requests.output_tokens(row))
                for r, row in enumerate(rows.tolist())
                if row in self.rules
            ]
        batch = SamplingBatch(
            temperature=self.temperature[rows],
            top_p=self.top_p[rows],
            top_k=self.top_k[rows],
            min_p=self.min_p[rows],
            keys=self.keys[rows],
            num_logprobs=self.num_logprobs[rows],
            num_output_tokens=done,
            rules=rules,
            logprob_ids=self._logprob_ids(rows),
        )
        # Rules come with the output so far, which is another one in every step.
        self._last = None if rules else (rows, batch)
        return batch

    def _logprob_ids(self, rows: Ints) -> dict[int, list[int]]:
        if not self.logprob_ids:
            return {}
        found = ((r, self.logprob_ids.get(row)) for r, row in enumerate(rows.tolist()))
        return {r: ids for r, ids in found if ids}

    def grow(self, num_rows: int) -> None:
        """Make room for more rows."""
        for name in _COLUMNS:
            old = getattr(self, name)
            larger = np.zeros(num_rows, old.dtype)
            larger[: len(old)] = old
            setattr(self, name, larger)
        # A row that was never used wants nothing.
        old_rows = len(old)
        self.num_logprobs[old_rows:] = NOT_WANTED
        self.num_prompt_logprobs[old_rows:] = NOT_WANTED


def is_greedy(temperature: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
    """[R] bool."""
    return temperature < GREEDY_BELOW


def warm_up_batch(num_rows: int) -> SamplingBatch:
    """Settings that use every filter, for measuring and warming up."""
    return SamplingBatch(
        temperature=np.ones(num_rows, np.float32),
        top_p=np.full(num_rows, 0.9),
        top_k=np.zeros(num_rows, np.int64),
        min_p=np.full(num_rows, 0.01, np.float32),
        keys=np.zeros(num_rows, np.uint64),
        num_logprobs=np.full(num_rows, NOT_WANTED, np.int64),
        num_output_tokens=np.zeros(num_rows, np.int64),
        rules=(),
    )


_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def request_key(seed: int | None, *, engine_seed: int, request_id: str) -> int:
    """The key of a request: of its own seed alone, or of the engine's seed and its id."""
    text = f"request {seed}" if seed is not None else f"engine {engine_seed} {request_id}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def uniforms(
    keys: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Random numbers in [0, 1), multiples of 2^-53, one per (key, position).

    They depend on nothing else: no state is advanced, so batching, preemption, restarts and overlapped
    steps cannot change them.

    SplitMix64's output function (Steele, Lea & Flood 2014, "Fast splittable pseudorandom number
    generators") at counter ``position + 1`` of the stream that starts at ``key``.
    """
    z = keys + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    z ^= z >> np.uint64(31)
    numbers: npt.NDArray[np.float64] = (z >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers

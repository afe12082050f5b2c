"""From logits to tokens, as a list of steps.

1. allowed tokens, bad words          4. penalties
2. min_tokens                         5. greedy rows end here: the largest logit
3. logit bias                         6. temperature, min_p, top_k and top_p
                                      7. draw by the request's own random number

Everything is float32 on the logits' device, touches only rows that ask for it, and gives a row the
same bits in any batch (on the CPU; see :mod:`headrace_engine.sampling.filters`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace_core.errors import ConfigError
from headrace_core.step import TokenLogprobs
from headrace_engine.sampling.draw import draw
from headrace_engine.sampling.filters import apply_min_p, apply_temperature, apply_top_k_top_p
from headrace_engine.sampling.logprobs import MODES, describe, values_for
from headrace_engine.sampling.masks import (
    apply_allowed_tokens,
    apply_bad_words,
    apply_logit_bias,
    apply_min_tokens,
)
from headrace_engine.sampling.noise import uniforms
from headrace_engine.sampling.penalties import apply_penalties
from headrace_engine.sampling.state import NOT_WANTED, SamplingBatch, is_greedy

Rows = npt.NDArray[np.int64]

_AT_ONCE = 1 << 18
"""Logits that are filtered and drawn from at once: intermediates stay in the cache (CPU) and in
a few megabytes (everywhere)."""


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """What was chosen for R rows."""

    token_ids: npt.NDArray[np.int64]
    """[R]; meaningless for rows in ``errors``."""
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """By row, for those that asked."""
    errors: dict[int, str] = field(default_factory=dict)
    """By row: why no token could be chosen."""


class Sampler:
    """Chooses tokens. Holds no request state.

    Args:
        logprobs_mode: ``raw_logprobs``, ``raw_logits`` (before any processing),
            ``processed_logprobs`` or ``processed_logits`` (after all of it).

    Raises:
        ConfigError: another mode.
    """

    def __init__(self, *, logprobs_mode: str = "raw_logprobs") -> None:
        if logprobs_mode not in MODES:
            raise ConfigError(
                f"model.logprobs_mode = {logprobs_mode!r}: must be one of {list(MODES)}",
                field="model.logprobs_mode",
            )
        self.logprobs_mode = logprobs_mode

    def __call__(self, logits: Tensor, batch: SamplingBatch) -> SamplerOutput:
        """Choose one token per row.

        Args:
            logits: [R, V] float32; changed.
            batch: the rows' settings.
        """
        asked = np.flatnonzero(batch.num_logprobs != NOT_WANTED)
        raw = self.logprobs_mode.startswith("raw")
        values = (
            values_for(self.logprobs_mode, _rows(logits, asked)) if raw and asked.size else None
        )

        if batch.rules:
            apply_allowed_tokens(logits, batch)
            apply_bad_words(logits, batch)
            apply_min_tokens(logits, batch)
            apply_logit_bias(logits, batch)
            apply_penalties(logits, batch)

        token_ids = logits.argmax(dim=-1)  # of a row that holds a NaN, its place
        largest = logits.gather(1, token_ids[:, None]).squeeze(1)
        errors = _unusable(logits, largest)
        random = np.flatnonzero(~is_greedy(batch.temperature))
        if random.size:
            token_ids = self._draw(logits, token_ids, random, batch)

        if not raw and asked.size:
            values = values_for(self.logprobs_mode, _rows(logits, asked))
        logprobs = {} if values is None else _describe(values, token_ids, asked, batch)
        return SamplerOutput(token_ids.cpu().numpy(), logprobs, errors)

    def _draw(self, logits: Tensor, token_ids: Tensor, rows: Rows, batch: SamplingBatch) -> Tensor:
        """Replace the random rows' tokens; in processed modes their logits too."""
        noise = torch.from_numpy(uniforms(batch.keys[rows], batch.num_output_tokens[rows]))
        noise = noise.to(logits.device)
        token_ids = token_ids.clone()
        size = max(1, _AT_ONCE // logits.shape[1])
        for first in range(0, len(rows), size):
            part = rows[first : first + size]
            index = torch.from_numpy(part).to(logits.device)
            filtered = filter_logits(
                logits[index],
                batch.temperature[part],
                batch.min_p[part],
                batch.top_k[part],
                batch.top_p[part],
            )
            token_ids[index] = draw(filtered, noise[first : first + size])
            if self.logprobs_mode.startswith("processed"):
                logits[index] = filtered
        return token_ids

    def prompt_logprobs(
        self, logits: Tensor, targets: npt.NDArray[Any], wanted: int
    ) -> list[TokenLogprobs]:
        """Entries for prompt tokens: raw values in every mode, as nothing was sampled.

        Args:
            logits: [n, V] float32.
            targets: [n]; the prompt token after each row.
            wanted: how many best tokens; -1 = all.
        """
        values = values_for(self.logprobs_mode, logits)
        chosen = torch.from_numpy(np.ascontiguousarray(targets, np.int64)).to(logits.device)
        return list(describe(values, chosen, [wanted] * len(targets)))


def filter_logits(
    logits: Tensor,
    temperature: npt.NDArray[np.float32],
    min_p: npt.NDArray[np.float64],
    top_k: Rows,
    top_p: npt.NDArray[np.float64],
) -> Tensor:
    """Temperature, min_p, top_k, top_p, in that order: logits [R, V], which are changed."""
    device = logits.device
    apply_temperature(logits, torch.from_numpy(temperature).to(device))
    some = np.flatnonzero(min_p > 0)
    if some.size:
        part = torch.from_numpy(min_p[some].astype(np.float32)).to(device)
        logits = _put(logits, some, apply_min_p(_rows(logits, some), part))
    some = np.flatnonzero((top_k > 0) | (top_p < 1))
    if some.size:
        part = apply_top_k_top_p(_rows(logits, some), top_k[some], top_p[some])
        logits = _put(logits, some, part)
    return logits


def _rows(logits: Tensor, rows: Rows) -> Tensor:
    """Those rows: the tensor itself if they are all, else a copy."""
    if len(rows) == logits.shape[0]:
        return logits
    return logits[torch.from_numpy(rows).to(logits.device)]


def _put(logits: Tensor, rows: Rows, part: Tensor) -> Tensor:
    """The logits with those rows replaced."""
    if len(rows) == logits.shape[0]:
        return part
    logits[torch.from_numpy(rows).to(logits.device)] = part
    return logits


def _unusable(logits: Tensor, largest: Tensor) -> dict[int, str]:
    """Rows from which nothing can be chosen. They are set to 0, so that nothing trips."""
    finite = torch.isfinite(largest)
    if bool(finite.all()):
        return {}
    errors = {}
    for r in (~finite).nonzero().squeeze(1).tolist():
        value = float(largest[r])
        if value == -torch.inf:
            errors[r] = "no token is possible: the request's constraints exclude all of them"
        else:
            errors[r] = f"the model's logits are not finite ({value})"
        logits[r] = 0.0
    return errors


def _describe(
    values: Tensor, token_ids: Tensor, rows: Rows, batch: SamplingBatch
) -> dict[int, TokenLogprobs]:
    chosen = token_ids[torch.from_numpy(rows).to(token_ids.device)]
    entries: Iterable[TokenLogprobs] = describe(values, chosen, batch.num_logprobs[rows].tolist())
    return dict(zip(rows.tolist(), entries))

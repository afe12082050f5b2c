"""Rules that make single tokens impossible or more or less likely. All change logits in place.

logits is [R, V] float32. Each function touches only the rows that have its rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace_engine.sampling.state import SamplingBatch

_IMPOSSIBLE = -torch.inf


def apply_constraints(logits: Tensor, batch: SamplingBatch) -> None:
    """Make tokens impossible that the grammars of structured output do not allow."""
    for r, rules, _ in batch.rules:
        constraint = rules.constraint
        if constraint is None:
            continue
        if constraint.words is not None:
            bits = np.unpackbits(
                constraint.words.view(np.uint8), count=logits.shape[1], bitorder="little"
            )
            impossible = torch.from_numpy(bits == 0).to(logits.device)
            logits[r].masked_fill_(impossible, _IMPOSSIBLE)
        if constraint.closes is not None:
            stands_for = [constraint.closes, *constraint.ends]
            logits[r, constraint.closes] = logits[r, stands_for].max()
        if constraint.banned:
            logits[r, list(constraint.banned)] = _IMPOSSIBLE


def apply_allowed_tokens(logits: Tensor, batch: SamplingBatch) -> None:
    """Everything but ``allowed_token_ids`` becomes impossible."""
    for r, rules, _ in batch.rules:
        if rules.allowed is not None:
            row = logits[r]
            ids = torch.from_numpy(rules.allowed).to(logits.device)
            kept = row[ids]
            row.fill_(_IMPOSSIBLE)
            row[ids] = kept


def apply_bad_words(logits: Tensor, batch: SamplingBatch) -> None:
    """The last token of a bad word becomes impossible where the output ends with the others."""
    forbid(
        logits,
        (
            (r, completions(rules.bad_words, output))
            for r, rules, output in batch.rules
            if rules.bad_words
        ),
    )


def apply_min_tokens(logits: Tensor, batch: SamplingBatch) -> None:
    """Stop tokens are impossible before ``min_tokens`` output tokens."""
    forbid(
        logits,
        ((r, rules.stop_ids) for r, rules, output in batch.rules if len(output) < rules.min_tokens),
    )


def apply_logit_bias(logits: Tensor, batch: SamplingBatch) -> None:
    """``logit_bias`` is added."""
    biased = [(r, rules) for r, rules, _ in batch.rules if rules.bias_ids.size]
    if not biased:
        return
    where = cells(((r, rules.bias_ids) for r, rules in biased), logits.device)
    bias = np.concatenate([rules.bias for _, rules in biased])
    logits[where] += torch.from_numpy(bias).to(logits.device)


def apply_thinking(logits: Tensor, batch: SamplingBatch) -> None:
    """Make everything but the reasoning's end impossible where the reasoning has used up its budget."""
    for r, rules, _ in batch.rules:
        token_id = rules.thinking.forced if rules.thinking is not None else None
        if token_id is not None:
            logits[r].fill_(_IMPOSSIBLE)
            logits[r, token_id] = 0.0  # whatever other rules say of it


def completions(words: Sequence[Sequence[int]], output: npt.NDArray[Any]) -> list[int]:
    """Last tokens of the words all of whose other tokens end the output."""
    longest = max(len(word) for word in words)
    tail = output[max(0, len(output) - longest + 1) :].tolist()
    return [
        word[-1]
        for word in words
        if len(word) == 1 or (len(tail) >= len(word) - 1 and tail[1 - len(word) :] == word[:-1])
    ]


def forbid(logits: Tensor, tokens: Iterable[tuple[int, Sequence[int] | npt.NDArray[Any]]]) -> None:
    """Make (row, token ids) impossible."""
    found = [(r, ids) for r, ids in tokens if len(ids)]
    if found:
        logits[cells(found, logits.device)] = _IMPOSSIBLE


def cells(
    tokens: Iterable[tuple[int, Sequence[int] | npt.NDArray[Any]]], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Index of (row, token ids) pairs: two [n] int64 tensors."""
    pairs = list(tokens)
    sizes = [len(ids) for _, ids in pairs]
    rows = np.repeat(np.array([r for r, _ in pairs], np.int64), sizes)
    columns = np.concatenate([np.asarray(ids, np.int64) for _, ids in pairs])
    return torch.from_numpy(rows).to(device), torch.from_numpy(columns).to(device)

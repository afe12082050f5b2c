"""Penalties for tokens that the text already holds. They change logits [R, V] float32 in place."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headrace_engine.sampling.logits_constraints import LogitsConstraints
from headrace_engine.sampling.masks import cells
from headrace_engine.sampling.state import SamplingBatch


def apply_penalties(logits: Tensor, batch: SamplingBatch) -> None:
    """Repetition first, then frequency and presence, as the field's engines do."""
    _apply_repetition(logits, batch)
    _apply_frequency_and_presence(logits, batch)


def _apply_repetition(logits: Tensor, batch: SamplingBatch) -> None:
    """Logits of tokens in prompt or output: divided if positive, else multiplied.

    Source: Keskar et al. 2019, arXiv:1909.05858, with the sign case that everybody adds.
    """
    penalised = [(r, rules) for r, rules, _ in batch.rules if rules.seen is not None]
    if not penalised:
        return
    where = cells(((r, _seen_ids(rules)) for r, rules in penalised), logits.device)
    factors = torch.from_numpy(
        np.concatenate(
            [
                np.full(len(_seen_ids(rules)), rules.repetition_penalty, np.float32)
                for _, rules in penalised
            ]
        )
    ).to(logits.device)
    values = logits[where]
    logits[where] = torch.where(values > 0, values / factors, values * factors)


def _apply_frequency_and_presence(logits: Tensor, batch: SamplingBatch) -> None:
    """``logit -= frequency_penalty * count + presence_penalty`` for tokens in the output."""
    pairs = [
        (r, rules, rules.output_counts)
        for r, rules, _ in batch.rules
        if rules.output_counts is not None and rules.output_counts.ids.size
    ]
    if not pairs:
        return
    where = cells(((r, counts.ids) for r, _, counts in pairs), logits.device)
    amounts = np.concatenate(
        [
            np.float32(rules.frequency_penalty) * counts.counts + np.float32(rules.presence_penalty)
            for _, rules, counts in pairs
        ]
    )
    logits[where] -= torch.from_numpy(amounts).to(logits.device)


def _seen_ids(rules: LogitsConstraints) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    assert rules.seen is not None
    return rules.seen.ids

"""Tokens that are given as vectors, in a worker: prompts of embeddings, and media's placeholders.

Kept on the device until they are computed, handed to the model by row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace_core.model import InputEmbeds
from headrace_core.request import PromptEmbeds
from headrace_engine.execution.requests import Ints


def as_tensor(embeds: PromptEmbeds, device: torch.device) -> Tensor:
    """[num_tokens, hidden size] on the device."""
    # A copy, as bytes are read-only; its size and dtype were checked when the object was made.
    flat = torch.frombuffer(bytearray(embeds.data), dtype=getattr(torch, embeds.dtype))
    return flat.view(embeds.num_tokens, embeds.hidden_size).to(device)


class _Span(NamedTuple):
    """Adjacent tokens of a request that are given as vectors."""

    start: int
    vectors: Tensor

    @property
    def end(self) -> int:
        return self.start + self.vectors.shape[0]


class GivenVectors:
    """By row of the request table."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: dict[int, list[_Span]] = {}

    def set(self, row: int, embeds: PromptEmbeds | None) -> None:
        """Keep a new request's prompt; None: it came as tokens."""
        self.clear(row)
        if embeds is not None:
            self.add(row, 0, as_tensor(embeds, self._device))

    def add(self, row: int, start: int, vectors: Tensor) -> None:
        """Keep the vectors [n, H] of a request's tokens from ``start`` on."""
        self._spans.setdefault(row, []).append(_Span(start, vectors))

    def clear(self, row: int) -> None:
        """Forget a row's request."""
        self._spans.pop(row, None)

    def inputs(self, rows: Ints, computed: Ints, cu_seqlens: Ints) -> InputEmbeds | None:
        """What a step's tokens are given as vectors; None if all are given by their ids.

        Vectors of tokens that were computed before are forgotten.

        Args:
            rows: [B]; rows of the request table.
            computed: [B]; tokens before this step.
            cu_seqlens: [B + 1]; running sum of this step's tokens.
        """
        if not self._spans:
            return None
        places, values = [], []
        for b, row in enumerate(rows.tolist()):
            if row not in self._spans:
                continue
            first, begin = int(computed[b]), int(cu_seqlens[b])
            last = first + int(cu_seqlens[b + 1]) - begin
            for span in self._remaining(row, first):
                start, end = max(first, span.start), min(last, span.end)
                if start < end:
                    places.append(np.arange(begin + start - first, begin + end - first))
                    values.append(span.vectors[start - span.start : end - span.start])
        if not places:
            return None
        index = torch.from_numpy(np.concatenate(places)).to(self._device)
        return InputEmbeds(index, torch.cat(values))

    def _remaining(self, row: int, first: int) -> list[_Span]:
        """A row's spans that do not end before ``first``; a request never goes back."""
        spans = [span for span in self._spans[row] if span.end > first]
        if spans:
            self._spans[row] = spans
        else:
            del self._spans[row]
        return spans

"""Prompts that came as embeddings, in a worker: kept on the device, handed to the model by row."""

from __future__ import annotations

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


class EmbeddedPrompts:
    """By row of the request table."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._prompts: dict[int, Tensor] = {}

    def set(self, row: int, embeds: PromptEmbeds | None) -> None:
        """Keep a new request's prompt; None: it came as tokens."""
        self._prompts.pop(row, None)
        if embeds is not None:
            self._prompts[row] = as_tensor(embeds, self._device)

    def clear(self, row: int) -> None:
        """Forget a row's request."""
        self._prompts.pop(row, None)

    def inputs(self, rows: Ints, computed: Ints, cu_seqlens: Ints) -> InputEmbeds | None:
        """What a step's tokens are given as vectors; None if all are given by their ids.

        Args:
            rows: [B]; rows of the request table.
            computed: [B]; tokens before this step.
            cu_seqlens: [B + 1]; running sum of this step's tokens.
        """
        if not self._prompts:
            return None
        places, values = [], []
        for b, row in enumerate(rows.tolist()):
            prompt = self._prompts.get(row)
            if prompt is None:
                continue
            first, start, end = int(computed[b]), int(cu_seqlens[b]), int(cu_seqlens[b + 1])
            count = min(first + end - start, prompt.shape[0]) - first
            if count > 0:  # else its output is being decoded, which is tokens again
                places.append(np.arange(start, start + count))
                values.append(prompt[first : first + count])
        if not places:
            return None
        index = torch.from_numpy(np.concatenate(places)).to(self._device)
        return InputEmbeds(index, torch.cat(values))

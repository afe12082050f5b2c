"""A driver of encoder-decoder models: :class:`~headrace_testing.model.decoders.PagedDriver` with groups of
cross-attention layers. Needs torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headrace_core.batch import ForwardBatch, GroupBatch
from headrace_core.kv import CrossAttentionSpec
from headrace_testing.model.decoders import PagedDriver

Inputs = Mapping[str, Tensor]


class EncoderDecoderDriver(PagedDriver):
    """Encodes a request's media in the step that brings them; afterwards they are in the cache."""

    def __init__(self, model: Any, *, num_blocks: int = 128, shuffled: bool = True) -> None:
        super().__init__(model, num_blocks=num_blocks, shuffled=shuffled)
        self.encoder: Any = model
        self.states: dict[str, int] = {}
        """By request: number of encoder states."""
        self.cross_tables: dict[str, list[list[int]]] = {}
        """By request and group; empty for groups of other layers."""

    def listen(
        self,
        chunks: Mapping[str, Sequence[int]],
        media: Mapping[str, Inputs] | None = None,
        num_states: int = 0,
    ) -> Tensor:
        """Feed each request its next tokens; logits [T, V] of all rows.

        Args:
            media: of requests that begin, in the order of ``chunks``.
            num_states: what the encoder makes of each.
        """
        batch = self.listening(chunks, media or {}, num_states)
        with torch.inference_mode():
            return self.model.compute_logits(self.model.forward(batch)).float()

    def listening(
        self, chunks: Mapping[str, Sequence[int]], media: Mapping[str, Inputs], num_states: int
    ) -> ForwardBatch:
        """The forward batch of these chunks; counts them as computed."""
        begun = [request for request in chunks if request in media]
        for request in begun:
            self.states[request] = num_states
            self.cross_tables[request] = [self._blocks(group, num_states) for group in self._groups]
        plain = self.batch(chunks)
        groups = tuple(
            self._cross_group(chunks, begun, group)
            if isinstance(spec, CrossAttentionSpec)
            else plain.groups[group]
            for group, spec in enumerate(self.specs)
        )
        states = None
        if begun:
            with torch.inference_mode():
                states = self.encoder.encode([media[request] for request in begun])
        return self.prepared(replace(plain, groups=groups, encoder_states=states))

    @property
    def _groups(self) -> range:
        return range(len(self.specs))

    def _blocks(self, group: int, num_states: int) -> list[int]:
        if not isinstance(self.specs[group], CrossAttentionSpec):
            return []
        return [self.free.pop() for _ in range(-(-num_states // self.specs[group].block_size))]

    def _cross_group(
        self, requests: Mapping[str, Any], begun: Sequence[str], group: int
    ) -> GroupBatch:
        size = self.specs[group].block_size
        tables = [self.cross_tables[request][group] for request in requests]
        lengths = [self.states[request] for request in requests]
        width = max(map(len, tables))
        slots = [
            self.cross_tables[request][group][i // size] * size + i % size
            for request in begun
            for i in range(self.states[request])
        ]
        return GroupBatch(
            torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32),
            torch.tensor(slots, dtype=torch.int64),
            torch.tensor(lengths, dtype=torch.int32),
            max(lengths),
        )

"""Media in a worker: what waits to be encoded or embedded, by row of the request table.

An encoder-decoder model encodes a request's media in its first step, whole, and its cross-attention
layers keep what they need in the cache. A model that takes embeddings in place of placeholders embeds
an item in the step that reaches its first one; what a cached prefix covers is never embedded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from headrace_core.arrays import PackedArray
from headrace_core.errors import ModelError
from headrace_core.model import SupportsEncoderDecoder, SupportsMultiModal
from headrace_core.multimodal import MediaInput
from headrace_core.step import NewRequest
from headrace_engine.execution.prompt_table import PromptTable
from headrace_engine.execution.requests import RequestTable
from headrace_engine.given_vectors import VECTORS


def tensors(inputs: Mapping[str, PackedArray], device: torch.device) -> dict[str, Tensor]:
    """A model's inputs, on its device."""
    return {name: as_tensor(array, device) for name, array in inputs.items()}


def as_tensor(array: PackedArray, device: torch.device) -> Tensor:
    """A copy, as bytes are read-only; size and dtype were checked when the object was made."""
    dtype = getattr(torch, array.dtype)
    if not array.data:
        return torch.empty(array.shape, dtype=dtype, device=device)
    return torch.frombuffer(bytearray(array.data), dtype=dtype).view(array.shape).to(device)


def encode(
    model: SupportsEncoderDecoder, media: Sequence[MediaInput], device: torch.device
) -> Tensor:
    """Encoder states [E, H] of items, one after the other.

    Raises:
        ModelError: there are more or fewer than the items say.
    """
    states = model.encode([tensors(item.inputs, device) for item in media])
    wanted = sum(item.num_tokens for item in media)
    if states.dim() != 2 or states.shape[0] != wanted:
        raise ModelError(
            f"{type(model).__name__}.encode returned {list(states.shape)}, not {wanted} states of "
            f"{len(media)} items"
        )
    return states


def given_vectors(item: MediaInput, device: torch.device) -> Tensor | None:
    """Vectors [num_vectors, W] that an item brings; None: a tower makes them."""
    array = item.inputs.get(VECTORS)
    return None if array is None else as_tensor(array, device)


def embed(
    model: SupportsMultiModal, media: Sequence[MediaInput], device: torch.device
) -> list[Tensor]:
    """One tensor [num_vectors, H] for each item, in order.

    Raises:
        ModelError: the model returned something else.
    """
    found: list[Tensor] = [torch.empty(0)] * len(media)
    for modality in dict.fromkeys(item.modality for item in media):
        indices = [i for i, item in enumerate(media) if item.modality == modality]
        inputs = [tensors(media[i].inputs, device) for i in indices]
        made = model.embed_media(modality, inputs)
        for i, vectors in zip(indices, made, strict=True):
            if vectors.dim() != 2 or vectors.shape[0] != media[i].num_vectors:
                raise ModelError(
                    f"{type(model).__name__}.embed_media returned {list(vectors.shape)} for an item "
                    f"of {media[i].num_vectors} vectors"
                )
            found[i] = vectors
    return found


class PendingMedia:
    """Items of requests in a worker that are neither encoded nor embedded yet.

    Args:
        table: the requests; not changed.
    """

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self.to_encode: dict[int, list[MediaInput]] = {}
        """By row: items for an encoder-decoder model, which encodes them in the request's first step."""
        self.to_embed: dict[int, list[MediaInput]] = {}
        """By row: items for placeholders, which are embedded in the step that reaches them."""

    def add(self, row: int, new: NewRequest) -> None:
        """Take a new request's media."""
        if new.request.num_encoder_tokens:
            self.to_encode[row] = new.request.media
        elif new.request.media:
            self.to_embed[row] = list(new.request.media)

    def remove(self, row: int, request_id: str) -> None:
        """Forget a row's request."""
        self.to_encode.pop(row, None)
        self.to_embed.pop(row, None)

    def take_encoder(self, rows: Sequence[int]) -> list[MediaInput]:
        """Their media, which wait no longer."""
        return [item for row in rows for item in self.to_encode.pop(row)]

    def embed_due(
        self,
        scheduled: Mapping[str, int],
        run: Callable[[Sequence[tuple[int, MediaInput]]], Sequence[Tensor]],
        into: PromptTable,
    ) -> None:
        """Have the items embedded that a step reaches.

        Args:
            scheduled: number of tokens by request id.
            run: embeds items of rows.
            into: gets their vectors.
        """
        due: list[tuple[int, MediaInput]] = []
        for request_id, count in scheduled.items():
            row = self._table.row_of.get(request_id, -1)
            waiting = self.to_embed.get(row)
            if waiting is None:
                continue
            start = int(self._table.num_computed_tokens[row])
            reached = [item for item in waiting if item.offset < start + count]
            due += [(row, item) for item in reached if item.offset + item.num_tokens > start]
            self.to_embed[row] = waiting[len(reached) :]
            if not self.to_embed[row]:
                del self.to_embed[row]
        if due:
            for (row, item), vectors in zip(due, run(due), strict=True):
                into.add_item(row, item, vectors)

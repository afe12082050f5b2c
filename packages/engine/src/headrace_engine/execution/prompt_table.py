"""Parts of prompts beside token ids, in a worker: vectors in place of tokens (embeddings, media's
placeholders), segments, and the number of tokens that are attended to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from headrace_core.model import InputEmbeds, SupportsMRoPE
from headrace_core.multimodal import MediaInput
from headrace_core.request import PromptEmbeds
from headrace_core.step import NewRequest
from headrace_engine.execution.requests import Ints


def as_tensor(embeds: PromptEmbeds, device: torch.device) -> Tensor:
    """Embeddings [num_tokens, hidden size] on the device."""
    # A copy, as bytes are read-only; its size and dtype were checked when the object was made.
    flat = torch.frombuffer(bytearray(embeds.data), dtype=getattr(torch, embeds.dtype))
    return flat.view(embeds.num_tokens, embeds.hidden_size).to(device)


@runtime_checkable
class PrunesMedia(SupportsMRoPE, Protocol):
    """A model whose towers say which of an item's tokens are kept, so that their places are known as late."""

    def retained_places(self, item: MediaInput, vectors: Tensor) -> tuple[Tensor, Tensor] | None:
        """Kept vectors [n, W] of an item, and their places [3, n] in time, height and width, from 0 for its
        first token; None: all are kept.

        Args:
            vectors: as ``embed_media`` gave them: of an item with the input
                :data:`~headrace_engine.given_vectors.RETAINED`, [n, W + ``INDEX_WIDTH``].
        """
        ...


class _VectorSpan(NamedTuple):
    """Vectors in place of a request's adjacent tokens."""

    start: int
    vectors: Tensor

    @property
    def end(self) -> int:
        return self.start + self.vectors.shape[0]


class _Axes(NamedTuple):
    """Places of a prompt's tokens in time, height and width."""

    positions: Ints
    """[3, prompt's tokens]."""
    shift: int
    """Number that is added to the position of a token behind the prompt."""

    @classmethod
    def of(cls, positions: Ints) -> _Axes:
        return cls(positions, int(positions.max()) + 1 - positions.shape[1])


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """[n, W], one below the other. W is the widest part's: a prompt's own embeddings may meet an item's
    vectors that hold something for further layers (Qwen3-VL), and have zeros there."""
    width = max(part.shape[1] for part in parts)
    return torch.cat(
        [
            part if part.shape[1] == width else functional.pad(part, (0, width - part.shape[1]))
            for part in parts
        ]
    )


class PromptTable:
    """Parts of prompts beside token ids, by row of the request table. Most requests have none, so that the
    table is empty in most steps.

    Letters: T tokens in a step, B requests in it.

    Args:
        device: where the tensors go.
        mrope: the model, if tokens of media have places of their own in it.
    """

    def __init__(self, device: torch.device, mrope: SupportsMRoPE | None = None) -> None:
        self._device, self._mrope = device, mrope
        self.spans: dict[int, list[_VectorSpan]] = {}
        """Vectors in place of tokens; on the device until they are computed."""
        self.token_types: dict[int, Ints] = {}
        """Segments of tokens, for models that tell the two texts of a pair apart; a row that is not here
        is all 0."""
        self.axes: dict[int, _Axes] = {}
        """Places of the tokens of prompts with media, for models that tell time, height and width apart."""
        self.whole_spans: dict[int, list[tuple[int, ...]]] = {}
        """Tokens that all see each other; see :class:`headrace_core.multimodal.MediaPlacement`."""
        self.num_attended: dict[int, int] = {}
        """Numbers of tokens that are attended to, for models that attend in both directions; a row that
        is not here attends to all of its tokens."""

    def add(self, row: int, new: NewRequest) -> None:
        """Keep a new request's parts."""
        request = new.request
        if request.whole_spans:
            self.whole_spans[row] = request.whole_spans
        if request.prompt_embeds is not None:
            self.add_span(row, 0, as_tensor(request.prompt_embeds, self._device))
        if request.token_type_ids is not None and any(request.token_type_ids):
            self.token_types[row] = np.array(request.token_type_ids, np.int64)
        if self._mrope is not None and request.media:
            places = self._mrope.mrope_positions(len(request.prompt_token_ids), request.media)
            self.axes[row] = _Axes.of(places.numpy())
        if request.num_attended_tokens is not None:
            self.num_attended[row] = request.num_attended_tokens

    def remove(self, row: int, request_id: str) -> None:
        """Forget a row's request."""
        self.spans.pop(row, None)
        self.token_types.pop(row, None)
        self.axes.pop(row, None)
        self.num_attended.pop(row, None)
        self.whole_spans.pop(row, None)

    def add_span(self, row: int, start: int, vectors: Tensor) -> None:
        """Keep the vectors [n, H] of a request's tokens from ``start`` on."""
        self.spans.setdefault(row, []).append(_VectorSpan(start, vectors))

    def add_item(self, row: int, item: MediaInput, vectors: Tensor) -> None:
        """Keep the vectors of an item of a request, and the places of those that are kept of more."""
        kept = None
        if isinstance(self._mrope, PrunesMedia):
            kept = self._mrope.retained_places(item, vectors)
        if kept is not None:
            vectors, places = kept
            axes = self.axes[row].positions[:, item.offset : item.offset + item.num_tokens]
            axes[:] = axes[:, :1] + places.numpy()  # the first token is always kept
        sizes = [number for _, number in item.vector_runs]
        for (first, _), part in zip(item.vector_runs, torch.split(vectors, sizes), strict=True):
            self.add_span(row, item.offset + first, part)

    def input_embeds(self, rows: Ints, computed: Ints, cu_seqlens: Ints) -> InputEmbeds | None:
        """Vectors in place of a step's tokens; None: all tokens are given by their ids.

        Vectors of tokens that were computed before are forgotten.

        Args:
            rows: [B]; rows of the request table.
            computed: [B]; tokens before this step.
            cu_seqlens: [B + 1]; running sum of this step's tokens.
        """
        if not self.spans:
            return None
        places, values = [], []
        for b, row in enumerate(rows.tolist()):
            if row not in self.spans:
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
        return InputEmbeds(index, _joined(values))

    def places(
        self, rows: Ints, computed: Ints, cu_seqlens: Ints, positions: Ints
    ) -> tuple[Ints, Ints | None]:
        """Where a step's tokens stand for the model: [T], and [3, T] if some stand at different places on
        the three axes; arguments as :meth:`input_embeds`.

        Args:
            positions: [T]; of the tokens in their requests.
        """
        moved = positions.copy()
        parts: list[tuple[int, Ints]] = []
        for b, row in enumerate(rows.tolist()):
            own = self.axes.get(row)
            if own is None:
                continue
            first, start, end = int(computed[b]), int(cu_seqlens[b]), int(cu_seqlens[b + 1])
            moved[start:end] += own.shift
            prompt = own.positions[:, first : first + end - start]
            if prompt.shape[1]:
                moved[start : start + prompt.shape[1]] = prompt[0]
                parts.append((start, prompt))
        if not parts:
            return moved, None
        whole = np.repeat(moved[None], 3, axis=0)
        for start, prompt in parts:
            whole[:, start : start + prompt.shape[1]] = prompt
        return moved, whole

    def token_type_ids(self, rows: Ints, computed: Ints, cu_seqlens: Ints) -> Tensor:
        """Segments [T] int64 of a step's tokens; arguments as :meth:`input_embeds`."""
        types = np.zeros(int(cu_seqlens[-1]), np.int64)
        if self.token_types:
            for b, row in enumerate(rows.tolist()):
                own = self.token_types.get(row)
                if own is not None:
                    first, start, end = int(computed[b]), int(cu_seqlens[b]), int(cu_seqlens[b + 1])
                    types[start:end] = own[first : first + end - start]
        return torch.from_numpy(types).to(self._device)

    def key_lens(self, rows: Ints, seq_lens: Ints) -> npt.NDArray[np.int32] | None:
        """Numbers of tokens that are attended to, [B] int32; None: all of all.

        Args:
            rows: [B]; rows of the request table.
            seq_lens: [B]; tokens of each request.
        """
        if not self.num_attended:
            return None
        lengths = seq_lens.astype(np.int32)
        for b, row in enumerate(rows.tolist()):
            lengths[b] = min(lengths[b], self.num_attended.get(row, lengths[b]))
        return lengths if (lengths < seq_lens).any() else None

    def last_keys(
        self, rows: Ints, computed: Ints, cu_seqlens: Ints, positions: Ints
    ) -> npt.NDArray[np.int32] | None:
        """Last position that each of a step's tokens sees, [T] int32; None: its own. Arguments as
        :meth:`input_embeds` and :meth:`places`."""
        last = None
        for b, row in enumerate(rows.tolist()):
            first, start = int(computed[b]), int(cu_seqlens[b])
            num_tokens = int(cu_seqlens[b + 1]) - start
            for bounds in self.whole_spans.get(row, ()):
                for begin, end in zip(bounds[::2], bounds[1::2], strict=True):
                    from_, to = max(begin - first, 0), min(end - first, num_tokens)
                    if from_ < to:
                        last = positions.astype(np.int32) if last is None else last
                        last[start + from_ : start + to] = bounds[-1] - 1
        return last

    def _remaining(self, row: int, first: int) -> list[_VectorSpan]:
        """A row's spans that do not end before ``first``; a request never goes back."""
        spans = [span for span in self.spans[row] if span.end > first]
        if spans:
            self.spans[row] = spans
        else:
            del self.spans[row]
        return spans

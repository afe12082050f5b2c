"""A decoder whose images and videos stand in time, height and width: mixin of the Qwen line.

Wang et al. 2024, arXiv:2409.12191, section 2.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from headrace_core.errors import RequestError
from headrace_core.model import MROPE_POSITIONS
from headrace_models.layers.rotary import ROTARY_ROWS, rows_by_axes
from headrace_models.layers.vision.media_decoder import MediaDecoder
from headrace_models.layers.vision.towers.qwen_vl import Grid
from headrace_models.layers.vision.video_pruning import (
    RETAINED,
    UNPRUNED,
    runs_of,
    without_indices,
)

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext
    from headrace_core.multimodal import MediaInput
    from headrace_models.config.rope import RopeSettings

PIXELS: Mapping[str, str] = {"image": "pixel_values", "video": "pixel_values_videos"}
"""Modality -> name of the model's input with an item's patches."""
GRID: Mapping[str, str] = {"image": "image_grid_thw", "video": "video_grid_thw"}
"""Modality -> name of the model's input with an item's grid."""
SECONDS = "second_per_grid_ts"
"""Model input of videos: seconds between two patches in time."""
_CONTEXT = 32_768
THETA = 1_000_000.0
"""Values that configs may leave out: the context, and the base of the rotation."""


class GridDecoder(MediaDecoder):
    """Items of other modalities than :data:`GRID` has stand one behind the other, as text does."""

    rope: RopeSettings
    merge: int
    """Patches of a side of the square that becomes a vector."""

    def mrope_positions(self, num_tokens: int, media: Sequence[MediaInput]) -> Tensor:
        """See :class:`headrace_core.model.SupportsMRoPE`: text counts on, an item's tokens stand in a box
        behind the text in front of it, and text goes on behind the box's longest side. An item that has
        text in it, between frames, stands in a box for each of its runs."""
        found, place, done = [], 0, 0
        for item in media:
            if item.modality not in GRID:
                continue
            for first, box in self._boxes(item):
                text = first - done
                found.append(torch.arange(place, place + text).expand(3, text))
                found.append(box + place + text)
                place, done = place + text + int(box.max()) + 1, first + box.shape[1]
        found.append(torch.arange(place, place + num_tokens - done).expand(3, num_tokens - done))
        return torch.cat(found, dim=1)

    def _boxes(self, item: MediaInput) -> Iterator[tuple[int, Tensor]]:
        """(first token in the prompt, places from 0) of each stretch of an item's vectors; of a pruned item,
        of all its tokens, as far as they are known before the tower has run."""
        if RETAINED in item.inputs:
            yield item.offset, _until_known(self._unpruned_places(item), item.num_tokens)
            return
        box = self.box(self._box_sizes(item, len(item.vector_runs)), item)
        for first, _ in item.vector_runs:
            yield item.offset + first, box

    def retained_places(self, item: MediaInput, vectors: Tensor) -> tuple[Tensor, Tensor] | None:
        """Kept vectors [n, W] of a pruned item, and their places [3, n] from its first one; None: it is not
        pruned."""
        if RETAINED not in item.inputs:
            return None
        vectors, kept = without_indices(vectors)
        return vectors, self._unpruned_places(item)[:, kept.cpu()]

    def _unpruned_places(self, item: MediaInput) -> Tensor:
        """Places of all tokens of an item, from 0: [3, N]."""
        tokens = item.inputs.get(UNPRUNED)
        if tokens is None:
            return self.box(self._box_sizes(item, 1), item)
        is_text = torch.tensor(tokens.tolist()) >= 0
        inputs = {name: array for name, array in item.inputs.items() if name != RETAINED}
        alone = replace(
            item, inputs=inputs, num_tokens=len(is_text), offset=0, runs=runs_of(is_text)
        )
        return GridDecoder.mrope_positions(self, len(is_text), [alone])

    def _box_sizes(self, item: MediaInput, num_runs: int) -> Grid:
        """Vectors of a run in time, height and width."""
        time, height, width = grid_of(item.inputs[GRID[item.modality]])
        return time // num_runs, height // self.merge, width // self.merge

    def box(self, sizes: Grid, item: MediaInput) -> Tensor:
        """Places of an item's vectors in time, height and width, from 0: [3, vectors] int64."""
        box = torch.stack(torch.meshgrid(*map(torch.arange, sizes), indexing="ij"))
        return box.flatten(1)

    def prepare_batch(self, batch: ForwardBatch) -> ForwardBatch:
        """See :meth:`headrace_models.layers.decoder.Decoder.prepare_batch`."""
        axes = batch.extra.get(MROPE_POSITIONS)
        table = getattr(self, "rotary", None)
        if axes is not None and table is not None:
            rows = self.rotary_rows(table, axes)
            batch = replace(batch, extra={**batch.extra, ROTARY_ROWS: rows})
        return super().prepare_batch(batch)

    def rotary_rows(self, table: Tensor, places: Tensor) -> Tensor:
        """Cosines and sines of tokens that stand at places [3, T] (:func:`rows_by_axes`)."""
        return rows_by_axes(table, places, self.rope)


class TimedDecoder(GridDecoder):
    """Frames of a video stand apart by seconds, and so may take more places than tokens: of a prompt up to
    a context more, for which the rotary table has rows."""

    places_per_second: float

    def num_places(self, context: BuildContext) -> int:
        """See :meth:`headrace_models.layers.decoders.llama.LlamaDecoder.num_places`."""
        return context.max_model_len + self._spare_places()

    def _spare_places(self) -> int:
        return self.settings.integer("max_position_embeddings", _CONTEXT)

    def mrope_positions(self, num_tokens: int, media: Sequence[MediaInput]) -> Tensor:
        """See :class:`headrace_core.model.SupportsMRoPE`.

        Raises:
            RequestError: the videos of a prompt are too long together; each alone was looked at before.
        """
        places = super().mrope_positions(num_tokens, media)
        over, spare = int(places.max()) + 1 - num_tokens, self._spare_places()
        if over > spare:
            raise RequestError(
                f"multi_modal_data.video: {int(places.max()) + 1} places in time for {num_tokens} tokens: "
                f"at most {spare} more than tokens are accepted",
                param="multi_modal_data.video",
            )
        return places


def embed_grids(
    tower: Callable[[Sequence[Tensor], Sequence[Grid]], Sequence[Tensor]],
    modality: str,
    inputs: Sequence[Mapping[str, Tensor]],
) -> Sequence[Tensor]:
    """Vectors of images or videos.

    Args:
        inputs: of images ``pixel_values`` [patches, numbers] and ``image_grid_thw`` [3] each; of videos
            ``pixel_values_videos`` and ``video_grid_thw``.
    """
    patches = [item[PIXELS[modality]] for item in inputs]
    return tower(patches, [grid_of(item[GRID[modality]]) for item in inputs])


def _until_known(whole: Tensor, number: int) -> Tensor:
    """Places [3, number] of kept tokens, at least two, until the tower has said which they are: the first is
    right, and the last is the largest, as what follows counts on behind it."""
    places = whole[:, :number].clone()
    places[:, -1] = whole.max()
    return places


def grid_of(sizes: Any) -> Grid:
    """A grid as a model's input has it: a tensor, or a packed array, of three numbers."""
    time, height, width = sizes.tolist()
    return time, height, width

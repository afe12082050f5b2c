"""H2OVL Mississippi's images: InternVL's tiles, twice, in grids of two shapes, where a prompt has one image.

Galib et al. 2024, arXiv:2410.13611, section 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from headrace_core.errors import RequestError
from headrace_core.multimodal import MediaPlacement, ProcessedMedia
from headrace_multimodal.images.internvl import Grid, grid_of, tile_option, wrong_option
from headrace_multimodal.images.internvl_chat import CUTS, MOST, InternVLChatProcessor
from headrace_multimodal.images.pixels import Pixels
from headrace_multimodal.images.processor import packed
from headrace_multimodal.images.steps import cut, resized

TWICE = "use_msac"
_LEAST_OF_SECOND = 3


class H2OVLProcessor(InternVLChatProcessor):
    """``pixel_values`` are [tiles, 3, side, side]: those of the second grid, of the first, the whole.

    Several images of a prompt are cut once each, as the model was trained. An image is processed without
    the others of its prompt, so that option is for the request to say.
    """

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        self._twice = bool(config.get(TWICE, False))

    def options(self) -> Sequence[str]:
        return (*super().options(), TWICE)

    def one(self, pixels: Pixels, options: Mapping[str, Any]) -> ProcessedMedia:
        """Raises: RequestError: see :meth:`InternVLChatProcessor.one`."""
        made = super().one(pixels, options)
        mark = packed(np.array([self._cuts_twice(options)], np.uint8))
        return replace(made, inputs={**made.inputs, TWICE: mark})

    def tiles(self, pixels: Pixels, options: Mapping[str, Any]) -> list[Pixels]:
        """See :meth:`InternVLChatProcessor.tiles`."""
        if not self._cuts_twice(options):
            return super().tiles(pixels, options)
        first, second = self._two_grids(pixels, options)
        side, whole = self._side, resized(pixels, self._side, self._side)
        found: list[Pixels] = []
        for columns, rows in (second, first):
            if columns * rows > 1:
                found += cut(resized(pixels, rows * side, columns * side), side)
        return [*found, whole]

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """Raises: RequestError: one of several images is cut twice."""
        twice = [item for item in media if TWICE in item.inputs and any(item.inputs[TWICE].data)]
        if twice and len(media) > 1:
            raise RequestError(
                f"the prompt comes with {len(media)} images, and {TWICE} is for one: several need "
                f'mm_processor_kwargs = {{"{TWICE}": false}}',
                param="mm_processor_kwargs",
            )
        return super().place(token_ids, media)

    def largest_size(self) -> tuple[int, int]:
        """Of the grid whose image has most tiles."""
        grids = [(c, r) for c in range(1, self._most + 1) for r in range(1, self._most // c + 1)]
        columns, rows = max(grids, key=self._count)
        return rows * self._side, columns * self._side

    def _count(self, grid: Grid) -> int:
        """Tiles of an image that has the shape of a grid, without the whole."""
        if not self._twice:
            return grid[0] * grid[1]
        blank = np.zeros((grid[1] * self._side, grid[0] * self._side, 1), np.uint8)
        both = self._two_grids(blank, {CUTS: True})
        return sum(columns * rows for columns, rows in both if columns * rows > 1)

    def _cuts_twice(self, options: Mapping[str, Any]) -> bool:
        twice = options.get(TWICE, self._twice)
        if type(twice) is not bool:
            raise wrong_option(TWICE, twice, "true or false")
        return twice

    def _two_grids(self, pixels: Pixels, options: Mapping[str, Any]) -> tuple[Grid, Grid]:
        """The nearest grid, and the nearest of those neither of whose sides divides that one's."""
        cuts = options.get(CUTS, self._cuts)
        if type(cuts) is not bool:
            raise wrong_option(CUTS, cuts, "true or false")
        most = tile_option(options, MOST, self._most, self._most) if cuts else 1
        size, tile = pixels.shape[:2], (self._side, self._side)
        first = grid_of(size, tile, 1, most)
        second = grid_of(
            size,
            tile,
            _LEAST_OF_SECOND,
            most,
            lambda grid: bool(first[0] % grid[0] and first[1] % grid[1]),
        )
        return first, second

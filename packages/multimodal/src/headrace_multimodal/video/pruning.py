"""How many tokens of a video are kept of those that change from frame to frame: Efficient Video Sampling.

Bagrov et al. 2025, arXiv:2510.14624. The number follows from the rate; which ones are kept, the
model's tower says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace_core.errors import RequestError
from headrace_core.multimodal import ProcessedMedia
from headrace_multimodal.images.processor import packed

RATE = "video_pruning_rate"
"""Option of a processor: share of a video's tokens that is dropped."""
RETAINED = "num_retained_tokens"
"""Model input: [1] int64, tokens of the item that are kept, text between frames included."""
UNPRUNED = "unpruned_token_ids"
"""Model input: [N] int64, all tokens of an item that has text between its frames, -1 in place of vectors."""


def pruning_rate(options: Mapping[str, Any]) -> float:
    """The rate that options say; 0: nothing is dropped.

    Raises: RequestError: it is no number from 0 to below 1.
    """
    rate = options.get(RATE)
    if rate is None:
        return 0.0
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < 1:
        raise RequestError(
            f"mm_processor_kwargs.{RATE} = {rate!r}: must be a number from 0 to below 1",
            param="mm_processor_kwargs",
        )
    return float(rate)


def num_retained(num_frames: int, per_frame: int, rate: float) -> int:
    """Vectors that are kept of a video; at least as many as a frame has, and two if there are as many."""
    total = num_frames * per_frame
    return min(total, max(per_frame, 2, int(total * (1 - rate))))


def pruned(
    made: ProcessedMedia, grid: tuple[int, int, int], merge: int, placeholder: int, rate: float
) -> ProcessedMedia:
    """An item with as many tokens as are kept of it.

    Args:
        made: the item with all of its tokens.
        grid: its patches in time, height and width.
        merge: patches of a side of the square that becomes a vector.
        placeholder: the token of a vector.
    """
    total = math.prod(grid) // merge**2
    dropped = total - num_retained(grid[0], total // grid[0], rate)
    if not dropped:
        return made
    number = made.num_tokens - dropped
    inputs = {**made.inputs, RETAINED: packed(np.array([number], np.int64))}
    if made.runs:
        tokens = np.array(made.token_ids, np.int64)
        for first, count in made.runs:
            tokens[first : first + count] = -1
        inputs[UNPRUNED] = packed(tokens)
    return ProcessedMedia(inputs, number, (placeholder,) * number)

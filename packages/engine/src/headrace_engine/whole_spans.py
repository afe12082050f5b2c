"""Parts of a prompt that one step must compute: what sees later tokens, and items that are not cut."""

from __future__ import annotations

from collections.abc import Sequence

from headrace_core.errors import RequestError
from headrace_core.multimodal import MediaInput

Span = tuple[int, int]
"""(first, end) of tokens of a prompt."""


def uncut_spans(
    whole_spans: Sequence[tuple[int, ...]], media: Sequence[MediaInput], *, whole_items: bool
) -> list[Span]:
    """All such parts of a prompt.

    Args:
        whole_spans: see :class:`headrace_core.multimodal.MediaPlacement`.
        whole_items: each item is one, too (``disable_chunked_mm_input``).
    """
    spans = [(span[0], span[-1]) for span in whole_spans]
    if whole_items:
        spans += [(item.offset, item.offset + item.num_tokens) for item in media]
    return spans


def check_spans(spans: Sequence[Span], most: int) -> None:
    """Check that each part fits into the largest step.

    Raises: RequestError: one does not.
    """
    for first, end in spans:
        if end - first > most:
            raise RequestError(
                f"multi_modal_data: tokens {first} to {end - 1} of the prompt must be computed in one step, "
                f"which holds at most {most} tokens (--max-num-batched-tokens)",
                param="multi_modal_data",
                value=end - first,
            )

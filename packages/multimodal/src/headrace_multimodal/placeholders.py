"""A prompt's placeholders: one token per media item becomes as many as the item takes."""

from __future__ import annotations

from collections.abc import Sequence

from headrace_core.errors import RequestError
from headrace_core.multimodal import MediaPlacement, ProcessedMedia


def expanded(
    token_ids: Sequence[int], media: Sequence[ProcessedMedia], placeholder: int
) -> MediaPlacement:
    """Put the n-th item's tokens in place of the n-th placeholder.

    Raises:
        RequestError: there are more or fewer placeholders than items.
    """
    found = sum(token == placeholder for token in token_ids)
    if found != len(media):
        raise RequestError(
            f"the prompt has {found} placeholders (token {placeholder}) and comes with {len(media)} "
            "media items: there must be one for each",
            param="multi_modal_data",
        )
    result: list[int] = []
    offsets: list[int] = []
    waiting = iter(media)
    for token in token_ids:
        if token != placeholder:
            result.append(token)
            continue
        offsets.append(len(result))
        item = next(waiting)
        result += item.token_ids or [placeholder] * item.num_tokens
    return MediaPlacement(result, offsets)

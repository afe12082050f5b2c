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
    return expanded_by_kind(token_ids, [(placeholder, item) for item in media], (placeholder,))


def expanded_by_kind(
    token_ids: Sequence[int],
    media: Sequence[tuple[int, ProcessedMedia]],
    placeholders: Sequence[int],
) -> MediaPlacement:
    """The same for items of several kinds, each with a placeholder of its own.

    Args:
        media: (placeholder, item); those of one placeholder stand in the prompt in this order.
        placeholders: all that the model has.

    Raises:
        RequestError: there are more or fewer placeholders than items.
    """
    waiting = {
        kind: [(i, item) for i, (own, item) in enumerate(media) if own == kind][::-1]
        for kind in placeholders
    }
    for kind, items in waiting.items():
        found = sum(token == kind for token in token_ids)
        if found != len(items):
            raise RequestError(
                f"the prompt has {found} placeholders (token {kind}) and comes with {len(items)} media "
                "items: there must be one for each",
                param="multi_modal_data",
            )
    result: list[int] = []
    offsets = [-1] * len(media)
    for token in token_ids:
        if token not in waiting:
            result.append(token)
            continue
        index, item = waiting[token].pop()
        offsets[index] = len(result)
        result += item.token_ids or [token] * item.num_tokens
    return MediaPlacement(result, offsets)

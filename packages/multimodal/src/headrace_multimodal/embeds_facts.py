"""Facts that come with vectors of an item (:class:`headrace_core.multimodal.TakesEmbeds`): checks, errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace_core.errors import RequestError

IMAGE_SIZES = "image_sizes"
"""[2] int64, an image's height and width as it came: an input of some models, a fact of vectors."""
MAX_STATED_PIXELS = 1 << 24
"""Of the image that vectors are said to be of; one of that size is laid out to know its tokens."""
MAX_FACT = 1 << 16


def check_facts(facts: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raises: RequestError: something else came with vectors."""
    for name in facts:
        if name not in known:
            accepted = f"may be {', '.join(known)}" if known else "is nothing else for this model"
            raise RequestError(
                f"multi_modal_data: {name}: unknown; beside the vectors there {accepted}",
                param="multi_modal_data",
            )


def fact(facts: Mapping[str, Any], name: str, count: int) -> tuple[int, ...]:
    """Sizes that came with an item's vectors.

    Raises: RequestError: they are not so many numbers from 1 to :data:`MAX_FACT`.
    """
    given = facts[name]
    good = isinstance(given, list) and len(given) == count
    if not good or not all(type(size) is int and 0 < size <= MAX_FACT for size in given):
        raise wrong_fact(name, given, f"{count} sizes from 1 to {MAX_FACT} for each item")
    return tuple(given)


def stated_size(facts: Mapping[str, Any]) -> tuple[int, int]:
    """Height and width of the image that vectors are of.

    Raises: RequestError: they are missing, or no size of an image.
    """
    if IMAGE_SIZES not in facts:
        raise missing_fact(IMAGE_SIZES, "height and width of the image")
    height, width = fact(facts, IMAGE_SIZES, 2)
    if height * width > MAX_STATED_PIXELS:
        raise wrong_fact(IMAGE_SIZES, [height, width], f"of at most {MAX_STATED_PIXELS} pixels")
    return height, width


def missing_fact(name: str, meaning: str) -> RequestError:
    """The error where vectors come without what the model must know beside them."""
    return RequestError(
        f"multi_modal_data: {name}: must be given beside the vectors: {meaning}",
        param="multi_modal_data",
    )


def wrong_fact(name: str, value: object, accepted: str) -> RequestError:
    """The error of a fact that cannot be."""
    return RequestError(
        f"multi_modal_data: {name} = {value!r:.100}: must be {accepted}", param="multi_modal_data"
    )

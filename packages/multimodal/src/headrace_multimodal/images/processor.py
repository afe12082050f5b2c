"""Base of the processors of models that take images."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from headrace_core.arrays import PackedArray
from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import MediaItem, MediaPlacement, Modality, ProcessedMedia
from headrace_multimodal.embeds_facts import IMAGE_SIZES, check_facts, missing_fact, stated_size
from headrace_multimodal.images.pixels import Pixels
from headrace_multimodal.images.settings import image_settings
from headrace_multimodal.placeholders import expanded

PIXEL_VALUES = "pixel_values"
"""Model input: float32, in the family's own shape."""


class ImageProcessor(ABC):
    """See :class:`headrace_core.multimodal.MediaProcessor`; families say how an image becomes numbers.

    Args:
        config: ``config.json``, whole.
        path: the checkpoint's folder.
    """

    text: str = "<image>"
    """Placeholder where a template writes none."""
    embeds_width: int = 1
    """See :class:`headrace_core.multimodal.TakesEmbeds`."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        self.config, self.path = config, path
        self.stated = image_settings(path)
        self.placeholder_id = self.find_placeholder()

    def find_placeholder(self) -> int:
        """The token that stands for an image."""
        return token_id(self.config, "image_token_id", "image_token_index")

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        """See :class:`headrace_core.multimodal.MediaProcessor`."""
        return (self.placeholder_id,)

    def modalities(self) -> Sequence[Modality]:
        return ("image",)

    def process(
        self, items: Sequence[MediaItem], options: Mapping[str, Any]
    ) -> list[ProcessedMedia]:
        """Raises: RequestError if an image is too narrow, or an option is unknown."""
        unknown = sorted(set(options) - set(self.accepted()))
        if unknown:
            raise RequestError(
                f"mm_processor_kwargs.{unknown[0]}: no such option; this model's are "
                f"{', '.join(self.options()) or 'none'}",
                param="mm_processor_kwargs",
            )
        return [self.processed(item, options) for item in items]

    def processed(self, item: MediaItem, options: Mapping[str, Any]) -> ProcessedMedia:
        """One item, with options that are known."""
        return self.one(item.data, options)

    def options(self) -> Sequence[str]:
        """Names that ``mm_processor_kwargs`` may have."""
        return ()

    def accepted(self) -> Sequence[str]:
        """The same, and names that the processor itself gives to options."""
        return self.options()

    @abstractmethod
    def one(self, pixels: Pixels, options: Mapping[str, Any]) -> ProcessedMedia:
        """An image [height, width, 3] as the model wants it."""

    @abstractmethod
    def largest_size(self) -> tuple[int, int]:
        """Height and width of an image that takes as many tokens as any."""

    def largest(self, modality: Modality, sizes: Mapping[str, int]) -> ProcessedMedia:
        """An image of the stated ``height`` and ``width``, or of :meth:`largest_size`; where that takes more
        than ``num_tokens``, a smaller square one, if the family makes fewer tokens of it."""
        height, width = self.largest_size()
        height, width = sizes.get("height", height), sizes.get("width", width)
        item, side = self.blank(height, width), math.sqrt(height * width)
        most = sizes.get("num_tokens", sys.maxsize)
        while item.num_tokens > most and side > 1:
            side = max(1.0, side * math.sqrt(most / item.num_tokens))
            item = min(item, self.blank(int(side), int(side)), key=attrgetter("num_tokens"))
        return item

    def blank(self, height: int, width: int) -> ProcessedMedia:
        """A black image, in the form that takes most."""
        return self.one(np.zeros((height, width, 3), np.uint8), {})

    def embedded(
        self, modality: Modality, num_vectors: int, facts: Mapping[str, Any]
    ) -> ProcessedMedia:
        """An image of the stated ``image_sizes``, height and width; see
        :class:`headrace_core.multimodal.TakesEmbeds`."""
        check_facts(facts, (IMAGE_SIZES,))
        if IMAGE_SIZES not in facts:
            return replace(self.sizeless(num_vectors), inputs={})
        height, width = stated_size(facts)
        return replace(self.one(np.zeros((height, width, 3), np.uint8), {}), inputs={})

    def sizeless(self, num_vectors: int) -> ProcessedMedia:
        """An image of which nothing but vectors is known.

        Raises: RequestError: its tokens depend on its size.
        """
        raise missing_fact(IMAGE_SIZES, "height and width of the image")

    def placeholder(self, modality: Modality, index: int) -> str:
        return self.text

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """See :func:`headrace_multimodal.placeholders.expanded`."""
        return expanded(token_ids, media, self.placeholder_id)


def token_id(config: Mapping[str, Any], *keys: str) -> int:
    """A token's id, as the first of some keys of a config says it.

    Raises: UnsupportedModel: none does.
    """
    for key in keys:
        value = config.get(key)
        if type(value) is int and value >= 0:
            return value
    raise UnsupportedModel(f"config.json: {' or '.join(keys)} must be a token id")


def part(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A config's object; {} if it is left out.

    Raises: UnsupportedModel: it is something else.
    """
    found = config.get(key)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise UnsupportedModel(f"config.json: {key} = {found!r:.200}: must be an object")
    return found


def packed(array: np.ndarray[Any, Any]) -> PackedArray:
    """An array of numpy's as plain data."""
    array = np.ascontiguousarray(array)
    return PackedArray(str(array.dtype), array.shape, array.tobytes())

"""Processors of several modalities as one: :class:`ByModality`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from headrace_core.errors import RequestError
from headrace_core.multimodal import (
    MediaItem,
    MediaPlacement,
    MediaProcessor,
    Modality,
    ProcessedMedia,
)
from headrace_multimodal.placeholders import expanded_by_kind


class Part(NamedTuple):
    """A processor among others."""

    processor: MediaProcessor
    options: tuple[str, ...]
    """Names of ``mm_processor_kwargs`` that it takes; it is given no other."""
    placeholders: Mapping[str, int]
    """Name of a model input that only items of one modality have -> the token that stands for them."""


class ByModality:
    """See :class:`headrace_core.multimodal.MediaProcessor`: each item goes to the processor of its modality.

    Args:
        parts: of modalities that differ.
        refused: option -> why it is not taken, for those that people expect.
    """

    def __init__(self, parts: Sequence[Part], refused: Mapping[str, str]) -> None:
        self._parts = {m: part for part in parts for m in part.processor.modalities()}
        self._refused = refused
        self._placeholders = {
            name: token for part in parts for name, token in part.placeholders.items()
        }

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        """See :class:`headrace_core.multimodal.MediaProcessor`."""
        return tuple(self._placeholders.values())

    def modalities(self) -> Sequence[Modality]:
        return tuple(self._parts)

    def process(
        self, items: Sequence[MediaItem], options: Mapping[str, Any]
    ) -> list[ProcessedMedia]:
        """Options that only another modality's processor takes change nothing of an item.

        Raises: RequestError: no processor takes the option; or a processor's own.
        """
        self._check(options)
        return [self._processed(item, options) for item in items]

    def _processed(self, item: MediaItem, options: Mapping[str, Any]) -> ProcessedMedia:
        part = self._parts[item.modality]
        own = {name: value for name, value in options.items() if name in part.options}
        return part.processor.process([item], own)[0]

    def _check(self, options: Mapping[str, Any]) -> None:
        known = {name for part in self._parts.values() for name in part.options}
        for name in sorted(set(options) - known):
            why = f"no such option; this model's are {', '.join(sorted(known))}"
            raise RequestError(
                f"mm_processor_kwargs.{name}: {self._refused.get(name, why)}",
                param="mm_processor_kwargs",
            )

    def largest(self, modality: Modality, sizes: Mapping[str, int]) -> ProcessedMedia:
        return self._parts[modality].processor.largest(modality, sizes)

    def placeholder(self, modality: Modality, index: int) -> str:
        return self._parts[modality].processor.placeholder(modality, index)

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """See :func:`headrace_multimodal.placeholders.expanded_by_kind`."""
        kinds = [(self._kind(item), item) for item in media]
        return expanded_by_kind(token_ids, kinds, tuple(self._placeholders.values()))

    def _kind(self, item: ProcessedMedia) -> int:
        """The token that stands for an item in a prompt. One that comes as vectors has no input that tells,
        but its tokens do."""
        for name, token in self._placeholders.items():
            if name in item.inputs:
                return token
        first, _ = item.runs[0]
        return item.token_ids[first]

"""Media that come as vectors, as a model's towers make them: from tensors, or files' bytes, to checked items.

Vectors are read as those of prompts are (:mod:`headrace_engine.input_processing.embeds`): files in a process
that can be killed. What a model must know beside them (``image_grid_thw``) its processor checks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from headrace_core.arrays import PackedArray, own_values
from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_core.multimodal import MediaItem, Modality, ProcessedMedia, TakesEmbeds
from headrace_engine.given_vectors import VECTORS
from headrace_engine.input_processing.embeds import EmbedsDecoder
from headrace_engine.input_processing.media_items import FIELD, ContentHash

EMBEDS_KEYS: Mapping[str, str] = {"image": "image_embeds", "audio": "audio_embeds"}
"""Modality -> key of the vectors in an object, and type of a message's part that brings them."""
OFF = (
    "this engine takes no vectors of media; it must be started with --enable-mm-embeds "
    "(enable_mm_embeds=True)"
)


class GivenEmbeds(NamedTuple):
    """An item that comes as vectors, unread."""

    vectors: object
    """A tensor [num_vectors, W] or [1, num_vectors, W], or the bytes of a file that holds one."""
    facts: Mapping[str, object] = {}
    """Name -> lists of numbers, an array, or a file's bytes."""


class MediaEmbeds:
    """Reads items of one model. Thread-safe.

    Args:
        processor: the model's.
        hidden_size: the language model's.
        dtype: the activations'.
        max_tokens: that a prompt holds; bounds what is read.
        content_hash: names an item's content.
    """

    def __init__(
        self,
        processor: TakesEmbeds,
        hidden_size: int,
        dtype: str,
        max_tokens: int,
        content_hash: ContentHash,
    ) -> None:
        self._processor, self._hash = processor, content_hash
        self._width = hidden_size * processor.embeds_width
        self._decoder = EmbedsDecoder(self._width, dtype, max_tokens)
        self._dtype = dtype

    def close(self) -> None:
        """End the process that reads files, if there is one."""
        self._decoder.close()

    def split(self, modality: Modality, given: object) -> list[GivenEmbeds] | None:
        """The items of an element of ``multi_modal_data``; None: it is no vectors.

        Raises: RequestError: an object has no vectors, or not one fact for each of its items.
        """
        if not has_vectors(modality, given):
            return None
        if isinstance(given, GivenEmbeds):
            return [given]
        key, where = EMBEDS_KEYS[modality], f"{FIELD}.{modality}"
        if not isinstance(given, Mapping):
            return [GivenEmbeds(one) for one in _apart(given)]
        if given.get(key) is None:
            raise RequestError(f"{where}: an object must have {key}, the vectors", param=where)
        facts = {name: value for name, value in given.items() if name != key}
        return self._with_facts(modality, given[key], facts)

    def _with_facts(
        self, modality: Modality, vectors: Any, facts: Mapping[str, object]
    ) -> list[GivenEmbeds]:
        rows = {name: self._rows(modality, name, value) for name, value in facts.items()}
        counts = {len(row) for row in rows.values()}
        stacked = _is_tensor(vectors) and vectors.dim() == 2
        if stacked and counts and counts != {1}:
            vectors = self._cut(modality, vectors, rows)
        items = _apart(vectors)
        for name, row in rows.items():
            if len(row) != len(items):
                raise _wrong(modality, f"{name}: {len(row)} of them for {len(items)} items")
        return [
            GivenEmbeds(item, {name: row[index] for name, row in rows.items()})
            for index, item in enumerate(items)
        ]

    def _cut(
        self, modality: Modality, vectors: Any, rows: Mapping[str, Sequence[object]]
    ) -> list[object]:
        """Vectors of several items, one behind the other, apart: each has as many as its facts say."""
        sizes = [
            num_vectors(self._embedded(modality, len(vectors), dict(zip(rows, one))))
            for one in zip(*rows.values())
        ]
        if sum(sizes) != len(vectors):
            raise _wrong(
                modality,
                f"{len(vectors)} vectors; must be {sum(sizes)} for the {len(sizes)} items that "
                f"{', '.join(rows)} tell of",
            )
        return list(vectors.split(sizes))

    def read(self, modality: Modality, given: GivenEmbeds) -> tuple[MediaItem, ProcessedMedia]:
        """An item with its hash, and what the model takes of it.

        Raises:
            RequestError: the vectors are of another shape or dtype, or not finite; there are not as many as
                the facts or the model say; a fact is unknown, missing or wrong.
        """
        where = f"{FIELD}.{modality}"
        facts = {name: self._row(modality, name, value) for name, value in given.facts.items()}
        read = self._decoder.rows(given.vectors, where)
        made = self._embedded(modality, read.num_tokens, facts)
        wanted = num_vectors(made)
        if wanted != read.num_tokens:
            raise _wrong(
                modality,
                f"{read.num_tokens} vectors; must be {wanted}, which "
                f"{f'follow from {facts!r:.100}' if facts else 'the model has for each'}",
            )
        shape = (read.num_tokens, self._width)
        inputs = {**made.inputs, VECTORS: PackedArray(self._dtype, shape, read.data)}
        return MediaItem(modality, None, self._name(modality, inputs), {}), ProcessedMedia(
            inputs, made.num_tokens, made.token_ids, made.runs
        )

    def _embedded(
        self, modality: Modality, number: int, facts: Mapping[str, Any]
    ) -> ProcessedMedia:
        """What the processor makes of the facts; its errors name the modality."""
        try:
            return self._processor.embedded(modality, number, facts)
        except RequestError as error:
            raise _wrong(modality, str(error).removeprefix(f"{FIELD}: ")) from error

    def _name(self, modality: str, inputs: Mapping[str, PackedArray]) -> str:
        """SHA-256 of all that the model sees of an item."""
        import numpy as np

        facts = {name: [one.dtype, list(one.shape)] for name, one in sorted(inputs.items())}
        data = b"".join(inputs[name].data for name in facts)
        return self._hash(modality, np.frombuffer(data, np.uint8), {"vectors": facts})

    def _rows(self, modality: Modality, name: str, value: object) -> list[object]:
        """A fact of each item: the rows of [items, n], or one."""
        found = self._fact(modality, name, value)
        return found if found and isinstance(found[0], list) else [found]

    def _row(self, modality: Modality, name: str, value: object) -> Any:
        """A fact of one item: [n], or [1, n] as of several."""
        rows = self._rows(modality, name, value)
        return rows[0] if len(rows) == 1 else rows

    def _fact(self, modality: Modality, name: str, value: object) -> list[Any]:
        """A fact as lists of whole numbers."""
        if isinstance(value, bytes | bytearray):
            return self._decoder.numbers(bytes(value), f"{FIELD}.{modality}", name)
        listed: Any = own_values(value)
        if not isinstance(listed, list | tuple) or not all(map(_is_number_or_row, listed)):
            raise _wrong(modality, f"{name} = {listed!r:.100}: must be whole numbers")
        return [list(one) if isinstance(one, list | tuple) else one for one in listed]


def has_vectors(modality: str, given: object) -> bool:
    """True if an element of ``multi_modal_data`` is vectors: an object, or a tensor of floats; of
    recordings, a tensor of three dimensions, as a waveform has fewer."""
    if modality not in EMBEDS_KEYS:
        return False
    if isinstance(given, Mapping | GivenEmbeds):
        return True
    if not _is_tensor(given) or not given.is_floating_point():  # type: ignore[attr-defined]
        return False
    return modality == "image" or given.dim() == 3  # type: ignore[attr-defined]


def refused_embeds(where: str) -> UnsupportedFeature:
    """The error where vectors come and the engine takes none."""
    return UnsupportedFeature(f"{where}: {OFF}", param=where)


def num_vectors(item: ProcessedMedia) -> int:
    """Vectors that stand for an item."""
    return sum(number for _, number in item.runs) if item.runs else item.num_tokens


def _apart(vectors: Any) -> list[object]:
    """Items of a list, or of a tensor [items, vectors, W]."""
    if isinstance(vectors, list | tuple):
        return list(vectors)
    if _is_tensor(vectors) and vectors.dim() == 3:
        return list(vectors)
    return [vectors]


def _is_tensor(given: object) -> bool:
    return type(given).__module__.partition(".")[0] == "torch" and hasattr(given, "dim")


def _is_number_or_row(value: object) -> bool:
    return type(value) is int or (
        isinstance(value, list | tuple) and all(type(one) is int for one in value)
    )


def _wrong(modality: str, message: str) -> RequestError:
    where = f"{FIELD}.{modality}"
    return RequestError(f"{where}: {message}", param=where)

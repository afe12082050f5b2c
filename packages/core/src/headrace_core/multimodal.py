"""Images, audio and video on their way into a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from headrace_core.arrays import PackedArray

Modality = Literal["image", "audio", "video"]
MODALITIES: tuple[Modality, ...] = ("image", "audio", "video")

MEDIA_LIMIT = 999
"""Items of a modality that a prompt may bring, unless the operator says otherwise."""

MEDIA_SIZES: Mapping[str, tuple[str, ...]] = {
    "image": ("width", "height"), "video": ("num_frames", "width", "height"), "audio": ("length",),
}  # fmt: skip
"""Modality -> sizes of an item that memory is measured with, beside ``count`` in its limit."""


def media_limit(limits: Mapping[str, Any], modality: str) -> int:
    """Most items of a modality in one prompt.

    Args:
        limits: ``model.limit_mm_per_prompt``, checked: modality -> count, or an object with ``count``.
    """
    given = limits.get(modality, MEDIA_LIMIT)
    count = given.get("count", MEDIA_LIMIT) if isinstance(given, Mapping) else given
    return int(count)


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One decoded item."""

    modality: Modality
    data: Any
    """image: [height, width, 3] uint8; audio: [samples] float32, one channel, with its
    ``sample_rate`` in ``metadata`` (absent: the model's own);
    video: [frames, height, width, 3] uint8."""
    content_hash: str
    """256-bit hex over the decoded content, its shape and its options."""
    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ProcessedMedia:
    """A media item as the model wants it."""

    inputs: Mapping[str, PackedArray]
    """For ``SupportsMultiModal.embed_media`` or ``SupportsEncoderDecoder.encode``."""
    num_tokens: int
    """Tokens that it takes in the prompt; of an encoder-decoder model, the length of what its encoder
    makes of it."""
    token_ids: tuple[int, ...] = ()
    """These tokens, [num_tokens]; (): all of them are the placeholder."""
    runs: tuple[tuple[int, int], ...] = ()
    """(first, number) of those among them that take vectors, in order; (): all do."""


@dataclass(frozen=True, slots=True)
class MediaInput:
    """A processed item on its way to the workers, with its place. Plain data."""

    modality: str
    inputs: dict[str, PackedArray]
    content_hash: str
    """256-bit hash (hex) of the decoded item and its options: names its content in cached prefixes."""
    num_tokens: int
    """See :class:`ProcessedMedia`."""
    offset: int = -1
    """Its first token in the prompt; -1: it is not in the prompt (an encoder's)."""
    runs: tuple[tuple[int, int], ...] = ()
    """See :class:`ProcessedMedia`."""

    @property
    def vector_runs(self) -> tuple[tuple[int, int], ...]:
        """:attr:`runs`, written out."""
        return self.runs or ((0, self.num_tokens),)

    @property
    def num_vectors(self) -> int:
        """Vectors that stand for it."""
        return sum(number for _, number in self.vector_runs)


class MediaPlacement(NamedTuple):
    """A prompt with its media's placeholders expanded."""

    token_ids: list[int]
    offsets: list[int]
    """By item: its first token."""
    whole_spans: Sequence[tuple[int, ...]] = ()
    """Bounds (first, end, first, end, ...) of tokens that all see each other: a step computes all of one."""


class MediaProcessor(Protocol):
    """Turns decoded items into a model's inputs.

    The object behind an entry point of ``headrace.multimodal_processors`` (the entry's name is the
    architecture) is a factory ``(config, path) -> MediaProcessor``: ``config.json`` whole, and the
    checkpoint's folder, whose ``preprocessor_config.json`` it may read. ``needs_media``: why prompts without
    media are refused. ``placeholder_ids``: tokens that only stand for media, which such prompts may not have.
    """

    def modalities(self) -> Sequence[Modality]: ...

    def process(
        self, items: Sequence[MediaItem], options: Mapping[str, Any]
    ) -> list[ProcessedMedia]:
        """Raises RequestError naming the option or the item."""

    def largest(self, modality: Modality, sizes: Mapping[str, int]) -> ProcessedMedia:
        """An item that takes as many tokens and as much memory as any: for measuring, whatever its
        content.

        Args:
            sizes: that the operator states (:data:`MEDIA_SIZES`); and ``num_tokens``, which a prompt holds.
        """

    def placeholder(self, modality: Modality, index: int) -> str:
        """Text of the placeholder for the conversation's item ``index`` (from 0) in a message, where
        the chat template itself writes none; "" for an encoder's."""

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """Expand each item's placeholder in a prompt, in order; an encoder-decoder model's prompt
        has none and stays as it is, with offsets of -1.

        Raises:
            RequestError: there are more or fewer placeholders than items.
        """


@runtime_checkable
class TakesEmbeds(Protocol):
    """A :class:`MediaProcessor` of a model that also takes items as vectors, which its towers made."""

    embeds_width: int
    """Hidden sizes of a vector: more than 1 where inner layers take vectors, too."""

    def embedded(
        self, modality: Modality, num_vectors: int, facts: Mapping[str, Any]
    ) -> ProcessedMedia:
        """An item as ``facts`` (lists of numbers by name) say, its inputs those beside vectors; of
        ``num_vectors`` where they leave it open. Raises RequestError naming the fact."""


class ECConnector(ABC):
    """The object behind an entry point of ``headrace.ec_connectors`` is a subclass. A worker makes one and
    calls it from one thread. A key is 64 hex digits, made of the model and an item's content.

    Args:
        settings: ``multimodal.ec_transfer_config``, checked. Raises ConfigError naming what is wrong.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings

    @abstractmethod
    def save(self, key: str, vectors: PackedArray) -> None:
        """Offer vectors [num_vectors, W], if they are not there. Raises OSError."""

    @abstractmethod
    def load(self, key: str) -> PackedArray | None:
        """Offered vectors; None: there are none. Does not wait for any to come. Raises OSError."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Let go of what it holds. Idempotent."""

"""Media of prompts: from what a caller gives to what the model's encoder takes.

Items are counted, hashed by content, and handed to the model's processor, which also puts as many
placeholders into the prompt as each item has tokens. What a client sent as a file is decoded by a
function that the engine was given; nothing here looks into a file.
"""

from __future__ import annotations

import base64
import binascii
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

from headrace_core.errors import PromptTooLong, QueueFull, RequestError, UnsupportedFeature
from headrace_core.multimodal import (
    MEDIA_LIMIT,
    MediaInput,
    MediaItem,
    MediaProcessor,
    Modality,
    ProcessedMedia,
    media_limit,
)
from headrace_core.request import MEDIA_PARTS, modality_of
from headrace_core.speech.model import AudioClip
from headrace_engine.input_processing.abandonment import abandonment, check_wanted
from headrace_engine.input_processing.media_embeds import (
    EMBEDS_KEYS,
    GivenEmbeds,
    MediaEmbeds,
    has_vectors,
    refused_embeds,
)
from headrace_engine.input_processing.media_items import (
    FIELD,
    NO_FILES,
    ContentHash,
    FileReading,
    ItemReader,
    Later,
)
from headrace_engine.input_processing.media_names import FIELD as NAMES_FIELD
from headrace_engine.input_processing.media_names import (
    NamesElsewhere,
    check_name,
    content_name,
    item_hash,
    names_of,
)
from headrace_engine.input_processing.processed_items import NotKept, ProcessedItems
from headrace_engine.whole_spans import check_spans, uncut_spans

TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Part type -> the key that holds its text."""
DETAILS = ("auto", "low", "high")
"""Values of an image's ``detail``; the model's own processor decides, whichever is given."""
CLIENT_PLACE = "_place"
"""Key of a part: where its content stands in a request of another protocol, for messages."""
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_URL_SAFE = str.maketrans("-_", "+/")
_KEYS = {"input_audio": "data", "audio_url": "url", "image_url": "url", "video_url": "url"}
"""Type of a message's part -> the key of its content, within an object of the type's name."""


_ForNumbers = Callable[[Mapping[str, int], Mapping[str, Any]], Mapping[str, Any]]
"""(modality -> how many items a prompt brings, options) -> options of a processor to which that matters."""
_ForText = Callable[[str, Mapping[str, Any]], Mapping[str, Any]]
"""(text of a prompt, options) -> options of a processor to which that matters."""
AT_ONCE = 8
"""Items that are held as they were decoded, of all requests."""
PLACE_SECONDS = 120.0
"""Seconds that a decoded item waits until it may be processed."""


_EMBEDS_FORM = (
    "base64 of a file of torch.save or safetensors that holds one tensor (in LLM.chat also a tensor), or an "
    "object of such files by name"
)


class _Place:
    """One of the places for items that are held as they were decoded; given back at the end.

    Args:
        places: those that are free.
    """

    def __init__(self, places: threading.Semaphore) -> None:
        self._places, self._taken = places, False

    def __enter__(self) -> _Place:
        return self

    def __exit__(self, *_: object) -> None:
        if self._taken:
            self._places.release()

    def take(self) -> None:
        """Wait for a place, unless there is one already.

        Raises: QueueFull: none became free in :data:`PLACE_SECONDS`.
        """
        if self._taken:
            return
        if not self._places.acquire(timeout=PLACE_SECONDS):
            raise QueueFull("too many media items wait to be processed", retry_after=1.0)
        self._taken = True


class PlacedMedia(NamedTuple):
    """A prompt's media, and its tokens with placeholders for them."""

    token_ids: list[int]
    media: list[MediaInput]
    num_encoder_tokens: int
    whole_spans: list[tuple[int, ...]]
    """See :class:`~headrace_core.multimodal.MediaPlacement`."""


class _Brought(NamedTuple):
    """An item of a prompt, unread."""

    modality: Modality
    given: object
    """None: it is known by its name."""
    name: str | None
    where: str
    place: str | None = None
    """Where a chat brings it; None: it is one of ``multi_modal_data``."""


class MediaReader:
    """Reads media for one model. Thread-safe.

    Args:
        processor: the model's.
        content_hash: names an item's content.
        limits: the operator's; see :func:`headrace_core.multimodal.media_limit`.
        is_encoder_decoder: the model's encoder reads the one item of a prompt.
        decoder_start_token_id: what a decoder's prompt begins with where none is given.
        files: reads what is brought.
        options: of the processor, where a request says none of its own.
        max_kept_bytes: of processed items that are kept for whoever brings them again.
        max_tokens: that the items of a prompt may take; a decoder's context.
        max_step: tokens of a step, which must hold all that is computed together.
        whole_items: each item is.
        embeds: reads items that come as vectors; None: none may.
        interleaves: media of a message that a template takes as one text stand where the message brings
            them; False: in front of its text.
    """

    def __init__(
        self,
        processor: MediaProcessor,
        content_hash: ContentHash,
        *,
        limits: Mapping[str, Any] | None = None,
        is_encoder_decoder: bool = False,
        decoder_start_token_id: int | None = None,
        files: FileReading = NO_FILES,
        options: Mapping[str, Any] | None = None,
        max_kept_bytes: int = 0,
        max_tokens: int = sys.maxsize,
        max_step: int = sys.maxsize,
        whole_items: bool = False,
        embeds: MediaEmbeds | None = None,
        interleaves: bool = True,
    ) -> None:
        self._embeds, self.interleaves = embeds, interleaves
        self._max_step, self._whole_items = max_step, whole_items
        self._max_tokens = max_tokens
        self._places = threading.Semaphore(AT_ONCE)
        self._options = dict(options or {})
        self.needs_media: str = getattr(processor, "needs_media", "")
        self.placeholder_ids = frozenset[int](getattr(processor, "placeholder_ids", ()))
        self._for_numbers: _ForNumbers | None = getattr(processor, "options_for_numbers", None)
        self._for_text: _ForText | None = getattr(processor, "options_for_text", None)
        self.is_encoder_decoder = is_encoder_decoder
        self.decoder_start_token_id = decoder_start_token_id
        self._bare = processor
        self._processor = ProcessedItems(processor, max_kept_bytes)
        self._items = ItemReader(files, content_hash)
        self._elsewhere: NamesElsewhere | None = None
        self._limits = {m: media_limit(limits or {}, m) for m in processor.modalities()}
        self.files = files

    def share_names(self, elsewhere: NamesElsewhere) -> None:
        """Have named items in common with other processes; before the first prompt."""
        self._elsewhere = elsewhere

    @property
    def modalities(self) -> tuple[str, ...]:
        """Modalities of which a prompt may bring at least one item, be it as vectors."""
        return tuple(m for m, most in self._limits.items() if most or self._takes_vectors(m))

    @property
    def reads_text(self) -> bool:
        """True if what becomes of an item depends on the text of its prompt."""
        return self._for_text is not None

    def part_types(self) -> tuple[str, ...]:
        """Types of the parts of messages that bring media."""
        vectors = EMBEDS_KEYS.values()
        return tuple(
            kind
            for kind, modality in MEDIA_PARTS.items()
            if modality in self._limits
            and (self._takes_vectors(modality) if kind in vectors else self._limits[modality])
        )

    def _takes_vectors(self, modality: str) -> bool:
        return self._embeds is not None and modality in EMBEDS_KEYS

    def place(
        self,
        token_ids: Sequence[int],
        data: object,
        options: object,
        names: object = None,
        salt: str | None = None,
        places: Mapping[str, Sequence[str]] | None = None,
        text: str = "",
    ) -> PlacedMedia:
        """A prompt with its media.

        Args:
            token_ids: with one placeholder for each item, or none for an encoder's.
            data: ``multi_modal_data``: modality -> one item or a list.
            options: ``mm_processor_kwargs``; None: none.
            names: ``multi_modal_uuids``: modality -> one name or a list; None: none.
            salt: the prompt's ``cache_salt``.
            places: modality -> where a chat brings its items, for messages.
            text: the prompt's, where :attr:`reads_text`.

        Raises:
            RequestError: an item, an option, a name or the number of items is wrong; says what.
            UnsupportedFeature: the model does not take the modality.
        """
        chosen = self._chosen(options)
        brought = self._brought(data, names, places or {})
        if self._for_numbers is not None:
            chosen = self._for_numbers(Counter(one.modality for one in brought), chosen)
        if self._for_text is not None:
            chosen = self._for_text(text, chosen)
        if self.is_encoder_decoder and len(brought) != 1:
            raise RequestError(
                f"{FIELD}: {len(brought)} items; must be exactly one, which the encoder reads",
                param=FIELD,
            )
        if options and all(isinstance(one.given, GivenEmbeds) for one in brought):
            self.check_options(options)  # nobody else does: vectors are not processed
        pairs = self._processed(brought, chosen, salt)
        items, processed = [item for item, _ in pairs], [made for _, made in pairs]
        placed = self._processor.place(token_ids, processed)
        media = [
            MediaInput(
                item.modality,
                dict(one.inputs),
                item.content_hash,
                one.num_tokens,
                offset,
                one.runs,
            )
            for item, one, offset in zip(items, processed, placed.offsets, strict=True)
        ]
        media.sort(key=lambda item: item.offset)
        uncut = uncut_spans(placed.whole_spans, media, whole_items=self._whole_items)
        check_spans(uncut, self._max_step)
        states = sum(item.num_tokens for item in media) if self.is_encoder_decoder else 0
        return PlacedMedia(placed.token_ids, media, states, list(placed.whole_spans))

    def _chosen(self, options: object) -> Mapping[str, Any]:
        if options is not None and not isinstance(options, Mapping):
            raise _refused("mm_processor_kwargs", options, "an object, or absent")
        return {**self._options, **(options or {})}

    def check_options(self, options: object) -> None:
        """Check options of a prompt that brings nothing to be processed with them, on an empty image.

        Raises: RequestError: a name is unknown or a value refused.
        """
        chosen = self._chosen(options)
        if "image" not in self._limits:
            self._bare.process([], chosen)
            return
        import numpy as np

        blank = MediaItem("image", np.zeros((224, 224, 3), np.uint8), "", {})
        self._bare.process([blank], chosen)

    def check_text_alone(self, prompt: object, param: str = "prompt") -> None:
        """Check a prompt that brings no media: whoever types a placeholder means an item.

        Args:
            prompt: a text, or a mapping with one; token ids are taken as they are.
            param: where the text comes from.

        Raises: RequestError: its text has placeholders.
        """
        text: Any = prompt
        if isinstance(prompt, Mapping) and prompt.get("prompt_token_ids") is None:
            text = prompt.get("prompt")
        for modality in self.modalities if isinstance(text, str) else ():
            placeholder = self.placeholder(cast("Modality", modality), 0)
            number = text.count(placeholder) if placeholder else 0
            if number:
                raise RequestError(
                    f"{param}: has {number} placeholder{'s' * (number > 1)} ({placeholder!r}), and no "
                    f"{modality} comes with it; bring one for each as {FIELD}.{modality}, or as a part of a "
                    "chat's messages",
                    param=param,
                )

    def placeholder(self, modality: Modality, index: int) -> str:
        """See :meth:`headrace_core.multimodal.MediaProcessor.placeholder`."""
        return self._processor.placeholder(modality, index)

    def decode(self, modality: Modality, data: bytes, where: str) -> object:
        """A file that a chat brought, as ``multi_modal_data`` has it.

        Raises:
            UnsupportedFeature: this engine decodes none.
            RequestError: it is no such file.
        """
        files = self.files
        read = {"audio": files.audio, "image": files.image, "video": files.video}[modality]
        if read is None:
            raise UnsupportedFeature(
                f"{where}: this engine decodes no files; bring {FIELD} in a prompt", param=where
            )
        made = read(data, where)
        return tuple(made) if isinstance(made, AudioClip) else made

    def fetch(self, url: str, modality: Modality, where: str) -> bytes:
        """The file behind a URL.

        Raises:
            UnsupportedFeature: this engine fetches none.
            RequestError: it may not be fetched, or could not be.
        """
        if self.files.fetch is None:
            raise UnsupportedFeature(
                f"{where} = {url[:64]!r}: must be a data: URL with base64 content; this engine fetches "
                "no files",
                param=where,
            )
        return self.files.fetch(url, modality, where)

    def close(self) -> None:
        """End what reads files; it would be started anew."""
        self.files.close()
        if self._embeds is not None:
            self._embeds.close()

    def _brought(
        self, data: object, names: object, places: Mapping[str, Sequence[str]]
    ) -> list[_Brought]:
        """The items that a prompt brings, unread."""
        if not isinstance(data, Mapping):
            raise _refused(FIELD, data, "a mapping of modalities to items")
        found: dict[str, Sequence[object]] = {}
        for modality, given in data.items():
            if modality not in self._limits:
                raise UnsupportedFeature(
                    f"{FIELD}.{modality}: this model takes {', '.join(self._limits)} only",
                    param=f"{FIELD}.{modality}",
                )
            found[modality] = self._split(cast("Modality", modality), given)
            # What comes by its name alone may be either; where nothing else may come, it is vectors.
            as_vectors = sum(isinstance(item, GivenEmbeds | None) for item in found[modality])
            self.check_count(modality, len(found[modality]), vectors=as_vectors)
        named = names_of(names, {modality: len(items) for modality, items in found.items()})
        return [
            _Brought(
                cast("Modality", modality),
                given,
                name,
                f"{modality}[{index}]",
                places[modality][index] if modality in places else None,
            )
            for modality, items in found.items()
            for index, (given, name) in enumerate(zip(items, named[modality], strict=True))
        ]

    def _split(self, modality: Modality, given: object) -> Sequence[object]:
        """The items of a modality, those that come as vectors as :class:`GivenEmbeds`."""
        elements = given if isinstance(given, list) else [given]
        if not any(has_vectors(modality, element) for element in elements):
            return self._items.split(modality, given)
        if self._embeds is None:
            raise refused_embeds(f"{FIELD}.{modality}")
        found: list[object] = []
        for element in elements:
            found += self._embeds.split(modality, element) or [element]
        return found

    def _processed(
        self, brought: Sequence[_Brought], options: Mapping[str, Any], salt: str | None
    ) -> list[tuple[MediaItem, ProcessedMedia]]:
        """One item after the other, so that of a prompt one is held as it was decoded, until they are more
        than the context holds.

        Raises:
            PromptTooLong: they are.
        """
        found: list[tuple[MediaItem, ProcessedMedia]] = []
        named: dict[str, tuple[MediaItem, ProcessedMedia]] = {}
        total = 0
        for one in brought:
            check_wanted()
            known = content_name(one.modality, one.name, salt, options) if one.name else ""
            pair = named.get(known)
            if pair is None:
                with named_at(one.place):
                    pair = self._one(one, known, options)
            if known:
                named[known] = pair = self._named(known, *pair)
            found.append(pair)
            total += pair[1].num_tokens
            if not self.is_encoder_decoder and total > self._max_tokens:
                raise PromptTooLong(self._max_tokens, total, 1)
        return found

    def _one(
        self, brought: _Brought, known: str, options: Mapping[str, Any]
    ) -> tuple[MediaItem, ProcessedMedia]:
        """
        Args:
            known: stands for the hash of its content; "": it has no name.
        """
        modality, given, name, where, _ = brought
        kept = self._kept(modality, known) if known else None
        if kept is not None:
            return kept
        if given is None and not known:
            raise RequestError(
                f"{FIELD}.{where} = null: must be an item, as it has no name ({NAMES_FIELD}; uuid beside a "
                "part)",
                param=f"{FIELD}.{modality}",
            )
        if given is None:
            raise RequestError(
                f"{NAMES_FIELD}.{where} = {name!r}: no item of that name is kept; send its content",
                param=f"{NAMES_FIELD}.{modality}",
                value=name,
            )
        if isinstance(given, GivenEmbeds):
            return self._vectors(modality, given, known)
        with _Place(self._places) as place:
            if isinstance(given, Later):
                # Neither a slow host nor files that wait for a decoder keep places from others.
                with self.files.during(abandonment(), place.take):
                    given = self._items.decoded(modality, given)
            place.take()
            item = self._items.read(modality, given, options)
            if known:
                item = replace(item, content_hash=known)
            [made] = self._processor.process([item], options)
        if modality == "audio":
            check_numbers(made, f"{FIELD}.{brought.where}")
        return replace(item, data=None), made

    def _kept(self, modality: Modality, known: str) -> tuple[MediaItem, ProcessedMedia] | None:
        """An item that came under its name before, to this process or to another."""
        item = MediaItem(modality, None, known, {})
        if self._processor.keeps(known):
            with suppress(NotKept):  # it was, when it was looked at
                return item, self._processor.process([item], {})[0]
        made = None if self._elsewhere is None else self._elsewhere.find(known)
        if made is None:
            return None
        self._processor.keep(known, made)
        return item, made

    def _named(
        self, known: str, item: MediaItem, made: ProcessedMedia
    ) -> tuple[MediaItem, ProcessedMedia]:
        """A named item as the engine and other processes are to know it."""
        item = replace(item, content_hash=item_hash(known, made))
        if self._elsewhere is not None:
            self._elsewhere.offer(known, item.content_hash, made)
        return item, made

    def _vectors(
        self, modality: Modality, given: GivenEmbeds, known: str
    ) -> tuple[MediaItem, ProcessedMedia]:
        """An item that came as vectors; kept if it has a name, by which it may come again."""
        if self._embeds is None:
            raise refused_embeds(f"{FIELD}.{modality}")
        item, made = self._embeds.read(modality, given)
        if known:
            item = replace(item, content_hash=known)
            self._processor.keep(known, made)
        return item, made

    def check_count(
        self, modality: str, count: int, where: str | None = None, *, vectors: int = 0
    ) -> None:
        """Raises: RequestError if a prompt brings too many items; names limit and modality.

        Args:
            where: a chat brings the last of them; None: ``multi_modal_data`` does.
            vectors: so many of them come as such, which a limit of 0 leaves alone.
        """
        most = self._limits[cast("Modality", modality)]
        if most == 0 and vectors == count and self._takes_vectors(modality):
            most = MEDIA_LIMIT
        if count > most:
            where = where or f"{FIELD}.{modality}"
            raise RequestError(
                f"{where}: {count} items; at most {most} are taken "
                f"(--limit-mm-per-prompt '{{\"{modality}\": {most}}}')",
                param=where,
                value=count,
            )


def check_numbers(made: ProcessedMedia, where: str) -> None:
    """Check what a processor made of samples, which may be any finite numbers.

    Raises: RequestError: a number is not finite, and the model's answer would not be.
    """
    import numpy as np

    for array in made.inputs.values():
        if (
            array.dtype == "float32"
            and not np.isfinite(np.frombuffer(array.data, np.float32)).all()
        ):
            raise RequestError(
                f"{where}: its samples are so large that its spectrogram is not finite; must be numbers "
                "from -1 to 1",
                param=f"{FIELD}.audio",
            )


@contextmanager
def named_at(place: str | None) -> Iterator[None]:
    """Errors that name ``multi_modal_data`` or ``multi_modal_uuids`` name this place instead; None: they
    stay."""
    try:
        yield
    except RequestError as error:
        if place is not None and (error.param or "").startswith((FIELD, NAMES_FIELD)):
            told = str(error)
            ours = re.match(rf"(?:{FIELD}|{NAMES_FIELD})[^ :]*", told)
            error.param = place
            error.args = (place + (told[ours.end() :] if ours else f": {told}"),)
        raise


class _Part(NamedTuple):
    """Content of a message's part that brings media."""

    modality: Modality
    content: object
    """base64, a URL or an object, as the part's type says."""
    kind: str
    where: str
    name: str | None


class ChatMedia:
    """The media of one conversation, in the order in which its messages bring them.

    Args:
        reader: None: the model takes none.
    """

    def __init__(self, reader: MediaReader | None) -> None:
        self._reader = reader
        self._parts: list[_Part] = []

    def __bool__(self) -> bool:
        return bool(self._parts)

    @property
    def interleaves(self) -> bool:
        """See :class:`MediaReader`."""
        return self._reader is None or self._reader.interleaves

    def take(self, part: Mapping[str, Any], path: str) -> tuple[Modality, str] | None:
        """Keep a part's content.

        Args:
            path: of the part, for messages.

        Returns:
            Its modality, and what stands for it in a text; None: the part brings no media.

        Raises:
            RequestError: its content is malformed.
        """
        kind, modality = part.get("type"), modality_of(part)
        if self._reader is None or modality is None or kind is None:
            return None
        if kind not in self._reader.part_types():
            if kind in EMBEDS_KEYS.values() and modality in self._reader.modalities:
                raise refused_embeds(f"{path}.{kind}")
            return None
        content, where = part.get(kind), _client_place(part) or f"{path}.{kind}"
        name = check_name(part.get("uuid"), f"{path}.uuid")
        if name is not None and content is None:
            where = f"{path}.uuid"
        elif kind in _KEYS:
            content, where = _text_in(part, kind, where)
        index = sum(other.modality == modality for other in self._parts)
        self._parts.append(_Part(modality, content, kind, where, name))
        self._reader.check_count(modality, index + 1, where, vectors=self._num_vectors(modality))
        return modality, self._reader.placeholder(modality, index)

    def accepted(self) -> str:
        """Types of parts that the model takes, as an error says them."""
        kinds = () if self._reader is None else self._reader.part_types()
        if not kinds:
            return f"this model takes text only, as one of {', '.join(TEXT_PARTS)}"
        return f"must be one of {', '.join((*TEXT_PARTS, *kinds))}"

    def data(self) -> dict[str, list[Any]]:
        """The media as a prompt's ``multi_modal_data``: fetched and decoded when they are read."""
        found: dict[str, list[Any]] = {}
        for part in self._parts:
            item: object = None
            if part.kind in EMBEDS_KEYS.values() and part.content is not None:
                item = _embeds_of(part)
            elif part.content is not None:
                item = Later(partial(self._fetched, part), partial(self._decoded, part))
            found.setdefault(part.modality, []).append(item)
        return found

    def names(self) -> dict[str, list[str | None]]:
        """Their names, as ``multi_modal_uuids`` has them."""
        found: dict[str, list[str | None]] = {}
        for part in self._parts:
            found.setdefault(part.modality, []).append(part.name)
        return found

    def places(self) -> dict[str, list[str]]:
        """Where the messages bring them."""
        found: dict[str, list[str]] = {}
        for part in self._parts:
            found.setdefault(part.modality, []).append(part.where)
        return found

    def _num_vectors(self, modality: Modality) -> int:
        """Items of a modality that come as vectors."""
        kind = EMBEDS_KEYS.get(modality)
        return sum(part.kind == kind for part in self._parts)

    def _fetched(self, part: _Part) -> object:
        """A file's bytes, or the object that was given."""
        assert self._reader is not None
        if not isinstance(part.content, str):
            return part.content
        if part.kind == "input_audio":
            return _from_base64(part.content, part.where)
        if not _SCHEME.match(part.content):
            raise RequestError(
                f"{part.where} = {part.content[:64]!r}: must begin with https:, http:, file: or data:; "
                "base64 content is sent as 'data:TYPE;base64,CONTENT'",
                param=part.where,
            )
        if part.content[:5].lower() != "data:":
            return self._reader.fetch(part.content, part.modality, part.where)
        head, _, text = part.content.partition(",")
        if not head.lower().endswith(";base64"):
            raise RequestError(
                f"{part.where} = {head[:64]!r}: a data: URL must have base64 content",
                param=part.where,
            )
        return _from_base64(text, part.where)

    def _decoded(self, part: _Part, fetched: object) -> object:
        assert self._reader is not None
        if not isinstance(fetched, bytes):
            return fetched
        return self._reader.decode(part.modality, fetched, part.where)


def _embeds_of(part: _Part) -> GivenEmbeds:
    """Vectors of a part: base64 of a file or a tensor, alone or in an object with facts.

    Raises: RequestError: a text is no base64, or an object has no vectors.
    """
    given = part.content
    if given is None or isinstance(given, int | float | list | tuple):
        raise _refused(part.where, given, _EMBEDS_FORM)
    if not isinstance(given, Mapping):
        return GivenEmbeds(_file_of(given, part.where))
    vectors = given.get(part.kind)
    if isinstance(vectors, int | float | list | tuple):
        raise _refused(f"{part.where}.{part.kind}", vectors, _EMBEDS_FORM)
    read = {name: _file_of(value, f"{part.where}.{name}") for name, value in given.items()}
    if read.get(part.kind) is None:
        raise RequestError(
            f"{part.where}: an object must have {part.kind}, the vectors", param=part.where
        )
    return GivenEmbeds(read.pop(part.kind), read)


def _file_of(value: object, where: str) -> object:
    return _from_base64(value, where) if isinstance(value, str) else value


def _client_place(part: Mapping[str, Any]) -> str | None:
    place = part.get(CLIENT_PLACE)
    return place if isinstance(place, str) else None


def _text_in(part: Mapping[str, Any], kind: str, where: str) -> tuple[str, str]:
    """A part's URL or base64, and where it stands: within an object, or alone if it is a URL.

    Raises:
        RequestError: the content is not text, or ``detail`` is not of :data:`DETAILS`.
    """
    content = part.get(kind)
    if isinstance(content, str) and kind != "input_audio":
        return content, where
    given = content if isinstance(content, Mapping) else {}
    detail = given.get("detail") if kind == "image_url" else None
    if detail is not None and detail not in DETAILS:
        raise _refused(f"{where}.detail", detail, f"one of {', '.join(DETAILS)}, or absent")
    if _client_place(part) is None:
        where = f"{where}.{_KEYS[kind]}"
    found = given.get(_KEYS[kind])
    if not isinstance(found, str):
        whole = content is not None and not isinstance(content, Mapping)
        form = f"; {kind} is an object with {_KEYS[kind]}" if whole else ""
        raise RequestError(f"{where}: must be text{form}", param=where)
    return found, where


def implicit_form(prompt: Mapping[str, Any]) -> dict[str, Any]:
    """An :class:`~headrace_core.request.EncoderDecoderPrompt` as the decoder's prompt with the encoder's
    media. Other prompts are copied.

    Raises:
        RequestError: the encoder is to read text, the decoder media, or a field is unknown.
    """
    if "encoder_prompt" not in prompt:
        return dict(prompt)
    _check_fields("prompt", prompt, ("encoder_prompt", "decoder_prompt", "cache_salt"))
    encoder, decoder = prompt["encoder_prompt"], prompt.get("decoder_prompt")
    encoder = encoder if isinstance(encoder, Mapping) else {"prompt": encoder}
    texts = ("prompt", "prompt_token_ids")
    own = (FIELD, NAMES_FIELD, "mm_processor_kwargs")
    _check_fields("encoder_prompt", encoder, (*texts, *own))
    if encoder.get("prompt") or encoder.get("prompt_token_ids"):
        raise _refused("encoder_prompt", encoder.get("prompt"), "empty: the encoder reads media")
    if isinstance(decoder, str) or decoder is None:
        decoder = {"prompt": decoder or ""}
    elif not isinstance(decoder, Mapping):
        decoder = {"prompt_token_ids": decoder}
    _check_fields("decoder_prompt", decoder, (*texts, "cache_salt"))
    media = {name: encoder[name] for name in own if name in encoder}
    salt = {"cache_salt": prompt["cache_salt"]} if prompt.get("cache_salt") is not None else {}
    return {**decoder, **media, **salt}


def needed_media(why: str) -> RequestError:
    """The error where a prompt must bring media and does not."""
    return RequestError(f"{FIELD}: must be given: {why}", param=FIELD)


def cuts_media(truncate_prompt_tokens: int | None) -> RequestError:
    """The error where a prompt with media would be shortened."""
    return RequestError(
        f"truncate_prompt_tokens = {truncate_prompt_tokens}: must be absent, as it would cut "
        "placeholders of media",
        param="truncate_prompt_tokens",
    )


def _check_fields(where: str, given: Mapping[str, Any], known: Iterable[str]) -> None:
    names = tuple(known)
    unknown = sorted(name for name in given if name not in names and given[name] is not None)
    if unknown:
        raise RequestError(
            f"{where}.{unknown[0]}: no such field; fields are {', '.join(names)}",
            param=f"{where}.{unknown[0]}",
        )


def _from_base64(text: str, where: str) -> bytes:
    """Content of either alphabet (RFC 4648, sections 4 and 5), padded or not."""
    try:
        plain = text.translate(_URL_SAFE).rstrip("=")
        return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise RequestError(f"{where}: must be base64", param=where) from None


def _refused(name: str, value: object, accepted: str) -> RequestError:
    return RequestError(f"{name} = {value!r:.100}: must be {accepted}", param=name)

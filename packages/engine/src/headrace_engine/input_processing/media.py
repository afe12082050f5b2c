"""Media of prompts: from what a caller gives to what the model's encoder takes.

Items are counted, hashed by content, and handed to the model's processor, which also puts as many
placeholders into the prompt as each item has tokens. What a client sent as a file is decoded by a
function that the engine was given; nothing here looks into a file.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_core.multimodal import MediaInput, MediaItem, MediaProcessor, Modality, media_limit
from headrace_core.request import MEDIA_PARTS
from headrace_core.speech.model import AudioClip

if TYPE_CHECKING:
    import numpy.typing as npt

AudioDecode = Callable[[bytes, str], AudioClip]
"""(a file's bytes, its name for messages) -> sound. Blocks; raises RequestError."""
ContentHash = Callable[[str, "npt.NDArray[Any]", Mapping[str, Any]], str]
"""(modality, decoded content, options) -> 256 bits in hex."""

FIELD = "multi_modal_data"
AUDIO_PARTS = dict(zip(MEDIA_PARTS, ("data", "url"), strict=True))
"""Type of a message's part -> the key of its content, within an object of the type's name."""


class PlacedMedia(NamedTuple):
    """A prompt's media, and its tokens with placeholders for them."""

    token_ids: list[int]
    media: list[MediaInput]
    num_encoder_tokens: int


class MediaReader:
    """Reads media for one model. Thread-safe.

    Args:
        processor: the model's.
        content_hash: names an item's content.
        limits: the operator's; see :func:`headrace_core.multimodal.media_limit`.
        is_encoder_decoder: the model's encoder reads the one item of a prompt.
        decoder_start_token_id: what a decoder's prompt begins with where none is given.
        decode_audio: decodes files that chats bring; None: they may bring none.
    """

    def __init__(
        self,
        processor: MediaProcessor,
        content_hash: ContentHash,
        *,
        limits: Mapping[str, Any] | None = None,
        is_encoder_decoder: bool = False,
        decoder_start_token_id: int | None = None,
        decode_audio: AudioDecode | None = None,
    ) -> None:
        self.is_encoder_decoder = is_encoder_decoder
        self.decoder_start_token_id = decoder_start_token_id
        self._processor = processor
        self._hash = content_hash
        self._limits = {m: media_limit(limits or {}, m) for m in processor.modalities()}
        self._decode_audio = decode_audio

    @property
    def modalities(self) -> tuple[str, ...]:
        """Modalities of which a prompt may bring at least one item."""
        return tuple(modality for modality, most in self._limits.items() if most)

    def place(self, token_ids: Sequence[int], data: object, options: object) -> PlacedMedia:
        """A prompt with its media.

        Args:
            token_ids: with one placeholder for each item, or none for an encoder's.
            data: ``multi_modal_data``: modality -> one item or a list.
            options: ``mm_processor_kwargs``; None: none.

        Raises:
            RequestError: an item, an option or the number of items is wrong; says what.
            UnsupportedFeature: the model does not take the modality.
        """
        if options is not None and not isinstance(options, Mapping):
            raise _refused("mm_processor_kwargs", options, "an object, or absent")
        chosen: Mapping[str, Any] = options or {}
        items = self._items(data, chosen)
        if self.is_encoder_decoder and len(items) != 1:
            raise RequestError(
                f"{FIELD}: {len(items)} items; must be exactly one, which the encoder reads",
                param=FIELD,
            )
        processed = self._processor.process(items, chosen)
        placed = self._processor.place(token_ids, processed)
        media = [
            MediaInput(item.modality, dict(one.inputs), item.content_hash, one.num_tokens, offset)
            for item, one, offset in zip(items, processed, placed.offsets, strict=True)
        ]
        media.sort(key=lambda item: item.offset)
        states = sum(item.num_tokens for item in media) if self.is_encoder_decoder else 0
        return PlacedMedia(placed.token_ids, media, states)

    def placeholder(self, modality: Modality, index: int) -> str:
        """See :meth:`headrace_core.multimodal.MediaProcessor.placeholder`."""
        return self._processor.placeholder(modality, index)

    def decode_audio(self, data: bytes, where: str) -> AudioClip:
        """A file that a chat brought.

        Raises:
            UnsupportedFeature: this engine decodes none.
            RequestError: it is no audio.
        """
        if self._decode_audio is None:
            raise UnsupportedFeature(
                f"{where}: this engine decodes no files; bring {FIELD} in a prompt", param=where
            )
        return self._decode_audio(data, where)

    def _items(self, data: object, options: Mapping[str, Any]) -> list[MediaItem]:
        if not isinstance(data, Mapping):
            raise _refused(FIELD, data, "a mapping of modalities to items")
        items: list[MediaItem] = []
        for modality, given in data.items():
            if modality not in self._limits:
                raise UnsupportedFeature(
                    f"{FIELD}.{modality}: this model takes {', '.join(self._limits)} only",
                    param=f"{FIELD}.{modality}",
                )
            found = given if isinstance(given, list) else [given]
            self.check_count(modality, len(found))
            items += (self._audio(one, options) for one in found)
        return items

    def check_count(self, modality: str, count: int) -> None:
        """Raises: RequestError if a prompt brings too many items; names limit and modality."""
        most = self._limits[cast("Modality", modality)]
        if count > most:
            raise RequestError(
                f"{FIELD}.{modality}: {count} items; at most {most} are taken "
                f"(--limit-mm-per-prompt {modality}={most})",
                param=f"{FIELD}.{modality}",
                value=count,
            )

    def _audio(self, given: object, options: Mapping[str, Any]) -> MediaItem:
        """An item from a waveform, or from a waveform and its rate."""
        import numpy as np  # not before there is a waveform: a server starts without

        metadata: dict[str, Any] = {}
        if isinstance(given, tuple) and len(given) == 2:
            given, rate = given
            if isinstance(rate, bool) or not isinstance(rate, int | float) or not rate > 0:
                raise _refused(f"{FIELD}.audio", rate, "(waveform, samples a second)")
            metadata["sample_rate"] = rate
        try:
            samples = np.asarray(given)
        except (TypeError, ValueError, RuntimeError) as error:
            # Ragged lists, or a tensor that numpy cannot read.
            raise RequestError(
                f"{FIELD}.audio: {type(given).__name__} is not an array ({error}); must be a "
                "waveform, or (waveform, samples a second)",
                param=f"{FIELD}.audio",
            ) from error
        if samples.dtype.kind != "f" or samples.ndim not in (1, 2) or not samples.size:
            raise RequestError(
                f"{FIELD}.audio: an array of shape {list(samples.shape)} and dtype {samples.dtype}; "
                "must be [samples] or [channels, samples] of floats from -1 to 1, and not empty",
                param=f"{FIELD}.audio",
            )
        mono = samples if samples.ndim == 1 else samples.mean(axis=0)
        mono = np.ascontiguousarray(mono, np.float32)
        name = self._hash("audio", mono, {**options, **metadata})
        return MediaItem("audio", mono, name, metadata)


class ChatMedia:
    """The media of one conversation, in the order in which its messages bring them.

    Args:
        reader: None: the model takes none.
    """

    def __init__(self, reader: MediaReader | None) -> None:
        self._reader = reader
        self._clips: list[tuple[bytes, str]] = []

    def __bool__(self) -> bool:
        return bool(self._clips)

    def take(self, part: Mapping[str, Any], path: str) -> tuple[Modality, str] | None:
        """Keep a part's content.

        Args:
            path: of the part, for messages.

        Returns:
            Its modality, and what stands for it in a text; None: the part brings no media.

        Raises:
            RequestError: its content is malformed.
        """
        kind = part.get("type")
        if self._reader is None or "audio" not in self._reader.modalities:
            return None
        if kind not in AUDIO_PARTS:
            return None
        where = f"{path}.{kind}.{AUDIO_PARTS[kind]}"
        content = part.get(kind)
        value = content.get(AUDIO_PARTS[kind]) if isinstance(content, Mapping) else None
        if not isinstance(value, str):
            raise RequestError(f"{where}: must be text", param=where)
        self._clips.append((_from_base64(value, where, url=kind == "audio_url"), where))
        index = len(self._clips) - 1
        self._reader.check_count("audio", index + 1)
        return "audio", self._reader.placeholder("audio", index)

    def data(self) -> dict[str, list[tuple[Any, int]]]:
        """The media as a prompt's ``multi_modal_data``. Decodes, which may take a while.

        Raises:
            RequestError: a file is no audio.
        """
        assert self._reader is not None
        return {"audio": [tuple(self._reader.decode_audio(*clip)) for clip in self._clips]}


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
    _check_fields("encoder_prompt", encoder, (*texts, FIELD, "mm_processor_kwargs"))
    if encoder.get("prompt") or encoder.get("prompt_token_ids"):
        raise _refused("encoder_prompt", encoder.get("prompt"), "empty: the encoder reads media")
    if isinstance(decoder, str) or decoder is None:
        decoder = {"prompt": decoder or ""}
    elif not isinstance(decoder, Mapping):
        decoder = {"prompt_token_ids": decoder}
    _check_fields("decoder_prompt", decoder, (*texts, "cache_salt"))
    media = {name: encoder[name] for name in (FIELD, "mm_processor_kwargs") if name in encoder}
    salt = {"cache_salt": prompt["cache_salt"]} if prompt.get("cache_salt") is not None else {}
    return {**decoder, **media, **salt}


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


def _from_base64(text: str, where: str, *, url: bool) -> bytes:
    if url:
        head, comma, text = text.partition(",")
        if not (comma and head.startswith("data:") and head.endswith(";base64")):
            raise UnsupportedFeature(
                f"{where} = {head[:64]!r}: must be a data: URL with base64 content", param=where
            )
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise RequestError(f"{where}: must be base64", param=where) from None


def _refused(name: str, value: object, accepted: str) -> RequestError:
    return RequestError(f"{name} = {value!r:.100}: must be {accepted}", param=name)

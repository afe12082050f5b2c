"""Pictures, recordings and clips that go with a question in the terminal."""

from __future__ import annotations

import base64
import codecs
import mimetypes
import shlex
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from headrace_core.errors import RequestError

PARTS = {"image": "image_url", "audio": "audio_url", "video": "video_url"}
"""First half of a media type -> type of a message's content part."""
IMAGES = ("image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp")
"""Media types of pictures that are read."""
ACCEPTED: Mapping[str, str] = {
    "image": "PNG, JPEG, WebP, GIF or BMP",
    "audio": "WAV, MP3, FLAC, Ogg, M4A, AAC or WebM",
    "video": "MP4, MOV, WebM, Matroska, AVI or GIF",
}
"""Kind -> formats, for messages."""
MAX_BYTES = 64 << 20
"""Of a file."""


class Attachment(NamedTuple):
    """A file's bytes as a content part of a chat message."""

    name: str
    kind: str
    """``image``, ``audio`` or ``video``."""
    part: dict[str, Any]


def attachment(name: str) -> Attachment:
    """Read a file; its name's ending says what it is.

    Args:
        name: of the file, or its ``file:`` URL; ``~`` is the home folder.

    Raises:
        RequestError: there is no such file, it is not a regular one or too large, its ending is not that
            of a picture, a recording or a clip, or it does not begin as one.
    """
    media_type = media_type_of(name)
    if media_type is None:
        raise _refusal(
            name,
            "its name must end as pictures', recordings' or clips' do (.png, .jpg, .wav, .mp4, ...)",
        )
    path = _path(name)
    if path is None:
        raise _refusal(name, "it names no file; web pages' URLs are not fetched here")
    try:
        if path.exists() and not path.is_file():
            raise _refusal(name, "it is not a regular file")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise _refusal(name, error.strerror or "it cannot be read") from error
    if len(data) > MAX_BYTES:
        raise _refusal(name, f"it has more than {MAX_BYTES:,} bytes")
    kind = media_type.partition("/")[0]
    if not begins_as(kind, data):
        raise _refusal(name, f"its content is not {ACCEPTED[kind]}")
    url = f"data:{media_type};base64,{base64.b64encode(data).decode()}"
    return Attachment(path.name, kind, {"type": PARTS[kind], PARTS[kind]: {"url": url}})


def begins_as(kind: str, data: bytes) -> bool:
    """True if a file's first bytes may be those of a picture, a recording or a clip that is read.

    Formats without a signature of their own (MPEG streams) count if they do not begin as text.
    """
    if kind == "image":
        return data.startswith((b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"BM")) or (
            data[:4] == b"RIFF" and data[8:12] == b"WEBP"
        )
    known = (b"RIFF", b"RF64", b"fLaC", b"OggS", b"ID3", b"\x1a\x45\xdf\xa3", b"GIF8")
    return data.startswith(known) or data[4:8] == b"ftyp" or not _is_text(data[:64])


def _is_text(data: bytes) -> bool:
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(data)  # the last letter may be cut
    except UnicodeDecodeError:
        return False
    return all(letter.isprintable() or letter.isspace() for letter in text)


def media_type_of(name: str) -> str | None:
    """The media type that a file's name tells; None: none that can be attached."""
    found = mimetypes.guess_type(name)[0] or ""
    kind = found.partition("/")[0]
    return found if found in IMAGES or (kind in PARTS and kind != "image") else None


def dropped_files(line: str) -> list[str]:
    """The files that a line names and nothing else: what terminals type when files are dropped on them.

    Spaces may be behind backslashes or within quotes, and names may be ``file:`` URLs. Empty if it names
    anything else, or files that cannot be attached.
    """
    names = split(line)
    return (
        names if all(media_type_of(name) is not None and _is_file(name) for name in names) else []
    )


def split(line: str) -> list[str]:
    """The names in a line, which may be quoted; the line itself if it names a file or its quotes are open."""
    if _is_file(line.strip()):
        return [line.strip()]
    try:
        return shlex.split(line)
    except ValueError:
        return [line]


def _is_file(name: str) -> bool:
    path = _path(name)
    try:
        return path is not None and path.is_file()
    except (OSError, ValueError):
        return False


def _path(name: str) -> Path | None:
    """None: it is another URL, or somebody's home folder who is not there."""
    try:
        if "://" in name:
            url = urllib.parse.urlsplit(name)
            return Path(urllib.parse.unquote(url.path)) if url.scheme == "file" else None
        return Path(name).expanduser()
    except (RuntimeError, ValueError):
        return None


def _refusal(name: str, reason: str) -> RequestError:
    return RequestError(f"{name!r} cannot be attached: {reason}", param="attach")

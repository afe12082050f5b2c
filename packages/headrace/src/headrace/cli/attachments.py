"""Pictures, recordings and clips that go with a question in the terminal."""

from __future__ import annotations

import base64
import mimetypes
import shlex
import urllib.parse
from pathlib import Path
from typing import Any, NamedTuple

from headrace_core.errors import RequestError

PARTS = {"image": "image_url", "audio": "audio_url", "video": "video_url"}
"""First half of a media type -> type of a message's content part."""
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

    Raises:
        RequestError: no such file, too large, or its ending names no picture, recording or clip.
    """
    path = Path(name).expanduser()
    media_type = mimetypes.guess_type(path.name)[0] or ""
    kind = media_type.partition("/")[0]
    if kind not in PARTS:
        raise RequestError(
            f"{name!r} cannot be attached: its name must end as pictures', recordings' or clips' "
            "do (.png, .jpg, .wav, .mp4, ...)",
            param="attach",
        )
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise RequestError(
                f"{name!r} cannot be attached: it has {size:,} bytes; at most {MAX_BYTES:,} are read",
                param="attach",
            )
        data = path.read_bytes()
    except OSError as error:
        raise RequestError(f"{name!r} cannot be read: {error.strerror}", param="attach") from error
    url = f"data:{media_type};base64,{base64.b64encode(data).decode()}"
    return Attachment(path.name, kind, {"type": PARTS[kind], PARTS[kind]: {"url": url}})


def dropped_file(line: str) -> str | None:
    """The file that a line names and nothing else: what terminals type when a file is dropped on them.

    Spaces may be behind backslashes or within quotes, and the name may be a ``file:`` URL. None if it is
    no file, or none that can be attached.
    """
    try:
        words = shlex.split(line)
    except ValueError:
        return None
    if len(words) != 1:
        return None
    name = words[0]
    if name.startswith("file://"):
        name = urllib.parse.unquote(urllib.parse.urlsplit(name).path)
    kind = (mimetypes.guess_type(name)[0] or "").partition("/")[0]
    return name if kind in PARTS and Path(name).expanduser().is_file() else None

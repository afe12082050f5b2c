"""Video files that are read: containers by their first bytes, codecs by list."""

from __future__ import annotations

from collections.abc import Mapping

DEMUXERS: Mapping[str, str] = {"mp4": "mov", "webm": "matroska", "avi": "avi", "gif": "gif"}
"""Format -> FFmpeg's demuxer."""
NAMES = "MP4, MOV, WebM, Matroska, AVI, GIF"
CODECS = (
    "h264", "hevc", "vp8", "vp9", "libvpx", "libvpx-vp9", "av1", "libdav1d", "mpeg4", "msmpeg4v2",
    "msmpeg4", "mjpeg", "gif", "mpeg2video", "h263", "prores", "rawvideo",
)  # fmt: skip
"""FFmpeg's decoders that may run; none for sound, subtitles or data."""


def recognised(data: bytes) -> str | None:
    """The format of a file by its first bytes: a key of :data:`DEMUXERS`; None: none of them."""
    if data[4:8] in (b"ftyp", b"moov", b"mdat", b"wide"):
        return "mp4"
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return "webm"
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        return "avi"
    if data[:6] in (b"GIF87a", b"GIF89a"):
        return "gif"
    return None

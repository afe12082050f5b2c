"""Supported audio files: recognized by the bytes that they begin with, never by their names.

A demuxer sees only a file that has its signature, and no demuxer that follows references to other
files or addresses (playlists, ``concat``, ...) is on the list.
"""

from __future__ import annotations

from collections.abc import Mapping

NAMES = "flac, mp3, mp4, mpeg, mpga, m4a, ogg, wav, webm"
"""File name endings of the formats that clients may send."""

DEMUXERS: Mapping[str, str] = {
    "wav": "wav",
    "flac": "flac",
    "ogg": "ogg",
    "mp3": "mp3",
    "aac": "aac",
    "mp4": "mov",
    "webm": "matroska",
    "mpeg": "mpeg",
}
"""Format -> FFmpeg's demuxer for it."""

SOUNDFILE_FORMATS = frozenset({"wav", "flac", "ogg", "mp3"})
"""Formats that libsndfile reads; it is tried first."""

_FIRST_FRAME = 8192
"""Bytes that hold the first frame of an MP3 file, and then some."""

CODECS = (
    "aac", "aac_latm", "mp3", "mp3float", "mp2", "mp2float", "mp1", "mp1float", "opus", "libopus",
    "vorbis", "libvorbis", "flac", "alac", "ac3", "eac3", "amrnb", "amrwb", "adpcm_ima_wav",
    "adpcm_ms", "gsm_ms", "pcm_u8", "pcm_s8", "pcm_s16le", "pcm_s16be", "pcm_s24le", "pcm_s24be",
    "pcm_s32le", "pcm_s32be", "pcm_f32le", "pcm_f32be", "pcm_f64le", "pcm_f64be", "pcm_alaw",
    "pcm_mulaw", "pcm_dvd",
)  # fmt: skip
"""FFmpeg's decoders that may run; none for pictures, subtitles or data."""


def recognised(data: bytes) -> str | None:
    """The format of a file by its first bytes: a key of :data:`DEMUXERS`; None: none of them."""
    if data[:4] in (b"RIFF", b"RF64") and data[8:12] == b"WAVE":
        return "wav"
    if data[:4] == b"fLaC":
        return "flac"
    if data[:4] == b"OggS":
        return "ogg"
    if data[4:8] == b"ftyp":
        return "mp4"
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return "webm"
    if data[:4] == b"\x00\x00\x01\xba":
        return "mpeg"
    if data[:3] == b"ID3":
        return "mp3"
    return _frame_format(data)


def _frame_format(data: bytes) -> str | None:
    """Format of a stream of MPEG audio frames without a header: eleven bits of sync, then version and
    layer."""
    if len(data) < 4 or data[0] != 0xFF or data[1] & 0xE0 != 0xE0:
        return None
    if data[1] & 0x06 == 0:  # ADTS has layer 0
        return "aac" if data[1] & 0xF0 == 0xF0 else None
    is_valid = data[1] & 0x18 != 0x08 and data[2] & 0xF0 != 0xF0 and data[2] & 0x0C != 0x0C
    return "mp3" if is_valid else None


def says_length(data: bytes, kind: str) -> bool:
    """True if a file says how long it is. MP3 does if it begins with an encoder's note; what libraries
    say of one without is a guess from its first frames."""
    begin = _behind_tag(data)
    return kind != "mp3" or any(
        note in data[begin : begin + _FIRST_FRAME] for note in (b"Xing", b"Info", b"VBRI")
    )


def _behind_tag(data: bytes) -> int:
    """Where an MP3's first frame is: a tag (https://id3.org/id3v2.3.0) may hold any text, and pictures."""
    if data[:3] != b"ID3" or len(data) < 10:
        return 0
    size = 0
    for byte in data[6:10]:  # seven bits each
        size = size << 7 | byte & 0x7F
    return 10 + size


def missing_bytes(data: bytes) -> int:
    """Bytes of sound that a WAV file announces and does not have.

    Libraries read such a file to its end and say nothing. Lengths near the field's largest values are
    what a writer puts in that cannot know the length.
    """
    position = 12
    while position + 8 <= len(data):
        name = data[position : position + 4]
        size = int.from_bytes(data[position + 4 : position + 8], "little")
        position += 8
        if name == b"data":
            unknown = size >= 0x7FFFFF00 or size == 0
            return 0 if unknown else max(0, size - (len(data) - position))
        position += size + size % 2
    return 0

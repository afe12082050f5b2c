"""Delays of animated GIFs: :func:`with_delays`.

FFmpeg tells frames apart by the extension that holds their delays, which may be left out. Blocks are those of
GIF89a (W3C, 1990): section 18 screen, 20 images, 23 delays.
"""

from __future__ import annotations

_EXTENSION, _IMAGE, _CONTROL = 0x21, 0x2C, 0xF9
_TENTH = bytes((_EXTENSION, _CONTROL, 4, 0, 10, 0, 0, 0))
"""A control extension of 100 ms."""


def with_delays(data: bytes) -> bytes:
    """The file, where frames without a delay have one of 100 ms, as browsers show them. Behind damage it is
    left as it is."""
    pieces: list[bytes] = []
    kept, at, has_control = 0, _behind_colours(data, 10, 13), False
    while at + 10 <= len(data) and data[at] in (_EXTENSION, _IMAGE):
        if data[at] == _IMAGE:
            if not has_control:
                pieces += (data[kept:at], _TENTH)
                kept = at
            has_control = False
            at = _behind_blocks(data, _behind_colours(data, at + 9, at + 10) + 1)
            continue
        if data[at + 1] == _CONTROL:
            has_control = True
            if not any(data[at + 4 : at + 6]):
                pieces += (data[kept : at + 4], _TENTH[4:5])
                kept = at + 5
        at = _behind_blocks(data, at + 2)
    return b"".join((*pieces, data[kept:]))


def _behind_colours(data: bytes, flags: int, at: int) -> int:
    """Where a table of colours ends that begins at ``at``, if the byte of flags says that there is one."""
    said = data[flags] if flags < len(data) else 0
    return at + (3 << (1 + (said & 7)) if said & 0x80 else 0)


def _behind_blocks(data: bytes, at: int) -> int:
    """Where a chain of blocks ends, the last of which is empty."""
    while at < len(data) and data[at]:
        at += 1 + data[at]
    return at + 1

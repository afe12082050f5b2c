"""The texts of clips become one text, in a stream as at once."""

from __future__ import annotations

UNSPACED = frozenset({"zh", "yue", "ja", "th", "lo", "my", "km", "bo"})
"""Languages that are written without spaces between words."""


class Joiner:
    """Joins texts that come in pieces; each piece gives what can be shown by now.

    White space at a clip's ends is replaced by one space between clips, or none in languages that are
    written without. So space at the end of a piece is held back until more text follows.

    Args:
        language: code; None: unknown.
    """

    def __init__(self, language: str | None) -> None:
        self._between = "" if language in UNSPACED else " "
        self._held = ""
        self._begun = False
        """True if anything was shown."""
        self._fresh = True
        """True if the clip has shown nothing yet."""

    def next_clip(self) -> None:
        """Begin another clip."""
        self._held = self._between if self._begun else ""
        self._fresh = True

    def add(self, piece: str) -> str:
        """The text that a piece of the clip adds."""
        if self._fresh:
            piece = piece.lstrip()
        if not piece:
            return ""
        self._fresh = False
        text = self._held + piece
        shown = text.rstrip()
        self._held = text[len(shown) :]
        self._begun = self._begun or bool(shown)
        return shown


def joined(texts: list[str], language: str | None) -> str:
    """Whole texts of clips, as one."""
    joiner, parts = Joiner(language), list[str]()
    for text in texts:
        joiner.next_clip()
        parts.append(joiner.add(text))
    return "".join(parts)

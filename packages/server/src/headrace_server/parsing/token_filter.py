"""Taking special tokens out of text, where a parser had to see them and the client must not.

Texts of special tokens are left out of outputs before they are decoded, by token id. A parser whose
format is written in special tokens needs them in the text; what it then passes on as content or
reasoning goes through here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def by_first(texts: Iterable[str]) -> Mapping[str, Sequence[str]]:
    """Texts by their first character, longest first: what :class:`TokenFilter` searches by."""
    found: dict[str, list[str]] = {}
    for text in sorted(set(texts), key=len, reverse=True):
        if text:
            found.setdefault(text[0], []).append(text)
    return found


class TokenFilter:
    """Leaves certain texts out of a text that comes in pieces. One per stream of text.

    For every way of cutting the text the pieces returned, joined, are the same. Of texts that begin
    at one place the longest is taken.

    Args:
        texts: what to leave out, as :func:`by_first` orders it.
    """

    def __init__(self, texts: Mapping[str, Sequence[str]]) -> None:
        self._texts = texts
        self._held = ""

    def feed(self, text: str) -> str:
        """Take the next piece; returns what is certain so far."""
        return self._filter(text, last=False)

    def finish(self) -> str:
        """No more text comes: returns what was held back."""
        return self._filter("", last=True)

    def _filter(self, text: str, *, last: bool) -> str:
        text, self._held = self._held + text, ""
        kept: list[str] = []
        start = position = 0
        while position < len(text):
            candidates = self._texts.get(text[position])
            if candidates is None:
                position += 1
                continue
            if not last and self._undecided(text, position, candidates):
                self._held = text[position:]
                break
            found = next((c for c in candidates if text.startswith(c, position)), None)
            if found is None:
                position += 1
                continue
            kept.append(text[start:position])
            start = position = position + len(found)
        kept.append(text[start:position])
        return "".join(kept)

    @staticmethod
    def _undecided(text: str, position: int, candidates: Sequence[str]) -> bool:
        """True if more text could make one of the longer candidates match here."""
        rest = text[position : position + len(candidates[0])]
        return any(len(c) > len(rest) and c.startswith(rest) for c in candidates)

"""Parts of texts that fit a length: encodings of the ``tokenizers`` library, cut as that library cuts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from headrace_core.errors import RequestError


class Cut(NamedTuple):
    """Rule for cutting texts that are too long."""

    limit: int
    """Tokens that are kept, special ones included."""
    strategy: str
    """``longest_first``, ``only_first`` or ``only_second``."""
    side: str
    """``right`` or ``left``: where tokens are dropped."""
    stride: int = 0
    """Tokens that an overflowing part repeats of the one before."""

    def shorten(self, parts: Sequence[Any], special: int) -> None:
        """Cut the encodings of one text or of a pair in place.

        Args:
            parts: without special tokens.
            special: number of special tokens that will be added.

        Raises:
            RequestError: no length is left for the texts, or the one that is to be cut is too short.
        """
        room = self.limit - special
        if room < 0:
            raise RequestError(
                f"max_length = {self.limit}: must leave room for the special tokens, {special} here",
                param="max_length",
            )
        lengths = [len(part.ids) for part in parts]
        if sum(lengths) <= room:
            return
        for part, kept in zip(parts, self._kept(lengths, room), strict=True):
            if kept < len(part.ids):
                if self.stride and self.stride >= kept:
                    raise RequestError(
                        f"stride = {self.stride}: must be less than the {kept} tokens that a part of "
                        "the text may have",
                        param="stride",
                    )
                part.truncate(kept, stride=self.stride, direction=self.side)

    def _kept(self, lengths: Sequence[int], room: int) -> list[int]:
        """Tokens that each text keeps."""
        if self.strategy == "longest_first":
            return _shares(lengths, room)
        index = 0 if self.strategy == "only_first" else 1
        if index >= len(lengths):
            raise RequestError(
                "truncation = 'only_second': must not be given for texts that are not pairs",
                param="truncation",
            )
        kept = list(lengths)
        kept[index] -= sum(lengths) - room
        if kept[index] <= 0 and room > 0:
            raise RequestError(
                f"truncation = {self.strategy!r}: the text that is to be cut has {lengths[index]} tokens; "
                f"more than that must go for max_length = {self.limit}",
                param="truncation",
            )
        kept[index] = max(0, kept[index])
        return kept


def _shares(lengths: Sequence[int], room: int) -> list[int]:
    """Tokens that each text keeps if the longest gives first."""
    if len(lengths) == 1:
        return [room]
    less, more = sorted(lengths)
    if less <= room // 2:
        more = max(less, room - less)
    else:
        less = room // 2
        more = room - less
    return [more, less] if lengths[0] > lengths[1] else [less, more]

"""Texts that stand around an image's vectors, in tokens of the checkpoint's tokenizer."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from headrace_core.errors import RequestError, UnsupportedModel

_LONGEST = 31
"""Line ends in a token, at most."""


class Words:
    """The tokenizer of a checkpoint's folder, read when it is first needed.

    A tokenizer decides itself whether two line ends are one token, so its files' lists of tokens do not
    suffice.

    Args:
        path: the folder; ``tokenizer.json`` is in it.
    """

    def __init__(self, path: Path) -> None:
        self._file = path / "tokenizer.json"

    @cached_property
    def _tokenizer(self) -> Any:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise UnsupportedModel(
                "prompts with images of this model need the package tokenizers: pip install "
                "'headrace-multimodal[text]'"
            ) from error
        try:
            return Tokenizer.from_file(str(self._file))
        except Exception as error:  # the library raises nothing more precise
            raise UnsupportedModel(f"{self._file}: cannot be read: {error}") from error

    def check(self, **expected: int | None) -> None:
        """
        Args:
            expected: special tokens -> their ids; None: any.

        Raises:
            UnsupportedModel: one is missing, or has another id.
        """
        for token, number in expected.items():
            found = self._tokenizer.token_to_id(token)
            if found is None or number not in (None, found):
                raise UnsupportedModel(
                    f"{self._file}: token {token} has the id {found}; config.json says {number}"
                )

    def number(self, token: str) -> int:
        """A special token's id.

        Raises:
            UnsupportedModel: there is no such token.
        """
        self.check(**{token: None})
        found: int = self._tokenizer.token_to_id(token)
        return found

    def ids(self, text: str) -> list[int]:
        """Tokens of a text, and none in front of it or behind."""
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return found

    def whole(self, text: str) -> list[int]:
        """Tokens of a text with those that stand around one, however long it is."""
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        found: list[int] = self._tokenizer.encode(text).ids
        return found

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones among them."""
        found: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return found

    @cached_property
    def first(self) -> list[int]:
        """What the file puts in front of a text."""
        found: list[int] = self._tokenizer.encode("").ids
        return found

    @cached_property
    def added(self) -> frozenset[int]:
        """Ids of tokens that are found in a text before all else."""
        return frozenset(self._tokenizer.get_added_tokens_decoder())

    @cached_property
    def special(self) -> frozenset[int]:
        """Ids of special tokens, which stand around a text."""
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)

    def with_text_before(
        self, token_ids: Sequence[int], marker: int, texts: Iterable[str]
    ) -> list[int]:
        """A prompt with a text in front of each marker, in the tokens that both it and what stands before it,
        back to the nearest special token, have as one text. Tokens that the tokenizer would not make of
        their text stay. Markers behind the last text stay alone."""
        special = self._tokenizer.get_added_tokens_decoder()
        found: list[int] = []
        start, waiting = 0, iter(texts)
        for token in token_ids:
            text = next(waiting, "") if token == marker else ""
            if text:
                before = found[start:]
                plain = self._tokenizer.decode(before, skip_special_tokens=False)
                whole = self.ids(plain + text) if self.ids(plain) == before else None
                found[start:] = before + self.ids(text) if whole is None else whole
            found.append(token)
            if token == marker or token in special:
                start = len(found)
        return found

    def with_text_around(
        self,
        token_ids: Sequence[int],
        text: str,
        around: Sequence[tuple[str, str]],
        placeholder: int,
    ) -> list[int]:
        """A prompt with a placeholder for each place that has a text, which need be no token, between further
        texts. These become tokens together with what stands before and behind them.

        Args:
            around: for each place, the texts before the placeholder and behind it. Where there are not as
                many places, the placeholders stand alone.

        Raises:
            RequestError: the text is there, and the tokens are not those that the tokenizer makes.
        """
        parts = self._tokenizer.decode(list(token_ids), skip_special_tokens=False).split(text)
        if len(parts) != len(around) + 1 or self.ids(text.join(parts)) != list(token_ids):
            return self.replaced(token_ids, text, placeholder)
        found: list[int] = []
        behind = ""
        for part, (before, after) in zip(parts[:-1], around, strict=True):
            found += [*self.ids(behind + part + before), placeholder]
            behind = after
        return found + self.ids(behind + parts[-1])

    def replaced(self, token_ids: Sequence[int], text: str, placeholder: int) -> list[int]:
        """A prompt with a placeholder for each place that has a text, which need be no token: what stands
        around it is made into tokens as if it were a special one.

        Raises:
            RequestError: the text is there, and the tokens are not those that the tokenizer makes.
        """
        number = self._tokenizer.token_to_id(text)
        if number is not None:
            return [placeholder if token == number else token for token in token_ids]
        whole = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        first, *others = whole.split(text)
        if not others:
            return list(token_ids)
        if self.ids(whole) != list(token_ids):
            raise RequestError(
                f"the prompt's tokens are not those that the tokenizer makes of its text, so {text!r} cannot "
                f"be found: write token {placeholder} for each media item",
                param="prompt",
            )
        found = self.ids(first)
        for part in others:
            found += [placeholder, *self.ids(part)]
        return found


class LineEnds:
    """Tokens that are nothing but line ends, of a tokenizer that joins several and keeps them apart from
    all else (Gemma's).

    Args:
        words: the tokenizer.
    """

    def __init__(self, words: Words) -> None:
        self._words = words

    @cached_property
    def _numbers(self) -> Mapping[int, int]:
        made = ((self.ids(number), number) for number in range(1, _LONGEST + 1))
        return {ids[0]: number for ids, number in made if len(ids) == 1}

    def number(self, token: int) -> int:
        """Line ends that a token stands for; 0: it is another."""
        return self._numbers.get(token, 0)

    def ids(self, number: int) -> list[int]:
        """Tokens of so many."""
        return self._words.ids("\n" * number) if number else []

    def around(
        self, token_ids: Sequence[int], placeholders: Collection[int], before: Iterable[int]
    ) -> list[int]:
        """A prompt with line ends in front of each placeholder and two behind it, which become one token with
        those that are there already.

        Args:
            placeholders: tokens that are one.
            before: line ends in front of each, in order; two where there are fewer numbers.
        """
        found: list[int] = []
        wanted, waiting = iter(before), 0  # line ends that are not written yet
        for token in token_ids:
            if number := self.number(token):
                waiting += number
                continue
            if token in placeholders:
                waiting += next(wanted, 2)
            found += [*self.ids(waiting), token]
            waiting = 2 * (token in placeholders)
        return found + self.ids(waiting)


def widened(
    token_ids: Sequence[int], placeholder: int, number: int
) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """Tokens with each placeholder repeated ``number`` times, and the runs of these
    (:class:`headrace_core.multimodal.ProcessedMedia`)."""
    found: list[int] = []
    runs: list[tuple[int, int]] = []
    for is_placeholder, group in itertools.groupby(token_ids, key=placeholder.__eq__):
        own = list(group)
        if is_placeholder:
            runs.append((len(found), len(own) * number))
            own *= number
        found += own
    return tuple(found), tuple(runs)

"""Prompts whose pieces between images are made into tokens one by one."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from headrace_core.errors import RequestError
from headrace_multimodal.images.vocabulary import begins_texts, named_token
from headrace_multimodal.images.words import Words


class PromptPieces:
    """The tokenizer of a checkpoint's folder, which puts its first token in front of every piece."""

    def __init__(self, path: Path) -> None:
        self._path, self.words = path, Words(path)

    def around(
        self, token_ids: Sequence[int], mark: re.Pattern[str]
    ) -> tuple[list[list[int]], list[str | None]]:
        """Tokens of the pieces around the marks of a prompt, and the first group of each mark.

        Raises: RequestError: the tokens are not those that the tokenizer makes of their text.
        """
        ids = list(token_ids)
        if self._first and ids[: len(self._first)] == self._first:
            ids = ids[len(self._first) :]
        texts, marks, done = [], [], 0
        text = self.text(ids)
        for match in mark.finditer(text):
            texts.append(text[done : match.start()])
            marks.append(match[1])
            done = match.end()
        texts.append(text[done:])
        return [self._first + self.words.ids(piece) for piece in texts], marks

    @cached_property
    def _first(self) -> list[int]:
        """What the tokenizer puts in front of a text."""
        stated = begins_texts(self._path)
        if stated is None:
            return self.words.first
        return [self.words.number(named_token(self._path, "bos_token", "<s>"))] if stated else []

    def text(self, ids: Sequence[int]) -> str:
        """The text of tokens. A tokenizer may put a space in front of each run between special tokens, or
        of the first only.

        Raises: RequestError: the tokens are not those that the tokenizer makes of it.
        """
        runs = itertools.groupby(ids, key=self.words.added.__contains__)
        for text in (
            "".join(self.words.text(list(run)) for _, run in runs),
            self.words.text(ids),
        ):
            if self.words.ids(text) == list(ids):
                return text
        raise RequestError(
            "the prompt's tokens are not those that the tokenizer makes of its text, so that images cannot "
            "be found in it: give the text",
            param="prompt",
        )


def numbered(marks: Sequence[str | None], count: int) -> list[int]:
    """Indices of images, by the numbers in their marks; a mark without one is the next image's.

    Raises: RequestError: they are not each image once.
    """
    order = [at if mark is None else int(mark) - 1 for at, mark in enumerate(marks)]
    if sorted(order) != list(range(count)):
        found = ", ".join(str(index + 1) for index in order) or "none"
        raise RequestError(
            f"the prompt names the images {found} and comes with {count} media items: there must be one for "
            "each",
            param="multi_modal_data",
        )
    return order

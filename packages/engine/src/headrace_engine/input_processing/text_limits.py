"""Refuses texts that are too long to be worth tokenizing, which takes a hundred times a text's memory."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from headrace_core.errors import PromptTooLong
from headrace_core.text import Tokenizer

UNMEASURED = 1 << 16
"""Characters of a text that is tokenized without a look at its size: some 50 ms."""
MOST_CHARACTERS = 1 << 20
"""Characters of a text that is tokenized though it cannot fit into the context: because it will be cut, or
because only its tokens are asked for."""
CHARACTERS_PER_TOKEN = 128
"""Characters of a text for each token of the context, where the tokenizer gives no bound: it drops some
text, white space say, or makes one token of any unknown word."""


@runtime_checkable
class MeasuresTexts(Protocol):
    """A tokenizer that knows something of a text's tokens before it has tokenized it."""

    def fewest_tokens(self, text: str) -> int | None:
        """A lower bound of the text's number of tokens; None: the tokenizer has none."""
        ...


class TextLimits:
    """Refuses texts that are too long. Thread-safe.

    Args:
        tokenizer: None: there are no texts.
        max_model_len: the context, in tokens.
    """

    def __init__(self, tokenizer: Tokenizer | None, max_model_len: int) -> None:
        found: object = tokenizer
        self._measures = found if isinstance(found, MeasuresTexts) else None
        self.max_model_len = max_model_len

    def check(self, param: str, *texts: str, room: int | None = None, cut: bool = False) -> None:
        """Refuse texts that cannot fit into the context together.

        Args:
            room: tokens for which there is room; None: the context.
            cut: up to :data:`MOST_CHARACTERS` need not fit.

        Raises:
            PromptTooLong: naming ``param``.
        """
        size = sum(map(len, texts))
        if size <= (MOST_CHARACTERS if cut else UNMEASURED):
            return
        room = self.max_model_len if room is None else room
        fewest = self._fewest(texts)
        if fewest is None:
            if size <= room * CHARACTERS_PER_TOKEN:
                return
            fewest = room + 1
        if fewest <= room:
            return
        hint = f"Shorten the {param}, which has {size} characters."
        if cut:
            hint += f" What does not fit is tokenized up to {MOST_CHARACTERS} characters."
        raise PromptTooLong(room, fewest, at_least=True, param=param, hint=hint)

    def _fewest(self, texts: tuple[str, ...]) -> int | None:
        """Tokens of all texts together; None: unknown."""
        if self._measures is None:
            return None
        total = 0
        for text in texts:
            fewest = self._measures.fewest_tokens(text)
            if fewest is None:
                return None
            total += fewest
        return total

"""Texts as a multi-vector model wants them: marked as query or document, cut, and filled up."""

from __future__ import annotations

import logging

from headrace_core.pooling import LateInteraction
from headrace_core.request import TokensPrompt
from headrace_core.text import Tokenizer

logger = logging.getLogger(__name__)


class MarkedTexts:
    """Prompts for one model. Thread-safe.

    Args:
        info: the checkpoint's rules.
        tokenizer: the checkpoint's.
        lower_case: texts are made lower-case first.
    """

    def __init__(
        self, info: LateInteraction, tokenizer: Tokenizer, *, lower_case: bool = False
    ) -> None:
        self._info = info
        self._tokenizer = tokenizer
        self._lower_case = lower_case
        self._expands = info.expand_queries and info.attend_to_expansion
        if info.expand_queries and not self._expands:
            logger.warning(
                "late interaction: queries are not filled up with mask tokens, as the model would "
                "have to compute tokens that nothing attends to; scores sum over their own tokens"
            )
        self.skipped = frozenset(info.skip_ids)
        """Tokens of documents whose vectors match nothing."""
        self._query_mark = self._mark(info.query_marker, info.query_marker_id)
        self._document_mark = self._mark(info.document_marker, info.document_marker_id)

    def query(self, text: str) -> TokensPrompt:
        """A query's prompt."""
        info = self._info
        ids = self._marked(text, self._query_mark, info.query_length)
        if self._expands:
            ids += self._ids_of("mask_token") * (info.query_length - len(ids))
        return TokensPrompt(prompt_token_ids=ids)

    def document(self, text: str) -> TokensPrompt:
        """A document's prompt."""
        info = self._info
        return TokensPrompt(
            prompt_token_ids=self._marked(text, self._document_mark, info.document_length)
        )

    def _mark(self, marker: str, known: int | None) -> list[int]:
        """A marker that is one token of the vocabulary, or a text like any other."""
        if known is not None:
            return [known]
        return self._tokenizer.encode(marker, add_special_tokens=False) if marker else []

    def _marked(self, text: str, mark: list[int], length: int) -> list[int]:
        ids = self._tokenizer.encode(text.lower() if self._lower_case else text)
        room = length - len(mark)
        if len(ids) > room:  # the end marker stays
            ids = [*ids[: room - 1], ids[-1]]
        return [*ids[:1], *mark, *ids[1:]]

    def _ids_of(self, name: str) -> list[int]:
        text = self._tokenizer.special_tokens.get(name, "")
        return self._tokenizer.encode(text, add_special_tokens=False)[:1] if text else []

"""Texts as a multi-vector model wants them: marked as query or document, cut, and filled up."""

from __future__ import annotations

import logging

from headrace_core.pooling import LateInteraction
from headrace_core.request import TokensPrompt
from headrace_core.text import Tokenizer
from headrace_engine.freed_memory import trimmed_after
from headrace_engine.input_processing.pooling import FilledPrompt
from headrace_engine.input_processing.text_limits import TextLimits
from headrace_engine.input_processing.tokens import check_text

logger = logging.getLogger(__name__)


class MarkedTexts:
    """Prompts for one model. Thread-safe.

    Args:
        info: the checkpoint's rules.
        tokenizer: the checkpoint's.
        max_model_len: longest prompt, in tokens.
        lower_case: texts are made lower-case first.
        causal: the model attends to what stands before a token only.
    """

    def __init__(
        self,
        info: LateInteraction,
        tokenizer: Tokenizer,
        *,
        max_model_len: int,
        lower_case: bool = False,
        causal: bool = False,
    ) -> None:
        self._info = info
        self._max_model_len = max_model_len
        self._tokenizer = tokenizer
        self._texts = TextLimits(tokenizer, max_model_len)
        self._lower_case = lower_case
        self._builder = self._filler_ids(causal=causal)
        self._query_mark = self._mark(info.query_marker, info.query_marker_id)
        self._document_mark = self._mark(info.document_marker, info.document_marker_id)
        self.skipped = frozenset(info.skip_ids) | self._single_tokens(info.skip_words)
        """Tokens of documents whose vectors match nothing."""

    def query(self, text: str, keep: int | None = None) -> TokensPrompt | FilledPrompt:
        """A query's prompt.

        Args:
            keep: most tokens, where that is fewer than the checkpoint's rules say; None: as they do.

        Raises:
            RequestError: the text is none.
            PromptTooLong: it is longer than what is tokenized in order to be cut.
        """
        length = self._length(self._info.query_length, keep)
        own = self._marked("text_1", text, self._query_mark, length)
        ids = own + self._builder * (length - len(own))
        if self._info.attend_to_expansion or len(ids) == len(own):
            return TokensPrompt(prompt_token_ids=ids)
        return FilledPrompt(ids, len(own))

    def document(self, text: str, keep: int | None = None) -> TokensPrompt:
        """A document's prompt; as :meth:`query`."""
        length = self._length(self._info.document_length, keep)
        return TokensPrompt(
            prompt_token_ids=self._marked("text_2", text, self._document_mark, length)
        )

    def _length(self, length: int, keep: int | None) -> int:
        return min(length, self._max_model_len, length if keep is None else keep)

    def _marked(self, param: str, text: str, mark: list[int], length: int) -> list[int]:
        check_text(param, text)
        self._texts.check(param, text, cut=True)
        with trimmed_after(text):
            ids = self._tokenizer.encode(text.lower() if self._lower_case else text)
        room = max(1, length - len(mark))
        if len(ids) > room:  # the end marker stays
            ids = [*ids[: room - 1], ids[-1]]
        return [*ids[:1], *mark, *ids[1:]]

    def _mark(self, marker: str, marker_id: int | None) -> list[int]:
        if marker_id is not None:
            return [marker_id]
        return self._tokenizer.encode(marker, add_special_tokens=False) if marker else []

    def _single_tokens(self, words: tuple[str, ...]) -> frozenset[int]:
        """Ids of the words that are one token."""
        encoded = (self._tokenizer.encode(word, add_special_tokens=False) for word in words)
        return frozenset(ids[0] for ids in encoded if len(ids) == 1)

    def _filler_ids(self, *, causal: bool) -> list[int]:
        """The token that fills queries up; none if they are left as they are."""
        info = self._info
        if not info.expand_queries:
            return []
        if causal and not info.attend_to_expansion:
            logger.warning(
                "late interaction: queries are not filled up with mask tokens, as a causal model "
                "cannot compute tokens that nothing attends to; scores sum over their own tokens"
            )
            return []
        if info.expansion_id is not None:
            return [info.expansion_id]
        return self._ids_of("mask_token") or self._ids_of("eos_token")

    def _ids_of(self, name: str) -> list[int]:
        text = self._tokenizer.special_tokens.get(name, "")
        return self._tokenizer.encode(text, add_special_tokens=False)[:1] if text else []

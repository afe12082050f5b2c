"""Texts to token ids: :class:`EncodesTexts`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headrace.texts.checks import need_length, need_text, need_texts
from headrace.texts.filling import FillsUp, TokenizedText
from headrace.texts.vocabulary import LONGEST_LIMIT
from headrace_core.errors import RequestError, UnsupportedFeature

if TYPE_CHECKING:
    from headrace_core.text import EncodedPair


class EncodesTexts(FillsUp):
    """Makes token ids of texts."""

    def tokenize(
        self, text: str, pair: str | None = None, add_special_tokens: bool = False
    ) -> list[str]:
        """The tokens of a text, as the vocabulary spells them; unknown parts as the text does, where
        the vocabulary tells."""
        need_text("text", text)
        if self._backend is None:
            ids = self.encode(text, pair, add_special_tokens=add_special_tokens)
            return [self._tokenizer.token_string(token_id) for token_id in ids]
        given = text if pair is None else (text, need_text("pair", pair))
        made = self._backend.encode_batch([given], add_special_tokens=add_special_tokens)
        return list(made[0].tokens)

    def encode(
        self,
        text: str,
        text_pair: str | None = None,
        add_special_tokens: bool = True,
        padding: bool | str = False,
        truncation: bool | str | None = None,
        max_length: int | None = None,
        *,
        padding_side: str | None = None,
        return_tensors: str | None = None,
    ) -> Any:
        """Token ids of one text, or of a pair: a list; arguments and errors as a call of the object."""
        need_text("text", text)
        made = self(
            text, text_pair, add_special_tokens, padding, truncation, max_length,
            padding_side=padding_side, return_tensors=return_tensors,
        )  # fmt: skip
        return made["input_ids"]

    def encode_pair(self, first: str, second: str | None = None, **options: Any) -> EncodedPair:
        """Ids and token types of one text, or of two.

        Args:
            options: ``add_special_tokens``, ``max_length`` and ``truncation_side``, see
                :meth:`headrace_core.text.Tokenizer.encode_pair`.

        Raises:
            RequestError: a text is not one.
        """
        need_text("first", first)
        if second is not None:
            need_text("second", second)
        return self._tokenizer.encode_pair(first, second, **options)

    def token_string(self, token_id: int) -> str:
        """See :meth:`headrace_core.text.Tokenizer.token_string`."""
        return self._tokenizer.token_string(token_id)

    def __call__(
        self,
        text: str | Sequence[str],
        text_pair: str | Sequence[str] | None = None,
        add_special_tokens: bool = True,
        padding: bool | str = False,
        truncation: bool | str | None = None,
        max_length: int | None = None,
        *,
        pad_to_multiple_of: int | None = None,
        padding_side: str | None = None,
        return_tensors: str | None = None,
        return_token_type_ids: bool | None = None,
        return_attention_mask: bool | None = None,
    ) -> TokenizedText:
        """Tokenize one text or a list of texts.

        Args:
            text_pair: the second texts of pairs, as many as ``text``.
            padding: True or ``longest``: fill up to the longest text; ``max_length``: up to that.
            truncation: True, ``longest_first`` or ``only_first``: cut to ``max_length`` tokens, special
                ones kept; None: only if ``max_length`` is given without padding. Pairs are not cut.
            max_length: tokens; None: :attr:`model_max_length`.
            pad_to_multiple_of: round the filled length up.
            padding_side: None: :attr:`padding_side`.
            return_tensors: ``pt`` for torch, ``np`` for numpy; None: lists.
            return_token_type_ids, return_attention_mask: None: as :attr:`model_input_names` says.

        Raises:
            RequestError: an argument is wrong; there is no padding token; texts of different lengths
                are to be one array; ``max_length`` leaves no room for a token.
            UnsupportedFeature: pairs are to be cut.
        """
        one = isinstance(text, str)
        texts = need_texts("text", text)
        pairs = [None] * len(texts) if text_pair is None else need_texts("text_pair", text_pair)
        if len(pairs) != len(texts) or (
            text_pair is not None and one != isinstance(text_pair, str)
        ):
            raise RequestError(
                f"text_pair: must hold a text for each of text, which holds {len(texts)}",
                param="text_pair",
            )
        limit = self._limit(truncation, max_length, padding)
        if limit is not None and text_pair is not None:
            raise UnsupportedFeature(
                "truncation: pairs are not cut; encode_pair(..., max_length=) cuts them at the left",
                param="truncation",
            )
        encoded = [
            self._encoded(first, second, add_special_tokens, limit)
            for first, second in zip(texts, pairs, strict=True)
        ]
        return self._collected(
            encoded, one, padding, max_length, pad_to_multiple_of, padding_side, return_tensors,
            return_token_type_ids, return_attention_mask,
        )  # fmt: skip

    def _limit(
        self, truncation: bool | str | None, max_length: int | None, padding: bool | str
    ) -> int | None:
        """Tokens that a text may have; None: any number."""
        max_length = need_length("max_length", max_length)
        if truncation not in (None, True, False, "longest_first", "only_first", "do_not_truncate"):
            raise RequestError(
                f"truncation = {truncation!r:.100}: must be True, False, None, 'longest_first', "
                "'only_first' or 'do_not_truncate'",
                param="truncation",
            )
        if truncation in (False, "do_not_truncate"):
            return None
        if truncation is None and (max_length is None or padding):
            return None
        limit = self.model_max_length if max_length is None else max_length
        return None if limit > LONGEST_LIMIT else limit

    def _encoded(
        self, first: str, second: str | None, add_special_tokens: bool, limit: int | None
    ) -> tuple[list[int], list[int]]:
        """Ids and token types of one text, or of a pair."""
        if second is not None or limit is None:
            ids, types = self._tokenizer.encode_pair(
                first, second, add_special_tokens=add_special_tokens
            )
            return ids, types
        room = limit - (len(self._tokenizer.encode("")) if add_special_tokens else 0)
        if room < 0:
            raise RequestError(
                f"max_length = {limit}: must leave room for the special tokens", param="max_length"
            )
        if self._backend is None or self.truncation_side == "left":
            ids, types = self._tokenizer.encode_pair(
                first, add_special_tokens=add_special_tokens, max_length=limit
            )
            return ids, types
        part = self._backend.encode_batch([first], add_special_tokens=False)[0]
        part.truncate(room)
        whole = self._backend.post_process(part, None, add_special_tokens=add_special_tokens)
        return whole.ids, whole.type_ids

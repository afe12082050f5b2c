"""Token ids to texts: :class:`DecodingMixin`."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.tokenizer_calls.checks import need_ids, several
from headrace.tokenizer_calls.vocabulary import Vocabulary
from headrace_core.arrays import own_value

CLEANED_UP = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"),
    (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip
"""Texts that ``clean_up_tokenization_spaces`` replaces, in order."""

ACCEPTED = "a token id, a list of them, or a list of such lists"


class DecodingMixin(Vocabulary):
    """Makes texts of token ids."""

    def decode(
        self,
        token_ids: Any,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
        *,
        spaces_between_special_tokens: bool = True,
    ) -> Any:
        """The text of an id or of a list of ids; of a list of such lists the texts.

        Args:
            token_ids: integers, or an array of numpy or torch.
            clean_up_tokenization_spaces: leave out spaces before punctuation, for vocabularies of
                words; None: as the checkpoint says.
            spaces_between_special_tokens: see :meth:`headrace_core.text.Tokenizer.decode`.

        Raises:
            RequestError: an id is not an integer from 0 to
                :data:`~headrace.tokenizer_calls.checks.LARGEST_ID`.
                Ids in this range that are not tokens have no text.
        """
        text = functools.partial(
            self._text,
            skip=skip_special_tokens,
            clean=clean_up_tokenization_spaces,
            spaces=spaces_between_special_tokens,
        )
        found = own_value(token_ids)
        if isinstance(found, Mapping):
            found = own_value(found.get("input_ids"))
        if isinstance(found, int):
            return text("token_ids", [found])
        ids = several("token_ids", found, ACCEPTED)
        if not ids or not isinstance(ids[0], Sequence) or isinstance(ids[0], str | bytes):
            return text("token_ids", ids)
        return [
            text(f"token_ids[{index}]", [row] if isinstance(row, int) else row)
            for index, row in enumerate(ids)
        ]

    def _text(
        self, name: str, given: object, *, skip: bool, clean: bool | None, spaces: bool
    ) -> str:
        """The text of one list of ids, which :meth:`decode` got under ``name``."""
        ids = need_ids(name, several(name, given, ACCEPTED))
        text = self._tokenizer.decode(
            ids, skip_special_tokens=skip, spaces_between_special_tokens=spaces
        )
        if clean is None:
            clean = self.clean_up_tokenization_spaces
        if clean and self._backend is not None and type(self._backend.model).__name__ != "BPE":
            text = self.clean_up_tokenization(text)
        return text

    @staticmethod
    def clean_up_tokenization(text: str) -> str:
        """A text without the spaces that vocabularies of words put before punctuation."""
        for spaced, plain in CLEANED_UP:
            text = text.replace(spaced, plain)
        return text

    def batch_decode(
        self,
        sequences: Any,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
        *,
        spaces_between_special_tokens: bool = True,
    ) -> list[str]:
        """The texts of lists of ids; arguments as :meth:`decode`."""
        text = self.decode(
            sequences,
            skip_special_tokens,
            clean_up_tokenization_spaces,
            spaces_between_special_tokens=spaces_between_special_tokens,
        )
        return [text] if isinstance(text, str) else text

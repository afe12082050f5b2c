"""Token ids to texts: :class:`DecodesIds`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.tokenizing.vocabulary import Vocabulary
from headrace_core.foreign import own_value

CLEANED_UP = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"),
    (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip
"""What ``clean_up_tokenization_spaces`` replaces, in order."""


class DecodesIds(Vocabulary):
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
        """
        ids = own_value(token_ids)
        if isinstance(ids, Mapping):
            ids = own_value(ids["input_ids"])
        if isinstance(ids, int):
            ids = [ids]
        ids = [own_value(one) for one in ids]
        if ids and isinstance(ids[0], Sequence):
            return [
                self.decode(
                    row,
                    skip_special_tokens,
                    clean_up_tokenization_spaces,
                    spaces_between_special_tokens=spaces_between_special_tokens,
                )
                for row in ids
            ]
        text = self._tokenizer.decode(
            ids,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
        )
        clean = clean_up_tokenization_spaces
        if clean is None:
            clean = bool(self._config.get("clean_up_tokenization_spaces", False))
        if clean and self._backend is not None and type(self._backend.model).__name__ != "BPE":
            for spaced, plain in CLEANED_UP:
                text = text.replace(spaced, plain)
        return text

    def batch_decode(
        self,
        sequences: Any,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> list[str]:
        """The texts of lists of ids; arguments as :meth:`decode`."""
        text = self.decode(sequences, skip_special_tokens, clean_up_tokenization_spaces)
        return [text] if isinstance(text, str) else text

"""Token ids of several texts in the form that a caller asks for: filled up, as lists or as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.texts.checks import need_length, need_side
from headrace.texts.vocabulary import LONGEST_LIMIT, Vocabulary
from headrace_core.errors import RequestError


class TokenizedText(dict[str, Any]):
    """The result of tokenizing one text or several: ``input_ids``, ``attention_mask`` and, where the
    model reads them, ``token_type_ids``; by key or as attributes.

    Each is a list of integers; for several texts a list of such lists; with ``return_tensors`` an
    int64 array [texts, tokens].
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"the tokenizer returned no {name!r}, only {', '.join(self)}"
            ) from None


class FillsUp(Vocabulary):
    """Brings the token ids of texts to one length."""

    def _collected(
        self,
        encoded: Sequence[tuple[list[int], list[int]]],
        one: bool,
        padding: bool | str,
        max_length: int | None,
        multiple: int | None,
        side: str | None,
        return_tensors: str | None,
        types: bool | None,
        mask: bool | None,
    ) -> TokenizedText:
        """Ids of texts in the form that was asked for."""
        side = self.padding_side if side is None else need_side("padding_side", side)
        length = self._padded_length(
            [len(ids) for ids, _ in encoded], padding, max_length, multiple
        )
        names = self.model_input_names
        pad_id = self._id_of_named("pad_token")
        if length is not None and pad_id is None:
            raise RequestError(
                "padding: the tokenizer has no padding token; set one: "
                "tokenizer.pad_token = tokenizer.eos_token",
                param="padding",
            )
        rows: dict[str, list[list[int]]] = {"input_ids": []}
        if "token_type_ids" in names if types is None else types:
            rows["token_type_ids"] = []
        if "attention_mask" in names if mask is None else mask:
            rows["attention_mask"] = []
        for ids, kinds in encoded:
            whole = {"input_ids": ids, "token_type_ids": kinds, "attention_mask": [1] * len(ids)}
            for name, every in rows.items():
                fill = [pad_id or 0 if name == "input_ids" else 0] * ((length or 0) - len(ids))
                every.append([*fill, *whole[name]] if side == "left" else [*whole[name], *fill])
        if return_tensors is not None:
            return TokenizedText({n: _array(n, every, return_tensors) for n, every in rows.items()})
        return TokenizedText({n: every[0] if one else every for n, every in rows.items()})

    def _padded_length(
        self,
        lengths: Sequence[int],
        padding: bool | str,
        max_length: int | None,
        multiple: int | None,
    ) -> int | None:
        if padding in (False, "do_not_pad"):
            return None
        if padding not in (True, "longest", "max_length"):
            raise RequestError(
                f"padding = {padding!r:.100}: must be True, False, 'longest', 'max_length' or "
                "'do_not_pad'",
                param="padding",
            )
        multiple = need_length("pad_to_multiple_of", multiple)
        length = max(lengths, default=0)
        if padding == "max_length":
            limit = self.model_max_length if max_length is None else max_length
            length = length if limit > LONGEST_LIMIT else limit
        return -(-length // multiple) * multiple if multiple else length


def _array(name: str, rows: list[list[int]], kind: str) -> Any:
    """Rows as one int64 array [texts, tokens] of numpy or torch."""
    if kind not in ("pt", "np"):
        raise RequestError(
            f"return_tensors = {kind!r:.100}: must be 'pt', 'np' or None", param="return_tensors"
        )
    if len({len(row) for row in rows}) > 1:
        raise RequestError(
            f"return_tensors = {kind!r}: {name} of texts of different lengths cannot be one array; add "
            "padding=True",
            param="return_tensors",
        )
    if kind == "pt":
        import torch

        return torch.tensor(rows, dtype=torch.int64)
    import numpy

    return numpy.array(rows, dtype=numpy.int64)

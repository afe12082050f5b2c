"""Token ids of several texts in the form that a caller asks for: filled up, as lists or as arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.tokenizer_calls.options import CallOptions
from headrace.tokenizer_calls.vocabulary import LONGEST_LIMIT, Vocabulary
from headrace_core.arrays import own_value
from headrace_core.errors import RequestError, UnsupportedFeature

FILLS: Mapping[str, Any] = {
    "token_type_ids": 0, "attention_mask": 0, "special_tokens_mask": 1, "offset_mapping": (0, 0),
    "assistant_masks": 0,
}  # fmt: skip
"""Values of the tokens that fill up a text."""


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

    @property
    def data(self) -> dict[str, Any]:
        """The same as a plain dictionary."""
        return dict(self)

    def convert_to_tensors(
        self, tensor_type: str | None = None, prepend_batch_axis: bool = False
    ) -> TokenizedText:
        """Make arrays of the lists, in place.

        Args:
            tensor_type: ``pt`` or ``np``; None: nothing is changed.
            prepend_batch_axis: the lists are of one text: put an axis before.

        Raises:
            RequestError: the lists have different lengths.
        """
        if tensor_type is not None:
            for name, value in self.items():
                rows = own_value(value)
                self[name] = _array(name, [rows] if prepend_batch_axis else rows, tensor_type)
        return self

    def to(self, device: Any, *, non_blocking: bool = False) -> TokenizedText:
        """Move torch tensors to a device, in place.

        Args:
            device: as ``torch.Tensor.to`` takes it.
            non_blocking: as there.
        """
        for name, value in self.items():
            if callable(getattr(value, "to", None)):
                self[name] = value.to(device=device, non_blocking=non_blocking)
        return self


@dataclasses.dataclass
class TextEncoding:
    """The tokens of one text or pair, or of a part of it."""

    ids: list[int]
    types: list[int]
    special: list[int] | None = None
    """1 for special tokens that were put around the text."""
    offsets: list[tuple[int, int]] | None = None
    """Where each token is in its text: first character, and the one behind the last."""
    assistant: list[int] | None = None
    """1 for tokens that an assistant wrote."""
    overflowing: Sequence[TextEncoding] = ()
    """Parts that were cut off."""

    def rows(self, options: CallOptions) -> dict[str, list[Any]]:
        """Values for each token by name, not yet filled up."""
        found: dict[str, list[Any]] = {
            "input_ids": self.ids,
            "token_type_ids": self.types,
            "attention_mask": [1] * len(self.ids),
        }
        if options.return_special_tokens_mask:
            found["special_tokens_mask"] = self.special or [0] * len(self.ids)
        if options.return_offsets_mapping:
            found["offset_mapping"] = self.offsets or []
        if self.assistant is not None:
            found["assistant_masks"] = self.assistant
        return found


class PaddingMixin(Vocabulary):
    """Brings the token ids of texts to one length."""

    def _collected(
        self, encoded: Sequence[TextEncoding], one: bool, options: CallOptions
    ) -> TokenizedText:
        """Tokens of texts in the form that was asked for."""
        side = self.padding_side if options.padding_side is None else options.padding_side
        length = self._padded_length([len(piece.ids) for piece in encoded], options)
        pad_id = self._need_pad_id() if length is not None else 0
        overflows = options.return_overflowing_tokens
        every = [
            (index, piece)
            for index, whole in enumerate(encoded)
            for piece in ((whole, *whole.overflowing) if overflows else (whole,))
        ]
        rows: dict[str, list[Any]] = {}
        for _, piece in every:
            missing = max(0, (length or 0) - len(piece.ids))
            for name, values in piece.rows(options).items():
                if self._returns(name, options):
                    fill = [pad_id if name == "input_ids" else FILLS[name]] * missing
                    filled = [*fill, *values] if side == "left" else [*values, *fill]
                    rows.setdefault(name, []).append(filled)
        if not every:
            rows["input_ids"] = []
        if one and options.return_tensors is None and not overflows:
            rows = {name: values[0] for name, values in rows.items()}
        if options.return_length:
            rows["length"] = [max(len(piece.ids), length or 0) for _, piece in every]
        if overflows:
            rows["overflow_to_sample_mapping"] = [index for index, _ in every]
        return TokenizedText(rows).convert_to_tensors(options.return_tensors)

    def _returns(self, name: str, options: CallOptions) -> bool:
        """True if a call returns these values."""
        wanted = {
            "token_type_ids": options.return_token_type_ids,
            "attention_mask": options.return_attention_mask,
        }
        if name not in wanted:
            return True
        asked = wanted[name]
        return name in self.model_input_names if asked is None else asked

    def _need_pad_id(self) -> int:
        pad_id = self._id_of_named("pad_token")
        if pad_id is None:
            raise RequestError(
                "padding: the tokenizer has no padding token; set one: "
                "tokenizer.pad_token = tokenizer.eos_token",
                param="padding",
            )
        return pad_id

    def _padded_length(self, lengths: Sequence[int], options: CallOptions) -> int | None:
        """Tokens that each text is filled up to; None: texts stay as they are."""
        if not options.pads:
            return None
        length = max(lengths, default=0)
        if options.padding == "max_length":
            limit = self.model_max_length if options.max_length is None else options.max_length
            if limit > LONGEST_LIMIT:
                return None
            length = limit
        multiple = options.pad_to_multiple_of
        return -(-length // multiple) * multiple if multiple else length

    def pad(
        self,
        encoded_inputs: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        padding: bool | str = True,
        max_length: int | None = None,
        pad_to_multiple_of: int | None = None,
        padding_side: str | None = None,
        return_attention_mask: bool | None = None,
        return_tensors: str | None = None,
        verbose: bool = True,
    ) -> TokenizedText:
        """Fill up token ids that were made before, as a data loader's ``collate_fn`` does.

        Args:
            encoded_inputs: results of calls: a list of them, or one with ``input_ids`` of one text or of
                several. ``attention_mask``, ``token_type_ids`` and ``special_tokens_mask`` are filled
                up, too; whatever else is there comes back as it is.
            padding, max_length, pad_to_multiple_of, padding_side: as a call of the object.
            return_attention_mask: make ``attention_mask`` where it is missing, and fill it up; None: as
                :attr:`model_input_names` says.
            return_tensors: ``pt``, ``np``; None: lists, or what ``input_ids`` came as.
            verbose: nothing is logged in either case.

        Raises:
            RequestError: ``input_ids`` are missing, an argument is wrong, or there is no padding token.
            UnsupportedFeature: a mask has more than one dimension for each text.
        """
        options = CallOptions(
            padding=padding, max_length=max_length, pad_to_multiple_of=pad_to_multiple_of,
            padding_side=padding_side, return_attention_mask=return_attention_mask, verbose=verbose,
        )  # fmt: skip
        given = _as_columns(encoded_inputs)
        kind = return_tensors if return_tensors is not None else _kind(given["input_ids"])
        columns = {name: _own_rows(values) for name, values in given.items()}
        ids = columns["input_ids"]
        masks = options.return_attention_mask
        if masks is None:
            masks = "attention_mask" in self.model_input_names
        if not ids:
            made: dict[str, Any] = {"attention_mask": []} if options.return_attention_mask else {}
            return TokenizedText({**columns, **made})
        one = not isinstance(ids[0], list)
        if one:
            columns = {name: [values] for name, values in columns.items()}
        counts = {name: len(values) for name, values in columns.items()}
        if len(set(counts.values())) > 1:
            raise RequestError(
                f"encoded_inputs: must hold equally many values of each name, not {counts}",
                param="encoded_inputs",
            )
        if masks:
            columns.setdefault("attention_mask", [[1] * len(row) for row in columns["input_ids"]])
        self._fill_columns(columns, options, masks)
        if one:
            columns = {name: values[0] for name, values in columns.items()}
        return TokenizedText(columns).convert_to_tensors(kind)

    def _fill_columns(
        self, columns: dict[str, list[Any]], options: CallOptions, masks: bool
    ) -> None:
        """Fill up the rows of each column, in place."""
        lengths = [len(row) for row in columns["input_ids"]]
        length = self._padded_length(lengths, options)
        if length is None:
            return
        side = self.padding_side if options.padding_side is None else options.padding_side
        fills = {"input_ids": self._need_pad_id(), **FILLS}
        for name in ("input_ids", "token_type_ids", "special_tokens_mask", "attention_mask"):
            if name not in columns or (name == "attention_mask" and not masks):
                continue
            for index, row in enumerate(columns[name]):
                if row and isinstance(row[0], list):
                    raise UnsupportedFeature(
                        f"encoded_inputs.{name}[{index}]: must have one value for each token; arrays of "
                        "more dimensions are not filled up",
                        param="encoded_inputs",
                    )
                fill = [fills[name]] * max(0, length - lengths[index])
                columns[name][index] = [*fill, *row] if side == "left" else [*row, *fill]


def _as_columns(given: Any) -> dict[str, Any]:
    """Results of calls as one mapping.

    Raises:
        RequestError: they are not results, or hold no ``input_ids``.
    """
    if isinstance(given, Sequence) and given and all(isinstance(one, Mapping) for one in given):
        for index, one in enumerate(given):
            if one.keys() != given[0].keys():
                raise RequestError(
                    f"encoded_inputs[{index}]: must have the names {list(given[0])}, as the first has; "
                    f"has {list(one)}",
                    param="encoded_inputs",
                )
        given = {name: [one[name] for one in given] for name in given[0]}
    if not isinstance(given, Mapping):
        raise RequestError(
            f"encoded_inputs = {given!r:.100}: must be a result of the tokenizer, or a list of them",
            param="encoded_inputs",
        )
    if given.get("input_ids") is None:
        raise RequestError(
            f"encoded_inputs: must hold input_ids; holds {list(given)}", param="encoded_inputs"
        )
    return dict(given)


def _kind(values: Any) -> str | None:
    """``pt`` or ``np`` for tensors and arrays, and lists of them; None for plain lists."""
    for one in (values, values[0] if isinstance(values, Sequence) and values else None):
        if hasattr(one, "new_zeros"):
            return "pt"
        if hasattr(one, "__array__"):
            return "np"
    return None


def _own_rows(values: Any) -> list[Any]:
    """Values of texts as lists of Python's own."""
    own = own_value(values)
    if not isinstance(own, Sequence) or isinstance(own, str | bytes):
        raise RequestError(
            f"encoded_inputs = {values!r:.100}: must hold lists or arrays", param="encoded_inputs"
        )
    rows = [own_value(row) for row in own]
    return [list(map(own_value, row)) if isinstance(row, list | tuple) else row for row in rows]


def _array(name: str, rows: list[Any], kind: str) -> Any:
    """Rows as one array of numpy or torch: integers as int64."""
    if kind not in ("pt", "np"):
        raise RequestError(
            f"return_tensors = {kind!r:.100}: must be 'pt', 'np' or None", param="return_tensors"
        )
    if len({len(row) for row in rows if isinstance(row, list)}) > 1:
        raise RequestError(
            f"return_tensors = {kind!r}: {name} of texts of different lengths cannot be one array; add "
            "padding=True",
            param="return_tensors",
        )
    try:
        if kind == "pt":
            import torch

            tensor = torch.tensor(rows)
            return tensor if tensor.numel() else tensor.long()
        import numpy

        array = numpy.array(rows)
        return array if array.size else array.astype(numpy.int64)
    except (TypeError, ValueError) as error:
        raise RequestError(
            f"return_tensors = {kind!r}: {name} cannot be an array: {error}", param="return_tensors"
        ) from None

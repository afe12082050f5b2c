"""Settings of a tokenizer call: :class:`CallOptions`, the arguments of a tokenizer's call in checked form."""

from __future__ import annotations

import dataclasses
from typing import Any

from headrace.tokenizer_calls.checks import need_flag, need_length, need_side
from headrace_core.arrays import own_value
from headrace_core.errors import RequestError

STRATEGIES = ("longest_first", "only_first", "only_second", "do_not_truncate")
"""Names that ``truncation`` may have."""
PADDINGS = ("longest", "max_length", "do_not_pad")
"""Names that ``padding`` may have."""
FLAGS = (
    "add_special_tokens", "is_split_into_words", "return_overflowing_tokens",
    "return_special_tokens_mask", "return_offsets_mapping", "return_length", "verbose",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class CallOptions:
    """Arguments of a call of the tokenizer, as :meth:`headrace.tokenizer.ModelTokenizer.__call__` describes
    them.

    Raises:
        RequestError: one is of another kind, or two exclude each other.
    """

    add_special_tokens: bool = True
    padding: bool | str = False
    truncation: bool | str | None = None
    max_length: int | None = None
    stride: int = 0
    is_split_into_words: bool = False
    pad_to_multiple_of: int | None = None
    padding_side: str | None = None
    return_tensors: str | None = None
    return_token_type_ids: bool | None = None
    return_attention_mask: bool | None = None
    return_overflowing_tokens: bool = False
    return_special_tokens_mask: bool = False
    return_offsets_mapping: bool = False
    return_length: bool = False
    verbose: bool = True

    def __post_init__(self) -> None:
        for name in FLAGS:
            need_flag(name, getattr(self, name))
        for name in ("return_token_type_ids", "return_attention_mask"):
            if getattr(self, name) is not None:
                need_flag(name, getattr(self, name))
        if self.truncation not in (None, True, False, *STRATEGIES):
            raise RequestError(
                f"truncation = {self.truncation!r:.100}: must be True, False, None, 'longest_first', "
                "'only_first', 'only_second' or 'do_not_truncate'",
                param="truncation",
            )
        if self.padding not in (True, False, *PADDINGS):
            raise RequestError(
                f"padding = {self.padding!r:.100}: must be True, False, 'longest', 'max_length' or "
                "'do_not_pad'",
                param="padding",
            )
        if self.padding_side is not None:
            need_side("padding_side", self.padding_side)
        stride = own_value(self.stride)
        if not isinstance(stride, int) or isinstance(stride, bool) or stride < 0:
            raise RequestError(
                f"stride = {self.stride!r:.100}: must be a number of tokens, 0 or more",
                param="stride",
            )
        own: dict[str, Any] = {
            "stride": stride,
            "max_length": need_length("max_length", self.max_length),
            "pad_to_multiple_of": need_length("pad_to_multiple_of", self.pad_to_multiple_of),
        }
        for name, value in own.items():
            object.__setattr__(self, name, value)

    @property
    def pads(self) -> bool:
        """True if texts are to be filled up."""
        return self.padding not in (False, "do_not_pad")

    @property
    def cuts(self) -> str | None:
        """The strategy by which texts are cut; None: they are not."""
        if self.truncation is None:
            return None if self.max_length is None or self.pads else "longest_first"
        if self.truncation is False or self.truncation == "do_not_truncate":
            return None
        return "longest_first" if self.truncation is True else str.__str__(self.truncation)

    @property
    def details(self) -> tuple[str, ...]:
        """Names of the arguments that ask for more than token ids."""
        asked = {
            "stride": self.stride > 0,
            "is_split_into_words": self.is_split_into_words,
            "return_overflowing_tokens": self.return_overflowing_tokens,
            "return_special_tokens_mask": self.return_special_tokens_mask,
            "return_offsets_mapping": self.return_offsets_mapping,
        }
        return tuple(name for name, wanted in asked.items() if wanted)


CALL_OPTIONS = frozenset(field.name for field in dataclasses.fields(CallOptions))
"""Names of the fields of :class:`CallOptions`."""

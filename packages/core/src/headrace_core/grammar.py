"""Structured output: a grammar compiled once, matched per request, masking logits per step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from headrace_core.sampling import StructuredOutputsParams
from headrace_core.text import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor


class GrammarMatcher(Protocol):
    """One request's place in a grammar."""

    def fill_bitmask(self, bitmask: Tensor, row: int) -> None:
        """Set row ``row`` of bitmask [B, ceil(V / 32)] int32: bit v = token v is allowed."""
        ...

    def advance(self, token_ids: list[int]) -> bool:
        """Take tokens; False, with nothing taken, if the grammar forbids one."""
        ...

    def roll_back(self, num_tokens: int) -> None:
        """Forget the last tokens taken."""
        ...

    @property
    def terminated(self) -> bool:
        """Only an end token may follow."""
        ...


class Grammar(Protocol):
    """A compiled constraint; immutable and shared between requests."""

    def matcher(self) -> GrammarMatcher: ...


class GrammarBackend(Protocol):
    """The object behind an entry point of ``headrace.grammar_backends``."""

    name: str

    def refuse(self, params: StructuredOutputsParams) -> list[str]:
        """Reasons why this backend cannot serve the constraint; each names keyword and pointer."""
        ...

    def compile(self, params: StructuredOutputsParams, tokenizer: Tokenizer) -> Grammar:
        """Raises RequestError with keyword and JSON pointer."""
        ...

"""The vocabulary of a tokenizer, as grammars see it."""

from __future__ import annotations

from collections.abc import Iterable

from headrace_core.errors import UnsupportedFeature
from headrace_core.grammar import Vocabulary
from headrace_core.text import Tokenizer
from headrace_engine.output_processing.detokenizer import BytePieces


def vocabulary_of(tokenizer: Tokenizer, size: int, end_token_ids: Iterable[int]) -> Vocabulary:
    """Every token's bytes.

    Args:
        tokenizer: whose tokens are byte strings.
        size: width of the logits; ids beyond the tokenizer's stand for nothing.
        end_token_ids: the model's: marks, even if the tokenizer does not say so.

    Raises:
        UnsupportedFeature: the tokenizer's tokens are words, whose spaces depend on their
            neighbours.
    """
    if not isinstance(tokenizer, BytePieces):
        raise UnsupportedFeature(
            "structured_outputs: not with this model: its tokenizer's tokens are not byte strings",
            param="structured_outputs",
        )
    token_bytes = tokenizer.token_bytes
    return Vocabulary(
        tokens=[token_bytes(token_id) for token_id in range(size)],
        special_token_ids=frozenset(tokenizer.special_token_ids) | frozenset(end_token_ids),
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
    )
